"""After a power cut at any instant each agent is whole, at its last version or at the one that was being saved, and a
job about it takes effect once."""

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from tests.worker.memory.agents import HYBRID, MODEL, Agent, ids, make_model, open_store, squeeze
from tests.worker.memory.recorded_disk import Op, RecordedDisk, Replay, Survivors

from stoker_shared.agents import AgentRequest, AgentResult
from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.database import Connection
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Delivery, Turn

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("DEEP", "0")) // 125
"""Of each instant, with each choice of what survives; 0: every fourth instant, each with another choice."""

LONG = ids(1200)
Q8 = make_model("q8", spec=make_model().spec.__class__(MODEL.spec.layers, MODEL.spec.dtype, store_dtype="q8"))
MODELS = {"window": HYBRID, "q8": Q8}
"""By agent; the others have `MODEL`."""

State = tuple[int, tuple[int, ...]]
"""Version and token ids; version 0 is no agent."""

NOBODY: State = (0, ())


@dataclass
class AgentJob:
    request: AgentRequest
    delivery: Delivery
    result: AgentResult | None = None

    def run(self, store: AgentCacheStore) -> AgentResult:
        return store.agent_jobs.run(self.request, self.delivery)


@dataclass
class Story:
    """What is done to a store on a recorded disk. Each change of an agent is noted before it begins and after it has
    returned."""

    disk: RecordedDisk
    store: AgentCacheStore
    jobs: Iterator[int] = field(default_factory=count)

    def agent(self, name: str) -> Agent:
        return Agent(self.store, name, MODELS.get(name, MODEL), jobs=self.jobs)

    @contextmanager
    def changing(self, name: str, after: State, by: Turn | AgentJob) -> Iterator[None]:
        self.disk.note("begun", name, after, by)
        yield
        self.disk.note("returned", name, after, by)

    def say(self, name: str, prompt: tuple[int, ...], answer: tuple[int, ...] = (7, 8)) -> None:
        turn = self.agent(name).turn(prompt, answer)
        with self.changing(name, (turn.version, (*prompt, *answer)), turn):
            self.store.save(turn)

    def say_together(self, prompts: dict[str, tuple[int, ...]]) -> None:
        """Turns whose transactions share one sync."""
        database = self.store.parts.database
        threads = [threading.Thread(target=self.say, args=item) for item in prompts.items()]
        with database._leading:
            for thread in threads:
                thread.start()
            while len(database._waiting) < len(threads):
                threads[0].join(0.001)
        for thread in threads:
            thread.join()

    def job(self, action: str, name: str, after: State, **fields: str) -> None:
        request = AgentRequest(agent_id=name, action=action, **fields)  # type: ignore[arg-type]
        job = AgentJob(request, Delivery(f"agent-job-{next(self.jobs)}", "2024-01-01T00:00:00Z"))
        with self.changing(fields.get("target", name), after, job):
            job.result = job.run(self.store)

    def reopen(self) -> None:
        self.store.close()
        self.store = on_disk(self.disk)


def on_disk(disk: RecordedDisk) -> AgentCacheStore:
    def often_emptied(path: Path) -> Connection:
        connection = disk.connector(path)
        connection.execute("PRAGMA wal_autocheckpoint=24").fetchall()
        return connection

    return AgentCacheStore(disk.root, files=disk, connector=often_emptied, max_bytes=1 << 30, keep_versions=2)


def tell(root: Path, plot: Callable[[Story], None]) -> list[Op]:
    """The steps on the disk, from the making of the store on."""
    root.mkdir()
    disk = RecordedDisk(root)
    with disk.witnessed():
        story = Story(disk, on_disk(disk))
        plot(story)
        story.store.close()
    return disk.ops


def everything(story: Story) -> None:
    story.say("a", LONG[:300])
    story.say("window", LONG[:280])
    story.say("a", (*LONG[:300], 7, 8, *LONG[300:400]))
    story.say_together({"a": LONG[:900], "b": LONG[:600], "q8": LONG[:300], "c": LONG[:20]})
    story.job("fork", "a", (1, story.agent("a").tokens()), target="d")
    story.say("window", LONG[:520])
    story.job("rollback", "window", (3, (*LONG[:280], 7, 8)))
    story.job("forget", "b", NOBODY)
    squeeze(story.store)
    story.store.parts.database.empty_log()
    story.say("a", LONG[:1000])
    story.reopen()
    story.say("q8", ids(270, seed=5))  # another conversation
    story.say("b", ids(30, seed=6))
    story.job("forget", "c", NOBODY)


def many_versions(story: Story) -> None:
    """A whole transcript after deltas, and old versions pruned."""
    for number in range(18):
        story.say("a", (*LONG[: 10 + number],))


