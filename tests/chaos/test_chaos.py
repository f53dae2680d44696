"""Whatever happens to workers, server and clock, nothing is lost and nothing happens twice.

Everything is drawn from one seed. It is printed with a failure; ``CHAOS_SEED=N`` has that run again (what the threads
and the machine make of it is another matter). ``CHAOS=long`` is `make chaos`.
"""

import os
import random
import time
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
from tests.chaos.forked_worker import ForkServer
from tests.chaos.invariants import Aftermath
from tests.chaos.plan import draw_jobs
from tests.chaos.restarting_server import RestartingServer
from tests.chaos.storm import Storm
from tests.chaos.traffic import Traffic
from tests.dashboard_process import running_dashboard
from tests.server_fixture import require_server_program

pytestmark = pytest.mark.server

LONG = os.environ.get("CHAOS") == "long"
SIZE = (
    {"n_jobs": 1500, "n_agents": 50, "n_crash": 5, "n_break": 3}
    if LONG
    else {"n_jobs": 160, "n_agents": 12, "n_crash": 1, "n_break": 1}
)
KILLS, LASTS_S, CALM_S = (45, 100, 300) if LONG else (5, 9, 60)


@contextmanager
def dashboard_where_there_is_one(redis_url, folder):
    if find_spec("rq_dashboard") is None:
        yield None
    else:
        with running_dashboard(redis_url, folder / "dashboard.log") as page:
            yield page


@pytest.mark.timeout(1200 if LONG else 180)
def test_nothing_is_lost_and_nothing_happens_twice_whatever_happens(tmp_path):
    require_server_program()
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"chaos: CHAOS_SEED={seed}, everything in {tmp_path}")
    begin = time.monotonic()
    draw = random.Random(seed)
    jobs = draw_jobs(draw, **SIZE)
    server = RestartingServer(tmp_path / "redis")
    traffic = Traffic(server, jobs, random.Random(draw.random()), LASTS_S)
    with ForkServer() as forks, dashboard_where_there_is_one(server.url, tmp_path) as page:
        storm = Storm(forks, server, traffic, draw, tmp_path, dashboard=page)
        try:
            traffic.start()
            storm.rage(KILLS)
            storm.calm(CALM_S)
            with server.connection() as connection:
                aftermath = Aftermath(connection, traffic, storm)
                broken = aftermath.broken()
        finally:
            traffic.leave()
            storm.end()
            server.stop()
    print(f"episodes {dict(storm.counts)}, {storm.loud_exits} loud exits, {len(traffic.in_doubt)} enqueues in doubt")
    print(f"ends {aftermath.ends()}, {time.monotonic() - begin:.0f} s")
    assert broken == [], "\n".join(broken)
