"""EXP-009's tables and plot, made from its results alone."""

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Json, spread
from report import Report, columns, figure, machine_line, say, span, table

FIRST, KEPT, STREAMED = "first", "kept running", "kept running, streamed"
STOPPED, KILLED = "after SIGTERM", "after SIGKILL"
_ASKED = {FIRST: 0.75}
_LATER = 1.0
RATIOS = {"stoker's round": "{kind}", "beside (best peer)": "{best}", "ratio": "{ratio}", "asked, at most": "{asked}"}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    jobs, rounds = content["backlog"], _rounds(content)
    kinds = list(dict.fromkeys(kind for found in rounds.values() for kind in found))
    ratios = [{"kind": kind, **found, "ratio": found, "asked": _ASKED.get(kind, _LATER)}
              for kind, found in content["ratios"].items()]  # fmt: skip
    rates = [
        (name, span(found, " s"), f"{jobs['jobs'] / found['median']:.2f}") for name, found in jobs["seconds"].items()
    ]
    number = say(content, "a later round {ratios[kept running][median]} times as long (asked: 1); the backlog at "
                 "{backlog[rate][median]} times its rate")  # fmt: skip
    return Report("this worker and its peers, kept running and restarted", number, {
        "summary": _summary(content),
        "machine": machine_line(content) + _versions(content),
        "rounds": table(
            ("server", *kinds),
            [(name, *(_cell(found.get(kind, [])) for kind in kinds)) for name, found in rounds.items()],
        ),
        "ratios": columns(ratios, RATIOS),
        "starts": table(("server", "ready again after"), list(_starts(content))),
        "parts": _parts(content),
        "backlog": table(("server", "the backlog", "jobs/s"), rates),
        "first tokens": _first_tokens(content),
        "answers": _answers(content),
    })  # fmt: skip


def _rounds(content: Json) -> dict[str, dict[str, list[float]]]:
    """Seconds, by server and by what came before the round."""
    found: dict[str, dict[str, list[float]]] = {}
    for repeat in content["repeats"]:
        for name, turns in repeat["turns"].items():
            for turn in turns:
                found.setdefault(name, {}).setdefault(turn["kind"], []).append(turn["s"])
    return found


