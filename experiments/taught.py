"""Does a small model learn a teacher's answers from a batch's training set, and serve them? Prints JSON.

Customers' messages are sorted: which team has to answer, and is it urgent? The teacher is a program with rules, because
no second model is at hand: the form and the choice of its answers are what is to be learned, and whether an answer is
right is known. Its answers are written as the output file of a batch and exported; mlx-lm trains an adapter
on them; and a worker answers the messages that were held out, first without the adapter, then with it.

Run: ``python experiments/taught.py > experiments/results/taught_results.json``.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from datetime import date
from itertools import product
from pathlib import Path

from common import Json, machine, note
from smollm2 import smollm2
from worker_process import WorkerProcess

from stoker import Producer
from stoker.api.chat import CHAT_URL
from stoker.batch.input_file import answer_id_for, job_id_for
from stoker.batch.output_file import line_bytes, success_line
from stoker_shared.result import GenerationResult
from stoker_worker.embedded_redis import EmbeddedServer

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "training_set.py"
ASKED = 'As JSON: "team" (billing, delivery, repairs or returns) and "urgent" (true or false).'
TROUBLES = {
    "billing": ("I paid twice for the {thing}", "the invoice for the {thing} has the wrong address",
                "you charged me for a {thing} that I never ordered"),
    "delivery": ("the {thing} has not arrived", "the courier left the {thing} with a neighbour I do not know",
                 "I want the {thing} sent to {city} instead"),
    "repairs": ("the {thing} stopped working", "the {thing} makes a strange noise",
                "a part of the {thing} broke off"),
    "returns": ("I want to send the {thing} back", "the {thing} is the wrong size, so I would like another",
                "I have changed my mind about the {thing}"),
}  # fmt: skip
HURRY = {True: ("Please answer today.", "I need this solved before tomorrow."), False: ("There is no hurry.", "")}
THINGS = ("lamp", "kettle", "jacket", "phone", "chair", "clock", "bicycle", "radio", "oven", "tent")
CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Osaka", "Tunis", "Perth")
TRAINING = (*("--num-layers", "8", "--learning-rate", "2e-4"), *("--steps-per-eval", "10", "--val-batches", "-1"))
COMMAND = "from {module} import main; main()"
TRAINER = "from stoker_worker.models.blas import preload_blas; preload_blas(); " + COMMAND.format(module="mlx_lm.lora")


def messages(count: int) -> list[tuple[str, str]]:
    """Messages and the teacher's answers, in random order."""
    found = []
    for team, is_urgent in product(TROUBLES, HURRY):
        for trouble, thing, city, hurry in product(TROUBLES[team], THINGS, CITIES, HURRY[is_urgent]):
            text = f"{city}: {trouble.format(thing=thing, city=city)}. {hurry}".strip()
            found.append((text, json.dumps({"team": team, "urgent": is_urgent})))
    return random.Random(1).sample(sorted(set(found)), count)


def chat(text: str) -> list[Json]:
    return [{"role": "system", "content": ASKED}, {"role": "user", "content": text}]


def write_batch(folder: Path, pairs: list[tuple[str, str]]) -> None:
    with (folder / "in.jsonl").open("w") as lines, (folder / "out.jsonl").open("wb") as ends:
        for number, (text, answer) in enumerate(pairs, start=1):
            name = f"message {number}"
            body = {"model": "rules", "messages": chat(text)}
            line = {"custom_id": name, "method": "POST", "url": CHAT_URL, "body": body}
            lines.write(json.dumps(line) + "\n")
            job_id = job_id_for("taught", number, name)
            result = GenerationResult.model_validate({
                "job_id": job_id, "text": answer, "finish_reason": "stop", "model": "rules", "cache": {},
                "usage": {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0},
                "timing": dict.fromkeys(("queued_s", "prefill_s", "first_token_s", "decode_s", "total_s"), 0.0),
            })  # fmt: skip
            ends.write(line_bytes(success_line(answer_id_for(job_id), name, CHAT_URL, 0, result)))


def ran(program: str, *options: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-c", program, *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def float32_copy(model: str, folder: Path) -> str:
    """MLX has no fast path for packed weights on a CPU. The adapter fits the packed model too."""
    copy = str(folder / "float32")
    ran(COMMAND.format(module="mlx_lm.convert"), "--hf-path", model, "--mlx-path", copy, "-d", "--dtype", "float32")
    return copy


def trained(model: str, data: Path, adapter: Path, iterations: int) -> Json:
    """The loss on what was held out, without the adapter and with it."""
    options = ("--model", model, "--data", str(data), "--mask-prompt", "--batch-size", "2")
    ran(TRAINER, *options, *TRAINING, "--train", "--adapter-path", str(adapter), "--iters", str(iterations))
    paths = {"without": "", "with": str(adapter)}
    printed = {name: ran(TRAINER, *options, "--test", "--adapter-path", path) for name, path in paths.items()}
    return {name: float(re.findall(r"Test loss ([\d.]+)", text)[0]) for name, text in printed.items()}


def served(url: str, folder: Path, model: str, held_out: list[Json], *options: str) -> Json:
    """How many answers have the form that was asked for, and how many are right."""
    requests = [{"messages": row["messages"], "max_tokens": 40} for row in held_out]
    with WorkerProcess(url, folder, "--model", model, *options), Producer(url) as producer:
        results = producer.results(producer.submit_many(requests))
    return {
        "model": results[0].model,
        "answers": len(results),
        "in_the_form": sum(is_in_the_form(result.text) for result in results),
        "right": sum(result.text == row["answer"] for result, row in zip(results, held_out, strict=True)),
    }


def is_in_the_form(text: str) -> bool:
    """What a check can tell of an answer without knowing the right one."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and set(found) == {"team", "urgent"}
        and found["team"] in list(TROUBLES)
        and isinstance(found["urgent"], bool)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=40)
    options = parser.parse_args()
    facts, model = machine(), str(smollm2())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_batch(folder, messages(options.messages))
        files = [str(folder / each) for each in ("in.jsonl", "out.jsonl")]
        ran(EXAMPLE.read_text(), *files, str(folder / "training"), "--held-out", "0.2")
        [data] = (folder / "training").iterdir()  # all messages are of one class
        parts = {path.stem: [json.loads(raw)["messages"] for raw in path.open()] for path in data.iterdir()}
        note(f"training on {len(parts['train'])} messages")
        loss = trained(float32_copy(model, folder), data, folder / "sorter", options.iterations)
        held_out = [{"messages": row[:-1], "answer": row[-1]["content"]} for row in parts["test"]]
        with EmbeddedServer(folder / "redis") as server:
            note(f"answering {len(held_out)} messages without the adapter, then with it")
            both = {"without": (), "with": ("--adapter", str(folder / "sorter"))}
            ends = {name: served(server.url, folder / f"store {name}", model, held_out, *more)
                    for name, more in both.items()}  # fmt: skip
    counts = {part: len(rows) for part, rows in sorted(parts.items())}
    found = {"date": date.today().isoformat(), "machine": facts, "examples": counts, "iterations": options.iterations,
             "loss_on_test": loss, "served": ends}  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
