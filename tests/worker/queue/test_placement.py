"""Which worker an agent's next job goes to: nobody works on an agent beside another one, and the worker that has an
agent's cache is left its jobs for a while."""

import pytest
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.worker.queue.ends import fail, finish, give_back
from tests.worker.queue.looking import is_ours
from tests.worker.queue.members import claim, claim_within, die, ids, impatient, last_of, recovered, run, turn

from stoker_shared.wire import AGENT_TASK_PATH, FIELD_AGENT, FIELD_ATTEMPTS, FIELD_SAVING, HELD_KEY, LAST_KEY, TASK_PATH
from stoker_worker.ports import Busy, LastVersion, Serving

pytestmark = pytest.mark.server

HELD, LAST = HELD_KEY.format(queue="generate"), LAST_KEY.format(queue="generate")


@pytest.fixture
def timed(join, clock):
    """Joins, is ready, lets all the others see it, and has patience by this clock."""
    workers = []

    def join_timed(name, **settings):
        queue = join(name, **{"patience_s": 10, **settings})
        queue.announce(Serving("m", 4096, "batched", 8, "given"))
        workers.append(queue)
        claim(queue, limit=0)
        for other in workers:
            other._members.look()
        for claimer in queue._claim_order.claimers.values():
            claimer._clock = clock
        return queue

    return join_timed


def look(queue, limit=16):
    """As much later as a fetcher looks again: at the other workers, and at what is left to them."""
    queue._members.look()
    queue._claim_order._look.make_due()
    queue.claim(0, Busy())
    return claim(queue, limit)


def one_turn(queue, submit, agent="x", version=1):
    submit(agent)
    run(claim_within(queue), version)


# --- held ---


def test_an_agent_that_another_worker_works_on_waits_and_its_jobs_stay_in_order(join, submit):
    a, b = join("a"), join("b")
    first, other, second = submit("x", "y", "x")
    assert ids(claim(a, limit=1)) == [first]
    assert ids(claim(b)) == [other]
    run(a.in_flight())
    assert ids(claim_within(b)) == [second]


def test_jobs_that_read_run_beside_one_another_and_one_that_writes_waits_for_them(join, submit):
    a, b = join("a"), join("b")
    one, two = submit("x", "x", cache="read")
    assert ids(claim(a, limit=1)) == [one]
    assert ids(claim(b)) == [two]
    (writes,) = submit("x")
    (behind,) = submit("x", cache="read")
    run(b.in_flight())
    assert claim(a) == []
    assert claim(b) == []
    run(a.in_flight())
    assert ids(claim_within(b)) == [writes]
    assert claim(a) == []
    run(b.in_flight())
    assert ids(claim_within(a)) == [behind]


@pytest.mark.parametrize("how", ["canceled", "failed", "deleted"])
def test_a_job_that_has_ended_in_any_way_holds_its_agent_no_more(connection, producer, join, submit, how):
    a, b = join("a"), join("b")
    first, second = submit("x", "x")
    [job] = claim(a)
    assert claim(b) == []
    if how == "canceled":
        producer.ticket(first).cancel()
    elif how == "deleted":
        Job.fetch(first, connection, JSONSerializer).delete()
    else:
        fail(job, ValueError("x"), may_retry=False)
    assert ids(claim_within(b)) == [second]


@pytest.mark.parametrize("status", ["queued", "scheduled", "deferred"])
def test_a_job_that_is_enqueued_again_while_it_runs_holds_its_agent_still(connection, join, submit, status):
    a, b = join("a"), join("b")
    first, second = submit("x", "x")
    [job] = claim(a)
    connection.hset(f"rq:job:{first}", "status", status)  # as an enqueue, or a save, of the same delivery does
    connection.rpush("rq:queue:generate", first)
    assert claim(b) == []
    run([job])
    assert ids(claim_within(b)) == [second]


