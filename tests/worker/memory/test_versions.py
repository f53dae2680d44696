"""The versions of agents over hundreds of turns, against a model: whatever is rewritten, pruned or read again."""

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker.memory.agents import Agent, ids, make_model, make_turn, open_store, rows, tidy

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_shared.message import Message
from stoker_worker.memory import transcripts
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.transcripts import FULL_EVERY
from stoker_worker.ports import Delivery, Transcript, Turn
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

WITHOUT_MEMORY = make_model(spec=ModelCacheSpec((LayerSpec(LayerKind.UNKNOWN),), "float32"))
_tokens = count(1)


@dataclass
class Conversation:
    """An agent in the store, and what it should be.

    Attributes:
        said: its transcripts; the first is version 1.
    """

    agent: Agent
    said: list[Transcript] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    def save(self, transcript: Transcript) -> None:
        turn = make_turn(self.agent, self.agent.open(), transcript, None)
        self.agent.store.save(turn)
        self.said.append(transcript)
        self.deliveries.append(turn.delivery)
        self.results.append(turn.result)

    def step(self, how: str, amount: int) -> None:
        """Go on, replace the end, replace everything, repeat the same, or change to chat messages or to text."""
        last = self.said[-1] if self.said else Transcript((), "tok", (), None, "eos")
        tokens, messages, text = last.token_ids, last.messages or (), last.text or ""
        if how == "cut":
            tokens, messages, text = tokens[: amount * 3], messages[: amount // 8], text[:amount]
        elif how == "replace":
            tokens, messages, text = (), (), ""
        if how != "repeat":
            tokens += tuple(next(_tokens) % 50_000 for _ in range(amount))
            messages += (Message(role="user", content=f"{next(_tokens)} \U0001f600"),)
            text += f"{next(_tokens)} \u00e9\U0001f600"
        is_text = (last.text is not None) != (how == "other form")
        forms = (None, text) if is_text else (messages, None)
        self.save(Transcript(tokens, "tok", *forms, ("eos", "stop", "length")[amount % 3], "." * (amount % 2)))  # type: ignore[arg-type, call-arg]

    def check(self, keep_versions: int) -> None:
        """The newest version is right, and every version that is kept can be returned and is right."""
        store, version = self.agent.store, self.agent.open()
        newest = self.said[-1] if self.said else None
        assert (version.number, version.transcript) == (len(self.said), newest)
        if newest is None:
            return
        with store.parts.database.snapshot() as connection:
            row = transcripts.find_agent(connection, self.agent.name)
            assert row is not None
            kept = [record.version for record, can_return in transcripts.read_history(connection, row) if can_return]
            for number in kept:
                assert transcripts.read_version(connection, row, number)[0] == self.said[number - 1]
        oldest = max(1, len(self.said) - keep_versions + 1)
        assert set(range(oldest, len(self.said) + 1)) <= set(kept)
        assert len(kept) <= keep_versions + 2 * FULL_EVERY
        for delivery, result in list(zip(self.deliveries, self.results, strict=True))[-keep_versions:]:
            assert store.answer(self.agent.name, delivery) == result


HOW = st.sampled_from(["go on"] * 6 + ["cut", "replace", "repeat", "other form"])
STEPS = st.lists(st.tuples(st.integers(0, 2), HOW, st.integers(0, 40)), min_size=1, max_size=30)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(1, 20), st.integers(3, 8))
def test_transcripts_stay_right_over_hundreds_of_turns(
    tmp_path: Path, steps: list[tuple[int, str, int]], keep_versions: int, rounds: int
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    store = open_store(folder, keep_versions=keep_versions)
    agents = [Conversation(Agent(store, f"agent {number}", WITHOUT_MEMORY)) for number in range(3)]
    for _ in range(rounds):
        for number, how, amount in steps:
            agents[number].step(how, amount)
        for agent in agents:
            agent.check(keep_versions)
        store.close()
        store = open_store(folder, keep_versions=keep_versions)
        for agent in agents:
            agent.agent.store = store
            agent.check(keep_versions)
    store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentCacheStore]:
    store = open_store(tmp_path / "store", keep_versions=2)
    yield store
    store.close()


