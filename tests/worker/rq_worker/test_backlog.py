"""Claiming looks ahead, claims in order, and leaves an id in exactly one list."""

import json

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from stoker_shared.wire import FIELD_ATTEMPTS, LEASE_KEY, TASK_PATH
from stoker_worker.ports import Busy
from stoker_worker.rq_worker.backlog import Backlog

pytestmark = pytest.mark.server

LEASE = "mine"
SIDES = ("before", "behind")


@pytest.fixture
def connection(redis_url):
    with Redis.from_url(redis_url) as connection:
        connection.set(LEASE_KEY.format(queue="generate"), LEASE)
        yield connection


@pytest.fixture
def backlog(connection):
    return Backlog(connection, "generate")


@pytest.fixture
def submit(producer, connection):
    return lambda *agents: [producer.submit(agent_id=agent, prompt="x").job_id for agent in agents]


def waiting(connection):
    return Queue("generate", connection=connection, serializer=JSONSerializer).get_job_ids()


def claimed(connection):
    return [job_id.decode() for job_id in connection.lrange("rq:queue:generate:intermediate", 0, -1)]


def claim(backlog, limit=10, busy=(), lease=LEASE):
    now = Busy(writing=frozenset(busy))
    backlog.read_ahead(limit, now)
    return backlog.claim(limit, now, lease)


def claim_soon(backlog, **options):
    """Reading what thousands of jobs are takes more than one look."""
    return next((found for _ in range(100) if (found := claim(backlog, **options))), [])


def test_the_oldest_job_of_each_free_agent_is_claimed_in_queue_order(connection, backlog, submit):
    a1, _, b1, c1 = submit("a", "a", "b", "c")
    assert claim(backlog, busy=["c"]) == [a1, b1]
    assert claimed(connection) == [a1, b1]
    assert c1 in waiting(connection)
    assert len(waiting(connection)) == 2


def test_no_more_than_the_limit_is_claimed(backlog, submit):
    ids = submit("a", "b", "c")
    assert claim(backlog, limit=2) == ids[:2]
    assert claim(backlog, limit=2) == ids[2:]


def test_an_agent_behind_thousands_of_anothers_jobs_is_found(connection, producer, backlog, submit):
    producer.submit_many([{"agent_id": "greedy", "prompt": "x"}] * 1500)
    (other,) = submit("other")
    assert claim_soon(backlog, busy=["greedy"]) == [other]
    assert len(waiting(connection)) == 1500


def test_an_agents_first_job_is_claimed_next_but_one_at_most_whoever_waits_with_many(connection, backlog, submit):
    submit(*["heavy"] * 30)
    assert claim(backlog, limit=1)
    (other,) = submit("other")
    assert [other] in [claim(backlog, limit=1), claim(backlog, limit=1)]
    assert len(waiting(connection)) == 28


def test_it_is_found_while_every_place_is_taken(connection, producer, backlog, submit):
    producer.submit_many([{"agent_id": "heavy", "prompt": "x"}] * 1500)
    (other,) = submit("other")
    for _ in range(200):
        assert claim(backlog, limit=0) == []
    assert [other] in [claim(backlog, limit=1), claim(backlog, limit=1)]


def test_a_claim_that_came_to_nothing_costs_nobodys_turn(connection, backlog, submit):
    submit(*["heavy"] * 5)
    assert claim(backlog, limit=1)
    (other,) = submit("other")
    for _ in range(5):
        assert claim(backlog, limit=1, lease="somebody else's") == []
    assert claim(backlog, limit=1) == [other]


def test_nothing_is_claimed_by_a_worker_that_lost_its_lease(connection, backlog, submit):
    ids = submit("a")
    assert claim(backlog, lease="somebody else's") == []
    assert (waiting(connection), claimed(connection)) == (ids, [])


def test_a_job_that_was_canceled_since_it_was_seen_is_not_claimed(connection, backlog, submit):
    a, b = submit("a", "b")
    assert claim(backlog, busy=["a", "b"]) == []
    connection.lrem("rq:queue:generate", 1, a)
    assert claim(backlog) == [b]


def test_a_job_nobody_can_read_is_claimed_so_that_it_can_be_refused(connection, backlog, submit):
    (good,) = submit("a")
    connection.rpush("rq:queue:generate", "no-hash")
    connection.hset("rq:job:junk", mapping={"data": b"\x80junk", FIELD_ATTEMPTS: "many"})
    connection.set("rq:job:text", "not a hash")
    connection.rpush("rq:queue:generate", "junk", "text")
    assert claim(backlog) == [good, "no-hash", "junk", "text"]


def test_a_job_lost_once_is_claimed_by_itself_only_and_others_but_its_agents_pass_it_by(connection, backlog, submit):
    first, suspect, same_agent, behind = submit("a", "b", "b", "c")
    connection.hset(f"rq:job:{suspect}", FIELD_ATTEMPTS, 1)
    assert claim(backlog) == [first, behind]
    assert backlog.has_suspect
    assert backlog.claim_suspect(LEASE) == [suspect]
    assert not backlog.has_suspect
    assert claim(backlog) == [same_agent]