@pytest.mark.parametrize(
    "entry",
    ["", "[", "7", "{}", '["w"]', '["w", 1, 2, 3]', '["w", "generate", "gone", "no-such-job"]', '["w", "generate"]'],
)
def test_whatever_is_in_the_entry_of_an_agent_nothing_is_held_for_ever(connection, join, submit, entry):
    """Redis may have lost its data, or be an old copy of itself."""
    b = join("b")
    connection.hset(HELD, "x", entry)
    connection.hset(LAST, "x", entry)
    (job_id,) = submit("x")
    assert ids(claim(b)) == [job_id]


def test_a_job_behind_one_that_was_noted_for_its_agent_by_mistake_takes_no_place_from_others(connection, join, submit):
    a = join("a")
    submit("y")
    running = claim(a)
    wrong, behind, other = submit("y", "x", "z")
    note = connection.hget(f"rq:job:{wrong}", FIELD_AGENT)
    assert note.endswith(b" y")
    connection.hset(f"rq:job:{wrong}", FIELD_AGENT, note[:-1] + b"x")
    assert claim(a, limit=1) == []  # it is claimed, and goes back to the front
    assert ids(claim(a, limit=1)) == [other]
    run(running)
    for job_id in (wrong, behind):
        found = claim_within(a)
        assert ids(found) == [job_id]
        run(found)


def test_after_a_flush_the_agents_next_job_goes_to_anybody(connection, join, submit):
    a, b = join("a"), join("b")
    submit("x")
    [lost] = claim(a)
    assert claim(b) == []
    connection.flushdb()  # a server of the test's own
    assert a.beat()
    assert b.beat()
    (job_id,) = submit("x")
    assert ids(claim_within(b)) == [job_id]
    assert not is_ours(lost)


def test_what_is_over_is_removed_and_what_is_in_flight_or_waits_stays(connection, join, submit, monkeypatch):
    monkeypatch.setattr("stoker_worker.placement.placement._MOST_LAST", 3)
    a = join("a")
    submit("finished", "failed", "back", "running", "canceled")
    jobs = {job.request.agent_id: job for job in claim(a)}
    finish(jobs["finished"], turn(1))
    fail(jobs["failed"], ValueError("x"), may_retry=False)
    give_back([jobs["back"]], counts_as_attempt=False)
    connection.hset(f"rq:job:{jobs['canceled'].job_id}", "status", "canceled")
    assert set(connection.hkeys(HELD)) == {b"back", b"running", b"canceled"}
    connection.hset(LAST, mapping={f"agent {n}": "stoker-b-00000000 1" for n in range(5010)})
    a._housekeeping._clean.make_due()
    a.tidy()
    assert set(connection.hkeys(HELD)) == {b"back", b"running"}
    assert connection.hlen(LAST) == 11


def test_a_worker_without_a_shared_store_writes_neither_hash(connection, join, submit):
    a = join("a", shared="")
    one_turn(a, submit)
    submit("x")
    [job] = claim(a)
    assert job.last is None
    assert not connection.exists(HELD, LAST)


# --- the newest version ---


def test_a_job_knows_who_made_its_agents_newest_version(connection, join, submit):
    a, b = join("a"), join("b")
    submit("x")
    [first] = claim(a)
    assert (first.last, first.moved_from) == (None, None)
    finish(first, turn(7))
    assert last_of(connection, "x") == "a 7"
    submit("x")
    [second] = claim(a)
    assert (second.last, second.moved_from) == (LastVersion(7, "a", is_here=True), None)
    fail(second, ValueError("x"), may_retry=False)
    submit("x", cache="read")
    [reads] = claim(a)
    assert (reads.last, reads.moved_from) == (LastVersion(7, "a", is_here=False), None)
    finish(reads, {})
    submit("x")
    [third] = claim_within(b)
    assert (third.last, third.moved_from) == (LastVersion(7, "a", is_here=False), "a")
    finish(third, turn(8))
    assert last_of(connection, "x") == "b 8"


