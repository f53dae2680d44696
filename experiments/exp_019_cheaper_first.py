"""EXP-019: the share of accepted answers and the cost of a small model that is asked first, beside the large one alone.
Two scripted workers of stated accuracies and costs, and `stoker batch run`; no model and no MLX."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from command import server_main
from common import Json
from redis import Redis
from report import Report, columns

from stoker import Producer
from stoker.api.chat import TEXT_URL
from stoker_shared.result import Attempt

MODELS = ["small", "large"]
COST_MS = {"small": 1.0, "large": 10.0}
"""Of a token, as stated: the workers are paced by `STEPS_PER_S`, and no cost is measured."""
STEPS_PER_S = {"small": 4000, "large": 400}
TASKS = ("easy", "medium", "hard")
SMALL = {"easy": 0.97, "medium": 0.9, "hard": 0.05}
SMALL_TURNED_BAD = {**SMALL, "medium": 0.05}
GOOD_PART = 0.6
"""Of the lines, before the small model turns bad."""
LARGE = 0.98
MIN_TRUST = 0.6
CHECK = {"regex": "^(?:yes)$"}
PROMPTS = {
    (True, True): "say yes", (True, False): "if small say yes else no", (False, True): "if large say yes else no",
    (False, False): "say no",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """`passes`: whether each model would pass."""

    number: int
    task: str
    passes: tuple[bool, bool]

    @property
    def text(self) -> str:
        asked = PROMPTS[self.passes]
        prompt = f"{self.number:0{40 - len(asked)}}\n{asked}"  # all are of one length
        body = {"model": "any", "prompt": prompt, "task": self.task, "max_tokens": 20}
        return json.dumps({"custom_id": str(self.number), "method": "POST", "url": TEXT_URL, "body": body})


def lines_of(n_lines: int, seed: int) -> list[Line]:
    dice, found = random.Random(seed), []
    for number in range(n_lines):
        task = TASKS[number % len(TASKS)]
        small = (SMALL if number < _turn(n_lines) else SMALL_TURNED_BAD)[task]
        found.append(Line(number, task, (dice.random() < small, dice.random() < LARGE)))
    return found


def _turn(n_lines: int) -> int:
    """The line at which the small model turns bad."""
    return int(GOOD_PART * n_lines)


@contextmanager
def workers(url: str, folder: Path) -> Iterator[None]:
    started = []
    for model in MODELS:
        words = ["run", "--engine", "scripted", "--model", model, "--queues", model, "--name", model, "--redis", url]
        words += ["--store", str(folder / model), "--scripted-steps-per-s", str(STEPS_PER_S[model]), "--quiet"]
        started.append(subprocess.Popen([sys.executable, "-m", "stoker_worker", *words]))
    try:
        with Producer(url) as producer:
            while {worker.model for worker in producer.workers()} != set(MODELS):
                time.sleep(0.05)
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def ran(url: str, folder: Path, lines: Sequence[Line]) -> list[list[Attempt]]:
    """The attempts at all lines, in their order.

    Raises:
        CalledProcessError: not all have succeeded.
    """
    source, answers, check = (folder / name for name in ("in.jsonl", "out.jsonl", "check.json"))
    source.write_text("".join(f"{line.text}\n" for line in lines))
    check.write_text(json.dumps(CHECK))
    words = ["--redis", url, "batch", "run", str(source), "--out", str(answers), "--models", ",".join(MODELS)]
    words += ["--check", str(check), "--min-trust", str(MIN_TRUST)]
    subprocess.run([sys.executable, "-c", "from stoker.cli import main; main()", *words], check=True)
    found = {}
    for answer in map(json.loads, answers.read_text().splitlines()):
        found[int(answer["custom_id"])] = answer["response"]["body"]["attempts"]
    return [[Attempt.model_validate(one) for one in found[line.number]] for line in lines]


def followed_after(lines: Sequence[Line], begun: Sequence[str]) -> int | None:
    """Lines from the one at which the small model turns bad to the first from which at most a tenth of the next 30 of
    its class begin with it; ``None`` if there is none."""
    turned = _turn(len(lines))
    of_class = [line.number for line in lines[turned:] if line.task == "medium"]
    for at in range(len(of_class) - 29):
        if sum(begun[number] == "small" for number in of_class[at : at + 30]) <= 3:
            return of_class[at] - turned
    return None


def run(url: str, folder: Path, *, quick: bool) -> Json:
    lines = lines_of(900 if quick else 5000, seed=19)
    with workers(url, folder):
        began = time.perf_counter()
        attempts = ran(url, folder, lines)
        took_s = time.perf_counter() - began
    with Redis.from_url(url) as connection:
        n_left = connection.llen("rq:queue:small") + connection.llen("rq:queue:large")
    tokens = [one.prompt_tokens + one.completion_tokens for made in attempts for one in made]
    begun = [made[0].model for made in attempts]
    costs_ms = [sum(map(_cost_ms, made)) for made in attempts]
    accepted = 100 * sum(made[-1].accepted for made in attempts) / len(lines)
    alone = 100 * sum(line.passes[1] for line in lines) / len(lines)
    after = followed_after(lines, begun)
    alone_ms, turn = COST_MS["large"] * mean(tokens), _turn(len(lines))
    share, before, since = (100 * mean(part) / alone_ms for part in (costs_ms, costs_ms[:turn], costs_ms[turn:]))
    return {
        "verdict": {
            "accepted_within_2_points_of_the_large_model": accepted >= alone - 2,
            "under_60_percent_of_its_cost": share < 60,
            "trust_follows_within_300_lines": after is not None and after <= 300,
            "every_line_has_its_result": n_left == 0 and all(map(_is_right, lines, attempts)),
        },
        "lines": len(lines),
        "lines_per_s": round(len(lines) / took_s),
        "accepted_percent": round(accepted, 2),
        "large_alone_percent": round(alone, 2),
        "cost_percent": round(share, 1),
        "cost_percent_before_and_since": [round(before, 1), round(since, 1)],
        "turned_bad_at": turn,
        "followed_after_lines": after,
    }


def _cost_ms(attempt: Attempt) -> float:
    return COST_MS[attempt.model] * (attempt.prompt_tokens + attempt.completion_tokens)


def _is_right(line: Line, made: Sequence[Attempt]) -> bool:
    """Whether each model passed as drawn, and the large one was asked if the small one had not passed."""
    passes = dict(zip(MODELS, line.passes, strict=True))
    verdicts = all(one.accepted == passes[one.model] for one in made)
    return verdicts and (made[-1].accepted or made[-1].model == "large")


def render(content: Json, results: Path) -> Report:
    accepted, alone, cost = (content[name] for name in ("accepted_percent", "large_alone_percent", "cost_percent"))
    after = content["followed_after_lines"]
    summary = (
        f"{accepted} % of the answers pass, {alone} % with the large model alone, at {cost} % of its cost. "
        "After the small model turns bad in one class, jobs of that class begin with the large one within "
        f"{'no' if after is None else after} lines."
    )
    number = f"{accepted} % accepted (large alone: {alone} %) at {cost} % of its cost"
    return Report("a cheaper model first", number, {"summary": summary, "cost": columns([content], COSTS)})


COSTS = {
    "lines": "{lines}", "turned bad at": "{turned_bad_at}", "accepted %": "{accepted_percent}",
    "large alone %": "{large_alone_percent}", "cost, % of the large one's": "{cost_percent}",
    "before, since": "{cost_percent_before_and_since[0]}, {cost_percent_before_and_since[1]}",
    "followed after lines": "{followed_after_lines}", "lines/s": "{lines_per_s}",
}  # fmt: skip


if __name__ == "__main__":
    server_main(__doc__ or "", "019", run, render)
