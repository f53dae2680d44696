"""The fair queue chooses the same jobs as a scan of the whole list would, and no agent waits for long. Lines that are
aside stay in order, are never chosen, and come back where they belong."""

import gc
from collections import deque
from typing import Any
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker_worker.ports import UNUSED, Busy, MemoryUse
from stoker_worker.queue.lease import NO_STORE
from stoker_worker.queue.waiting import MOST_PASSED, MOST_PASSED_S, Aside, FairQueue, PassedOver

AGENTS = ("a", "b", "c", None)
JOBS = [f"job-{n}" for n in range(30)]


def agent_of(job_id):
    return AGENTS[int(job_id.removeprefix("job-")) % len(AGENTS)]


def reads(job_id):
    return int(job_id.removeprefix("job-")) % 7 < 3


def use_of(job_id):
    agent = agent_of(job_id)
    return UNUSED if agent is None else MemoryUse("read" if reads(job_id) else "write", agent)


def plainly(known, limit, busy, quarantined, given, served):
    """The expected choice, by a scan of all `known` jobs, which have no gap.

    `given` is the number of jobs chosen so far; `served` lists the waiting agents that had a turn, oldest first.
    """

    def line(job_id):
        return agent_of(job_id) or job_id

    def may_go(job_id, chosen):
        before = [other for other in known[: known.index(job_id)] if line(other) == line(job_id)]
        if job_id in quarantined or job_id in busy.job_ids or any(other not in chosen for other in before):
            return False
        beside = [other for other in chosen if line(other) == line(job_id)]
        if reads(job_id) and agent_of(job_id):
            return line(job_id) not in busy.writing and all(reads(other) for other in beside)
        return not agent_of(job_id) or (line(job_id) not in busy.agents and not beside)

    first_of = {line(job_id): job_id for job_id in reversed(known)}
    ready = [job_id for job_id in known if job_id in quarantined and job_id in first_of.values()]
    chosen = []
    while len(chosen) < limit:
        free = [job_id for job_id in known if job_id not in chosen and may_go(job_id, chosen)]
        if not free:
            break
        pick = free[0]
        if (given + len(chosen)) % 2:
            had_one = {agent_of(job_id) for job_id in chosen}
            in_turn = [job_id for job_id in free if agent_of(job_id) and agent_of(job_id) not in had_one]
            new = [job_id for job_id in in_turn if agent_of(job_id) not in served]
            longest_ago = [job_id for agent in served for job_id in in_turn if agent_of(job_id) == agent]
            pick = (*new[:1], *longest_ago[:1], pick)[0]
        chosen.append(pick)
    return chosen, (ready[0] if ready else None)


