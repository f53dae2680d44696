"""A storm over the queue: one episode after the other while jobs come in, then a calm in which every job must end."""

import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.chaos.crew import LEASE_S, Breed, Crew
from tests.chaos.episodes import EPISODES, MOST_OFF_S, Episodes
from tests.chaos.losses import Losses
from tests.chaos.redis_view import RedisView
from tests.chaos.restarting_server import RestartingServer
from tests.chaos.traffic import Traffic
from tests.support.wait import wait_for

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
        *,
        dashboard: str | None,
    ) -> None:
        self._breed, self._traffic, self._losses, self._random = breed, traffic, losses, random
        self._begin = time.monotonic()
        self._view = RedisView(server.connection())
        self.seen, clock = folder / "seen", folder / "clock"
        clock.write_text("0")
        hooks = {"seen": str(self.seen), "clock": str(clock)}
        self.crew = Crew(breed, losses.workers, self._view, folder, hooks)
        self._episodes = Episodes(self.crew, server, traffic, self._view, random, clock=clock, dashboard=dashboard)
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
        """Set the clock right and leave the worker alone until every job has ended; then stop it in order."""
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
            return self.crew.is_ready and self._traffic.is_over and not left

        wait_for(over, timeout_s, lambda: f"left: {self._view.left()[:20]}\n{self.crew.worker.log[-3000:]}")
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