@dataclass
class Expected:
    """What a power cut may leave of each agent, by the notes so far."""

    at: dict[str, State]
    maybe: dict[str, State]
    turns: dict[tuple[str, State], Turn] = field(default_factory=dict)
    jobs: dict[str, AgentJob] = field(default_factory=dict)
    """By the agent that they change: those that are its last change."""

    def hear(self, what: str, name: str, state: State, by: Turn | AgentJob) -> None:
        self.at.setdefault(name, NOBODY)
        if isinstance(by, Turn):
            self.turns[name, state] = by
        if what == "begun":
            self.maybe[name] = state
            self.jobs.pop(name, None)
            if isinstance(by, AgentJob):
                self.jobs[name] = by
        else:
            self.at[name] = self.maybe.pop(name)

    def check(self, folder: Path, counts: Counter[str]) -> None:
        """The store opens; all agents are whole, at a state that they may be at, and go on from there."""
        with closing(open_store(folder)) as store:
            caches = (str(store.parts.blocks.path), str(store.parts.pieces.path))  # files of which may be torn
            assert [line for line in verify_store(store.parts) if not line.startswith(caches)] == []
            for name in self.at:
                agent = Agent(store, name, MODELS.get(name, MODEL))
                version = agent.open()
                state = (version.number, agent.tokens())
                assert state in (self.at[name], self.maybe.get(name)), name
                counts["new" if state != self.at[name] else "old"] += 1
                for at in {self.at[name], self.maybe.get(name, NOBODY)}:
                    if turn := self.turns.get((name, at)):
                        answer = store.answer(name, turn.delivery)
                        assert answer == (turn.result if at == state or state[0] > at[0] else None)
                if state[0]:
                    counts["cached" if agent.cached((*state[1], 1)) else "missed"] += 1  # and it is the right cache
            for name, job in self.jobs.items():
                self.deliver_again(store, name, job)
            if self.at:
                name = sorted(self.at)[len(counts) % len(self.at)]
                agent = Agent(store, name, MODELS.get(name, MODEL))
                prompt = (*agent.tokens(), *LONG[:300])
                for _ in range(2):  # without its snapshot, torn blocks are only found behind the next one
                    agent.say(prompt)
                assert agent.cached((*prompt, 1)) == len(prompt)

    def deliver_again(self, store: AgentCacheStore, name: str, job: AgentJob) -> None:
        """The job takes effect once, and has the answer that it would have had."""
        answer, is_after = store.agent_jobs.answer(job.request, job.delivery), self.maybe.get(name, self.at[name])
        assert answer is not None or name in self.maybe
        assert (answer or job.run(store)) == job.result == store.agent_jobs.answer(job.request, job.delivery)
        agent = Agent(store, name, MODELS.get(name, MODEL))
        assert (agent.open().number, agent.tokens()) == is_after


def cut_everywhere(quick_path: Path, ops: list[Op], first: int = 0) -> Counter[str]:
    counts: Counter[str] = Counter()
    every: list[Survivors] = ["all", "none", "some"]
    for round_ in range(max(ROUNDS, 1)):
        replay, expected = Replay(), Expected({}, {})
        for number, op in enumerate(ops):
            if op[0] == "note":
                expected.hear(*op[1:])
                continue
            replay.step(op)
            if number < first or (not ROUNDS and number % 4):
                continue
            for survivors in every if ROUNDS else [every[number // 4 % 3]]:
                after = quick_path / "after"
                after.mkdir()
                replay.write_to(after, survivors, random.Random(number + 1000 * round_))
                expected.check(after, counts)
                shutil.rmtree(after)
    return counts


def test_a_power_cut_leaves_each_agent_at_its_last_version_or_at_the_next_one(quick_path: Path) -> None:
    counts = cut_everywhere(quick_path, tell(quick_path / "disk", everything))
    assert min(counts[kind] for kind in ("new", "old", "cached", "missed")) > 20


def test_a_power_cut_while_versions_are_pruned_leaves_the_others(quick_path: Path) -> None:
    ops = tell(quick_path / "disk", many_versions)
    cut_everywhere(quick_path, ops, first=0 if ROUNDS else len(ops) - 60)


def test_what_a_save_returned_for_does_not_need_the_syncs_after_it(quick_path: Path) -> None:
    """The last instant of each save, with nothing that is not synced: its version is there."""
    ops = tell(quick_path / "disk", everything)
    replay, expected, n_saves = Replay(), Expected({}, {}), 0
    for number, op in enumerate(ops):
        if op[0] != "note":
            replay.step(op)
            continue
        expected.hear(*op[1:])
        if op[1] == "returned":
            n_saves += 1
            after = quick_path / str(number)
            after.mkdir()
            replay.write_to(after, "none", random.Random(0))
            expected.check(after, Counter())
    assert n_saves == 15