class FairQueueMachine(RuleBasedStateMachine):
    """Compares with a plain list, of which the first `learned` jobs have been read."""

    def __init__(self):
        super().__init__()
        self.fair_queue = FairQueue(NO_STORE.is_at_hand)
        self.waiting = []
        self.known = set()
        self.quarantined = set()
        self.given, self.served = 0, []

    def remove(self, job_ids):
        self.waiting = [job_id for job_id in self.waiting if job_id not in job_ids]
        self.known -= set(job_ids)
        self.served = [agent for agent in self.served if agent in map(agent_of, self.known)]

    @rule(job_ids=st.lists(st.sampled_from(JOBS), unique=True, max_size=6))
    def come_in_behind(self, job_ids):
        self.remove(job_ids)
        self.waiting += job_ids
        self.fair_queue.append(job_ids)

    @rule(job_ids=st.lists(st.sampled_from(JOBS), unique=True, max_size=6))
    def come_in_before(self, job_ids):
        self.remove(job_ids)
        self.waiting[:0] = job_ids
        self.fair_queue.prepend(job_ids)

    @rule(job_id=st.sampled_from(JOBS))
    def go(self, job_id):
        self.remove([job_id])
        self.fair_queue.discard(job_id)

    @rule()
    def start_over(self):
        self.waiting, self.known, self.served = [], set(), []
        self.fair_queue.clear()

    @rule(count=st.integers(1, 8), quarantined=st.sets(st.sampled_from(JOBS), max_size=3))
    def learn(self, count, quarantined):
        for job_id in self.fair_queue.unlearned(count):
            assert job_id not in self.known
            (self.quarantined.add if job_id in quarantined else self.quarantined.discard)(job_id)
            self.fair_queue.learn(job_id, use_of(job_id), quarantined=job_id in quarantined)
            self.known.add(job_id)

    @rule(
        limit=st.integers(1, 6),
        writing=st.sets(st.sampled_from("abc")),
        reading=st.sets(st.sampled_from("abc")),
        behind_runs=st.sets(st.sampled_from(JOBS), max_size=2),
        claim=st.booleans(),
    )
    def choose(self, limit, writing, reading, behind_runs, claim):
        busy = Busy(frozenset(writing), frozenset(reading), frozenset(behind_runs))
        unread = next((n for n, job_id in enumerate(self.waiting) if job_id not in self.known), len(self.waiting))
        wanted, quarantined = plainly(self.waiting[:unread], limit, busy, self.quarantined, self.given, self.served)
        assert self.fair_queue.choose(limit, busy) == wanted
        assert self.fair_queue.next_quarantined(Busy()) == quarantined
        for job_id in wanted if claim else ():
            self.serve(job_id)

    @rule()
    def claim_quarantined(self):
        if (job_id := self.fair_queue.next_quarantined(Busy())) is not None:
            self.serve(job_id)

    def serve(self, job_id):
        self.remove([job_id])
        self.given += 1
        if agent_of(job_id) in {agent_of(known) for known in self.known} - {None}:
            self.served = [agent for agent in self.served if agent != agent_of(job_id)] + [agent_of(job_id)]
        self.fair_queue.serve(job_id)

    @invariant()
    def its_ends_are_those_of_the_list(self):
        assert len(self.fair_queue) == len(self.waiting)
        first, last = self.fair_queue.first(3), self.fair_queue.last(3)
        assert first == self.waiting[: len(first)]
        assert last == self.waiting[::-1][: len(last)]
        assert bool(first) == bool(last) == bool(self.waiting)


TestFairQueue = FairQueueMachine.TestCase


@given(st.lists(st.sampled_from(JOBS), unique=True), st.integers(0, 10), st.integers(1, 6))
def test_the_agents_of_the_next_jobs_are_those_that_are_chosen_next(job_ids, n_served, limit):
    fair_queue = FairQueue(NO_STORE.is_at_hand)
    fair_queue.append(job_ids)
    for job_id in fair_queue.unlearned(100):
        fair_queue.learn(job_id, use_of(job_id), quarantined=False)
    for _ in range(n_served):
        for job_id in fair_queue.choose(1, Busy()):
            fair_queue.serve(job_id)
    chosen = [agent for agent in map(agent_of, fair_queue.choose(limit, Busy())) if agent]
    found = fair_queue.next_agents(2 * limit)
    assert len(set(found)) == len(found)
    assert set(found) >= set(chosen)


class Places:
    """Gives one place after the other; an agent's jobs are named after it."""

    def __init__(self, at_hand=None):
        self.now = 0.0
        self.fair_queue, self.given = FairQueue(NO_STORE.is_at_hand, PassedOver(lambda: self.now)), []
        if at_hand is not None:
            self.fair_queue.is_at_hand = at_hand.__contains__

    def submit(self, *agents, front=False):
        job_ids = [f"{agent}-{uuid4()}" for agent in agents]
        (self.fair_queue.prepend if front else self.fair_queue.append)(job_ids)
        for job_id in self.fair_queue.unlearned(10_000):
            self.fair_queue.learn(job_id, MemoryUse("write", job_id.partition("-")[0]), quarantined=False)

    def give(self, n_places=1):
        for _ in range(n_places):
            for job_id in self.fair_queue.choose(1, Busy()):
                self.fair_queue.serve(job_id)
                self.given.append(job_id.partition("-")[0])
        return self.given


def test_the_first_job_of_an_agent_gets_one_of_the_next_two_places_beside_agents_with_many():
    for n_heavy in (1, 2, 16):
        for n_given in range(2 * n_heavy, 2 * n_heavy + 20):  # until each of them was served they are new too
            places = Places()
            places.submit(*(f"heavy{n}" for n in range(n_heavy) for _ in range(100)))
            places.give(n_given)
            places.submit("new")
            assert "new" in places.give(2)[-2:]


def test_new_agents_do_not_starve_the_agent_that_has_waited_longest():
    places = Places()
    places.submit(*["heavy"] * 20)
    for n in range(40):
        places.submit(f"new{n}", f"newer{n}")
        places.give()
    assert places.given.count("heavy") == 20


