"""When a home gives an agent up: the wait is set against the cost of a move."""

import json
import time
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from stoker_worker.periodic import Periodic
from stoker_worker.queue.moving import PREFILL_S, AskedFor, ClaimRate, Moving


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_wait_follows_from_the_claims_of_late():
    clock = Clock()
    rate = ClaimRate(clock)
    assert rate.wait_s(0) == inf
    rate.note(2)
    clock.now = 4.0
    rate.note(0)
    assert rate.wait_s(0) == 2.0
    assert rate.wait_s(3) == 8.0
    clock.now = 40.0  # nothing was claimed for long
    assert rate.wait_s(0) == 20.0


def test_old_claims_are_forgotten():
    clock = Clock()
    rate = ClaimRate(clock)
    rate.note(64)
    clock.now = 100.0
    rate.note(63)
    clock.now = 101.0
    rate.note(1)
    assert rate.wait_s(0) == pytest.approx(1 / 64)


def test_what_is_asked_for_is_taken_once():
    asked = AskedFor()
    asked.add(["a", "b"], 1)
    asked.add(["a"], 2)
    assert asked.take() == (frozenset({"a", "b"}), 3)
    assert asked.take() == (frozenset(), 0)


class PlayedHomes:
    def __init__(self):
        self.given = {}

    def give_up(self, agents):
        self.given |= agents
        return len(agents)


class PlayedClaimer:
    def __init__(self, ahead):
        self._ahead = ahead

    def n_ahead(self, agent_id):
        return self._ahead.get(agent_id)


@pytest.fixture
def homes():
    return PlayedHomes()


@pytest.fixture
def moving(homes, monkeypatch):
    """Its next job is claimed in as many seconds as lines are ahead of it, and one."""
    claimer = PlayedClaimer({"next": -0.9, "soon": 3, "late": 99})
    played: Any = None, None, homes, {"q": claimer}
    moving = Moving(*played)
    monkeypatch.setattr(moving._rate, "wait_s", lambda n_ahead: n_ahead + 1.0)
    moving.asked.add(["next", "soon", "late", "running", "nobody"], 2)
    return moving


def test_an_agent_moves_only_for_a_wait_that_is_longer_than_the_move(moving, homes):
    assert 4 < PREFILL_S < 100
    moving.answer(lambda: frozenset({"running"}), is_full=True)
    assert homes.given == {"soon": False, "late": True}  # the first only if nothing is stored of it


def test_the_cost_of_a_move_may_be_known_better(moving, homes):
    moving.move_s = lambda agent_id: 2.0
    moving.answer(frozenset, is_full=True)
    assert homes.given == {"soon": True, "late": True}


def test_of_the_agents_with_a_memory_no_more_go_than_were_asked_for_those_that_wait_longest_first(moving, homes):
    moving.move_s = lambda agent_id: 0.1
    moving.asked.take()
    moving.asked.add(["soon", "late"], 1)
    moving.answer(frozenset, is_full=True)
    assert homes.given == {"soon": False, "late": True}


def test_a_worker_with_free_places_keeps_its_agents(moving, homes):
    moving.answer(frozenset, is_full=False)
    moving.answer(frozenset, is_full=True)
    assert homes.given == {}


def test_a_worker_that_drains_gives_up_whatever_is_asked_for_once_nothing_of_it_is_in_flight(moving, homes):
    for in_flight in ({"running"}, {"running"}, set()):
        moving.leave(lambda: frozenset(in_flight))  # noqa: B023
        assert ("running" in homes.given) is (not in_flight)
    assert homes.given == dict.fromkeys(("next", "soon", "late", "nobody", "running"), True)


def test_the_time_in_which_places_were_free_does_not_count():
    clock = Clock()
    rate = ClaimRate(clock)
    rate.note(8)
    clock.now = 3600.0
    rate.note(0, is_full=False)
    rate.note(8)
    clock.now = 3608.0
    assert rate.wait_s(0) == 1.0


def test_an_agent_whose_job_waits_where_this_worker_does_not_look_goes_in_any_case(moving, homes):
    moving.asked.take()
    moving.unserved.add(["soon", "running", "nobody"])
    moving.answer(lambda: frozenset({"running"}), is_full=False)
    assert homes.given == {"soon": True, "nobody": True}
    moving.answer(frozenset, is_full=False)
    assert homes.given["running"]


class Asker:
    """A worker that sees lines aside, and what it publishes."""

    def __init__(self, aside, leaving=()):
        self.sent = {}
        homes = set(aside.values())
        members = {
            home: SimpleNamespace(worker=home, queues=("q",), is_leaving=home in leaving, shared="") for home in homes
        }
        claimer = SimpleNamespace(
            first_aside=lambda limit, sharing: list(aside.items())[:limit], look_around=lambda present, asked: None
        )
        played: Any = (
            SimpleNamespace(publish=self._publish),
            SimpleNamespace(others=members, of=lambda queue: members),
            None,
            {"q": claimer},
        )
        self.moving = Moving(*played)

    def _publish(self, channel, message):
        asked = json.loads(message)
        self.sent[channel.rpartition(":")[2]] = asked["agents"], asked["n_with_memory"]


ASIDE = {"a": "mac1", "b": "mac2", "c": "mac2"}


def test_a_worker_with_free_places_asks_for_one_agent_with_a_memory_where_the_most_wait():
    asker = Asker(ASIDE)
    asker.moving.look_around(0, 5, 0)
    assert asker.sent == {"mac1": (["a"], 0), "mac2": (["b", "c"], 1)}


def test_a_worker_asks_for_no_agent_with_a_memory_while_one_that_has_moved_there_runs():
    asker = Asker(ASIDE)
    asker.moving.look_around(0, 5, 1)
    assert asker.sent == {"mac1": (["a"], 0), "mac2": (["b", "c"], 0)}


def test_after_a_look_that_took_long_the_next_one_is_later(monkeypatch):
    asker = Asker(ASIDE)
    asker.moving._look = Periodic(0)
    seconds = count(step=60.0)
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    for _ in range(2):
        asker.moving.look_around(0, 5, 0)
        sent, asker.sent = asker.sent, {}
    assert sent == {}


def test_a_worker_without_free_places_asks_only_those_that_drain():
    asker = Asker(ASIDE, leaving={"mac1"})
    asker.moving.look_around(0, 0, 0)
    assert asker.sent == {"mac1": (["a"], 1)}