def test_a_worker_that_was_started_again_is_not_certain_of_anything(join, submit):
    a = join("a")
    one_turn(a, submit)
    a.sign_off()
    again = join("a")
    submit("x")
    [job] = claim(again)
    assert (job.last, job.moved_from) == (LastVersion(1, "a", is_here=False), None)


@pytest.mark.parametrize("result", [turn(9, saved=False), turn(3), turn(4), {}, {"cache": None}])
def test_a_job_that_makes_no_newer_version_changes_nothing(connection, join, submit, result):
    """An answer that is given a second time has an older number."""
    a, b = join("a"), join("b")
    one_turn(a, submit, version=4)
    submit("x")
    [job] = claim_within(b)
    finish(job, result)
    assert last_of(connection, "x") == "a 4"


def test_changes_of_an_agents_memory_are_versions_too(connection, plain, join, submit):
    a, b = join("a"), join("b")
    one_turn(a, submit, version=4)
    for action, target in (("fork", "y"), ("forget", None)):
        fields = {"agent_id": "x", "action": action} | ({"target": target} if target else {})
        plain.enqueue(AGENT_TASK_PATH, request=fields)
        [job] = claim_within(b)
        finish(job, {"version": 1 if target else 5})
    assert (last_of(connection, "x"), last_of(connection, "y")) == ("b 5", "b 1")
    assert connection.hgetall(HELD) == {}


# --- patience ---


def test_an_agent_is_left_to_the_worker_that_has_its_cache_until_patience_is_over(timed, submit, clock):
    a, b = timed("a"), timed("b")
    one_turn(a, submit)
    (second,) = submit("x")
    assert look(b) == []
    clock.now += 9.9
    assert look(b) == []
    (beside,) = submit("new")
    assert ids(look(b)) == [beside]
    clock.now += 0.2
    assert ids(look(b)) == [second]
    assert look(a) == []


def test_a_backlog_uses_up_nobodys_patience(timed, submit, clock):
    a, b = timed("a"), timed("b")
    one_turn(a, submit)
    (left,) = submit("x")
    for n in range(3):
        (own,) = submit(f"new {n}")
        assert ids(look(b, limit=1)) == [own]  # there is never a place that it could not fill
        clock.now += 10
    assert look(b, limit=1) == []
    clock.now += 10
    assert ids(look(b, limit=1)) == [left]


@pytest.mark.parametrize("how", ["leaves", "has left", "has died"])
def test_an_agent_moves_at_once_when_that_worker_is_gone_or_leaves(connection, timed, join, submit, how):
    a, b = timed("a"), timed("b")
    one_turn(a, submit)
    (second,) = submit("x")
    assert look(b) == []
    if how == "leaves":
        a.leave()
    elif how == "has died":
        die(a)
        b._members._ttl_s = 0.0  # it is found dead at once
    else:
        a.sign_off()
    assert ids(look(b)) == [second]


def test_an_agent_stays_with_a_worker_that_was_started_again(timed, submit, clock):
    """Its caches are on its disk. While it starts, others take what waits."""
    a, b = timed("a"), timed("b")
    one_turn(a, submit)
    a.sign_off()
    a = timed("a")
    (second,) = submit("x")
    assert look(b) == []
    clock.now += 5
    assert look(b) == []
    assert ids(look(a)) == [second]


def test_a_worker_that_does_not_serve_the_jobs_queue_is_not_waited_for(timed, producer, submit):
    a, b = timed("a", queues="generate,high"), timed("b", queues="generate,low")
    submit("x")
    run(claim(a), 1)
    low = producer.submit(agent_id="x", prompt="x", queue="low").job_id
    assert ids(claim(b)) == [low]


