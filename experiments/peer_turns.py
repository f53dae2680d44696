"""EXP-009's turns: the same conversations with every server, with and without restarts between them.

Owns their order, their times, and where stoker's jobs say that theirs went.
"""

import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from answer_differences import Said, cause, rendered, transcript
from bench import Bench
from common import Json, note
from peer_servers import STOKER, Answer, Message, Server, Servers, rotated, store, user
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
    bench: Bench,
    servers: Servers,
    turns: tuple[str, ...],
    number: int,
    *,
    n_tokens: int,
    max_tokens: int,
    loses: bool,
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
    return {"turns": dict(taken), "answers": _compared(bench, store(folder), of, max_tokens)}


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


def _compared(bench: Bench, kept: Path, of: Mapping[str, Conversations], max_tokens: int) -> dict[str, list[Json]]:
    """For each peer, how its answers compare with stoker's to the same turn."""
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
                    compared.append({"agent": agent, "turn": n, **cause(bench, mine, said, max_tokens)})
    return found
