"""Trust: bounds, decay, the choice of the first model, classes of tasks and routes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cascade.routing import cheapest_first, first_to_ask
from stoker_shared.request import build_request
from stoker_shared.result import Attempt
from stoker_shared.route import RouteStep, next_step
from stoker_shared.trust import KEPT, Counts, field_of, model_and_task, task_of

MOST = 1 / (1 - KEPT)
weights = st.floats(0, 1e6, allow_nan=False)


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


def step(model, cost):
    return RouteStep(model=model, queue=model, prompt_token_s=cost / 1000, token_s=cost / 1000)


GOOD, BAD = Counts(95, 5), Counts(5, 95)


def begins(counts, *, cost=1, min_trust=None, has_check=True):
    """How often jobs begin with the small model; the large one costs 10."""
    steps, all_counts = [step("small", cost), step("large", 10)], [counts, Counts()]
    firsts = [first_to_ask(steps, all_counts, min_trust, has_check=has_check) for _ in range(2000)]
    return firsts.count(0) / 2000


@pytest.mark.parametrize(
    ("counts", "options", "least", "most"),
    [
        (GOOD, {}, 1, 1),
        (GOOD, {"min_trust": 0.8}, 1, 1),
        (BAD, {"min_trust": 0.8}, 0.001, 0.03),
        (Counts(), {"min_trust": 0.8}, 0.2, 0.3),
        # It pays to begin with a model of a tenth of the cost, even if a third of its answers are rejected.
        (Counts(66, 33), {}, 1, 1),
        (Counts(66, 33), {"has_check": False}, 0.001, 0.03),
        (Counts(5, 500), {}, 0.001, 0.03),
        # The batch of a model that is rarely asked is never full, so its tokens seem dear.
        (Counts(), {"cost": 100}, 0.2, 0.3),
        (Counts(90, 4), {"cost": 100}, 1, 1),
    ],
)
def test_the_cheapest_trusted_model_begins_and_others_are_tried_now_and_then(counts, options, least, most):
    random.seed(1)
    assert least <= begins(counts, **options) <= most


def test_models_without_a_measured_cost_come_last():
    found = cheapest_first([RouteStep(model="new", queue="q"), step("large", 10), step("small", 1)])
    assert [one.model for one in found] == ["small", "large", "new"]


def test_a_route_ends_with_its_list_or_its_cost():
    steps = [step(name, cost) for name, cost in (("small", 1), ("middle", 4), ("large", 100))]
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
