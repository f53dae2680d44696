"""The chaos run with the real model: every answer equals that of mlx-lm alone for the same conversation.

Eighty jobs; the poison jobs kill their worker as soon as the engine has them. `make chaos` only.
"""

import os

import pytest
from tests.chaos.fresh_worker import start_fresh
from tests.chaos.hooks import MLX_ENGINE
from tests.chaos.oracle import ModelOracle
from tests.chaos.plan import Mix, Shares, draw_jobs
from tests.chaos.play import Course, play
from tests.chaos.storm import SHORT, Breed
from tests.support.server_fixture import require_server_program

pytestmark = [
    pytest.mark.server,
    pytest.mark.model,
    pytest.mark.skipif(os.environ.get("CHAOS") != "long", reason="takes minutes: make chaos"),
]

REAL = Mix(
    kinds={
        "words": 60, "long": 5, "flaky": 6, "late": 3, "canceled": 5, "withdrawn": 7,
        "short-lived": 2, "scheduled": 4, "question": 4, "off": 4,
    },
    words=(
        "The longest river in South America is",
        "To tie a bowline, first make a loop.",
        "Bees make honey from",
        "The capital of Norway is",
        "A good loaf of bread needs time.",
    ),
    most_words=8,
    short=range(4, 14),
    long=range(30, 60),
    endless=1500,
    may_end_early=True,
    shares=Shares(fails=0),
)  # fmt: skip
SIZE = {"n_jobs": 80, "n_agents": 10, "n_crash": 1}
COURSE = Course(lasts_s=45, n_kills=5, calm_s=240)
POISON = {"target": f"{MLX_ENGINE}.submit", "when": "after", "needles": [r"\ncrash'"]}


@pytest.mark.timeout(900)
def test_answers_are_those_of_the_model_alone_whatever_happens(tmp_path, smollm2):
    require_server_program()

    def start(arguments, log, hooks):
        hooks = {**hooks, "engine": MLX_ENGINE, "die": POISON}
        return start_fresh(["--model", str(smollm2), *arguments], log, env=SHORT, hooks=hooks)

    breed = Breed(start, start_s=90, pause_s=(2, 8))  # the first start has the proof
    plan = lambda draw: draw_jobs(draw, REAL, **SIZE)  # noqa: E731
    broken = play(tmp_path, plan, breed, COURSE, lambda: ModelOracle(smollm2))
    assert broken == [], "\n".join(broken)
