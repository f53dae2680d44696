"""Random histories of three machines: turns, moves, crashes, lost machines, outages, jobs about agents.

The test knows what the queue knows: where each agent is at home, and the newest version whose job has ended. From that
it tells what each turn has to find: the conversation, to the token, or an error by name where turns are only on a
machine that is lost or cannot be asked.
"""

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.worker.memory.agents import ids, problems_of
from tests.worker.memory.replica.sharing import Machine, SharedAgent, SharedFolder

from stoker_shared.agent_request import build_agent_request
from stoker_shared.errors import AgentMemoryError, AgentTranscriptUnreadable, AgentVersionConflict, SharedStoreAway
from stoker_worker.memory.replica.objects import version_name
from stoker_worker.ports import AgentHome, AgentVersion, Delivery, Turn

pytest.importorskip("obstore")

ROUNDS = int(os.environ.get("DEEP", "6"))
STEPS = 120


@dataclass
class Known:
    """An agent as the queue and its user know it.

    Attributes:
        tokens: its conversation; ``None``: it has none.
        version: the newest whose job has ended.
        is_lost: turns that were finished in an outage are on a machine that is gone.
    """

    tokens: tuple[int, ...] | None = None
    version: int = 0
    home: str = ""
    kept_by: str = ""
    is_lost: bool = False


