"""Whatever happens to workers, server and clock, no job is lost and none takes effect twice.

Everything is drawn from one seed, which is printed with a failure; ``CHAOS_SEED=N`` repeats that run, except for the
timing of threads and machine. ``CHAOS=long`` is `make chaos`.
"""

import os

import pytest
from tests.chaos.oracle import ScriptedOracle
from tests.chaos.plan import SCRIPTED, draw_jobs
from tests.chaos.play import Course, play
from tests.chaos.storm import SHORT, Breed
from tests.support.forked_worker import ForkServer
from tests.support.server_fixture import require_server_program

pytestmark = pytest.mark.server

LONG = os.environ.get("CHAOS") == "long"
SIZE = (
    {"n_jobs": 1200, "n_agents": 50, "n_crash": 5, "n_break": 3}
    if LONG
    else {"n_jobs": 100, "n_agents": 10, "n_crash": 1, "n_break": 1}
)
COURSE = Course(lasts_s=80, n_kills=36, calm_s=300) if LONG else Course(lasts_s=6, n_kills=3, calm_s=60)
ENGINE = ("--engine", "scripted", "--scripted-steps-per-s", "400")


@pytest.mark.timeout(1200 if LONG else 180)
def test_nothing_is_lost_and_nothing_happens_twice_whatever_happens(tmp_path):
    require_server_program()
    with ForkServer() as forks:

        def start(arguments, log, hooks):
            return forks.run(["run", *ENGINE, *arguments], log, env=SHORT, hooks=hooks)

        breed = Breed(start, start_s=0, pause_s=(0.02, 0.5))
        broken = play(tmp_path, lambda draw: draw_jobs(draw, SCRIPTED, **SIZE), breed, COURSE, ScriptedOracle)
    assert broken == [], "\n".join(broken)
