"""EXP-009's loads: the same conversations with every server, with and without restarts between their turns, and
backlogs of short jobs, as fast as each can take them.

Owns their order, their times, and the comparison of all answers.
"""

import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from answer_differences import Said, cause, rendered, transcript
from bench import Bench
from common import Json, note, ratios, spread
from peer_servers import STOKER, Answer, Job, Message, Server, Servers, job_agent, rotated, store, user
from prompts import SIX_KINDS, text_of

from stoker_worker.memory.store import AgentCacheStore

FIRST, KEPT, STOPPED, KILLED = "first", "kept running", "after SIGTERM", "after SIGKILL"
_SIGNALS = {STOPPED: signal.SIGTERM, KILLED: signal.SIGKILL}


class Conversations:
    """Those of one server, with each of its agents."""

    def __init__(self, firsts: Mapping[str, str]) -> None:
        self.messages: dict[str, list[Message]] = {agent: [user(text)] for agent, text in firsts.items()}
        self.answers: dict[str, list[Answer]] = {agent: [] for agent in firsts}

    def add(self, answers: Mapping[str, Answer]) -> None:
        for agent, answer in answers.items():
            question = user(f"And then, {len(self.answers[agent])}?")
            self.messages[agent] += [{"role": "assistant", "content": answer.text}, question]
            self.answers[agent].append(answer)


def converse(
    bench: Bench, servers: Servers, name: str, turns: tuple[str, ...], times: int, *, n_tokens: int, max_tokens: int
) -> list[Json]:
    """So many conversations with each agent, one after the other: the turns of every server, and its answers beside
    stoker's.

    Args:
        turns: what comes before each turn. A server whose caches would not survive it keeps running instead.
        n_tokens: of the first messages, which differ from one conversation to the next.
    """
    talks = []
    with servers.started(name) as (started, folder):
        for number in range(times):
            agents = {f"agent {n} of {number}": n for n in range(servers.agents)}
            firsts = {agent: _first_message(bench, number, n, n_tokens) for agent, n in agents.items()}
            of = {server: Conversations(firsts) for server in started}
            taken: dict[str, list[Json]] = defaultdict(list)
            for n, before in enumerate(turns):
                for server in rotated(started, n + number):
                    survives = before not in _SIGNALS or _SIGNALS[before] in started[server].survived
                    kind = before if survives else KEPT
                    taken[server].append(_turn(server, started[server], of[server], kind, max_tokens))
            talks.append((taken, of))
    note(f"{name}: comparing answers")
    return [
        {"turns": dict(taken), "answers": _compared(bench, store(folder), of, lambda _: max_tokens)}
        for taken, of in talks
    ]


def _first_message(bench: Bench, number: int, agent: int, n_tokens: int) -> str:
    """Its first words are its own, so that no two agents begin alike."""
    text = text_of(bench.encode, SIX_KINDS[agent % len(SIX_KINDS)], n_tokens - agent, seed=10 * number + agent)
    return f"Notes {number}{agent}. {text}"


def _turn(name: str, server: Server, conversations: Conversations, kind: str, max_tokens: int) -> Json:
    start_s = round(server.restart(_SIGNALS[kind]), 2) if kind in _SIGNALS else None
    began = time.perf_counter()
    answers = server.turns(conversations.messages, max_tokens)
    seconds = time.perf_counter() - began
    note(f"{name}: {kind}: {seconds:.1f} s")
    conversations.add(answers)
    return {"kind": kind, "s": round(seconds, 3), "start_s": start_s}


def backlogs(bench: Bench, servers: Servers, *, n_jobs: int, most_tokens: int, rounds: int) -> Json:
    """Prompts of log-normal lengths, 8 to 24 tokens generated; other prompts in every round."""
    seconds: dict[str, list[float]] = defaultdict(list)
    jobs: dict[str, Job] = {}
    with servers.started("backlogs") as (started, folder):
        answers: dict[str, dict[str, Answer]] = {name: {} for name in started}
        for n in range(rounds):
            of_round = _jobs(bench, n, n_jobs, most_tokens)
            jobs |= of_round
            for name in rotated(started, n):
                began = time.perf_counter()
                found = started[name].backlog(f"backlog {n}", list(of_round.values()))
                seconds[name].append(time.perf_counter() - began)
                answers[name] |= zip(of_round, found, strict=True)
                note(f"backlog {n + 1} of {rounds}: {name}: {seconds[name][-1]:.1f} s")
    of = {name: Conversations({agent: job.prompt for agent, job in jobs.items()}) for name in answers}
    for name, conversations in of.items():
        conversations.add(answers[name])
    best = min((name for name in seconds if name != STOKER), key=lambda name: statistics.median(seconds[name]))
    note("backlogs: comparing answers")
    return {
        "jobs": n_jobs,
        "seconds": {name: spread(found, digits=1) for name, found in seconds.items()},
        "best": best,
        "rate": ratios(seconds[best], seconds[STOKER]),
        "answers": _compared(bench, store(folder), of, lambda agent: jobs[agent].max_tokens),
    }


def _jobs(bench: Bench, backlog: int, n_jobs: int, most_tokens: int) -> dict[str, Job]:
    """By the agent that stoker keeps each for."""
    drawn, jobs = random.Random(backlog), {}
    for n in range(n_jobs):
        length = min(most_tokens, max(8, int(drawn.lognormvariate(3.4, 0.9))))
        text = text_of(bench.encode, drawn.choice(SIX_KINDS), length, seed=1000 * backlog + n)
        jobs[job_agent(f"backlog {backlog}", n)] = Job(f"{backlog}.{n}: {text}", drawn.randint(8, 24))
    return jobs


def _compared(
    bench: Bench, kept: Path, of: Mapping[str, Conversations], max_tokens: Callable[[str], int]
) -> dict[str, list[Json]]:
    """For each peer, how its answers compare with stoker's to the same turn.

    Args:
        max_tokens: of an agent's answers.
    """
    found: dict[str, list[Json]] = {name: [] for name in of if name != STOKER}
    with closing(AgentCacheStore(kept)) as memory:
        for agent, ours in of[STOKER].answers.items():
            ids = transcript(memory, agent)
            for n, our in enumerate(ours):
                mine = Said([one.text for one in ours[:n]], ids[: our.n_prompt], our.n_prompt, our.text)
                for name, compared in found.items():
                    theirs = of[name].answers[agent]
                    prompt = rendered(bench, of[name].messages[agent][: 2 * n + 1])
                    said = Said([one.text for one in theirs[:n]], prompt, theirs[n].n_prompt, theirs[n].text)
                    compared.append({"agent": agent, "turn": n, **cause(bench, mine, said, max_tokens(agent))})
    return found
