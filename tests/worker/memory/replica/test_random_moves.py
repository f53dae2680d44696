"""Random histories of some machines with one bucket, whose calls fail, are lost after they were carried out, arrive
late or twice, and list late; machines crash, sleep and lose their disks.

The driver does what the pipeline does with a job: look, answer, open, save; given back when it cannot know. It knows
what was said, and compares: each finished turn is in the newest chain exactly once and in order, and no job that ended
without a turn is in it.
"""

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import make_transcript, make_turn, problems_of
from tests.worker.memory.replica.sharing import Machine, SharedAgent, SharedFolder

from stoker_shared.agents import build_agent_request
from stoker_shared.errors import AgentMemoryError, AgentVersionConflict, SharedStoreAway, VersionTaken
from stoker_worker.memory import turn_saver
from stoker_worker.memory.database import DatabaseFailed
from stoker_worker.memory.replica import versions
from stoker_worker.memory.replica.bucket import BucketAway
from stoker_worker.ports import Delivery, LastVersion, Turn

pytestmark = pytest.mark.slow

pytest.importorskip("obstore")

ROUNDS = int(os.environ.get("DEEP", "4"))
STEPS = 150
CALLS = ("create", "get", "put", "find", "listed", "remove")


@dataclass
class Job:
    agent: str
    kind: str  # append, full, forget, rollback
    number: int
    to: int = 0  # rollback: the version
    was_saving: bool = False

    @property
    def delivery(self) -> Delivery:
        return Delivery(f"job-{self.number}", "2026")


@dataclass
class Known:
    """An agent as its user knows it.

    Attributes:
        tokens: its conversation.
        at: by version, what it was there; since the last forget.
        last: the newest version whose job has ended, and its machine.
        job: that has not ended.
    """

    tokens: tuple[int, ...] = ()
    at: dict[int, tuple[int, ...]] = field(default_factory=dict)
    last: tuple[str, int] | None = None
    job: Job | None = None


