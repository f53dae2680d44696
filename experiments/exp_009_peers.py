"""EXP-009, peers: agents' turns, kept running and restarted, a fleet larger than RAM, and a backlog: stoker,
mlx_lm.server and vllm-mlx.

All serve the same model in the same dtype with the same BLAS, and take turns: while one works the others wait.
vllm-mlx needs an environment of its own, because it needs another mlx-lm; without ``--vllm-mlx`` it is left out.
"""

import json
import statistics
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from answer_differences import EQUAL, UNEXPLAINED
from bench import Bench, main
from common import Json, ratios, spread
from peer_servers import STOKER, VLLM_MLX, Servers
from peer_turns import FIRST, KEPT, KILLED, STOPPED, backlogs, converse
from report import Report, columns, machine_line, say, span, table

from stoker_worker.models.blas import find_blas

AGENTS = 8
MOST_FIRST, MOST_LATER, MOST_FLEET, LEAST_RATE = 0.75, 1.0, 0.5, 1.3
TURNS, FLEET_TURNS = (FIRST, KEPT, KILLED), (FIRST, KEPT, STOPPED)
SHARE_IN_RAM = 1 / 4


def run(bench: Bench, folder: Path, *, quick: bool, vllm_mlx: str | None) -> Json:
    servers = _servers(bench, folder, AGENTS, Path(vllm_mlx) if vllm_mlx else None)
    lengths = {"n_tokens": 40, "max_tokens": 4} if quick else {"n_tokens": 200, "max_tokens": 12}
    repeats = converse(bench, servers, "conversations", TURNS, 1 if quick else 3, **lengths)
    fleet = _fleet(bench, servers, 4 if quick else 48, lengths)
    of_jobs = (
        {"n_jobs": 4, "most_tokens": 40, "rounds": 1} if quick else {"n_jobs": 60, "most_tokens": 200, "rounds": 2}
    )
    jobs = backlogs(bench, servers, **of_jobs)
    of_peers = _ratios(repeats)
    answers = [one for part in (*repeats, fleet, jobs) for found in part["answers"].values() for one in found]
    verdict = {
        "a_first_round_at_most_0_75_of_the_best_peers": of_peers[FIRST]["median"] <= MOST_FIRST,
        "every_later_round_at_most_the_best_peers_kept_running": all(
            found["median"] <= MOST_LATER for kind, found in of_peers.items() if kind != FIRST
        ),
        "a_fleet_larger_than_ram_at_most_0_5_of_the_best_peers": fleet["ratio"] <= MOST_FLEET,
        "the_backlog_at_1_3_of_the_best_peers_rate": jobs["rate"]["median"] >= LEAST_RATE,
        "every_answer_equal_or_explained": all(one["cause"] != UNEXPLAINED for one in answers),
    }
    return {
        "verdict": verdict,
        "versions": _versions_found(vllm_mlx),
        "agents": AGENTS,
        "tokens_at_first": lengths["n_tokens"],
        "ratios": of_peers,
        "repeats": list(map(_without_equal, repeats)),
        "fleet": _without_equal(fleet),
        "backlog": _without_equal(jobs),
    }


def _fleet(bench: Bench, servers: Servers, n_agents: int, lengths: Json) -> Json:
    """Three turns of agents whose caches are four times as large as the RAM that any server may keep them in."""
    per_agent = (lengths["n_tokens"] + len(FLEET_TURNS) * 40) * bench.facts["cache_bytes_per_token"]
    fleet = replace(servers, agents=n_agents, cache_bytes=int(SHARE_IN_RAM * n_agents * per_agent))
    (talk,) = converse(bench, fleet, "fleet", FLEET_TURNS, 1, **lengths)
    whole = {name: sum(turn["s"] for turn in turns) for name, turns in talk["turns"].items()}
    best = min((name for name in whole if name != STOKER), key=lambda name: whole[name])
    later = {name: whole[name] - talk["turns"][name][0]["s"] for name in (STOKER, best)}
    return {"agents": n_agents, "best": best, "ratio": whole[STOKER] / whole[best],
            "ratio_without_first": later[STOKER] / later[best], **talk}  # fmt: skip


def short_form(bench: Bench, folder: Path) -> list[Json]:
    """Beside mlx_lm.server, both kept running."""
    servers = _servers(bench, folder, 4, None)
    kinds = (FIRST, KEPT, KEPT, KEPT)
    (talk,) = converse(bench, servers, "conversations", kinds, 1, n_tokens=200, max_tokens=16)
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
    for kind in dict.fromkeys(turn["kind"] for turn in repeats[0]["turns"][STOKER]):
        of_peers = FIRST if kind == FIRST else KEPT
        best = min(peers, key=lambda name: statistics.median(median(one, name, of_peers) for one in repeats))
        ours = [median(repeat, STOKER, kind) for repeat in repeats]
        theirs = [median(repeat, best, of_peers) for repeat in repeats]
        found[kind] = {"best": best, **ratios(ours, theirs)}
    return found


def _without_equal(part: Json) -> Json:
    """With how many answers are equal, and all about the others."""
    others = {name: [one for one in found if one["cause"] != EQUAL] for name, found in part["answers"].items()}
    counted = {
        name: {"equal": len(part["answers"][name]) - len(found), "others": found} for name, found in others.items()
    }
    return {**part, "answers": counted}