def value(store: AgentCacheStore, sql: str) -> float:
    return float(rows(store, sql)[0][0])


def test_rows_and_bytes_do_not_grow_with_the_turns_of_a_conversation(store: AgentCacheStore) -> None:
    """A conversation that stays as long as it is leaves as much behind after 120 turns as after 60."""
    agent = Conversation(Agent(store, model=WITHOUT_MEMORY))
    sizes = []
    for number in range(120):
        agent.save(Transcript((*ids(100, seed=1), number), "tok", None, "always the same", "eos"))
        store.ended("agent", agent.deliveries[-1], remember_s=-1)
        tidy(store)
        sql = "SELECT (SELECT count(*) FROM turns), (SELECT count(*) FROM deliveries), transcript_bytes FROM agents"
        sizes += rows(store, sql)
    for early, late in zip(*(map(max, zip(*part, strict=True)) for part in (sizes[20:60], sizes[80:])), strict=True):
        assert late <= 1.05 * early  # numbers in JSON get longer
    agent.said[:-1] = [None] * 119  # type: ignore[list-item]
    assert agent.agent.open().transcript == agent.said[-1]


def test_many_answers_whose_time_is_over_are_forgotten_in_small_steps(store: AgentCacheStore) -> None:
    """A worker that was away for days finds them all at once; no commit may take long for that."""
    for number in range(500):
        saved_turn(store, f"agent {number}")
    store.parts.database.commit(lambda connection: connection.execute("UPDATE deliveries SET expires = agent"))
    left = [500.0]
    for _ in itertools.chain(store._upkeep.tidy(), [None]):
        left.append(value(store, "SELECT count(*) FROM deliveries"))
    assert max(before - after for before, after in itertools.pairwise(left)) < 300
    assert left[-1] == 0


def saved_turn(store: AgentCacheStore, name: str = "agent") -> Turn:
    agent = Agent(store, name, WITHOUT_MEMORY)
    turn = make_turn(agent, agent.open(), Transcript((1,), "tok", None, "x", "eos"), None)
    store.save(turn)
    return turn


def test_an_answer_that_is_missing_or_damaged_is_never_taken_for_none(store: AgentCacheStore) -> None:
    turn = saved_turn(store)
    for statement in (
        "UPDATE deliveries SET result = replace(result, 'job', 'jot')",
        "UPDATE deliveries SET result = x'ff'",
        "UPDATE deliveries SET checksum = x'00'",
        "DELETE FROM deliveries",
        "UPDATE turns SET about = replace(about, 'answer_until', 'answer_Until')",
    ):
        store.parts.database.commit(methodcaller("execute", statement))
        with pytest.raises(AgentTranscriptUnreadable, match="the answers of agent 'agent'"):
            store.answer("agent", turn.delivery)


def kept_for(store: AgentCacheStore) -> float:
    """Seconds until the first answer is forgotten."""
    tidy(store)
    return value(store, "SELECT min(expires) - strftime('%s') FROM deliveries")


def test_the_end_of_a_job_is_not_lost_with_a_commit_that_fails(
    store: AgentCacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = saved_turn(store)
    store.ended("agent", turn.delivery, remember_s=100)

    def fail(change: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(store.parts.database, "commit", fail)
        with pytest.raises(OSError, match="no space"):
            tidy(store)
    assert 0 < kept_for(store) < 200


@pytest.mark.slow
def test_a_job_that_is_enqueued_again_after_its_end_lives_longer(store: AgentCacheStore) -> None:
    turn = saved_turn(store)
    for lives_s in (100, 3600):
        store.ended("agent", turn.delivery, remember_s=lives_s)
        tidy(store)
    assert 3500 < kept_for(store) < 3700