def test_a_job_at_the_front_waits_for_one_place_at_most():
    for n_given in range(6):
        places = Places()
        places.submit(*["heavy"] * 20, *(f"new{n}" for n in range(20)))
        places.give(n_given)
        places.submit("urgent", front=True)
        assert "urgent" in places.give(2)[-2:]


def test_jobs_of_agents_at_hand_go_first_and_jobs_without_an_agent_with_them():
    places = Places(at_hand={"c", "e"})
    places.submit(*"abcabde")
    places.fair_queue.append(["none"])
    places.fair_queue.learn("none", UNUSED, quarantined=False)
    assert places.give(3) == ["c", "e", "none"]
    assert sorted(places.give(5)[3:]) == ["a", "a", "b", "b", "d"]


def test_a_job_is_passed_over_for_so_many_seconds_only():
    places = Places(at_hand={"hot"})
    places.submit("cold", *["hot"] * 100)
    places.give(2)
    places.now = MOST_PASSED_S - 0.01
    assert places.give(2) == ["hot"] * 4
    places.now = MOST_PASSED_S
    assert "cold" in places.give(2)


def test_what_was_passed_over_is_remembered_when_the_queue_is_read_anew():
    places = Places(at_hand={"hot"})
    places.submit(*["cold"], *["hot"] * 100)
    places.give(2)
    job_ids, places.now = places.fair_queue.first(1000), MOST_PASSED_S
    places.fair_queue.clear()
    places.fair_queue.append(job_ids)
    for job_id in job_ids:
        places.fair_queue.learn(job_id, MemoryUse("write", job_id.partition("-")[0]), quarantined=False)
    assert "cold" in places.give(2)


def test_a_long_queue_is_not_searched_for_agents_at_hand():
    places, asked = Places(), []

    def is_at_hand(agent):
        asked.append(agent)
        return False

    places.submit(*(f"cold{n}" for n in range(5000)), "hot")
    places.fair_queue.is_at_hand = is_at_hand
    places.give(10)
    places.fair_queue.next_agents(8)
    assert len(asked) <= 12 * 2 * MOST_PASSED


@given(st.data())
def test_nobody_is_passed_over_beyond_the_bounds_and_each_agents_order_stays(data):
    """The first choice without a preference is the job that is passed over, if there is another one with it."""
    agents = [f"agent{n}" for n in range(12)]
    at_hand, passed, submitted = set(agents[6:]), {}, []
    places = Places(at_hand)
    fair_queue = places.fair_queue
    for _ in range(data.draw(st.integers(1, 8))):
        places.submit(*data.draw(st.lists(st.sampled_from(agents), min_size=5, max_size=40)))
        submitted += [job_id for job_id in fair_queue.first(10_000) if job_id not in submitted]
        at_hand ^= data.draw(st.sets(st.sampled_from(agents), max_size=1))
        second = data.draw(st.sampled_from([0.0, 0.1, 1.0, 4.0]))
        for _ in range(data.draw(st.integers(0, 30))):
            fair_queue.is_at_hand = NO_STORE.is_at_hand
            plain = fair_queue.choose(1, Busy())
            fair_queue.is_at_hand = at_hand.__contains__
            choice = fair_queue.choose(1, Busy())
            if choice != plain:
                n_before, since = passed.setdefault(plain[0], (len(places.given), places.now))
                assert len(places.given) - n_before < MOST_PASSED
                assert places.now - since < MOST_PASSED_S
            for job_id in choice:
                fair_queue.serve(job_id)
                places.given.append(job_id)
            places.now += second
    while choice := fair_queue.choose(1, Busy()):
        fair_queue.serve(choice[0])
        places.given += choice
    assert sorted(places.given) == sorted(submitted)
    for agent in agents:
        mine = [job_id for job_id in submitted if job_id.startswith(f"{agent}-")]
        assert [job_id for job_id in places.given if job_id in mine] == mine