def _versions_found(python: str | None) -> Json:
    """Those of vllm-mlx and its libraries; ``{}`` if it is left out."""
    if python is None:
        return {}
    code = "import json; from importlib.metadata import version as v; "
    code += f"print(json.dumps({{name: v(name) for name in ({VLLM_MLX!r}, 'mlx', 'mlx-lm')}}))"
    return dict(json.loads(subprocess.check_output([python, "-c", code])))


RATIOS = {"stoker's round": "{kind}", "beside (best peer)": "{best}", "ratio": "{ratio}", "asked, at most": "{asked}"}


def render(content: Json, results: Path) -> Report:
    jobs, fleet, repeats = content["backlog"], content["fleet"], content["repeats"]
    turns = {name: [turn for repeat in repeats for turn in repeat["turns"][name]] for name in repeats[0]["turns"]}
    rounds, starts = ({name: _by_kind(found, key) for name, found in turns.items()} for key in ("s", "start_s"))
    kinds = list(dict.fromkeys(kind for found in rounds.values() for kind in found))
    ratios = [{"kind": kind, **found, "ratio": found, "asked": MOST_FIRST if kind == FIRST else MOST_LATER}
              for kind, found in content["ratios"].items()]  # fmt: skip
    number = say(content, "a later round {ratios[kept running][median]} times as long (asked: 1); the backlog at "
                 "{backlog[rate][median]} times its rate")  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    of_peer = f" The third server's environment: {versions}." if versions else ""
    rates = [(name, span(s, " s"), f"{jobs['jobs'] / s['median']:.2f}") for name, s in jobs["seconds"].items()]
    of_fleet = {name: [turn["s"] for turn in found] for name, found in fleet["turns"].items()}
    return Report("this worker and its peers, kept running and restarted", number, {
        "summary": _summary(content),
        "machine": machine_line(content) + of_peer,
        "rounds": table(("server", *kinds), [(name, *(_cell(found.get(kind, [])) for kind in kinds))
                                             for name, found in rounds.items()]),
        "ratios": columns(ratios, RATIOS),
        "starts": table(("server", "ready again after"), [(f"{name}, {kind}", _cell(seconds))
                        for name, found in starts.items() for kind, seconds in found.items()]),
        "fleet": table(("server", "first turn", "second", "third, restarted if its caches survive that", "all"),
                       [(name, *(f"{s:.1f} s" for s in (*found, sum(found)))) for name, found in of_fleet.items()]),
        "backlog": table(("server", "the backlog", "jobs/s"), rates),
        "answers": _answers(content),
    })  # fmt: skip


def _by_kind(turns: Sequence[Json], key: str) -> dict[str, list[float]]:
    """Seconds by what came before the turn; without those that have none."""
    found: dict[str, list[float]] = {}
    for turn in turns:
        if turn[key] is not None:
            found.setdefault(turn["kind"], []).append(turn[key])
    return found


def _cell(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"{seconds[0]:.1f} s, once" if seconds else ""
    return f"{span(spread(seconds, digits=1), ' s')}, {len(seconds)} times"


def _summary(content: Json) -> str:
    jobs, fleet, (_, first), *later = content["backlog"], content["fleet"], *content["ratios"].items()
    told = "; ".join(f"{kind} {span(found)} times" for kind, found in later)
    are_explained = content["verdict"]["every_answer_equal_or_explained"]
    return (
        f"The first round of {content['agents']} agents with {content['tokens_at_first']} tokens each took "
        f"{span(first)} times as long as that of the best peer, {first['best']} (asked: at most 0.75). A later round, "
        f"beside the one of {later[0][1]['best']}, which kept running: {told} (asked: at most 1). "
        f"{fleet['agents']} agents whose caches are four times as large as the RAM for them took {fleet['ratio']:.2f} "
        f"times as long as with {fleet['best']} for three turns (asked: at most {MOST_FLEET}), "
        f"{fleet['ratio_without_first']:.2f} times without the first. A backlog of "
        f"{jobs['jobs']} jobs went through at {span(jobs['rate'])} times the rate of {jobs['best']} (asked: 1.3). "
        f"{'Every answer is equal or explained.' if are_explained else 'Some answers are neither equal nor explained.'}"
        f"{'' if content['versions'] else ' vllm-mlx was not run.'}"
    )


def _answers(content: Json) -> str:
    """How many answers are equal, and how many differ for which cause."""
    rows = []
    parts = {"turns": [one["answers"] for one in content["repeats"]]}
    parts |= {name: [content[name]["answers"]] for name in ("fleet", "backlog")}
    for what, compared in parts.items():
        for name in compared[0]:
            causes = Counter(other["cause"] for one in compared for other in one[name]["others"])
            equal = sum(one[name]["equal"] for one in compared)
            told = "; ".join(f"{n}: {cause}" for cause, n in causes.items()) or "none"
            rows.append((f"{name}, {what}", equal + causes.total(), equal, told))
    return table(("peer", "answers", "equal", "different"), rows)


if __name__ == "__main__":
    python = {"help": "Python of an environment with vllm-mlx; without it, that peer is left out"}
    main(__doc__ or "", "009", run, render, vllm_mlx=python)