@dataclass
class Play:
    folder: Path
    share: SharedFolder
    random: random.Random
    machines: dict[str, Machine] = field(default_factory=dict)
    agents: defaultdict[str, Known] = field(default_factory=lambda: defaultdict(Known))
    late: list[Callable[[], object]] = field(default_factory=list)  # puts on their way
    asleep: list[tuple[str, Turn]] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)  # names that listings lack yet
    faults: float = 0.15
    n_jobs: int = 0
    done: list[str] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)

    def start(self, name: str) -> None:
        machine = Machine(self.folder / name, self.share)
        for call in CALLS:
            setattr(machine.bucket, call, self.faulty(call, getattr(machine.bucket, call)))
        self.machines[name] = machine

    def faulty(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **more: Any) -> Any:
            fate = self.random.random() / self.faults if self.faults else 1.0
            if fate < 0.3:
                raise BucketAway("not carried out")
            if fate < 0.6 and name in ("create", "put"):
                self.late.append(lambda: call(*args, **more))
                if fate < 0.45:
                    raise BucketAway("on its way")
            result = call(*args, **more)
            if name == "create" and result and self.random.random() < 0.3:
                self.hidden.add(args[0])
            if fate < 1.0 and name != "listed":
                raise BucketAway("the reply is lost")
            return [x for x in result if x.name not in self.hidden] if name == "listed" else result

        return faulty

    def crash(self, name: str, *, loses_disk: bool = False) -> None:
        self.machines.pop(name).store.close()
        self.asleep = [one for one in self.asleep if one[0] != name]
        if loses_disk:
            shutil.rmtree(self.folder / name)
        self.start(name)

    def step(self) -> None:
        what = self.random.random()
        name = self.random.choice(list(self.machines))
        if what < 0.04:
            self.crash(name, loses_disk=what < 0.01)
        elif what < 0.12 and self.late:
            self.arrive()
        elif what < 0.16 and self.asleep:
            self.wake()
        elif what < 0.2:
            self.hidden.clear()
        elif what < 0.23:
            self.caches_behind(name)
        elif what < 0.3 and self.finished:
            self.again(name, self.random.choice(self.finished))
        elif what < 0.33 and not self.hidden:  # names stay for longer than a listing lags
            with suppress(BucketAway):
                self.machines[name].versions.prune(self.random.choice("abc"))
        else:
            self.work(name, self.random.choice("abc"))

    def arrive(self) -> None:
        self.late.pop(self.random.randrange(len(self.late)))()

    def wake(self) -> None:
        """A machine that slept saves the turn of a job that others have run, or ended, meanwhile."""
        name, turn = self.asleep.pop(self.random.randrange(len(self.asleep)))
        with suppress(VersionTaken, SharedStoreAway, AgentVersionConflict):
            self.machines[name].store.save(turn)

    def caches_behind(self, name: str) -> None:
        with suppress(BucketAway):
            self.machines[name].write_behind()

    def work(self, name: str, agent_id: str) -> None:
        known = self.agents[agent_id]
        if known.job is None:
            known.job = self.new_job(agent_id, known)
        job, machine = known.job, self.machines[name]
        last = known.last and LastVersion(known.last[1], known.last[0], is_here=known.last[0] == name)
        self.done.append(f"{name} {job.kind} {agent_id} {job.number}")
        try:
            version = (
                self.turn(machine, job, known, last) if job.kind in ("append", "full") else self.change(machine, job)
            )
        except (VersionTaken, SharedStoreAway):
            return  # given back
        if version is None:
            return
        if version:
            self.ended(known, job, version, name)
        known.job = None

    def again(self, name: str, job: Job) -> None:
        """A job that has ended is delivered again: Redis went back in time. It is never run again."""
        machine = self.machines[name]
        with suppress(SharedStoreAway, AgentVersionConflict):  # its answer may be gone with what was forgotten
            machine.store.look(job.agent)
            if job.kind in ("append", "full"):
                assert machine.store.answer(job.agent, job.delivery) is not None, f"job {job.number} would run again"
            else:
                assert machine.store.agent_jobs.answer(self.request(job), job.delivery) is not None

    def request(self, job: Job) -> Any:
        fields = {"version": job.to} if job.kind == "rollback" else {}
        return build_agent_request({"action": job.kind, "agent_id": job.agent, **fields})

    def new_job(self, agent_id: str, known: Known) -> Job:
        self.n_jobs += 1
        kind = self.random.choices(("append", "full", "forget", "rollback"), (12, 2, 1, 2))[0]
        to = 0
        if kind == "rollback":
            kind, to = ("rollback", self.random.choice(list(known.at))) if known.at else ("append", 0)
        return Job(agent_id, kind, self.n_jobs, to)

    def turn(self, machine: Machine, job: Job, known: Known, last: LastVersion | None) -> int | None:
        """The version that the job has made; 0: it has failed; ``None``: it goes on later."""
        store = machine.store
        store.look(job.agent, last)
        if (answer := store.answer(job.agent, job.delivery)) is not None:
            return int(answer["version"])
        base = store.open_agent(job.agent)
        tokens = base.transcript.token_ids if base.transcript else ()
        if last is None or not last.is_here or last.number != base.number:
            assert tokens == known.tokens, "the newest version is not what was said"
        if self.random.random() < 0.06:  # it times out, or is canceled
            if job.was_saving:
                store.close_number(job.agent)
            return 0
        new = (*tokens, job.number) if job.kind == "append" else (job.number,)
        agent = SharedAgent(store, job.agent)
        turn = make_turn(agent, base, make_transcript(new), None)
        turn = Turn(turn.base, job.delivery, turn.transcript, turn.model, None, None, {"version": base.number + 1})
        job.was_saving = True
        if self.random.random() < 0.1:
            self.asleep.append((next(name for name, m in self.machines.items() if m is machine), turn))
            return None
        with self.full_disk(machine):
            return int(store.save(turn)["version"])

    def full_disk(self, machine: Machine) -> Any:
        patch = pytest.MonkeyPatch.context()

        class Full:
            def __enter__(inner) -> None:
                inner.patch = patch.__enter__()
                if self.random.random() < 0.05:
                    inner.patch.setattr(machine.store.parts.database, "commit", refuse)

            def __exit__(inner, *error: object) -> None:
                patch.__exit__(*error)  # type: ignore[arg-type]

        return Full()

    def change(self, machine: Machine, job: Job) -> int | None:
        request, jobs = self.request(job), machine.store.agent_jobs
        answer = jobs.answer(request, job.delivery)
        if answer is None:
            try:
                answer = jobs.run(request, job.delivery)
            except (VersionTaken, SharedStoreAway):
                job.was_saving = True
                raise
            except AgentMemoryError:  # the version is not here any more
                if job.was_saving:
                    machine.store.close_number(job.agent)
                return 0
        version = answer.model_dump()["version"]
        return int(version) + (1 if job.kind == "forget" else 0) or 1

    def ended(self, known: Known, job: Job, version: int, name: str) -> None:
        if job.kind == "append":
            known.tokens = (*known.tokens, job.number)
        elif job.kind == "full":
            known.tokens = (job.number,)
        elif job.kind == "forget":
            known.tokens, known.at = (), {}
        else:
            known.tokens = known.at[job.to]
        self.finished.append(job)
        known.last = (name, version)
        if job.kind != "forget":
            known.at[version] = known.tokens

    def check_all(self) -> None:
        self.faults = 0.0
        while self.late:
            self.arrive()
        while self.asleep:
            self.wake()
        self.start("new")
        for agent_id, known in self.agents.items():
            while known.job is not None:
                self.work(self.random.choice(list(self.machines)), agent_id)
            for name, machine in self.machines.items():
                assert machine.agent(agent_id).tokens() == known.tokens, f"agent {agent_id} at {name}"
        for machine in self.machines.values():
            assert not problems_of(machine.store)
            machine.store.close()


def refuse(run: object) -> None:
    raise DatabaseFailed("the disk is full")


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_each_finished_turn_is_in_the_newest_chain_once_and_in_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (versions, turn_saver):
        monkeypatch.setattr(module, "FULL_EVERY", 3)
    monkeypatch.setattr(versions, "_GRACE_S", -1.0)
    play = Play(tmp_path, SharedFolder(tmp_path), random.Random(seed))
    for name in ("one", "two", "three"):
        play.start(name)
    try:
        for _ in range(STEPS):
            play.step()
        play.check_all()
    except BaseException:
        print("\n".join(play.done[-40:]))
        raise
