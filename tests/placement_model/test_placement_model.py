"""The rule for several workers holds in random histories, and each of its lines is needed.

The seeds are those of histories that were found before. `DEEP=N` plays N thousand new ones, and shortens what fails.
"""

import os

import pytest
from tests.placement_model.explore import events, history_of, play, rule_with, search, shortest
from tests.placement_model.mutations import MUTATIONS, SCENES

pytestmark = pytest.mark.scheduled

DEEP = int(os.environ.get("DEEP", "0"))
HISTORIES = DEEP * 1000 or 300


def test_no_history_breaks_an_invariant():
    found = search(range(HISTORIES))
    assert found is None, f"{found}: {shortest(found[0])}"


def test_the_histories_reach_what_the_rule_is_there_for():
    counted = events(range(100))
    for event in [
        "a put takes a number below the newest",
        "a late put takes a number below the newest",
        "a listing lacks the newest",
        "more than the grace passes before put",
    ]:
        assert counted[event] >= 3, event


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_line_is_found(name):
    """Its seed may be another one after a change of the model, so a few more are tried."""
    (seed, *change), scene = MUTATIONS[name], SCENES.get(name)
    rule = rule_with(change)
    found = search([seed], rule, scene) or search(range(HISTORIES), rule, scene)
    assert found is not None
    assert play(history_of(found[0], scene), found[0]) is None  # the unbroken rule survives the same history
