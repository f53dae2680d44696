"""A storm over the queue: one episode after the other while jobs come in, then a calm in which every job must end.

Owns the workers, one after the other, with the count of their losses, and the proxies on whose connections replies are
lost: one for workers and one for producers.
"""

import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

from tests.chaos.plan import QUEUES
from tests.chaos.redis_view import RedisView
from tests.chaos.traffic import AWAY, ENDED, Traffic
from tests.support.lossy_proxy import Exchange, LossyProxy
from tests.support.restarting_server import RestartingServer
from tests.support.store_reader import StoreReader
from tests.support.wait import wait_for
from tests.support.worker_process import AnyWorker

from stoker_shared.wire import MAX_ATTEMPTS

Kind = tuple[str, ...]
_TRANSACTION = "MULTI"
_TRANSACTIONS = 0.6  # the share of all losses
_MOST_AT_ONCE = 3
_MOST_WAITING = 20  # at most this many of a kind pass before one is lost


class Losses:
    """
    Attributes:
        workers, producers: URLs of the server behind each proxy.
    """

    def __init__(self, server_port: int, random: Random) -> None:
        self._random = random
        self._proxies = [LossyProxy(server_port), LossyProxy(server_port)]
        self._seen: dict[int, Counter[Kind]] = {proxy.port: Counter() for proxy in self._proxies}
        self.workers, self.producers = (proxy.url for proxy in self._proxies)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for proxy in self._proxies:
            self._stack.enter_context(proxy)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def lost(self) -> int:
        """The number of replies lost so far."""
        return sum(len(proxy.lost) for proxy in self._proxies)

    def lose(self) -> None:
        """Soon lose one reply or a few of some kinds, on each connection."""
        for proxy in self._proxies:
            for _ in range(self._random.randrange(1, _MOST_AT_ONCE + 1)):
                proxy.lose(self._draw(proxy), self._random.randrange(1, _MOST_AT_ONCE + 1))

    def hold_back(self, longest_s: float) -> None:
        """Soon delay one reply on each connection."""
        for proxy in self._proxies:
            proxy.hold_back(self._draw(proxy), self._random.uniform(0.05, longest_s))

    def end(self) -> None:
        """Lose nothing from now on."""
        for proxy in self._proxies:
            proxy.spare_all()

    def _draw(self, proxy: LossyProxy) -> Callable[[Exchange], bool]:
        """Draw a kind of request, and which of the coming ones to lose: mostly the next."""
        seen = self._seen[proxy.port]
        seen.update(_kind_of(exchange) for exchange in proxy.take_seen() if exchange.is_write)
        kinds = sorted(seen)
        if self._random.random() < _TRANSACTIONS:
            kinds = [kind for kind in kinds if kind[0] == _TRANSACTION] or kinds
        kind = self._random.choices(kinds, [seen[kind] ** 0.5 for kind in kinds])[0] if kinds else None
        passing = iter(range(self._random.randrange(_MOST_WAITING) if self._random.random() < 0.3 else 0))

        def chooses(exchange: Exchange) -> bool:
            return exchange.is_write and kind in {None, _kind_of(exchange)} and next(passing, None) is None

        return chooses


def _kind_of(exchange: Exchange) -> Kind:
    """The script, or the distinct commands of a transaction."""
    if exchange.is_transaction:
        return (_TRANSACTION, *dict.fromkeys(exchange.names))
    return (*exchange.names, exchange.commands[0][1][:40].decode(errors="replace"))


LEASE_S = 1.0
SHORT = {
    "STOKER_HEARTBEAT_S": "0.2",
    "STOKER_LEASE_TTL_S": str(LEASE_S),
    "STOKER_RECOVER_S": "0.3",
    "STOKER_POLL_S": "0.02",
    "STOKER_KEEP_VERSIONS": "100000",  # the rules are for whole histories
}
RECOVERED_S = 5.0


@dataclass(frozen=True)
class Breed:
    """The kind of worker that a storm hits.

    Attributes:
        start: starts a worker with these arguments, this log and these hooks.
        start_s: the longest time until its code begins to run.
        pause_s: shortest and longest time between two episodes.
    """

    start: Callable[[Sequence[str], Path, dict[str, Any]], AnyWorker]
    start_s: float
    pause_s: tuple[float, float]


