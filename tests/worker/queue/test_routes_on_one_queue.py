"""Models that share a queue: a job whose answer was rejected goes on to a worker with the next model, and no other."""

import pytest
from tests.worker.queue.ends import finish
from tests.worker.queue.members import claim, claim_in_turn, claim_within, ids

from stoker_shared.result import Attempt
from stoker_shared.route import Step
from stoker_shared.wire import COUNTS_KEY, TAKEN_KEY, TASK_PATH

pytestmark = pytest.mark.server

ROUTE = [{"model": "small", "queue": "generate"}, {"model": "large", "queue": "generate"}]
ROUTED = {"check": {"contains": ["x"]}, "route": ROUTE, "task": "t"}


def go_on(job):
    job.escalate(Attempt(model="small", accepted=False), Step.model_validate(ROUTE[1]))
    job.release()


@pytest.mark.parametrize("is_noted", [True, False])
def test_each_worker_claims_the_job_when_its_model_is_next(serve, submit, plain, is_noted):
    small, large = serve("s", "small"), serve("l", "large")
    if is_noted:
        submit(None, **ROUTED)
    else:
        plain.enqueue(TASK_PATH, request={"v": 4, "prompt": "x", **ROUTED})
    assert claim(large) == []
    [job] = claim(small)
    go_on(job)
    assert claim(small) == []
    [later] = claim(large)
    assert (later.job_id, later.model, len(later.tried)) == (job.job_id, "large", 1)


def test_the_agents_next_job_waits_until_that_one_has_ended(serve, submit):
    small, large = serve("s", "small"), serve("l", "large")
    (first,), (second,) = submit("a", **ROUTED), submit("a", **ROUTED)
    assert claim(large) == []
    [job] = claim_within(small)
    go_on(job)
    assert claim_in_turn(large, small) == [first]
    assert claim(small) == []
    finish(large.in_flight()[0], {})
    assert claim_in_turn(small, large) == [second]


def test_a_job_that_reads_an_agents_memory_goes_to_the_next_model(serve, submit):
    small, large = serve("s", "small"), serve("l", "large")
    submit("a", cache="read", **ROUTED)
    [job] = claim_within(small)
    go_on(job)
    assert claim_in_turn(large, small) == [job.job_id]


def test_a_worker_that_missed_how_the_job_was_taken_does_not_keep_it_for_the_first_model(connection, serve, submit):
    small, large = serve("s", "small"), serve("l", "large")
    (job_id,) = submit(None, **ROUTED)
    assert claim(large) == []
    [job] = claim(small)
    go_on(job)
    taken = TAKEN_KEY.format(queue="generate")
    connection.rpush(taken, *(f"other-{n}" for n in range(2000)))
    connection.ltrim(taken, -2000, -1)
    connection.hincrby(COUNTS_KEY.format(queue="generate"), "taken", 2000)
    assert ids(claim(large)) == [job_id]
