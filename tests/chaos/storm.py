"""What happens to the worker, its server and its clock while jobs come in: one episode after the other."""

import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from redis import Redis
from tests.chaos.forked_worker import ForkedWorker, wait_for
from tests.chaos.onlookers import by_dashboard, by_registries, by_rq_info
from tests.chaos.plan import QUEUES
from tests.chaos.restarting_server import RestartingServer
from tests.chaos.traffic import AWAY, ENDED, Traffic
from tests.worker_process import WorkerProcess

from stoker_shared.wire import FIELD_ATTEMPTS, MAX_ATTEMPTS

LEASE_S = 1.0
SHORT = {
    "STOKER_HEARTBEAT_S": "0.2",
    "STOKER_LEASE_TTL_S": str(LEASE_S),
    "STOKER_RECOVER_S": "0.3",
    "STOKER_POLL_S": "0.02",
}
MOST_OFF_S = 1500.0  # far more than any lease but RQ's
RECOVERED_S = 5.0

AnyWorker = ForkedWorker | WorkerProcess

EPISODES = {
    "kill": 30, "stop": 10, "stop twice": 6, "sleep": 6, "deposed": 8, "redis": 7, "redis and worker": 4, "clock": 6,
    "look": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Breed:
    """The kind of worker that a storm is about.

    Attributes:
        start: a worker of these arguments, this log and these hooks.
        start_s: what it may take until its code begins to run.
        pause_s: shortest and longest time between two episodes.
    """

    start: Callable[[Sequence[str], Path, dict[str, Any]], AnyWorker]
    start_s: float
    pause_s: tuple[float, float]


class Storm:
    """Attributes:
    deaths: how many workers died for certain with a job in flight, by job id.
    uncounted_deaths: how many died while another one waited and took their jobs before anybody could look.
    loud_exits: workers that left by themselves because their engine broke; what was in it has used up a try.
    """

    def __init__(
        self,
        breed: Breed,
        server: RestartingServer,
        traffic: Traffic,
        random: Random,
        folder: Path,
        *,
        dashboard: str | None,
    ) -> None:
        self._dashboard = dashboard
        self._breed, self._server, self._traffic, self._random = breed, server, traffic, random
        self._folder = folder
        self._begin = time.monotonic()
        self._connection: Redis = server.connection()
        self._clock_file = folder / "clock"
        self.store = folder / "store-0"
        self.seen = folder / "seen"
        self.deaths: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.uncounted_deaths = self.loud_exits = 0
        self.problems: list[str] = []
        self._workers: list[AnyWorker] = []
        self._set_clock(0.0)
        self.worker = self._start()

    def log_of_all(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("worker-*.log")))

    # --- episodes ---

    def rage(self, n_kills: int) -> None:
        """Until everything is enqueued, and that many workers have been killed, and each episode was had once."""
        todo = list(EPISODES)  # each of them once, then at random
        self._random.shuffle(todo)
        has_to_wait = False
        while not self._traffic.is_enqueued or self.counts["kill"] < n_kills or todo:
            others = "kill" if self._traffic.is_enqueued else self._draw_episode()
            has_others = not todo or (has_to_wait and self.counts["kill"] < n_kills)
            name = others if has_others else todo.pop()
            time.sleep(self._random.uniform(*self._breed.pause_s))
            self._see_to_worker()
            print(f"{time.monotonic() - self._begin:7.2f} {name}")
            was_had = getattr(self, f"_{name.replace(' ', '_')}")() is not False
            if name != "kill":  # these are counted where they happen
                self.counts[name] += was_had
            has_to_wait = not has_others and not was_had
            if has_to_wait:
                todo.insert(0, name)
            assert not self._traffic.errors, self._traffic.errors

    def _draw_episode(self) -> str:
        return self._random.choices(list(EPISODES), list(EPISODES.values()))[0]

    def calm(self, timeout_s: float) -> None:
        """The clock is right again, and nobody disturbs the worker until all is done; then it leaves in order."""
        print(f"{time.monotonic() - self._begin:7.2f} calm")
        self._set_clock(MOST_OFF_S)

        def over() -> bool:
            self._see_to_worker()
            assert not self._traffic.errors, self._traffic.errors
            is_ready = "ready: model" in self.worker.log  # before that, a signal ends it at once
            return is_ready and self._traffic.is_over and self._left() == []

        wait_for(over, timeout_s, lambda: f"left: {self._left()[:20]}\n{self.worker.log[-3000:]}")
        self.worker.signal(signal.SIGTERM)
        code = self.worker.wait(30)
        if code != 0:
            self.problems.append(f"the last worker left with {code}")

    def end(self) -> None:
        """No process outlives the run, whatever became of it."""
        for worker in self._workers:
            worker.kill()

    def _left(self) -> list[str]:
        """What has not ended, at one instant."""
        with self._connection.pipeline(transaction=True) as pipeline:
            for queue in QUEUES:
                for kind in ("wip", "scheduled"):
                    pipeline.zrange(f"rq:{kind}:{queue}", 0, -1)
                for part in ("", ":intermediate"):
                    pipeline.lrange(f"rq:queue:{queue}{part}", 0, -1)
            return [entry.decode() for entries in pipeline.execute() for entry in entries]

    def _kill(self) -> bool:
        if not self._put_to_sleep():
            return False
        self._note_deaths(self.worker)
        self._die()
        time.sleep(self._random.choice((0, 0, 0.2, 1.2)))
        self._replace()
        return True

    def _stop(self) -> None:
        self._stop_in_order()
        self._replace()

    def _stop_twice(self) -> None:
        self._stop_in_order(twice=True)
        self._replace()

    def _sleep(self) -> None:
        """Longer than the lease, with a standby on the same store: nobody else can write there, so it waits on."""
        standby, crashes = self._start("--standby"), self.counts["crash"]
        standby.wait_for(lambda: "standing by" in standby.log or self.worker.returncode is not None)
        self.worker.signal(signal.SIGSTOP)
        time.sleep(LEASE_S * self._random.uniform(1.2, 2))
        self.worker.signal(signal.SIGCONT)
        time.sleep(self._random.uniform(0, 0.4))
        if self.worker.returncode is not None:  # a job was faster
            self._left_by_itself(self.worker)
        elif standby.returncode is not None:
            self.problems.append(f"the standby left with {standby.returncode}: {standby.log[-500:]}")
        elif self._put_to_sleep():
            self._note_deaths(self.worker)
            self._die()
        else:
            self._stop_in_order()
        self.uncounted_deaths += self.counts["crash"] - crashes
        name, self.worker = self._name_of(self.worker), standby
        self._assert_soon_free_of(name)

    def _deposed(self) -> bool:
        """The worker sleeps; one with its store's files takes over, as on another machine; it wakes up again."""
        with self._traffic.pause:  # no new poison: a successor that dies first leaves the queue to the one that wakes
            has_store = "ready: model" in self.worker.log
            return has_store and not self._poison_waits() and self._put_to_sleep() and self._depose()

    def _depose(self) -> bool:
        zombie, its_store = self.worker, self.store
        self._note_deaths(zombie)  # recovery takes its jobs from it as from a dead one
        self.store = self._folder / f"store-{len(self._workers)}"
        shutil.copytree(its_store, self.store)
        heads = heads_of(its_store)
        self.worker = self._start("--standby")
        self._wait_until_ready()
        self._assert_soon_free_of(self._name_of(zombie))
        time.sleep(self._random.uniform(0, 1))
        written = self._results_of(zombie)
        zombie.signal(signal.SIGCONT)
        code = zombie.wait(30)
        if code != 1 or not ("QueueHeld" in zombie.log or "EngineFailed: the engine broke" in zombie.log):
            self.problems.append(f"a deposed worker left with {code}: {zombie.log[-500:]}")
        if self._results_of(zombie) != written:
            self.problems.append("a deposed worker has written a result")
        changed = [agent for agent, head in heads_of(its_store).items() if heads.get(agent) != head]
        if len(changed) > 4:  # as many as finalisers may have been past their look at the lease
            self.problems.append(f"a deposed worker has written {len(changed)} versions")
        return True

    def _redis(self) -> None:
        self._server.kill()
        time.sleep(self._random.choice((0.1, 0.5, LEASE_S * 1.5)))
        self._server.start()

    def _redis_and_worker(self) -> bool:
        if not self._put_to_sleep():
            return False
        self._note_deaths(self.worker)
        self._server.kill()
        self._die()
        self._server.start()
        self._replace()
        return True

    def _look(self) -> bool:
        """The registries, `rq info` and the dashboard say the same of a moment that lasts."""
        if not self._traffic.acknowledged:
            return False
        with self._traffic.pause:
            self.worker.signal(signal.SIGSTOP)
            time.sleep(0.05)
            so = by_registries(self._connection)
            said = {"rq info": by_rq_info(self._server.url)}
            if self._dashboard is not None:
                said["dashboard"] = by_dashboard(self._dashboard)
            if by_registries(self._connection) != so:
                self.problems.append("somebody wrote while all slept, or by looking")
            self.problems += [f"{who} says {counts}, and it is {so}" for who, counts in said.items() if counts != so]
            self.worker.signal(signal.SIGCONT)
        return True

    def _clock(self) -> None:
        self._set_clock(self._random.uniform(-MOST_OFF_S, MOST_OFF_S))

    # --- steps ---

    def _start(self, *arguments: str) -> AnyWorker:
        options = ["--redis", self._server.url, "--store", str(self.store), "--queues", ",".join(QUEUES)]
        options += ["--max-batch", "8", "--grace-s", "0.3", *arguments]
        log = self._folder / f"worker-{len(self._workers):03}.log"
        hooks = {"seen": str(self.seen), "clock": str(self._clock_file)}
        worker = self._breed.start(options, log, hooks)
        self._workers.append(worker)
        return worker

    def _replace(self) -> None:
        """A new worker for one that is dead, whose jobs do not look started for long."""
        name = self._name_of(self.worker)
        self.worker = self._start()
        self._assert_soon_free_of(name)

    def _see_to_worker(self) -> None:
        """Start another one when a job has killed it."""
        if self.worker.returncode is not None:
            self._left_by_itself(self.worker)
            self._replace()

    def _stop_in_order(self, *, twice: bool = False) -> None:
        could = "ready: model" in self.worker.log  # before that, a signal ends it at once
        self.worker.signal(signal.SIGTERM)
        if twice:
            time.sleep(self._random.uniform(0, 0.2))
            self.worker.signal(signal.SIGINT)
        if self.worker.wait(30) != 0 and could:  # a job was faster
            self._left_by_itself(self.worker)

    def _left_by_itself(self, worker: AnyWorker) -> None:
        if worker.returncode == -signal.SIGKILL:
            self.counts["crash"] += 1
            self._note_deaths(worker)
        elif "EngineFailed: the engine broke" in worker.log:
            self.loud_exits += 1
        elif "ready: model" not in worker.log and "Error: RedisUnavailable" in worker.log:
            pass  # the server was killed while it started: it says so and leaves
        else:
            self.problems.append(f"a worker left with {worker.returncode}: {worker.log[-2000:]}")

    def _put_to_sleep(self) -> bool:
        """Stop it, unless it runs a job's last try: that would be the third death of one that kills nobody."""
        self.worker.signal(signal.SIGSTOP)
        time.sleep(0.02)  # until Redis has read what it has sent
        if self.worker.returncode is not None:  # a job was faster
            return False
        for job_id in self._in_flight(self.worker):
            deaths = int(self._connection.hget(f"rq:job:{job_id}", FIELD_ATTEMPTS) or 0)
            if deaths >= MAX_ATTEMPTS - 1:
                self.worker.signal(signal.SIGCONT)
                return False
        return True

    def _poison_waits(self) -> bool:
        jobs = [job for job in (*self._traffic.acknowledged, *self._traffic.in_doubt) if job.is_poison]
        states = [self._connection.hget(f"rq:job:{job.job_id}", "status") for job in jobs]
        return any(state is not None and state.decode() not in ENDED for state in states)

    def _die(self) -> None:
        self.worker.kill()
        self.counts["kill"] += 1

    def _note_deaths(self, worker: AnyWorker) -> None:
        self.deaths.update(self._in_flight(worker))

    def _in_flight(self, worker: AnyWorker) -> list[str]:
        name = self._name_of(worker)
        return [job_id for job_id, owner in self._started() if owner == name]

    def _started(self) -> list[tuple[str, str]]:
        """Job ids with their workers' names."""
        keys = [key for queue in QUEUES for key in self._connection.zrange(f"rq:wip:{queue}", 0, -1)]
        owners = [self._connection.hget(b"rq:execution:" + key, "worker_name") or b"" for key in keys]
        return [(key.decode().split(":")[0], owner.decode()) for key, owner in zip(keys, owners, strict=True)]

    def _name_of(self, worker: AnyWorker) -> str | None:
        found = re.search(r"worker (stoker-\S+) holds", worker.log)
        return found[1] if found else None

    def _assert_soon_free_of(self, name: str | None) -> None:
        """No started entry outlives its worker: within 5 s of the next one's start, and mostly at once."""

        def free() -> bool:
            with suppress(*AWAY):
                return self.worker.returncode is not None or name not in [owner for _, owner in self._started()]
            return False

        wait_for(
            free,
            RECOVERED_S + self._breed.start_s,
            lambda: f"{name} still has jobs: {self._started()}\n{self.worker.log}",
        )

    def _wait_until_ready(self) -> None:
        wait_for(
            lambda: "ready: model" in self.worker.log or self.worker.returncode is not None,
            20 + self._breed.start_s,
            lambda: self.worker.log,
        )

    def _results_of(self, worker: AnyWorker) -> Counter[str]:
        name = (self._name_of(worker) or "").encode()
        jobs = [*self._traffic.acknowledged, *self._traffic.in_doubt]
        with self._connection.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.xrange(f"rq:results:{job.job_id}")
            streams = pipeline.execute()
        found = zip(jobs, streams, strict=True)
        return Counter(job.job_id for job, stream in found for _, entry in stream if entry[b"worker_name"] == name)

    def _set_clock(self, offset_s: float) -> None:
        new = self._folder / "clock.new"
        new.write_text(str(offset_s))
        new.replace(self._clock_file)


def heads_of(store: Path) -> dict[str, bytes]:
    """Every agent's HEAD, by its folder."""
    return {path.parent.name: path.read_bytes() for path in (store / "agents").rglob("HEAD")}