class Crew:
    """Attributes:
    worker: the worker that holds the queue, or stands by for it.
    worker_losses: how many workers were certainly lost with the job in flight, by job id.
    loud_exits: workers that left by themselves because their engine broke; the jobs in the engine used up a try.
    crashes: workers that a job killed; `kills`: workers that the storm killed.
    problems: broken rules, one line each.
    """

    def __init__(self, breed: Breed, redis_url: str, view: RedisView, folder: Path, hooks: dict[str, Any]) -> None:
        self._breed, self._url, self._view, self._folder, self._hooks = breed, redis_url, view, folder, hooks
        self.store = folder / "store-0"
        self.worker_losses: Counter[str] = Counter()
        self.loud_exits = self.crashes = self.kills = 0
        self.problems: list[str] = []
        self._workers: list[AnyWorker] = []
        self.worker = self.start()

    def start(self, *arguments: str) -> AnyWorker:
        options = ["--redis", self._url, "--store", str(self.store), "--queues", ",".join(QUEUES)]
        options += ["--max-batch", "8", "--grace-s", "0.3", "--new-store", *arguments]
        log = self._folder / f"worker-{len(self._workers):03}.log"
        worker = self._breed.start(options, log, self._hooks)
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        """Leave no process behind, in any case."""
        for worker in self._workers:
            worker.kill()

    def new_store(self) -> Path:
        """A name for another store, used from the next worker on."""
        self.store = self._folder / f"store-{len(self._workers)}"
        return self.store

    @property
    def is_ready(self) -> bool:
        """Whether the worker handles signals already; before, a signal ends it at once."""
        return "ready: model" in self.worker.log

    def log_of_all(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("worker-*.log")))

    # --- the end of a worker, and the next one ---

    def replace(self, successor: AnyWorker | None = None) -> None:
        """Start a worker in place of a lost one, and check that the lost one's jobs leave the started registry soon."""
        name = name_of(self.worker)
        self.worker = successor or self.start()
        self.assert_soon_free_of(name)

    def see_to_worker(self) -> None:
        """Start another worker if a job killed this one."""
        if self.worker.returncode is not None:
            self.note_leaving()
            self.replace()

    def stop_in_order(self, *, twice_after_s: float | None = None) -> None:
        could = self.is_ready
        self.worker.signal(signal.SIGTERM)
        if twice_after_s is not None:
            time.sleep(twice_after_s)
            self.worker.signal(signal.SIGINT)
        if self.worker.wait(30) != 0 and could:  # a job killed it first
            self.note_leaving()

    def kill(self) -> None:
        """Kill the worker, which is paused."""
        self.note_losses()
        self.worker.kill()
        self.kills += 1

    def put_to_sleep(self) -> bool:
        """Pause the worker, unless it runs a job's last try: that job would fail, and would then kill no worker."""
        self.worker.signal(signal.SIGSTOP)
        time.sleep(0.02)  # until Redis has read everything the worker sent
        if self.worker.returncode is not None:  # a job killed it first
            return False
        in_flight = self._view.in_flight(name_of(self.worker))
        if any(self._view.lost_alone(job_id) >= MAX_ATTEMPTS - 1 for job_id in in_flight):
            self.worker.signal(signal.SIGCONT)
            return False
        return True

    def note_losses(self) -> None:
        """Count a loss for each job that the worker has in flight."""
        self.worker_losses.update(self._view.in_flight(name_of(self.worker)))

    def note_leaving(self) -> None:
        """Classify the exit of a worker that the storm did not end."""
        worker = self.worker
        if worker.returncode == -signal.SIGKILL:
            self.crashes += 1
            self.note_losses()
        elif "EngineFailed: the engine broke" in worker.log:
            self.loud_exits += 1
        elif not self.is_ready and "Error: RedisUnavailable" in worker.log:
            pass  # the server was killed while the worker started: it reports that and leaves
        else:
            self.problems.append(f"a worker left with {worker.returncode}: {worker.log[-2000:]}")

    # --- waiting ---

    def assert_soon_free_of(self, name: str | None) -> None:
        """No started entry outlives its worker by more than 5 s after the next one's start, and mostly none at all."""

        def free() -> bool:
            with suppress(*AWAY):
                return self.worker.returncode is not None or not self._view.in_flight(name or "?")
            return False

        wait_for(
            free,
            RECOVERED_S + self._breed.start_s,
            lambda: f"{name} still has jobs: {self._view.started()}\n{self.worker.log}",
        )

    def wait_until_ready(self) -> None:
        wait_for(
            lambda: self.is_ready or self.worker.returncode is not None,
            20 + self._breed.start_s,
            lambda: self.worker.log,
        )


def name_of(worker: AnyWorker) -> str | None:
    found = re.search(r"worker (stoker-\S+) holds", worker.log)
    return found[1] if found else None