def test_a_suspect_that_somebody_took_away_is_not_claimed(connection, backlog, submit):
    gone, suspect = submit("a", "b")
    for job_id in (gone, suspect):
        connection.hset(f"rq:job:{job_id}", FIELD_ATTEMPTS, 1)
    assert claim(backlog) == []
    connection.lrem("rq:queue:generate", 1, gone)
    assert backlog.claim_suspect("somebody else's") == []
    assert backlog.claim_suspect(LEASE) == [suspect]
    assert backlog.claim_suspect(LEASE) == []


def test_the_agents_of_waiting_jobs_are_known_without_asking(connection, backlog, submit):
    assert backlog.agents() == frozenset()
    _, _, _, c1 = submit("a", "a", "b", "c")
    connection.rpush("rq:queue:generate", "no-hash")
    claim(backlog, busy=["b"], limit=1)
    claim(backlog, busy=["a", "b", "c"])
    before = backlog.agents()
    assert before == {"a", "b", "c"}
    claim(backlog, busy=["a", "b", "c"])
    assert backlog.agents() is before
    assert claim(backlog, busy=["a", "b"]) == [c1]
    assert backlog.agents() == {"a", "b"}


def test_the_agents_of_an_emptied_queue_are_forgotten(connection, backlog, submit):
    submit("a", "b")
    claim(backlog, busy=["a", "b"])
    connection.delete("rq:queue:generate")
    assert claim(backlog) == []
    assert backlog.agents() == frozenset()


def test_what_comes_in_at_either_end_after_the_first_look_is_claimed_in_its_place(connection, backlog, submit):
    a, b = submit("a", "b")
    assert claim(backlog, busy=["a", "b"]) == []
    behind, before = [], []
    for n in range(3):
        behind += submit(f"behind {n}")
        before = submit(f"before {n}") + before
        connection.lmove("rq:queue:generate", "rq:queue:generate", "RIGHT", "LEFT")
        assert (
            claim(backlog, busy=["a", "b", *(f"{side} {m}" for side in ("before", "behind") for m in range(3))]) == []
        )
    assert claim(backlog) == [*before, a, b, *behind]


def test_a_job_that_moved_to_the_end_has_lost_its_place(connection, backlog, submit):
    a, b = submit("a", "b")
    assert claim(backlog, busy=["a", "b"]) == []
    connection.lmove("rq:queue:generate", "rq:queue:generate", "LEFT", "RIGHT")
    assert claim(backlog) == [b, a]


@pytest.mark.parametrize("page", [1000, 3])
@pytest.mark.parametrize("count", [1, 3, 5, 9])
@pytest.mark.parametrize("side", ["LPOP", "RPOP"])
def test_jobs_that_somebody_else_took_away_are_not_claimed(connection, backlog, submit, monkeypatch, side, count, page):
    monkeypatch.setattr("stoker_worker.rq_worker.backlog._PAGE", page)
    ids = submit(*(f"a{n}" for n in range(10)))
    for _ in range(4):
        assert claim(backlog, busy=[f"a{n}" for n in range(10)]) == []
    connection.execute_command(side, "rq:queue:generate", count)
    (new,) = submit("new")
    left = ids[count:] if side == "LPOP" else ids[:-count]
    claimed = []
    while found := claim_soon(backlog, limit=2):
        claimed += found
    assert claimed == [*left, new]


def test_a_queue_that_was_emptied_and_filled_again_is_read_anew(connection, backlog, submit):
    submit(*(f"a{n}" for n in range(50)))
    assert claim(backlog, limit=1)
    connection.delete("rq:queue:generate")
    ids = submit("x", "y")
    assert claim_soon(backlog) == ids


def test_many_jobs_canceled_in_the_middle_do_not_hold_up_what_is_left(connection, backlog, submit):
    ids = submit(*(f"a{n}" for n in range(300)))
    assert claim(backlog, busy=[f"a{n}" for n in range(300)]) == []
    for job_id in ids[1:-1]:
        connection.lrem("rq:queue:generate", 1, job_id)
    assert claim(backlog) == [ids[0], ids[-1]]


def test_a_job_that_became_a_suspect_since_it_was_read_is_read_again(connection, backlog, submit):
    first, second = submit("a", "b")
    assert claim(backlog, limit=1) == [first]
    connection.hset(f"rq:job:{first}", FIELD_ATTEMPTS, 1)
    connection.lrem("rq:queue:generate:intermediate", 1, first)
    connection.lpush("rq:queue:generate", first)
    assert claim(backlog) == [second]
    assert backlog.claim_suspect(LEASE) == [first]