@given(st.lists(st.sampled_from(JOBS), unique=True), st.integers(1, 6))
def test_with_nothing_at_hand_the_order_is_the_plain_one(job_ids, limit):
    queues = FairQueue(NO_STORE.is_at_hand), FairQueue(NO_STORE.is_at_hand)
    queues[1].is_at_hand = lambda agent: False
    for fair_queue in queues:
        fair_queue.append(job_ids)
        for job_id in fair_queue.unlearned(100):
            use = MemoryUse("write", agent_of(job_id) or "d")
            fair_queue.learn(job_id, use, quarantined=False)
    while chosen := queues[0].choose(limit, Busy()):
        assert queues[1].choose(limit, Busy()) == chosen
        assert queues[1].next_agents(limit) == queues[0].next_agents(limit)
        for fair_queue in queues:
            for job_id in chosen:
                fair_queue.serve(job_id)


def test_the_next_agents_are_those_at_hand_until_the_others_are_passed_over_no_more():
    places = Places(at_hand={"y", "z"})
    places.submit(*"abcd", *"yz" * 50)
    assert places.fair_queue.next_agents(3) == ["y", "z", "a"]
    places.give(MOST_PASSED - 3)
    assert set(places.fair_queue.next_agents(3)) == set("abc")


def test_nothing_is_kept_of_agents_without_waiting_jobs():
    places = Places()
    for n in range(100):
        places.submit(*["heavy"] * 2, f"a{n}", f"a{n}")
        places.give(4)
    places.give(10)
    assert len(places.given) == 400
    assert len(places.fair_queue) == 0
    places.fair_queue.first(1), places.fair_queue.choose(1, Busy())
    seen: dict[int, Any] = {}
    todo: list[Any] = [vars(places.fair_queue)]
    while todo:
        for found in gc.get_referents(todo.pop()):
            if id(found) not in seen and isinstance(found, dict | list | tuple | deque | str):
                seen[id(found)] = found
                todo.append(found)
    assert [text for text in seen.values() if isinstance(text, str) and text.startswith(("heavy", "a0", "a1"))] == []


WHY = Aside("job", "stoker-mac2-00000000", 1.0)


def queue_of(*jobs):
    """The ids are each agent and its place."""
    queue, ids = FairQueue(NO_STORE.is_at_hand), []
    for place, agent in enumerate(jobs):
        job_id = f"{agent}{place}"
        ids.append(job_id)
        queue.append([job_id])
        queue.learn(job_id, MemoryUse("write", agent), quarantined=agent == "quarantined")
    return queue, ids


def chosen(queue, limit=9):
    return queue.choose(limit, Busy())


def test_a_line_that_is_aside_is_not_chosen_and_comes_back_in_order():
    queue, (a0, b1, a2, _) = queue_of("a", "b", "a", "b")
    queue.lines.put_aside("a", WHY)
    assert chosen(queue) == [b1]
    assert queue.lines.agents() == {"b"}
    assert queue.next_agents(9) == ["b"]
    queue.lines.take_back(["a"])
    assert chosen(queue) == [a0, b1]
    queue.serve(a0)
    assert a2 in chosen(queue)


def test_jobs_that_come_or_go_while_their_line_is_aside_change_nothing_for_others():
    queue, (a0, b1) = queue_of("a", "b")
    queue.lines.put_aside("a", WHY)
    queue.append(["late"])
    queue.learn("late", MemoryUse("write", "a"), quarantined=False)
    queue.discard(a0)
    assert chosen(queue) == [b1]
    queue.lines.take_back(["a"])
    assert chosen(queue) == [b1, "late"]


def test_an_agent_without_waiting_jobs_is_not_aside_any_more():
    queue, (a0,) = queue_of("a")
    queue.lines.put_aside("a", WHY)
    queue.discard(a0)
    assert queue.lines.aside == {}
    queue.lines.put_aside("nobody", WHY)
    queue.lines.take_back(["nobody"])
    assert queue.lines.aside == {}


def test_a_line_stays_aside_when_the_queue_is_read_anew():
    queue, (a0, b1) = queue_of("a", "b")
    queue.lines.put_aside("a", WHY)
    known = queue.learned()
    queue.clear()
    queue.append([a0, b1])
    for job_id, (use, quarantined) in known.items():
        queue.learn(job_id, use, quarantined=quarantined)
    assert chosen(queue) == [b1]


def test_a_quarantined_job_whose_line_is_aside_is_another_workers():
    queue, (lost,) = queue_of("quarantined")
    assert queue.next_quarantined(Busy()) == lost
    queue.lines.put_aside("quarantined", WHY)
    assert queue.next_quarantined(Busy()) is None