def _cell(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"{seconds[0]:.1f} s, once" if seconds else ""
    return f"{span(spread(seconds, digits=1), ' s')}, {len(seconds)} times"


def _summary(content: Json) -> str:
    jobs, (_, first), *later = content["backlog"], *content["ratios"].items()
    told = "; ".join(f"{kind} {span(found)} times" for kind, found in later)
    are = "Every answer is equal or explained." if content["verdict"]["every_answer_equal_or_explained"] else ""
    return (
        f"The first round of {content['agents']} agents with {content['tokens_at_first']} tokens each took "
        f"{span(first)} times as long as that of the best peer, {first['best']} (asked: at most 0.75). A later round, "
        f"beside the one of {later[0][1]['best']}, which kept running: {told} (asked: at most 1). A backlog of "
        f"{jobs['jobs']} jobs went through at {span(jobs['rate'])} times the rate of {jobs['best']} (asked: 1.3). "
        f"{are or 'Some answers are neither equal nor explained.'}"
        f"{'' if content['versions'] else ' vllm-mlx was not run.'}"
    )


def _versions(content: Json) -> str:
    if not content["versions"]:
        return ""
    found = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f" The third server's environment: {found}."


def _starts(content: Json) -> Iterator[tuple[str, str]]:
    for name in content["repeats"][0]["turns"]:
        turns = [turn for repeat in content["repeats"] for turn in repeat["turns"][name]]
        for kind in dict.fromkeys(turn["kind"] for turn in turns if turn["start_s"]):
            yield f"{name}, {kind}", _cell([turn["start_s"] for turn in turns if turn["kind"] == kind])


def _parts(content: Json) -> str:
    """Of stoker's rounds; medians, so the parts need not add up."""
    turns = [turn for repeat in content["repeats"] for turn in repeat["turns"]["stoker"]]
    kinds = list(dict.fromkeys(turn["kind"] for turn in turns))

    def row(name: str, of: str, unit: str) -> tuple[str, ...]:
        found = (statistics.median(turn[of][name] for turn in turns if turn["kind"] == kind) for kind in kinds)
        return (name, *(f"{value:.{2 if unit else 0}f}{unit}" for value in found))

    rows = [row(part, "parts", " s") for part in turns[0]["parts"]]
    rows += [row(what, "work", " s" if what.startswith("seconds") else "") for what in turns[0]["work"]]
    return table(("of stoker's round", *kinds), rows)


def _first_tokens(content: Json) -> str:
    """Of the rounds whose answers were streamed."""
    rows = []
    for name in content["repeats"][0]["turns"]:
        turns = [turn for repeat in content["repeats"] for turn in repeat["turns"][name]]
        streamed = [turn for turn in turns if turn["kind"] == STREAMED]
        first = spread([turn["first_token_s"] for turn in streamed], digits=2)
        rest = spread([turn["s"] - turn["first_token_s"] for turn in streamed], digits=2)
        rows.append((name, span(first, " s"), span(rest, " s")))
    return table(("server", "to the first token, mean of the agents", "from there to the last answer"), rows)


def _answers(content: Json) -> str:
    """How many answers are equal, how many differ and why, with an example of each cause."""
    rows, examples = [], []
    parts = {"turns": [one["answers"] for one in content["repeats"]], "backlog": [content["backlog"]["answers"]]}
    for what, compared in parts.items():
        for name in compared[0]:
            others = [other for one in compared for other in one[name]["others"]]
            equal, causes = sum(one[name]["equal"] for one in compared), Counter(one["cause"] for one in others)
            told = "; ".join(f"{n}: {cause}" for cause, n in causes.items()) or "none"
            rows.append((f"{name}, {what}", equal + len(others), equal, told))
            for cause in causes:
                proved = [one for one in others if one["cause"] == cause and "margins" in one]
                examples += [_example(name, proved)] if proved else []
    return "\n".join([table(("peer", "answers", "equal", "different"), rows), "", *examples]).rstrip()


def _example(name: str, proved: list[Json]) -> str:
    """The first of some answers that differ for one cause."""
    one = proved[0]
    at = f"{one['agent']}, turn {one['turn']}" if "agent" in one else f"job {one['job']} of backlog {one['backlog']}"
    margins = [margin for other in proved for margin in other["margins"]]
    most = "none that gives them was found" if None in margins else f"{max(margins):.1g}"
    told = (
        f"* {name}, {one['cause']} ({len(proved)}): logits apart where a run was left, at most: {most}. The first: {at}"
    )
    if "pieces" not in one:
        return f"{told}."
    mine, other = ("`" + "|".join(map(_shown, pieces)) + "`" for pieces in one["pieces"])
    return f"{told}, where prompts of {one['lengths'][0]} and {one['lengths'][1]} tokens part: {mine}, {other}."


def _shown(piece: str) -> str:
    return piece.replace("\n", "\\n").replace("`", "'").replace("|", "¦")


def plot(content: Json, results: Path) -> None:
    rounds, jobs = _rounds(content), content["backlog"]
    kinds = [kind for kind in rounds["stoker"] if kind not in (FIRST, STREAMED)]
    width = 0.8 / len(rounds)
    with figure(content, results, "peers", (10, 3.8), panels=(1, 2), width_ratios=(2, 1)) as (left, right):
        for place, (name, found) in enumerate(rounds.items()):
            shown = [(n, spread(found[kind])) for n, kind in enumerate(kinds) if kind in found]
            at = [n + width * place for n, _ in shown]
            _bars(left, at, [one for _, one in shown], width=0.9 * width, label=name)
            _bars(right, [place], [jobs["seconds"][name]], width=0.7)
        left.set_xticks([n + width * (len(rounds) - 1) / 2 for n in range(len(kinds))], kinds)
        left.set_title("a later round of turns, s")
        left.legend()
        right.set_xticks(range(len(rounds)), list(rounds))
        right.set_title(f"{jobs['jobs']} jobs, s")


def _bars(axes: Any, at: list[float], found: list[Json], *, width: float, label: str | None = None) -> None:
    medians = [one["median"] for one in found]
    error = [[one["median"] - one["min"] for one in found], [one["max"] - one["median"] for one in found]]
    axes.bar(at, medians, yerr=error, capsize=4, width=width, label=label)
