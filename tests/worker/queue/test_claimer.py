"""Claiming looks ahead, claims in order, and leaves an id in exactly one list."""

import json

import pytest

from stoker_worker.ports import Busy
from stoker_worker.queue.waiting import _READING

pytestmark = pytest.mark.server


@pytest.fixture
def claimer(make_claimer):
    return make_claimer()


def claim(claimer, limit=10, busy=()):
    now = Busy(writing=frozenset(busy))
    claimer.read_ahead(limit, now)
    return [granted.job_id for granted in claimer.claim(limit, now)]


def claim_soon(claimer, **options):
    """Claim several times: reading thousands of jobs takes more than one claim."""
    return next((found for _ in range(100) if (found := claim(claimer, **options))), [])


def test_an_agent_behind_thousands_of_anothers_jobs_is_found(connection, producer, claimer, submit):
    producer.submit_many([{"agent_id": "greedy", "prompt": "x"}] * 1500)
    (other,) = submit("other")
    assert claim_soon(claimer, busy=["greedy"]) == [other]
    assert connection.llen("rq:queue:generate") == 1500


def test_the_agents_of_waiting_jobs_are_known_without_a_command(connection, claimer, submit):
    assert claimer.waiting.lines.agents() == frozenset()
    _, _, _, c1 = submit("a", "a", "b", "c")
    connection.rpush("rq:queue:generate", "no-hash")
    claim(claimer, busy=["b"], limit=1)
    claim(claimer, busy=["a", "b", "c"])
    before = claimer.waiting.lines.agents()
    assert before == {"a", "b", "c"}
    claim(claimer, busy=["a", "b", "c"])
    assert claimer.waiting.lines.agents() is before
    assert claim(claimer, busy=["a", "b"]) == [c1]
    assert claimer.waiting.lines.agents() == {"a", "b"}
    connection.delete("rq:queue:generate")
    assert claim(claimer) == []
    assert claimer.waiting.lines.agents() == frozenset()


def test_jobs_added_at_either_end_after_the_first_claim_are_claimed_in_order(connection, claimer, submit):
    a, b = submit("a", "b")
    assert claim(claimer, busy=["a", "b"]) == []
    behind, before = [], []
    for n in range(3):
        behind += submit(f"behind {n}")
        before = submit(f"before {n}") + before
        connection.lmove("rq:queue:generate", "rq:queue:generate", "RIGHT", "LEFT")
        assert (
            claim(claimer, busy=["a", "b", *(f"{side} {m}" for side in ("before", "behind") for m in range(3))]) == []
        )
    assert claim(claimer) == [*before, a, b, *behind]


@pytest.mark.parametrize(("count", "page"), [(1, 1000), (9, 1000), (3, 3), (5, 3)])
@pytest.mark.parametrize("side", ["LPOP", "RPOP"])
def test_jobs_that_were_removed_meanwhile_are_not_claimed(connection, claimer, submit, monkeypatch, side, count, page):
    monkeypatch.setattr("stoker_worker.queue.waiting._PAGE", page)
    ids = submit(*(f"a{n}" for n in range(10)))
    for _ in range(4):
        assert claim(claimer, busy=[f"a{n}" for n in range(10)]) == []
    connection.execute_command(side, "rq:queue:generate", count)
    (new,) = submit("new")
    left = ids[count:] if side == "LPOP" else ids[:-count]
    claimed = []
    while found := claim_soon(claimer, limit=2):
        claimed += found
    assert claimed == [*left, new]


def test_a_queue_that_was_emptied_and_filled_again_is_read_again(connection, claimer, submit):
    submit(*(f"a{n}" for n in range(50)))
    assert claim(claimer, limit=1)
    connection.delete("rq:queue:generate")
    ids = submit("x", "y")
    assert claim_soon(claimer) == ids


def test_many_canceled_jobs_in_the_middle_do_not_hold_up_the_rest(connection, claimer, submit):
    ids = submit(*(f"a{n}" for n in range(300)))
    assert claim(claimer, busy=[f"a{n}" for n in range(300)]) == []
    for job_id in ids[1:-1]:
        connection.lrem("rq:queue:generate", 1, job_id)
    assert claim(claimer) == [ids[0], ids[-1]]


def test_an_id_enqueued_again_while_it_waits_has_the_agent_in_its_new_hash(claimer, submit, enqueue):
    again, beside = submit("a", "a", cache="read")
    assert claim(claimer, busy=["a"]) == []
    enqueue(again, "a", "y")
    assert claim(claimer) == [beside]
    assert claim(claimer) == [again]


@pytest.mark.parametrize("removed", [False, True])
def test_an_id_enqueued_again_for_another_agent_waits_behind_that_agents_jobs(
    connection, claimer, submit, enqueue, removed
):
    (again,) = submit("a")
    (before,) = submit("b")
    assert claim(claimer, busy=["a", "b"]) == []
    if removed:
        connection.delete("rq:queue:generate")
        assert claim(claimer) == []
        connection.rpush("rq:queue:generate", before)
    else:
        connection.lrem("rq:queue:generate", 0, again)
    enqueue(again, "b", "y")
    assert claim_soon(claimer) == [before]
    assert claim(claimer) == [again]


def test_requests_are_not_read_if_the_producer_stored_the_agent_in_the_hash(connection, claimer, submit):
    agents = "a", "\u00fc \U0001f642/.."
    for job_id in submit(*agents):
        connection.hset(f"rq:job:{job_id}", "data", b"nobody can read this")
    claim(claimer, limit=0)
    assert claimer.waiting.lines.agents() == frozenset(agents)


def test_no_more_than_one_large_request_is_read_at_once(connection, claimer, monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.waiting._READING", (*_READING[:3], 1000, *_READING[4:]))
    names = [f"large {n}" for n in range(6)] + [f"small {n}" for n in range(40)]
    for name in names:
        request = {"agent_id": name, "prompt": "x" * (900 if "large" in name else 9)}
        connection.hset(f"rq:job:{name}", "data", json.dumps(["x", None, [], {"request": request}]))
        connection.rpush("rq:queue:generate", name)
    replies, real = [], claimer.view._read_at

    def noting(**words):
        replies.append(real(**words))
        return replies[-1]

    monkeypatch.setattr(claimer.view, "_read_at", noting)
    while len(claimer.waiting.lines.agents()) < len(names):
        claim(claimer, limit=0)
    assert all(len(found) == 1 or sum(map(len, found)) <= 1000 for found, *_ in replies)
    assert 5 < len(replies) < 15
    assert claim(claimer, limit=50) == names


def test_jobs_that_are_large_together_come_with_several_claims(connection, submit, monkeypatch, make_claimer):
    ids = submit("a", "b", "c")
    for job_id in ids:
        connection.hset(f"rq:job:{job_id}", "description", "x" * 300_000)
    monkeypatch.setattr("stoker_worker.queue.claim.MOST_BYTES", 500_000)
    claimer = make_claimer()
    found = []
    for n in range(3):
        found += claim(claimer)
        assert (len(found), claimer.has_unread) == (n + 1, n < 2)
    assert found == ids