MOST_OFF_S = 1500.0  # far more than any lease but RQ's

# The weight of each episode.
EPISODES = {
    "kill": 30, "stop": 10, "stop_twice": 6, "sleep": 6, "deposed": 8, "redis": 7, "redis_and_worker": 4, "clock": 6,
}  # fmt: skip


class Episodes:
    """
    Attributes:
        uncounted_losses: losses of a worker whose standby took its jobs before the test could count them.
    """

    def __init__(
        self,
        crew: Crew,
        server: RestartingServer,
        traffic: Traffic,
        view: RedisView,
        random: Random,
        *,
        clock: Path,
    ) -> None:
        self._crew, self._server, self._traffic, self._view = crew, server, traffic, view
        self._random = random
        self._clock_file = clock
        self.uncounted_losses = 0

    def have(self, name: str) -> bool:
        return getattr(self, name)() is not False

    def kill(self) -> bool:
        if not self._crew.put_to_sleep():
            return False
        self._crew.kill()
        time.sleep(self._random.choice((0, 0, 0.2, 1.2)))
        self._crew.replace()
        return True

    def stop(self) -> None:
        self._crew.stop_in_order()
        self._crew.replace()

    def stop_twice(self) -> None:
        self._crew.stop_in_order(twice_after_s=self._random.uniform(0, 0.2))
        self._crew.replace()

    def sleep(self) -> bool:
        """Pause longer than the lease, with a standby on the same store: the store is locked, so the standby waits."""
        crew = self._crew
        crew.wait_until_ready()  # otherwise the standby may win
        if not crew.is_ready:
            return False
        standby, crashes = crew.start("--standby"), crew.crashes
        standby.wait_for(lambda: "standing by" in standby.log or crew.worker.returncode is not None)
        crew.worker.signal(signal.SIGSTOP)
        time.sleep(LEASE_S * self._random.uniform(1.2, 2))
        crew.worker.signal(signal.SIGCONT)
        time.sleep(self._random.uniform(0, 0.4))
        if crew.worker.returncode is not None:  # a job killed it first
            crew.note_leaving()
        elif standby.returncode is not None:
            crew.problems.append(f"the standby left with {standby.returncode}: {standby.log[-500:]}")
        elif crew.put_to_sleep():
            crew.kill()
        else:
            crew.stop_in_order()
        self.uncounted_losses += crew.crashes - crashes
        crew.replace(standby)
        return True

    def deposed(self) -> bool:
        """Pause the worker; another one with a copy of its store takes over, as on another machine; resume."""
        self._crew.wait_until_ready()
        with self._traffic.pause:  # no new poison: if the successor died first, the resumed worker would get the queue
            crew = self._crew
            return crew.is_ready and not self._poison_waits() and crew.put_to_sleep() and self._depose()

    def _depose(self) -> bool:
        crew, zombie, its_store = self._crew, self._crew.worker, self._crew.store
        crew.note_losses()  # recovery treats the jobs as those of a lost worker
        shutil.copytree(its_store, crew.new_store())
        heads = StoreReader(its_store).heads()
        crew.worker = crew.start("--standby")
        crew.wait_until_ready()
        crew.assert_soon_free_of(name_of(zombie))
        time.sleep(self._random.uniform(0, 1))
        written = self._view.results_of(name_of(zombie), self._known_ids())
        zombie.signal(signal.SIGCONT)
        code = zombie.wait(30)
        if code != 1 or not ("QueueHeld" in zombie.log or "EngineFailed: the engine broke" in zombie.log):
            crew.problems.append(f"a deposed worker left with {code}: {zombie.log[-500:]}")
        if self._view.results_of(name_of(zombie), self._known_ids()) != written:
            crew.problems.append("a deposed worker has written a result")
        changed = [agent for agent, head in StoreReader(its_store).heads().items() if heads.get(agent) != head]
        if len(changed) > 4:  # up to four finisher threads may be past their ownership check
            crew.problems.append(f"a deposed worker has written {len(changed)} versions")
        return True

    def redis(self) -> None:
        self._server.kill()
        time.sleep(self._random.choice((0.1, 0.5, LEASE_S * 1.5)))
        self._server.start()

    def redis_and_worker(self) -> bool:
        if not self._crew.put_to_sleep():
            return False
        self._crew.note_losses()
        self._server.kill()
        self._crew.worker.kill()
        self._crew.kills += 1
        self._server.start()
        self._crew.replace()
        return True

    def clock(self) -> None:
        self.set_clock(self._random.uniform(-MOST_OFF_S, MOST_OFF_S))

    def set_clock(self, offset_s: float) -> None:
        new = self._clock_file.with_suffix(".new")
        new.write_text(str(offset_s))
        new.replace(self._clock_file)

    def _known_ids(self) -> list[str]:
        return list(dict.fromkeys(delivery.job_id for delivery in list(self._traffic.deliveries)))

    def _poison_waits(self) -> bool:
        sent = [delivery.job.job_id for delivery in self._traffic.deliveries if delivery.job.is_poison]
        return any(state is not None and state not in ENDED for state in self._view.states(sent))


