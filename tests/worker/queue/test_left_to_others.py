"""Which jobs a worker leaves to others, for how long, and what is shown of those that nobody can serve."""

import pytest

from stoker_shared.needs import NOTHING, Needs
from stoker_worker.ports import Busy, MemoryUse
from stoker_worker.queue.fair_queue import FairQueue
from stoker_worker.queue.left_to_others import LeftToOthers
from stoker_worker.queue.offers import Offer

WAIT_S = 300.0
MINE, THEIRS = Needs("mine"), Needs("theirs")


class Queue:
    """One queue, its other members as `elsewhere` and `has_company` have them, and the time."""

    def __init__(self):
        self.waiting = FairQueue()
        self.elsewhere = set()
        self.newcomers = set()  # not seen yet
        self.has_company = True
        self.now = 1000.0
        lines = self.waiting.lines
        self.left = LeftToOthers(lines, self, "q", wait_s=WAIT_S, clock=lambda: self.now)
        self.left.offer = Offer("mine", {"generate": 3})

    def look(self):
        self.elsewhere |= self.newcomers

    def is_served_elsewhere(self, queue, needs):
        return needs in self.elsewhere

    def had_company(self, queue, within_s):
        return self.has_company

    def add(self, job_id, needs, agent_id=None, **use):
        self.waiting.append([job_id])
        self.waiting.learn(job_id, MemoryUse.of("write", agent_id, **use), needs, quarantined=False)

    def chosen(self, after_s=0.0):
        self.now += after_s
        self.left.look()
        return self.waiting.choose(99, Busy())


@pytest.fixture
def queue():
    return Queue()


def test_what_this_worker_serves_is_never_left(queue):
    for job_id, needs in [("any", NOTHING), ("model", MINE), ("both", Needs("mine", "generate", 3))]:
        queue.add(job_id, needs)
    queue.elsewhere = {NOTHING, MINE}
    assert queue.chosen() == ["any", "model", "both"]


@pytest.mark.parametrize(
    "needs", [THEIRS, Needs(None, "generate", 4), Needs("mine", "generate", 4), Needs(None, "x", 1)]
)
def test_what_another_serves_is_left_to_it_for_as_long_as_it_takes(queue, needs):
    queue.elsewhere = {needs}
    queue.add("other", needs)
    assert queue.chosen() == queue.chosen(after_s=10 * WAIT_S) == []
    assert queue.left.served_by_nobody(9) == []


def test_a_worker_without_company_claims_what_it_cannot_serve_at_once(queue):
    queue.has_company = False
    queue.add("other", THEIRS)
    assert queue.chosen() == ["other"]


def test_nothing_is_claimed_to_be_refused_if_another_worker_has_come_that_serves_it(queue):
    queue.has_company = False
    queue.newcomers = {THEIRS}
    queue.add("other", THEIRS)
    assert queue.waiting.choose(99, Busy()) == []


def test_a_job_that_could_not_be_claimed_at_once_is_left_to_a_worker_that_came_meanwhile(queue):
    queue.has_company = False
    queue.add("other", THEIRS)
    assert queue.chosen() == ["other"]
    queue.newcomers = {THEIRS}
    queue.left.look_at_refused()
    assert queue.waiting.choose(99, Busy()) == []


def test_what_nobody_serves_waits_for_a_while_is_shown_and_is_claimed_at_last(queue):
    queue.add("first", THEIRS)
    queue.add("second", THEIRS)
    queue.add("mine", MINE)
    assert queue.chosen() == ["mine"]
    assert queue.left.served_by_nobody(9) == [(THEIRS, 2)]
    assert queue.chosen(after_s=WAIT_S - 1) == ["mine"]
    assert queue.chosen(after_s=1) == ["first", "second", "mine"]


def test_the_wait_begins_when_the_last_worker_that_served_it_is_gone(queue):
    queue.elsewhere = {THEIRS}
    queue.add("other", THEIRS)
    assert queue.chosen(after_s=WAIT_S) == []
    queue.elsewhere = set()
    assert queue.chosen() == queue.chosen(after_s=WAIT_S - 1) == []
    queue.elsewhere = {THEIRS}
    assert queue.chosen(after_s=WAIT_S) == []
    queue.elsewhere = set()
    assert queue.chosen() == []
    assert queue.chosen(after_s=WAIT_S) == ["other"]


def test_a_worker_that_loads_its_model_leaves_nothing_to_others(queue):
    queue.left.offer = None
    queue.add("other", THEIRS)
    assert queue.chosen() == ["other"]


def test_only_what_still_waits_is_shown(queue):
    queue.add("other", THEIRS)
    assert queue.chosen() == []
    queue.waiting.discard("other")
    assert queue.chosen() == []
    assert queue.left.served_by_nobody(9) == []
    queue.now += WAIT_S
    queue.add("later", THEIRS)
    assert queue.chosen() == []


def test_an_agent_whose_memory_cannot_leave_is_claimed_at_last_and_shown_until_then(queue):
    queue.elsewhere = {THEIRS}
    queue.add("stuck", THEIRS, "a", continues=True)
    queue.add("beside", THEIRS, "b")
    queue.left.stay(["a"], among=["a", "b"])
    assert queue.chosen() == []
    assert queue.left.stuck_here(9) == [(THEIRS, 1)]
    queue.left.stay(["a"], among=["a", "b"])
    assert queue.chosen(after_s=WAIT_S) == ["stuck"]
    queue.waiting.serve("stuck")
    assert queue.chosen() == []
    assert queue.left.stuck_here(9) == []


def test_an_agent_whose_memory_can_leave_after_all_is_not_claimed_to_be_refused(queue):
    queue.elsewhere = {THEIRS}
    queue.add("stuck", THEIRS, "a", continues=True)
    queue.left.stay(["a"], among=["a"])
    assert queue.chosen(after_s=WAIT_S - 1) == []
    queue.left.stay([], among=["a"])
    assert queue.chosen(after_s=WAIT_S) == []
    assert queue.left.stuck_here(9) == []


def test_all_agents_whose_jobs_are_left_are_looked_at_in_turn(queue):
    queue.elsewhere = {THEIRS}
    for n in range(5):
        queue.add(f"job {n}", THEIRS, f"agent {n}")
    queue.add("nobody's", THEIRS)
    assert queue.chosen() == []
    seen = [queue.left.some_agents(2) for _ in range(6)]
    assert seen == 2 * [["agent 0", "agent 1"], ["agent 2", "agent 3"], ["agent 4"]]
