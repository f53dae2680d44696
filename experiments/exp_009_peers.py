"""EXP-009, peers: agents' turns, kept running and restarted, and a backlog: stoker, mlx_lm.server and vllm-mlx.

All serve the same model in the same dtype with the same BLAS, and take turns: while one works the others wait.
vllm-mlx needs an environment of its own, because it needs another mlx-lm; without ``--vllm-mlx`` it is left out.
"""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from answer_differences import EQUAL, UNEXPLAINED
from bench import Bench, main
from common import Json, ratios
from exp_009_report import FIRST, KEPT, KILLED, STOPPED, STREAMED, render
from peer_backlogs import backlogs
from peer_clients import PLACES, STOKER, VLLM_MLX
from peer_servers import Servers
from peer_turns import converse

from stoker_worker.models.blas import find_blas

AGENTS = 8
MOST_FIRST, MOST_LATER, LEAST_RATE = 0.75, 1.0, 1.3


@dataclass(frozen=True)
class Size:
    """
    Attributes:
        repeats: conversations with each agent, one after the other.
        turns, n_tokens, max_tokens, loses: as in `converse`; `loses` in the last repeat only.
        jobs, most_tokens, backlogs: as in `backlogs`.
    """

    repeats: int
    turns: tuple[str, ...]
    loses: bool
    n_tokens: int
    max_tokens: int
    jobs: int
    most_tokens: int
    backlogs: int


FULL = Size(3, (FIRST, KEPT, KEPT, STREAMED, STOPPED, KILLED), True, 300, 24, jobs=100, most_tokens=300, backlogs=2)
QUICK = Size(1, (FIRST, STREAMED, KEPT, KILLED), False, 40, 4, jobs=4, most_tokens=40, backlogs=1)


def run(bench: Bench, folder: Path, *, quick: bool, vllm_mlx: str | None) -> Json:
    size = QUICK if quick else FULL
    servers = _servers(bench, folder, AGENTS, Path(vllm_mlx) if vllm_mlx else None)
    repeats = [
        converse(
            bench,
            servers,
            size.turns,
            number,
            n_tokens=size.n_tokens,
            max_tokens=size.max_tokens,
            loses=size.loses and number == size.repeats,
        )
        for number in range(1, size.repeats + 1)
    ]
    jobs = backlogs(bench, servers, n_jobs=size.jobs, most_tokens=size.most_tokens, rounds=size.backlogs)
    of_peers = _ratios(repeats)
    answers = [one for part in (*repeats, jobs) for found in part["answers"].values() for one in found]
    verdict = {
        "a_first_round_at_most_0_75_of_the_best_peers": of_peers[FIRST]["median"] <= MOST_FIRST,
        "every_later_round_at_most_the_best_peers_kept_running": all(
            found["median"] <= MOST_LATER for kind, found in of_peers.items() if kind != FIRST
        ),
        "the_backlog_at_1_3_of_the_best_peers_rate": jobs["rate"]["median"] >= LEAST_RATE,
        "every_answer_equal_or_explained": all(one["cause"] != UNEXPLAINED for one in answers),
    }
    return {
        "verdict": verdict,
        "versions": _versions(vllm_mlx),
        "agents": AGENTS,
        "places": PLACES,
        "tokens_at_first": size.n_tokens,
        "max_tokens": size.max_tokens,
        "ratios": of_peers,
        "repeats": [{**repeat, "answers": _without_equal(repeat["answers"])} for repeat in repeats],
        "backlog": {**jobs, "answers": _without_equal(jobs["answers"])},
    }


def short(bench: Bench, folder: Path) -> list[Json]:
    """Beside mlx_lm.server, both kept running."""
    servers = _servers(bench, folder, 4, None)
    kinds = (FIRST, KEPT, KEPT, KEPT)
    talk = converse(bench, servers, kinds, 1, n_tokens=200, max_tokens=16, loses=False)
    jobs = backlogs(bench, servers, n_jobs=24, most_tokens=120, rounds=3)
    seconds = {name: [turn["s"] for turn in turns] for name, turns in talk["turns"].items()}
    peer = next(name for name in seconds if name != STOKER)
    ours, theirs = seconds[STOKER], seconds[peer]
    equal = [all(one["cause"] == EQUAL for one in found["answers"][peer]) for found in (talk, jobs)]
    return [
        {"what": f"a first round of turns / {peer}, in time", "ratio": ratios(ours[:1], theirs[:1]),
         "asked": f"at most {MOST_FIRST}", "equal": equal[0]},
        {"what": f"a later round of turns / {peer}, in time", "ratio": ratios(ours[1:], theirs[1:]),
         "asked": f"at most {MOST_LATER}", "equal": equal[0]},
        {"what": f"a backlog of {jobs['jobs']} jobs / {peer}, in speed", "ratio": jobs["rate"],
         "asked": f"at least {LEAST_RATE}", "equal": equal[1]},
    ]  # fmt: skip


def _servers(bench: Bench, folder: Path, agents: int, vllm_mlx: Path | None) -> Servers:
    """On a CPU the peers get the library that the worker loads by itself."""
    blas = None if bench.on_gpu else find_blas()
    return Servers(bench.as_computed(folder / "model"), bench.dtype, blas, folder, agents, vllm_mlx)


def _ratios(repeats: Sequence[Json]) -> Json:
    """By kind of turn: stoker's time to the best peer's, which has kept running, in the same conversations."""

    def median(repeat: Json, name: str, kind: str) -> float:
        return statistics.median(turn["s"] for turn in repeat["turns"][name] if turn["kind"] == kind)

    peers = [name for name in repeats[0]["turns"] if name != STOKER]
    found = {}
    for kind in dict.fromkeys(turn["kind"] for turn in repeats[0]["turns"][STOKER] if turn["kind"] != STREAMED):
        of_peers = FIRST if kind == FIRST else KEPT
        best = min(peers, key=lambda name: statistics.median(median(one, name, of_peers) for one in repeats))
        ours = [median(repeat, STOKER, kind) for repeat in repeats]
        theirs = [median(repeat, best, of_peers) for repeat in repeats]
        found[kind] = {"best": best, **ratios(ours, theirs)}
    return found


def _without_equal(answers: Mapping[str, list[Json]]) -> Json:
    """How many answers are equal, and all about the others."""
    others = {name: [one for one in found if one["cause"] != EQUAL] for name, found in answers.items()}
    return {name: {"equal": len(answers[name]) - len(found), "others": found} for name, found in others.items()}


def _versions(python: str | None) -> Json:
    """Those of vllm-mlx and its libraries; ``{}`` if it is left out."""
    if python is None:
        return {}
    code = "import json; from importlib.metadata import version as v; "
    code += f"print(json.dumps({{name: v(name) for name in ({VLLM_MLX!r}, 'mlx', 'mlx-lm')}}))"
    return dict(json.loads(subprocess.check_output([python, "-c", code])))


if __name__ == "__main__":
    python = {"help": "Python of an environment with vllm-mlx; without it, that peer is left out"}
    main(__doc__ or "", "009", run, render, vllm_mlx=python)