@dataclass
class Play:
    folder: Path
    share: SharedFolder
    random: random.Random
    machines: dict[str, Machine] = field(default_factory=dict)
    agents: dict[str, Known] = field(default_factory=dict)
    moving: dict[str, str | None] = field(default_factory=dict)
    asleep: dict[str, tuple[Machine, Turn, int]] = field(default_factory=dict)
    n_changes: Counter[str] = field(default_factory=Counter)
    is_away: bool = False
    n_lost: int = 0
    n_turns: int = 0

    def start(self, name: str) -> None:
        machine = Machine(self.folder / name, self.share)
        machine.store.know_homes(self.home_of)
        machine.store.local._in_flight._wait_s = 0.1
        self.machines[name] = machine

    def home_of(self, agent_id: str) -> AgentHome:
        known = self.agents[agent_id]
        return AgentHome(self.moving.get(agent_id), known.version, known.kept_by or "-")

    def crash(self, name: str) -> None:
        self.machines.pop(name).store.close()
        self.start(name)

    def lose(self, name: str) -> None:
        """For good: another machine takes its name."""
        self.machines.pop(name).store.close()
        self.n_lost += 1
        (self.folder / name).rename(self.folder / f"lost-{self.n_lost}")
        shutil.rmtree(self.folder / f"lost-{self.n_lost}")
        self.start(name)

    def claim(self, agent_id: str) -> Machine:
        """By the rule of the queue: an agent stays where its versions are not written through from."""
        known = self.agents[agent_id]
        name = self.random.choice(list(self.machines))
        if known.home in self.machines and self.machines[known.home].store.is_only_here(agent_id):
            name = known.home
        self.moving[agent_id] = known.home if known.home != name else None
        known.home = name
        return self.machines[name]

    def turn(self, agent_id: str) -> None:
        machine, known = self.claim(agent_id), self.agents[agent_id]
        agent = machine.agent(agent_id)
        is_full = self.random.random() < 0.15
        self.n_turns += 1
        base, problem = self.opened(agent)
        if isinstance(problem, SharedStoreAway):
            assert self.is_away
            return
        assert known.is_lost == (problem is not None), f"{agent_id}: {problem}"
        if problem is not None and not is_full:
            return
        if problem is None:
            assert (base.transcript.token_ids if base.transcript else None) == known.tokens
            assert base.number >= known.version
        before = () if is_full or known.tokens is None else known.tokens
        said = (*before, *ids(self.random.randint(1, 200), seed=self.n_turns))
        turn = agent.turn(said, agent=base)
        if self.random.random() < 0.1:
            self.asleep[agent_id] = machine, turn, self.n_changes[agent_id]
            return
        machine.store.save(turn)
        self.changed(agent_id, Known(said, base.number + 1, known.home, known.home))

    def changed(self, agent_id: str, known: Known) -> None:
        self.agents[agent_id] = known
        self.n_changes[agent_id] += 1

    def wake_up(self, agent_id: str) -> None:
        """A machine that fell asleep before the end of its turn saves it, whoever has continued the agent."""
        machine, turn, n_changes = self.asleep.pop(agent_id)
        names = [name for name, one in self.machines.items() if one is machine]
        if not names or self.is_away or not (self.is_shared(agent_id) or n_changes == self.n_changes[agent_id]):
            return
        if n_changes != self.n_changes[agent_id]:
            with pytest.raises(AgentVersionConflict):
                machine.store.save(turn)
        elif not self.agents[agent_id].is_lost:
            machine.store.save(turn)
            self.changed(agent_id, Known(turn.transcript.token_ids, turn.version, names[0], names[0]))

    def fork(self, source: str, target: str) -> None:
        """Into an agent that was forgotten, or never was."""
        self.agents.setdefault(target, Known())
        theirs = self.agents[target]
        machine = self.claim(source)
        name, at_home = self.agents[source].home, self.machines.get(theirs.home)
        is_elsewhere = at_home is not None and at_home is not machine and at_home.store.is_only_here(target)
        if theirs.tokens is not None or theirs.is_lost or is_elsewhere:
            return
        self.moving[target], theirs.home = (theirs.home if theirs.home != name else None), name
        self.n_turns += 1
        try:
            request = build_agent_request({"action": "fork", "agent_id": source, "target": target})
            done = machine.store.agent_jobs.run(request, Delivery(f"job-{self.n_turns}", "now"))
        except AgentMemoryError:
            return
        assert done.version > theirs.version
        self.changed(target, Known(self.agents[source].tokens, done.version, name, name))

    def opened(self, agent: SharedAgent) -> tuple[AgentVersion, AgentTranscriptUnreadable | None]:
        try:
            return agent.open(), None
        except AgentTranscriptUnreadable as problem:
            return problem.usable, problem

    def job(self, agent_id: str) -> None:
        machine, known = self.claim(agent_id), self.agents[agent_id]
        action = self.random.choice(["rollback", "forget"])
        self.n_turns += 1
        try:
            request = build_agent_request({"action": action, "agent_id": agent_id})
            done = machine.store.agent_jobs.run(request, Delivery(f"job-{self.n_turns}", "now"))
        except AgentMemoryError:
            return
        if action == "forget" and done.existed:
            self.changed(agent_id, Known(None, done.version + 1, known.home, known.home))
        elif action == "rollback":
            base = machine.store.local.open_agent(agent_id)
            assert base.transcript is not None
            self.changed(agent_id, Known(base.transcript.token_ids, base.number, known.home, known.home))

    def step(self) -> None:
        agent_id = self.random.choice("abcd")
        self.agents.setdefault(agent_id, Known())
        what = self.random.random()
        name = self.random.choice(list(self.machines))
        if agent_id in self.asleep and what < 0.2:
            self.wake_up(agent_id)
        elif what < 0.59:
            self.turn(agent_id)
        elif what < 0.62:
            self.fork(agent_id, self.random.choice("abcd"))
        elif what < 0.68:
            self.job(agent_id)
        elif what < 0.82 and not self.is_away:
            self.machines[name].notice_return()
            self.machines[name].write_through()
        elif what < 0.88:
            self.crash(name)
        elif what < 0.91:
            for one, known in self.agents.items():
                known.is_lost |= known.kept_by == name and not self.is_shared(one)
            self.lose(name)
        elif what < 0.95 and not self.is_away:
            self.share.go_away()
            self.is_away = True
        elif self.is_away:
            self.share.come_back()
            self.is_away = False
            for machine in self.machines.values():
                machine.notice_return()

    def is_shared(self, agent_id: str) -> bool:
        objects = self.share.objects.with_name("unmounted") if self.is_away else self.share.objects
        return (objects / version_name(agent_id, self.agents[agent_id].version)).exists()

    def end(self) -> None:
        if self.is_away:
            self.share.come_back()
        for name in list(self.machines):
            self.machines[name].notice_return()
            self.machines[name].write_through()
            assert self.machines[name].waiting() == 0
        self.start("fresh")
        for agent_id, known in self.agents.items():
            if not known.is_lost:
                self.moving[agent_id] = known.home
                found = self.machines["fresh"].agent(agent_id).open().transcript
                assert (found.token_ids if found else None) == known.tokens
                if found:
                    self.machines["fresh"].agent(agent_id).cached((*found.token_ids, 1))
        lost = tuple(f"agent {agent_id!r}: version " for agent_id, known in self.agents.items() if known.is_lost)
        for machine in self.machines.values():
            for agent_id in (agent_id for agent_id, known in self.agents.items() if not known.is_lost):
                machine.agent(agent_id).open()
            assert [problem for problem in problems_of(machine.store.local) if not problem.startswith(lost)] == []
            machine.store.close()


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_histories_keep_every_conversation_or_say_by_name_what_is_missing(quick_path: Path, seed: int) -> None:
    play = Play(quick_path, SharedFolder(quick_path), random.Random(seed))
    for name in ("mac1", "mac2", "mac3"):
        play.start(name)
    for _ in range(STEPS):
        play.step()
    play.end()
