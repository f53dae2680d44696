"""Flips single bytes in the files of a store with many agents, and judges what the store then does.

Right, or a named error: never another text, never a known agent as a new one, never an error of another kind.
"""

import os
import random
import re
import shutil
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from tests.worker.memory.agents import HYBRID, MODEL, Agent, FastDisk, files_below, ids

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict, StoreUnusable
from stoker_shared.message import Message
from stoker_worker.memory.admin.salvage import salvage
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.database import Connection, connect
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.turn_saver import cached_chain
from stoker_worker.ports import AgentVersion, Delivery, Turn

PAGE: Final = 4096
FRAME: Final = PAGE + 24
DATABASE: Final = ("agents.db", "agents.db-wal", "agents.db-shm", "agents.commits", "lock")


def unsynced(path: Path) -> Connection:
    """A connection for tests that cut no power."""
    connection = connect(path)
    connection.execute("PRAGMA synchronous=OFF")
    return connection


def open_unsynced(folder: Path) -> AgentCacheStore:
    return AgentCacheStore(folder, files=FastDisk(), connector=unsynced)


@dataclass
class Truth:
    """A store as it was written, and what it has to answer.

    Attributes:
        folder: never opened again; copies of it are.
        answers: by agent: its last delivery, and the result.
    """

    folder: Path
    versions: dict[str, AgentVersion] = field(default_factory=dict)
    answers: dict[str, tuple[Delivery, Any]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """The agent of a cache file, by the file's path in the store."""

    @classmethod
    def make(cls, folder: Path, n_agents: int) -> "Truth":
        """A store that was stopped without a last word, with a log that is not in the database yet."""
        truth, live = cls(folder), folder.with_name(f"{folder.name} live")
        store = open_unsynced(live)
        agents = [Agent(store, f"agent-{i:04}", HYBRID if i % 10 == 9 else MODEL) for i in range(n_agents)]
        gone = [Agent(store, f"gone-{i:04}") for i in range(n_agents // 10)]
        for agent in gone:
            truth.say(agent, 1200)
        for i, agent in enumerate(agents):
            for turn in range(1 + (i * 7) % 19):
                truth.say(agent, 300 if i % 5 == 0 and turn < 3 else 6)
        for agent in gone:  # pages that were in use, and are free
            forget_agent(store.parts, agent.name)
            del truth.answers[agent.name]
        for mode, some in (("TRUNCATE", agents[1::3]), ("PASSIVE", agents[::8])):
            # The newest turns are in the log alone, and behind them older ones, which SQLite has to leave out.
            with closing(connect(live / "agents.db")) as connection:
                connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            for agent in some:
                truth.say(agent, 5)
        shutil.copytree(live, folder)
        for agent in agents:
            truth.versions[agent.name] = agent.open()
        store.close()
        shutil.rmtree(live)
        return truth

    def say(self, agent: Agent, n_tokens: int) -> None:
        turn, root = next_turn(agent, agent.open(), n_tokens), agent.store.parts.path
        agent.store.save(turn)
        self.answers[agent.name] = turn.delivery, turn.result
        pieces = agent.store.parts.pieces.paths(agent.name, turn.version)
        self.owners |= {str(path.relative_to(root)): agent.name for path in pieces if path.exists()}
        chain = cached_chain(turn)
        assert chain is not None
        for path in chain.paths(agent.store.parts.blocks.path_of):
            self.owners[str(path.relative_to(root))] = agent.name


def next_turn(agent: Agent, version: AgentVersion, n_tokens: int) -> Turn:
    """A turn after `version`, with words that no other agent and no other turn has."""
    old = version.transcript
    seed = 100 * version.number + sum(agent.name.encode())
    prompt = (*(old.token_ids if old else ()), *ids(n_tokens, seed=seed))
    turn = agent.turn(prompt, (7, 8), version)
    said = Message(role="user", content=f"turn {turn.version} of {agent.name}")
    messages = (*((old.messages if old else None) or ()), said)
    result = {"job_id": turn.delivery.job_id, "text": f"the answer to {said.content}"}
    return replace(turn, transcript=replace(turn.transcript, messages=messages), result=result)


@dataclass(frozen=True)
class Flip:
    """One byte of a file (by its path in the store): exclusive or with `mask`."""

    path: str
    at: int
    mask: int

    def apply(self, folder: Path) -> None:
        path = folder / self.path
        data = bytearray(path.read_bytes())
        data[self.at] ^= self.mask
        path.unlink()  # the copy of a cache file is a link
        path.write_bytes(data)


def spoil(folder: Path, row: bytes, column: bytes) -> None:
    """Flip a bit of a column in the closed database, behind these bytes of its row: an index has another value now."""
    data = (folder / "agents.db").read_bytes()
    Flip("agents.db", data.index(column, data.index(row)) + len(column) - 1, 1).apply(folder)


class Flipper:
    """Chooses flips at random: half of them anywhere, half where a byte has a meaning of its own."""

    def __init__(self, truth: Truth, seed: int) -> None:
        self.truth = truth
        self.random = random.Random(seed)
        self._files = {str(path.relative_to(truth.folder)): path.read_bytes() for path in files_below(truth.folder)}
        self._caches = [path for path in self._files if path.endswith(".safetensors")]

    def choose(self) -> Flip:
        path = self.random.choices(["agents.db", "agents.db-wal", "cache", "small"], weights=[45, 35, 15, 5])[0]
        if path == "cache":
            path = self.random.choice(self._caches)
        elif path == "small":
            path = self.random.choice(["agents.db-shm", "agents.commits", "lock"])
        data = self._files[path]
        at = self.random.choice([self._anywhere, self._aimed])(path, data)
        mask = self.random.choice([1 << self.random.randrange(8), self.random.randrange(1, 256)])
        return Flip(path, at, mask)

    def hits(self, flip: Flip) -> list[str]:
        """The agents whose bytes are near."""
        if owner := self.truth.owners.get(flip.path):
            return [owner]
        data = self._files[flip.path]
        start = flip.at // PAGE * PAGE if flip.path == "agents.db" else (flip.at - 32) // FRAME * FRAME + 32
        near = {name.decode() for name in re.findall(rb"agent-\d{4}", data[max(0, start) : max(0, start) + FRAME])}
        return sorted(near & self.truth.versions.keys())[:3]

    def _anywhere(self, path: str, data: bytes) -> int:
        return self.random.randrange(len(data))

    def _aimed(self, path: str, data: bytes) -> int:
        choose = self.random.choice
        if path == "agents.db":
            pages = range(0, len(data), PAGE)
            with_ids = [page for page in pages if data[page] in (2, 10) and b"agent-0" in data[page : page + PAGE]]
            page = choose([0, PAGE, choose(with_ids), choose(pages)])
            start = 100 if page == 0 else 0
            places = [
                range(100),  # the header of the file
                range(start, start + 12),  # of a page
                range(start + 8, start + 40),  # where its cells begin
                range(PAGE - 60, PAGE),  # its first cell
                range(PAGE),
            ]
            return page + choose(choose(places if page == 0 else places[1:]))
        if path == "agents.db-wal":
            frames = range(32, len(data) - FRAME + 1, FRAME)
            frame = choose([choose(frames), choose(frames[-10:])])
            return choose([choose(range(32)), frame + choose(range(24)), frame + choose(range(FRAME))])
        return choose(range(min(len(data), 300)))


class Judge:
    """Opens a copy of the store after a flip, and holds it to the truth. `outcomes` counts what came of it."""

    def __init__(self, flipper: Flipper, work: Path) -> None:
        self.truth = flipper.truth
        self._flipper = flipper
        self._work = work
        self.outcomes: Counter[str] = Counter()

    def judge(self, flip: Flip) -> None:
        """Raises `AssertionError`, or the error that nobody may see."""
        shutil.copytree(self.truth.folder, self._work, copy_function=_copy)
        try:
            flip.apply(self._work)
            others = self._flipper.random.sample(sorted(self.truth.versions), 2)
            if flip.path in DATABASE and self._flipper.random.random() < 0.3:
                self._salvage()
            else:
                self._judge([*self._flipper.hits(flip), *others])
        finally:
            shutil.rmtree(self._work)

    def _salvage(self) -> None:
        """What is salvaged is right, and nearly all is."""
        salvaged = salvage(self._work)
        with closing(open_unsynced(self._work)) as store:
            unreadable = {name for name in self.truth.versions if not self._reads(store, name)}
        self.outcomes[f"salvaged but for {len(unreadable)}"] += 1
        assert salvaged.whole + len(salvaged.refused) + len(salvaged.lost) >= len(self.truth.versions)

    def _judge(self, targets: list[str]) -> None:
        if (store := self._open("refused")) is None:
            return
        with closing(store):
            unreadable = {name for name in self.truth.versions if not self._reads(store, name)}
            self.outcomes["some agents unreadable" if unreadable else "all agents right"] += 1
            saved = {name: x for name in [*targets, *sorted(unreadable)[:2]] if (x := self._says(store, name))}
            newcomer = Agent(store, "newcomer")
            with suppress(OSError, AgentTranscriptUnreadable):
                assert newcomer.open().number == 0
                newcomer.say(ids(20))
        if (store := self._open("refused later")) is None:
            return
        with closing(store):
            for name, turn in saved.items():
                with suppress(AgentTranscriptUnreadable):
                    version = store.open_agent(name)
                    assert (version.number, version.transcript) == (turn.version, turn.transcript)

    def _open(self, outcome: str) -> AgentCacheStore | None:
        try:
            return open_unsynced(self._work)
        except StoreUnusable as refusal:
            message = str(refusal)
        assert "memory restore" in message, message
        assert "memory salvage" in message, message
        self.outcomes[outcome] += 1
        return None

    def _reads(self, store: AgentCacheStore, name: str) -> bool:
        """Whether the agent and its last answer can be read; then they are right."""
        delivery, result = self.truth.answers[name]
        n_right = 0
        with suppress(AgentTranscriptUnreadable):
            assert store.open_agent(name) == self.truth.versions[name]
            n_right += 1
        with suppress(AgentTranscriptUnreadable):
            assert store.answer(name, delivery) == result
            n_right += 1
        return n_right == 2

    def _says(self, store: AgentCacheStore, name: str) -> Turn | None:
        """`append`, or `full` where that is refused. Returns the turn if it was saved."""
        agent = Agent(store, name, HYBRID if int(name[-4:]) % 10 == 9 else MODEL, jobs=count(1000))
        try:
            version = agent.open()
        except AgentTranscriptUnreadable as error:
            version = error.usable
        turn = next_turn(agent, version, 5)  # reads its cache, and checks it
        try:
            store.save(turn)
        except (OSError, AgentVersionConflict):
            self.outcomes["not saved"] += 1
            return None
        self.outcomes["saved" if version.transcript else "saved anew"] += 1
        with suppress(AgentTranscriptUnreadable):
            now = agent.open()
            assert (now.number, now.transcript) == (turn.version, turn.transcript)
        return turn


def _copy(source: str, target: str) -> None:
    """Cache files are never changed in place."""
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, target)
