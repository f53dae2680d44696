"""EXP-009's backlogs: the same short jobs for every server, as fast as each can take them."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from answer_differences import Said, cause, rendered, transcript
from bench import Bench
from common import Json, note, ratios, spread
from peer_servers import STOKER, Answer, Job, Servers, job_agent, rotated, store, user
from prompts import SIX_KINDS, text_of

from stoker_worker.memory.store import AgentCacheStore


def backlogs(bench: Bench, servers: Servers, *, n_jobs: int, most_tokens: int, rounds: int) -> Json:
    """Prompts of log-normal lengths, 8 to 24 tokens generated; other prompts in every round."""
    seconds: dict[str, list[float]] = defaultdict(list)
    taken: list[tuple[list[Job], dict[str, list[Answer]]]] = []
    with servers.started("backlogs") as (started, folder):
        for n in range(rounds):
            jobs, answers = _jobs(bench, n, n_jobs, most_tokens), {}
            for name in rotated(started, n):
                began = time.perf_counter()
                answers[name] = started[name].backlog(f"backlog {n}", jobs)
                seconds[name].append(time.perf_counter() - began)
                note(f"backlog {n + 1} of {rounds}: {name}: {seconds[name][-1]:.1f} s")
            taken.append((jobs, answers))
    peers = {name: found for name, found in seconds.items() if name != STOKER}
    best = min(peers, key=lambda name: statistics.median(peers[name]))
    lengths = [answer.n_prompt for _, answers in taken for answer in answers[STOKER]]
    note("backlogs: comparing answers")
    return {
        "jobs": n_jobs,
        "prompt_tokens": {"median": round(statistics.median(lengths)), "most": max(lengths)},
        "seconds": {name: spread(found, digits=1) for name, found in seconds.items()},
        "best": best,
        "rate": ratios(seconds[best], seconds[STOKER]),
        "answers": _compared(bench, store(folder), taken),
    }


def _jobs(bench: Bench, backlog: int, n_jobs: int, most_tokens: int) -> list[Job]:
    drawn, jobs = random.Random(backlog), []
    for n in range(n_jobs):
        length = min(most_tokens, max(8, int(drawn.lognormvariate(3.4, 0.9))))
        text = text_of(bench.encode, drawn.choice(SIX_KINDS), length, seed=1000 * backlog + n)
        jobs.append(Job(f"{backlog}.{n}: {text}", drawn.randint(8, 24)))
    return jobs


def _compared(
    bench: Bench, kept: Path, rounds: Sequence[tuple[list[Job], Mapping[str, list[Answer]]]]
) -> dict[str, list[Json]]:
    """For each peer, how its answers compare with stoker's to the same job."""
    found: dict[str, list[Json]] = {name: [] for name in rounds[0][1] if name != STOKER}
    with closing(AgentCacheStore(kept)) as memory:
        for number, (jobs, answers) in enumerate(rounds):
            for n, (job, our) in enumerate(zip(jobs, answers[STOKER], strict=True)):
                ids = transcript(memory, job_agent(f"backlog {number}", n))
                mine = Said([], ids[: our.n_prompt], our.n_prompt, our.text)
                for name, compared in found.items():
                    their = answers[name][n]
                    said = Said([], rendered(bench, [user(job.prompt)]), their.n_prompt, their.text)
                    compared.append({"backlog": number, "job": n, **cause(bench, mine, said, job.max_tokens)})
    return found
