"""The episodes of a storm: one disturbance of the worker, its server or its clock each. Keeps no state of its own.

An episode returns ``False`` if it was not possible at that moment.
"""

import shutil
import signal
import time
from pathlib import Path
from random import Random

from tests.chaos.crew import LEASE_S, Crew, name_of
from tests.chaos.deliveries import ENDED
from tests.chaos.onlookers import by_dashboard, by_registries, by_rq_info
from tests.chaos.redis_view import RedisView
from tests.chaos.restarting_server import RestartingServer
from tests.chaos.traffic import Traffic
from tests.support.store_reader import StoreReader

MOST_OFF_S = 1500.0  # far more than any lease but RQ's

# The weight of each episode.
EPISODES = {
    "kill": 30, "stop": 10, "stop_twice": 6, "sleep": 6, "deposed": 8, "redis": 7, "redis_and_worker": 4, "clock": 6,
    "look": 4,
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
        dashboard: str | None,
    ) -> None:
        self._crew, self._server, self._traffic, self._view = crew, server, traffic, view
        self._random = random
        self._clock_file = clock
        self._dashboard = dashboard
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

    def look(self) -> bool:
        """The registries, `rq info` and the dashboard show the same numbers while nothing changes."""
        if not self._traffic.deliveries:
            return False
        with self._traffic.pause:
            self._crew.worker.signal(signal.SIGSTOP)
            time.sleep(0.05)
            so = by_registries(self._view.connection)
            said = {"rq info": by_rq_info(self._server.url)}
            if self._dashboard is not None:
                said["dashboard"] = by_dashboard(self._dashboard)
            if by_registries(self._view.connection) != so:
                self._crew.problems.append("Redis changed while everything was paused, or by reading")
            lies = [f"{who} shows {counts} instead of {so}" for who, counts in said.items() if counts != so]
            self._crew.problems += lies
            self._crew.worker.signal(signal.SIGCONT)
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