def test_a_job_of_another_producer_is_known_by_its_request(connection, backlog, submit):
    request = {"agent_id": "plain", "prompt": "x"}
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    plain = [queue.enqueue(TASK_PATH, request=request).id for _ in range(2)]
    (ours,) = submit("a")
    connection.hset("rq:job:four-commands", "data", '["x", null, [], {"request": {"agent_id": "four"}}]')
    connection.rpush("rq:queue:generate", "four-commands")
    assert claim(backlog) == [plain[0], ours, "four-commands"]
    assert backlog.agents() == {"plain"}


def test_an_id_that_comes_again_while_it_waits_is_what_its_hash_says_then(connection, producer, backlog):
    reads = {"agent_id": "a", "prompt": "x", "cache": "read"}
    again, beside = (producer.submit(**reads).job_id for _ in range(2))
    assert claim(backlog, busy=["a"]) == []
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    queue.enqueue(TASK_PATH, request={"agent_id": "a", "prompt": "y"}, job_id=again)
    assert claim(backlog) == [beside]
    assert claim(backlog) == [again]


def test_an_id_that_came_again_for_another_agent_waits_for_those_before_it(connection, backlog, submit):
    (again,) = submit("a")
    (before,) = submit("b")
    assert claim(backlog, busy=["a", "b"]) == []
    connection.lrem("rq:queue:generate", 0, again)
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    queue.enqueue(TASK_PATH, request={"agent_id": "b", "prompt": "y"}, job_id=again)
    assert claim(backlog) == [before]
    assert claim(backlog) == [again]


def test_so_does_one_that_was_gone_in_between(connection, backlog, submit):
    (again,) = submit("a")
    (before,) = submit("b")
    assert claim(backlog, busy=["a", "b"]) == []
    connection.delete("rq:queue:generate")
    assert claim(backlog) == []
    connection.rpush("rq:queue:generate", before)
    queue = Queue("generate", connection=connection, serializer=JSONSerializer)
    queue.enqueue(TASK_PATH, request={"agent_id": "b", "prompt": "y"}, job_id=again)
    assert claim_soon(backlog) == [before]
    assert claim(backlog) == [again]


def test_a_note_of_an_id_that_was_enqueued_anew_for_another_agent_counts_for_nothing(connection, backlog, submit):
    (job_id,) = submit("a")
    connection.lrem("rq:queue:generate", 0, job_id)
    plain = Queue("generate", connection=connection, serializer=JSONSerializer)
    plain.enqueue_call(TASK_PATH, kwargs={"request": {"agent_id": "b", "prompt": "x"}}, job_id=job_id)
    assert connection.hget(f"rq:job:{job_id}", "stoker_agent").endswith(b" a")
    backlog.read_ahead(0, Busy())
    assert backlog.agents() == {"b"}


def test_requests_are_not_read_where_the_producer_noted_the_agent(connection, backlog, submit):
    a, b = submit("a", "\u00fc \U0001f642/..")
    for job_id in (a, b):
        connection.hset(f"rq:job:{job_id}", "data", b"nobody can read this")
    claim(backlog, limit=0)
    assert backlog.agents() == {"a", "\u00fc \U0001f642/.."}


def test_no_more_than_one_large_request_is_read_at_once(connection, backlog, monkeypatch):
    monkeypatch.setattr("stoker_worker.rq_worker.backlog._MAX_DATA_BYTES", 1000)
    names = [f"large {n}" for n in range(6)] + [f"small {n}" for n in range(40)]
    for name in names:
        request = {"agent_id": name, "prompt": "x" * (900 if "large" in name else 9)}
        connection.hset(f"rq:job:{name}", "data", json.dumps(["x", None, [], {"request": request}]))
        connection.rpush("rq:queue:generate", name)
    replies, real = [], backlog._read_at
    monkeypatch.setattr(backlog, "_read_at", lambda **words: replies.append(real(**words)) or replies[-1])
    while len(backlog.agents()) < len(names):
        claim(backlog, limit=0)
    assert all(len(found) == 1 or sum(map(len, found)) <= 1000 for found, _, _ in replies)
    assert len(replies) < 15
    assert claim(backlog, limit=50) == names


def test_whether_all_was_read_is_known(connection, producer, backlog, submit, monkeypatch):
    monkeypatch.setattr("stoker_worker.rq_worker.backlog._LEARN_S", 0)
    assert not backlog.has_unread
    producer.submit_many([{"agent_id": "heavy", "prompt": "x"}] * 600)
    claim(backlog, limit=0)
    assert backlog.has_unread
    looks = 0
    while backlog.has_unread:
        claim(backlog, limit=0)
        looks += 1
    assert 2 < looks < 20
    submit("other")
    claim(backlog, limit=0)
    assert backlog.agents() == {"heavy", "other"}


@pytest.mark.parametrize("nth", [0, 30, 59])
def test_a_job_is_found_from_either_end_of_a_long_queue(connection, backlog, submit, nth):
    ids = submit(*(f"a{n}" for n in range(60)))
    others = [f"a{n}" for n in range(60) if n != nth]
    assert claim(backlog, busy=others) == [ids[nth]]
    assert waiting(connection) == ids[:nth] + ids[nth + 1 :]
