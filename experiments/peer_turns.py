"""EXP-009's loads: the same conversations with every server, with and without restarts between their turns, and
backlogs of short jobs, as fast as each can take them.

Owns their order, their times, where stoker's jobs say that theirs went, and the comparison of all answers.
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

FIRST, KEPT, STREAMED = "first", "kept running", "kept running, streamed"
STOPPED, KILLED = "after SIGTERM", "after SIGKILL"
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
    bench: Bench, servers: Servers, turns: tuple[str, ...], number: int, *, n_tokens: int, max_tokens: int, loses: bool
) -> Json:
    """One conversation with each agent: the turns of every server, and its answers beside stoker's.

    Args:
        turns: what comes before each turn. A server whose caches would not survive it keeps running instead.
        number: of these conversations; others have other texts.
        n_tokens: of the first messages.
        loses: whether such servers are restarted once, too, at the end.
    """
    firsts = {f"agent {n}": _first_message(bench, number, n, n_tokens) for n in range(servers.agents)}
    taken: dict[str, list[Json]] = defaultdict(list)
    with servers.started(f"conversations {number}") as (started, folder):
        of = {name: Conversations(firsts) for name in started}
        for n, before in enumerate(turns):
            for name in rotated(started, n + number):
                survives = before not in _SIGNALS or _SIGNALS[before] in started[name].survived
                taken[name].append(_turn(name, started[name], of[name], before if survives else KEPT, max_tokens))
        for name, server in started.items():
            lost = [kind for kind, one in _SIGNALS.items() if one not in server.survived]
            for kind in lost[:1] if loses else ():
                taken[name].append(_turn(name, server, of[name], kind, max_tokens))
    note(f"conversations {number}: comparing answers")
    return {"turns": dict(taken), "answers": _compared(bench, store(folder), of, lambda _: max_tokens)}


def _first_message(bench: Bench, number: int, agent: int, n_tokens: int) -> str:
    """Its first words are its own, so that no two agents begin alike."""
    text = text_of(bench.encode, SIX_KINDS[agent % len(SIX_KINDS)], n_tokens - agent, seed=10 * number + agent)
    return f"Notes {number}{agent}. {text}"


def _turn(name: str, server: Server, conversations: Conversations, kind: str, max_tokens: int) -> Json:
    start_s = round(server.restart(_SIGNALS[kind]), 2) if kind in _SIGNALS else None
    before, began = server.work(), time.perf_counter()
    answers = server.turns(conversations.messages, max_tokens, streams=kind == STREAMED)
    seconds = time.perf_counter() - began
    work = {what: round(done - before[what], 3) for what, done in server.work().items()}
    note(f"{name}: {kind}: {seconds:.1f} s")
    conversations.add(answers)
    parts = _parts(seconds, answers) if name == STOKER else None
    firsts = [one.first_token_s for one in answers.values() if one.first_token_s is not None]
    first_token_s = round(statistics.mean(firsts), 3) if firsts else None
    turn = {"kind": kind, "s": round(seconds, 3), "start_s": start_s, "first_token_s": first_token_s}
    return {**turn, "parts": parts, "work": work}


def _parts(seconds: float, answers: Mapping[str, Answer]) -> Json:
    """Where the time went, as the jobs' own records have it: means over the agents, which add up to `seconds`."""
    names = ("queued_s", "prefill_s", "first_token_s", "decode_s", "total_s")
    mean = {name: statistics.mean(one.timing[name] for one in answers.values() if one.timing) for name in names}
    parts = {
        "to the claim": mean["queued_s"],
        "restoring, and waiting for the batch": mean["first_token_s"] - mean["queued_s"] - mean["prefill_s"],
        "prefill": mean["prefill_s"],
        "decoding": mean["decode_s"],
        "saving": mean["total_s"] - mean["first_token_s"] - mean["decode_s"],
        "outside the job": seconds - mean["total_s"],
    }
    return {name: round(value, 3) for name, value in parts.items()}


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