def test_a_job_whose_note_is_wrong_uses_up_the_patience_once(timed, producer, submit, connection, clock):
    """Else each of two workers waits anew when it has learned how the job is, and the other undoes that."""
    a, b, c = timed("a"), timed("b"), timed("c")
    submit("x")
    run(claim(a), 1)
    job_id = producer.submit(agent_id="x", prompt="x").job_id
    moment = connection.hget(f"rq:job:{job_id}", "created_at").decode()
    connection.hset(f"rq:job:{job_id}", "stoker_agent", f"{moment} read x")
    found = []
    for _ in range(12):
        for worker in (b, c):
            found += ids(look(worker))
            found += ids(look(worker))
            clock.now += 6
    assert found == [job_id]


def test_a_worker_that_still_loads_its_model_is_not_waited_for(timed, join, submit):
    a, b = join("a", loads="m"), timed("b", loads="m")
    one_turn(a, submit)
    (second,) = submit("x")
    assert ids(look(b)) == [second]


def test_a_backlog_does_not_use_up_the_patience(timed, submit, clock):
    a, b = timed("a"), timed("b")
    one_turn(a, submit)
    first, second = submit("x", "x")
    assert look(b) == []
    clock.now += 9
    assert ids(look(a)) == [first]
    assert look(b) == []
    run(a.in_flight(), 2)
    clock.now += 9
    assert look(b) == []
    clock.now += 2
    assert ids(look(b)) == [second]


def test_many_agents_of_another_worker_do_not_hold_up_a_job_behind_them(timed, submit, monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.claim._CLAIM_TRIES", 2)
    a, b = timed("a"), timed("b")
    agents = [f"agent {n}" for n in range(100)]
    submit(*agents)
    while len(a.in_flight()) < len(agents):
        claim(a, limit=100)
    run(a.in_flight(), 1)
    submit(*agents)
    behind, last = submit("new", "newer")
    for _ in range(100):
        if found := claim(b, limit=1):
            break
        assert b.has_unread()  # so that the fetcher does not rest
    assert ids(found) == [behind]
    assert ids(claim(b)) == [last]


def test_no_more_jobs_are_claimed_than_there_are_places_though_an_id_is_refused_meanwhile(connection, timed, submit):
    a, b = timed("a"), timed("b")
    submit("x", "y")
    run(claim(a), 1)
    submit("x")
    connection.rpush("rq:queue:generate", "no id of RQ's")
    _, first, *_ = submit("y", "new", "newer", "newest")
    assert ids(claim(b, limit=1)) == [first]


# --- what a worker may not claim ---


def test_while_the_shared_store_is_away_only_jobs_without_memory_are_claimed(connection, join, submit):
    a = join("a")
    lost, _, plain = submit("x", "y", None)
    connection.hset(f"rq:job:{lost}", FIELD_ATTEMPTS, 2)
    away = Busy(memory_is_away=True)
    [job] = a.claim(16, away)
    assert job.job_id == plain
    finish(job, {})
    assert a.claim(16, away) == []
    assert ids(a.claim(16, Busy())) == [lost]


def test_a_job_whose_turn_may_have_been_saved_says_so_to_the_next_worker(connection, plain, join):
    a, b = join("a"), impatient(join("b"))
    for job_id in ("saves", "computes"):
        plain.enqueue(TASK_PATH, request={"prompt": "x", "agent_id": job_id}, job_id=job_id)
    jobs = {job.job_id: job for job in claim(a)}
    assert not jobs["saves"].was_saving
    jobs["saves"].begin_save()
    die(a)
    assert recovered(b) == 2
    again = claim_within(b)
    found = {job.job_id: job.was_saving for job in again}
    run(again)
    assert found == {"saves": True, "computes": False}
    plain.enqueue(TASK_PATH, request={"prompt": "y", "agent_id": "saves"}, job_id="saves")
    connection.hset("rq:job:saves", FIELD_SAVING, "2020-01-01T00:00:00Z")  # of an earlier job with this id
    assert not claim_within(b)[0].was_saving
