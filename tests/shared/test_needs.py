"""What a job needs of its worker, from its request and from its producer's note."""

import pytest

from stoker_shared.needs import NOTHING, READS, Needs
from stoker_shared.wire import AGENT_TASK_PATH, TASK_PATH

NEWER = max(READS.values()) + 1


@pytest.mark.parametrize(
    ("request_", "needs"),
    [
        ({"prompt": "x"}, NOTHING),
        ({"v": 3, "prompt": "x"}, NOTHING),
        ({"v": 3, "model": "m"}, Needs("m")),
        ({"v": NEWER}, Needs(None, "generate", NEWER)),
        ({"v": NEWER, "model": "m"}, Needs("m", "generate", NEWER)),
        ({"v": True, "model": ["m"]}, NOTHING),
        ({"v": 10**400, "model": ""}, NOTHING),
    ],
)
def test_a_request_needs_its_model_and_a_worker_that_reads_its_version(request_, needs):
    assert Needs.of(TASK_PATH, request_) == needs


@pytest.mark.parametrize(("n_tried", "model"), [(0, "small"), (1, "large"), (2, "large")])
def test_a_job_with_a_route_needs_the_next_model_of_it(n_tried, model):
    request = {"v": 4, "route": [{"model": "small", "queue": "q"}, {"model": "large", "queue": "q"}]}
    assert Needs.of(TASK_PATH, request, n_tried) == Needs(model, "generate", 4)


@pytest.mark.parametrize("route", ["small", ["small"], [{}], {"model": "small"}])
def test_a_route_that_is_none_names_no_model(route):
    assert Needs.of(TASK_PATH, {"route": route}) == NOTHING


def test_versions_are_those_of_a_task():
    assert Needs.of(AGENT_TASK_PATH, {"v": NEWER}) == Needs(None, "agent", NEWER)
    assert Needs.of("some.other.function", {"v": NEWER, "model": "m"}) == NOTHING


@pytest.mark.parametrize(
    "needs", [NOTHING, Needs("m"), Needs("a name\nof words "), Needs(None, "agent", 7), Needs("m", "generate", 12)]
)
def test_a_note_is_read_as_it_was_written(needs):
    assert Needs.noted(needs.note) == needs


@pytest.mark.parametrize(
    "note", ["", " ", "generate", "generate x m", "generate -4 m", "generate 99999999999 m", " 4 m"]
)
def test_a_note_of_another_form_needs_nothing(note):
    assert Needs.noted(note) == NOTHING
