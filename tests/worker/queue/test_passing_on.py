"""Workers with other models or other request versions on one queue: each claims what it can serve, and nothing is
refused that another one could serve."""

import random
import time
from collections import defaultdict
from typing import Any

import pytest
from tests.worker.queue.ends import fail, finish
from tests.worker.queue.members import claim, claim_in_turn, claim_within, die, home_of, ids

from stoker_shared.needs import READS
from stoker_shared.wire import AGENT_TASK_PATH, FIELD_ATTEMPTS, FIELD_NEEDS, TASK_PATH
from stoker_worker.ports import Serving

pytestmark = pytest.mark.server


def run(jobs):
    for job in jobs:
        finish(job, {})


def unserved(producer, *workers):
    for worker in workers:
        worker._passing_on._look.make_due()
        claim(worker)
        assert worker.beat()
    return [(jobs.jobs, jobs.model, jobs.version, jobs.only_at) for jobs in producer.overview().unserved]


def test_each_worker_claims_the_jobs_of_its_model_and_those_of_any(serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    (small,), (large, of_agent) = submit(None, model="small"), submit(None, "x", model="large")
    (any_model,) = submit(None)
    assert ids(claim(a, limit=9)) == [small, any_model]
    assert ids(claim(b, limit=9)) == [large, of_agent]
    assert claim(a) == []


def test_jobs_of_other_producers_are_left_by_what_their_requests_have(serve, plain):
    a, b = serve("a", "small"), serve("b", "large")
    job = plain.enqueue(TASK_PATH, request={"prompt": "x", "model": "large"})
    assert claim(a) == []
    assert ids(claim(b)) == [job.id]


def test_a_job_whose_needs_were_not_noted_goes_back_to_the_queue_and_on_to_another(connection, serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    (job_id,) = submit("x", model="large")
    connection.hdel(f"rq:job:{job_id}", FIELD_NEEDS)  # as earlier producers leave it out
    assert claim(a) == []
    assert claim_in_turn(b, a) == [job_id]
    assert b.in_flight()[0].attempt == 1


def test_newer_requests_wait_for_the_worker_that_reads_them(monkeypatch, serve, plain):
    newer = READS["generate"] + 1
    a = serve("a", "m")
    monkeypatch.setitem(READS, "generate", newer)
    monkeypatch.setattr("stoker_shared.request.REQUEST_VERSION", newer)
    b = serve("b", "m")
    job = plain.enqueue(TASK_PATH, request={"v": newer, "prompt": "x"})
    assert claim(a) == []
    assert ids(claim(b)) == [job.id]


def test_an_agent_goes_where_its_next_job_is_served_and_its_jobs_stay_in_order(connection, serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    (first,), (second,), (third,) = (submit("x", model=model) for model in ("small", "large", "small"))
    assert ids(claim(a)) == [first]
    assert claim(b) == []
    run(a.in_flight())
    assert home_of(connection, "x") == "a ="
    assert claim_in_turn(b, a) == [second]
    assert claim(a) == []
    run(b.in_flight())
    assert claim_in_turn(a, b) == [third]
    assert home_of(connection, "x") == "a b"


def test_an_agent_that_is_in_flight_stays_until_its_job_has_ended(serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    submit("x", model="small", cache="read")
    (second,) = submit("x", model="large", cache="read")
    assert len(claim(a)) == 1
    for _ in range(3):
        a._passing_on._look.make_due()
        assert claim(a) == claim(b) == []
    run(a.in_flight())
    assert claim_in_turn(b, a) == [second]


def test_a_job_that_continues_what_only_this_worker_has_fails_there_at_last(producer, serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    submit("x", model="small")
    run(claim(a))
    (second,) = submit("x", context="append", model="large")
    assert claim(b) == claim(a) == []
    assert unserved(producer, a, b) == [(1, "large", 0, "a")]
    a._passing_on._left["generate"]._wait_s = 0
    assert claim_in_turn(a, b) == [second]


def test_a_job_that_continues_an_agent_without_memory_goes_to_whoever_serves_it(serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    (first,) = submit("x", model="small")
    [job] = claim(a)
    assert job.job_id == first
    fail(job, ValueError("no turn"))
    (second,) = submit("x", context="append", model="large")
    assert claim_in_turn(b, a) == [second]


def test_a_worker_that_loads_its_model_is_waited_for_with_jobs_of_that_model_alone(serve, join, submit):
    a = serve("a", "small")
    join("b", loads="large")
    (large,), (wrong,) = submit(None, model="large"), submit(None, model="wrong")
    a._members.look()
    assert ids(claim(a)) == [wrong]
    b = serve("b2", "large")
    assert ids(claim(b)) == [large]


@pytest.mark.parametrize("end", ["it leaves", "it is killed", "it leaves before the other comes"])
def test_a_worker_that_never_loaded_its_model_is_nobody_to_wait_for(serve, join, submit, end):
    late = end == "it leaves before the other comes"
    a: Any = None if late else serve("a", "small")
    b = join("b", loads="large")
    if not late:
        a._members.look()
    if end == "it is killed":
        die(b)
        a._members._ttl_s = 0
        claim(a, limit=0)
        a.recover()
    else:
        b.sign_off()
    a = a or serve("a", "small")
    a._members.look()
    jobs = [*submit(None, model="large"), *submit(None, model="wrong")]
    assert ids(claim(a)) == jobs


def test_a_worker_that_had_loaded_its_model_is_waited_for_when_it_has_left(serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    b.sign_off()
    submit(None, model="large")
    assert claim(a) == []


def test_a_worker_alone_claims_what_it_cannot_serve_so_that_it_fails_at_once(serve, submit):
    a = serve("a", "small")
    (job_id,) = submit("x", model="large")
    assert ids(claim(a)) == [job_id]


def test_what_nobody_serves_is_shown_and_waits_for_a_worker_that_does(producer, serve, submit):
    a, b = serve("a", "small"), serve("b", "small")
    agents = submit("x", "y", "x", model="large")
    assert claim(a) == claim(b) == []
    assert unserved(producer, a, b) == [(3, "large", 0, None)]
    c = serve("c", "large")
    assert ids(claim_within(c)) == agents[:2]
    assert unserved(producer, a, b, c) == []


def test_what_nobody_serves_is_claimed_after_a_while(serve, submit):
    a, b = serve("a", "small", home_wait_s=0.5), serve("b", "small", home_wait_s=600)
    (job_id,) = submit("x", model="large")
    assert claim_in_turn(a, b) == [job_id]


@pytest.mark.parametrize("newcomer", ["stays", "starts"])
def test_a_worker_whose_company_left_a_moment_ago_waits_for_it(serve, submit, newcomer):
    a, b = serve("a", "small"), serve("b", "large")
    b.leave()
    b.sign_off()
    if newcomer == "starts":
        a.sign_off()
        a = serve("c", "small")
    (job_id,) = submit("x", model="large")
    assert claim(a) == []
    assert ids(claim_within(serve("b", "large"))) == [job_id]


def test_a_worker_that_loads_its_model_may_be_the_one(join, producer, serve, submit):
    a, b = serve("a", "small", home_wait_s=0), join("b")
    a._members.look()
    (job_id,) = submit("x", model="large")
    assert claim(a) == []
    assert unserved(producer, a) == []
    b.announce(Serving("medium", 4096, "batched", 8, "given"))
    claim(b, limit=0)
    a._members.look()
    assert ids(claim_within(a)) == [job_id]


def test_a_draining_worker_is_not_waited_for_as_if_it_claimed(producer, serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    b.leave()
    a._members.look()
    submit("x", model="large")
    assert claim(a) == []
    assert unserved(producer, a) == [(1, "large", 0, None)]


def test_for_a_quarantined_job_the_first_that_serves_it_makes_room(connection, monkeypatch, serve, submit):
    monkeypatch.setattr("stoker_worker.queue.claim_order._QUARANTINED_WAITS_S", 0.2)
    a, b = serve("a", "small"), serve("b", "large")
    submit(None)
    assert len(claim(b)) == 1
    (lost,) = submit("x", model="large")
    connection.hset(f"rq:job:{lost}", FIELD_ATTEMPTS, 1)
    assert claim(b) == []
    time.sleep(0.3)
    (other,) = submit(None)
    assert claim(b) == []
    assert ids(claim(a)) == [other]
    run(b.in_flight())
    assert claim_in_turn(b, a) == [lost]


def test_jobs_about_an_agent_need_no_model(serve, submit, plain):
    a, b = serve("a", "small"), serve("b", "large")
    submit("x", model="small")
    run(claim(a))
    job = plain.enqueue(AGENT_TASK_PATH, request={"agent_id": "x", "action": "info"})
    assert claim(b) == []
    assert ids(claim_within(a)) == [job.id]


def test_what_the_others_serve_is_known_again_after_the_server_lost_it(connection, producer, serve, submit):
    a, b = serve("a", "small"), serve("b", "large")
    connection.delete("stoker:members")
    for worker in (a, b):
        assert worker.beat()
    a._members.look()
    submit("x", model="huge")
    assert claim(a) == []
    assert unserved(producer, a) == [(1, "huge", 0, None)]


def test_a_name_that_is_no_text_for_everybody_can_be_shown(producer, serve, plain):
    a, b = serve("a", "small"), serve("b", "small")
    plain.enqueue(TASK_PATH, request={"prompt": "x", "model": "\ud800" + 999 * "m"})
    [(n_jobs, model, *_)] = unserved(producer, a, b)
    assert (n_jobs, model) == (1, "?" + 199 * "m")


def test_a_worker_that_came_a_moment_ago_is_seen_before_its_jobs_are_refused(join, submit):
    a, b = (join(name, home_wait_s=600) for name in ("a", "b"))
    a.announce(Serving("small", 4096, "batched", 8, "given"))
    b.sign_off()
    claim(a, limit=0)
    a._members._company_at.clear()  # b left long ago
    b = join("b")
    b.announce(Serving("large", 4096, "batched", 8, "given"))
    (job_id,) = submit("x", model="large")
    assert claim(a) == []
    assert ids(claim(b)) == [job_id]


def test_with_a_shared_store_a_job_that_continues_an_agent_goes_where_it_is_served(tmp_path, serve, submit):
    shared = {"shared_store": f"file://{tmp_path}", "shared": "5a"}
    a, b = serve("a", "small", **shared), serve("b", "large", **shared)
    submit("x", model="small")
    run(claim(a))
    (second,) = submit("x", context="append", model="large")
    assert claim_in_turn(b, a) == [second]


def test_an_agent_of_which_the_shared_store_lacks_something_stays_and_its_job_is_shown(
    tmp_path, producer, serve, submit
):
    shared = {"shared_store": f"file://{tmp_path}"}
    a, b = serve("a", "small", **shared), serve("b", "large", **shared)
    submit("x", model="small")
    run(claim(a))
    a.weigh_moves(lambda agent_id: True, lambda agent_id: None)
    submit("x", context="append", model="large")
    assert claim(b) == claim(a) == []
    assert unserved(producer, a, b) == [(1, "large", 0, "a")]
    assert claim(b) == []


def test_whatever_workers_come_and_go_each_job_runs_where_it_is_served_and_in_order(monkeypatch, serve, submit):
    monkeypatch.setattr("stoker_worker.queue.members._LOOK_S", 0.01)
    monkeypatch.setattr("stoker_worker.queue.moving._LOOK_S", 0.01)
    monkeypatch.setattr("stoker_worker.queue.passing_on._LOOK_S", 0.01)
    chance = random.Random(1)
    models = {"a": "small", "b": "large", "c": "small"}
    workers = {name: serve(name, model) for name, model in models.items()}
    names = {}
    waiting = defaultdict(list)
    end = time.monotonic() + 120
    while any(waiting.values()) or len(names) < 80:
        assert time.monotonic() < end, f"these wait for ever: {waiting}"
        if len(names) < 80:
            agent, model = chance.choice(["x", "y", "z", None]), chance.choice(["small", "large", None])
            (job_id,) = submit(agent, model=model)
            names[job_id] = model
            waiting[agent].append(job_id)
        name = chance.choice(list(models))
        if chance.random() < 0.05 and not workers[name].in_flight():
            workers[name].leave()
            workers[name].sign_off()
            workers[name] = serve(name, models[name])
        for job in claim(workers[name], limit=2):
            assert names[job.job_id] in (None, models[name])
            if job.request.agent_id is not None:
                assert waiting[job.request.agent_id][0] == job.job_id
            waiting[job.request.agent_id].remove(job.job_id)
        run(job for job in workers[name].in_flight() if chance.random() < 0.5)
    for worker in workers.values():
        run(worker.in_flight())
