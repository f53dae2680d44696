"""Trust: bounds, decay, the choice of the first model, classes of tasks and routes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_shared.request import build_request
from stoker_shared.result import Attempt
from stoker_shared.route import Step, next_step
from stoker_shared.selection import Candidate, cheapest_first, route_of
from stoker_shared.task_class import task_of
from stoker_shared.trust import KEPT, Counts, field_of, model_and_task

MOST = 1 / (1 - KEPT)
weights = st.floats(0, 1e6, allow_nan=False)


@given(weights, weights)
def test_the_bound_is_a_share_below_the_rate(accepted, rejected):
    counts = Counts(accepted, rejected)
    assert 0.0 <= counts.lower_bound() <= counts.rate + 1e-9 <= 1.0 + 2e-9


@given(st.integers(0, 400), st.integers(0, 400))
def test_a_verdict_moves_the_bound_its_way(n_accepted, n_rejected):
    counts = Counts(n_accepted * 0.125, n_rejected * 0.125)
    assert counts.after(accepted=False).lower_bound() <= counts.lower_bound() + 1e-9
    assert counts.after(accepted=True).rate >= counts.rate - 1e-9
    assert counts.after(accepted=True).total <= MOST + 1e-6


@given(st.floats(0, MOST / 2), st.floats(0, MOST / 2))
def test_counts_in_redis_are_read_as_they_were_written(accepted, rejected):
    read = Counts.parsed(str(Counts(accepted, rejected)).encode())
    assert read.accepted == pytest.approx(accepted, abs=1e-4)
    assert read.rejected == pytest.approx(rejected, abs=1e-4)


@pytest.mark.parametrize("value", [None, b"", b"1", b"a b", b"nan 1", b"-1 2", b"inf 0", b"\xff 1"])
def test_unreadable_counts_are_none(value):
    assert Counts.parsed(value) == Counts()


@pytest.mark.parametrize("accepted", [True, False])
def test_later_verdicts_weigh_no_more_than_the_model_is_remembered(accepted):
    counts = Counts()
    for _ in range(1000):
        counts = counts.after(accepted=not accepted).corrected(accepted=accepted)
    assert counts.total <= MOST + 1e-6
    for _ in range(300):
        counts = counts.after(accepted=not accepted)
    assert (counts.rate < 0.1) == accepted


@given(st.text(min_size=1))
def test_a_field_has_model_and_class(model):
    assert model_and_task(field_of(model, "short/latin")) == (model, "short/latin")


def candidate(model, cost, counts=None):
    step = Step(model=model, queue=model, prompt_token_s=cost / 1000, token_s=cost / 1000)
    return Candidate(step, counts or Counts())


GOOD, BAD = Counts(95, 5), Counts(5, 95)


def begins(counts, **options):
    """How often jobs begin with the small model."""
    dice, options = random.Random(1), {"min_trust": None, "escalates": True, **options}
    models = [candidate("small", 1, counts), candidate("large", 10)]
    routes = [route_of(models, dice=dice, **options) for _ in range(2000)]
    assert all(route[-1].model == "large" for route in routes)
    return sum(route[0].model == "small" for route in routes) / 2000


def test_the_cheapest_trusted_model_begins_and_others_are_tried_now_and_then():
    assert begins(GOOD) == 1.0
    assert begins(GOOD, min_trust=0.8) == 1.0
    assert 0 < begins(BAD, min_trust=0.8) < 0.03
    assert 0.1 < begins(Counts(), min_trust=0.8) < 0.3
    # It pays to begin with a model of a tenth of the cost, even if a third of its answers are rejected.
    assert begins(Counts(66, 33)) == 1.0
    assert begins(Counts(66, 33), escalates=False) < 0.05
    assert begins(Counts(5, 500)) < 0.05


def test_the_same_seed_chooses_the_same():
    models = [candidate("small", 1), candidate("large", 10)]
    first, second = (
        [route_of(models, min_trust=0.5, escalates=True, dice=random.Random(7)) for _ in range(20)] for _ in range(2)
    )
    assert first == second


def test_a_model_that_looks_dear_because_it_is_rarely_asked_is_tried_all_the_same():
    """Its worker's batch is never full, so its tokens take longer than those of the next model."""
    new, trusted = (candidate("small", 100, counts) for counts in (None, Counts(90, 4)))
    routes = [
        [
            route_of([one, candidate("large", 10)], min_trust=None, escalates=True, dice=random.Random(n))
            for n in range(50)
        ]
        for one in (new, trusted)
    ]
    begun = [sum(route[0].model == "small" for route in found) for found in routes]
    assert begun[0] > 3
    assert begun[1] == 50


def test_models_without_a_measured_cost_come_last():
    found = cheapest_first([Step(model="new", queue="q"), candidate("large", 10).step, candidate("small", 1).step])
    assert [step.model for step in found] == ["small", "large", "new"]


def test_a_route_ends_with_its_list_or_its_cost():
    steps = [candidate(name, cost).step for name, cost in (("small", 1), ("middle", 4), ("large", 100))]
    spent = [Attempt(model="small", accepted=False, prompt_tokens=1000, completion_tokens=500, seconds=2.0)]
    assert next_step(steps, spent, None) == steps[1]
    assert next_step(steps, spent * 3, None) is None
    assert next_step(steps, spent, 8.1) == steps[1]  # 2 s spent, and 1,500 tokens of 4 ms to come
    assert next_step(steps, spent, 7.9) is None
    assert next_step(steps, spent * 2, 10.0) is None


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({"prompt": "Where is Paris?"}, "short/latin"),
        ({"prompt": "Где Париж?"}, "short/cyrillic"),
        ({"prompt": "パリはどこの国の都市ですか"}, "short/japanese"),
        ({"prompt": "巴黎在哪里"}, "short/chinese"),
        ({"prompt": "12 + 30"}, "short"),
        ({"prompt": "word " * 1000}, "medium/latin"),
        ({"prompt": "word " * 10_000}, "long/latin"),
        ({"prompt": "def f(x):\n    return {x: [x * 2 for x in (1, 2)]}"}, "short/code/latin"),
        ({"prompt": "a", "check": {"json_schema": {}}}, "short/schema/latin"),
        (
            {"messages": [{"role": "system", "content": "word " * 999}, {"role": "user", "content": "a"}]},
            "short/latin",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "short/tools/latin"),
        ({"prompt": "a", "task": "mine"}, "mine"),
    ],
)
def test_classes_of_tasks(fields, task):
    assert task_of(build_request(fields)) == task


@given(st.text(min_size=1))
def test_every_text_has_a_class_that_is_a_label(text):
    try:
        request = build_request({"prompt": text})
    except ValueError:
        return
    assert build_request({"prompt": "p", "task": task_of(request)}).task