_SAYS_EVERY_S = 5.0
_LOSES, _HOLDS_BACK = 0.8, 0.15  # the chance per episode


class Storm:
    """Attributes:
    counts: how often each episode took place.
    seen: a file with a line for each request that an engine got.
    """

    def __init__(
        self,
        breed: Breed,
        server: RestartingServer,
        losses: Losses,
        traffic: Traffic,
        random: Random,
        folder: Path,
    ) -> None:
        self._breed, self._traffic, self._losses, self._random = breed, traffic, losses, random
        self._begin = time.monotonic()
        self._view = RedisView(server.connection())
        self.seen, clock = folder / "seen", folder / "clock"
        clock.write_text("0")
        hooks = {"seen": str(self.seen), "clock": str(clock)}
        self.crew = Crew(breed, losses.workers, self._view, folder, hooks)
        self._episodes = Episodes(self.crew, server, traffic, self._view, random, clock=clock)
        self.counts: Counter[str] = Counter()

    @property
    def uncounted_losses(self) -> int:
        return self._episodes.uncounted_losses

    def rage(self, n_kills: int) -> None:
        """Until all jobs are enqueued, `n_kills` workers are killed, and each episode took place once."""
        todo = [name for name in EPISODES if name != "deposed"]  # each of them once, then at random
        self._random.shuffle(todo)
        todo.append("deposed")  # last: it is not possible while poison waits, and poison comes later
        has_to_wait = False
        while not self._traffic.is_enqueued or self.crew.kills < n_kills or todo:
            others = "kill" if self._traffic.is_enqueued else self._draw_episode()
            has_others = not todo or (has_to_wait and self.crew.kills < n_kills)
            name = others if has_others else todo.pop()
            time.sleep(self._random.uniform(*self._breed.pause_s))
            self.crew.see_to_worker()
            if not has_to_wait:  # otherwise so many losses that the worker never reaches the state waited for
                self._lose_replies()
            self._say(name)
            was_had = self._episodes.have(name)
            self.counts[name] += was_had
            has_to_wait = not has_others and not was_had
            if has_to_wait:
                todo.insert(-1, name)  # after another episode
            assert not self._traffic.errors, self._traffic.errors

    def calm(self, timeout_s: float) -> None:
        """Set the clock right and leave the worker alone until every job has ended and it has removed the dead workers,
        whose registrations outlive them for a moment; then stop it in order."""
        self._say("calm")
        self._losses.end()
        self._episodes.set_clock(MOST_OFF_S)
        said_at = time.monotonic()

        def over() -> bool:
            self.crew.see_to_worker()
            assert not self._traffic.errors, self._traffic.errors
            left = self._view.left()
            nonlocal said_at
            if left and time.monotonic() > said_at + _SAYS_EVERY_S:
                said_at = time.monotonic()
                self._say(f"left: {left[:10]}")
            return self.crew.is_ready and self._traffic.is_over and not left and len(self._view.workers()) == 1

        def state() -> str:
            return f"left: {self._view.left()[:20]}, {self._view.workers()}\n{self.crew.worker.log[-3000:]}"

        wait_for(over, timeout_s, state)
        self.crew.worker.signal(signal.SIGTERM)
        code = self.crew.worker.wait(30)
        if code != 0:
            self.crew.problems.append(f"the last worker left with {code}")
        if self._losses.lost == 0:
            self.crew.problems.append("no reply was lost: the storm tested nothing")

    def end(self) -> None:
        """Leave no process behind, in any case."""
        self.crew.end()

    def _lose_replies(self) -> None:
        """Besides the episodes: a lost reply may meet a lost worker or a killed server."""
        if self._random.random() < _LOSES:
            self._losses.lose()
        if self._random.random() < _HOLDS_BACK:
            self._losses.hold_back(2 * LEASE_S)  # one hung connection does not cost the lease

    def _draw_episode(self) -> str:
        return self._random.choices(list(EPISODES), list(EPISODES.values()))[0]

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:7.2f} {what}")
