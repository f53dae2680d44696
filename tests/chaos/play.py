"""One chaos run from its first job to the final check: the jobs, the storm and the check, in that order."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.invariants import FollowUp
from tests.chaos.oracle import Oracle
from tests.chaos.plan import PlannedJob
from tests.chaos.storm import Breed, Losses, Storm
from tests.chaos.traffic import Traffic
from tests.support.restarting_server import RestartingServer


@dataclass(frozen=True)
class Course:
    """Attributes:
    lasts_s: how long the enqueueing takes, roughly.
    n_kills: the storm kills at least this many workers.
    calm_s: the longest time for the remaining jobs after the storm.
    """

    lasts_s: float
    n_kills: int
    calm_s: float


def play(
    folder: Path,
    draw_plan: Callable[[random.Random], Sequence[PlannedJob]],
    breed: Breed,
    course: Course,
    ask_oracle: Callable[[], Oracle],
) -> list[str]:
    """Run it, and return the broken rules, with a line or two for each."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"chaos: CHAOS_SEED={seed}, everything in {folder}")
    begin = time.monotonic()
    draw = random.Random(seed)
    jobs = draw_plan(draw)
    server = RestartingServer(folder / "redis")
    losses = Losses(server.port, random.Random(draw.random()))
    traffic = Traffic(losses.producers, jobs, random.Random(draw.random()), course.lasts_s)
    with losses:
        storm = Storm(breed, server, losses, traffic, draw, folder)
        try:
            traffic.start()
            storm.rage(course.n_kills)
            storm.calm(course.calm_s)
            print(f"{time.monotonic() - begin:7.2f} over")
            with server.connection() as connection:
                aftermath = FollowUp(connection, traffic, storm, ask_oracle())
                broken = aftermath.broken()
        finally:
            traffic.leave()
            storm.end()
            server.stop()
    sent = traffic.deliveries
    in_doubt, met = (
        sum(not one.is_acknowledged for one in sent),
        Counter(str(state) for one in sent for state in one.met),
    )
    print(f"episodes {dict(storm.counts)}, {storm.crew.loud_exits} loud exits, {losses.lost} replies lost")
    print(f"{len(sent)} deliveries, {in_doubt} in doubt; states of the id at each send: {dict(met)}")
    print(f"ends {aftermath.ends()}, {time.monotonic() - begin:.0f} s")
    return broken
