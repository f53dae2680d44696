"""Several workers with a shared store: no job waits for one machine, and no agent leaves one that alone has it all."""

import time

import pytest
from tests.worker.queue.ends import fail, finish, give_back
from tests.worker.queue.members import claim, claim_within, home_of, ids

from stoker_shared.wire import AGENT_TASK_PATH, HOMES_KEY
from stoker_worker.ports import AgentHome, Busy

pytestmark = pytest.mark.server


@pytest.fixture
def share(join):
    """Joins the queue with a shared store, which the queue only has to know of."""
    return lambda name, **settings: join(name, shared="b1", home_wait_s=600, shared_store="file:///shared", **settings)


def turn(version, *, saved=True):
    return {"cache": {"agent_version": version, "saved": saved}}


def test_a_job_that_continues_what_is_stored_runs_elsewhere_at_once_when_its_home_has_left(connection, share, submit):
    a, b = share("a"), share("b")
    submit("x", context="append")
    [job] = claim(a)
    finish(job, turn(1))
    assert home_of(connection, "x") == "a = 1"
    (second,) = submit("x", context="append")
    assert claim(b) == []
    a.sign_off()
    [job] = claim_within(b)
    assert (job.job_id, job.former_home) == (second, "a")
    assert b.home_of("x") == AgentHome("a", 1, "a")
    assert home_of(connection, "x") == "b a 1 a"
    finish(job, turn(2))
    assert home_of(connection, "x") == "b = 2"


def test_a_worker_knows_how_far_the_jobs_of_an_agent_have_come_and_whether_it_was_elsewhere(connection, share, submit):
    a = share("a")
    submit("x")
    [first] = claim(a)
    assert a.home_of("x") == AgentHome("-", 0, "-")  # perhaps Redis has lost its data
    give_back([first], counts_as_attempt=False)
    [first] = claim_within(a)
    assert a.home_of("x") == AgentHome("-", 0, "-")
    finish(first, turn(1))
    submit("x")
    [second] = claim(a)
    assert a.home_of("x") == AgentHome(None, 1, "a")
    fail(second, ValueError("x"), may_retry=False)
    assert home_of(connection, "x") == "a = 1"
    assert a.home_of("never claimed") is None


def test_a_forgotten_agents_number_stays_used(connection, plain, share, submit):
    a, b = share("a"), share("b")
    submit("x")
    finish(claim(a)[0], turn(1))
    plain.enqueue(AGENT_TASK_PATH, request={"agent_id": "x", "action": "forget"})
    finish(claim(a)[0], {"version": 1, "existed": True})
    assert home_of(connection, "x") == "a = 2"
    plain.enqueue(AGENT_TASK_PATH, request={"agent_id": "never there", "action": "forget"})
    finish(claim(b)[0], {"version": 0, "existed": False})
    assert connection.hkeys(HOMES_KEY.format(queue="generate")) == [b"x"]


def test_an_agent_of_a_home_that_is_gone_is_no_obstacle_for_a_fork_but_the_store_is_asked(
    connection, plain, share, submit
):
    a, b = share("a"), share("b")
    submit("x", "y")
    finish(claim(a, limit=1)[0], turn(1))
    finish(claim(b)[0], turn(4))
    b.sign_off()
    plain.enqueue(AGENT_TASK_PATH, request={"agent_id": "x", "action": "fork", "target": "y"})
    [job] = claim_within(a)
    assert a.home_of("y") == AgentHome("-", 0, "-")
    assert home_of(connection, "y") == "a b 4 -"
    fail(job, ValueError("y exists"), may_retry=False)
    assert home_of(connection, "y") == "a b 4 -"


def move(a, b, connection):
    """Until `b` has claimed a job of `a`'s agent, which drains."""
    end = time.monotonic() + 20
    while not (found := claim(b)):
        assert time.monotonic() < end, home_of(connection, "x")
        a.leave()
        time.sleep(0.02)
    return found


def test_a_worker_that_drains_keeps_an_agent_until_it_is_written_through(connection, share, submit):
    a, b = share("a"), share("b")
    only_here = {"x"}
    a.weigh_moves(only_here.__contains__, lambda agent_id: 0.6)
    submit("x", "y", context="append")
    for job in claim(a):
        finish(job, turn(1))
    x, y = submit("x", "y", context="append")
    assert ids(move(a, b, connection)) == [y]
    assert home_of(connection, "x") == "a = 1"
    only_here.clear()
    assert ids(move(a, b, connection)) == [x]
    assert b.home_of("x") == AgentHome("a", 1, "a")


def test_a_full_worker_gives_up_an_agent_that_waits_to_go_on_unless_it_is_only_there(share, submit):
    a, b = share("a"), share("b")
    only_here, weighed = {"x"}, []

    def is_only_here(agent_id):
        weighed.append(agent_id)
        return agent_id in only_here

    a.weigh_moves(is_only_here, lambda agent_id: 0.6)
    submit("x", "y", context="append")
    for job in claim(a):
        finish(job, turn(1))
    busy, moves = submit("y", "x", context="append")
    assert ids(claim(a, limit=1)) == [busy]  # and it goes on for long
    end = time.monotonic() + 20
    while len(weighed) < 3:
        assert time.monotonic() < end
        a.claim(0, Busy(writing=frozenset({"y"})))
        assert claim(b) == []
        time.sleep(0.02)
    only_here.clear()
    while not (found := claim(b)):
        assert time.monotonic() < end
        a.claim(0, Busy(writing=frozenset({"y"})))
        time.sleep(0.02)
    assert ids(found) == [moves]


def test_without_a_shared_store_nothing_of_it_is_written_or_told(connection, join, submit):
    a = join("a")
    a.weigh_moves(lambda agent_id: True, lambda agent_id: None)
    submit("x")
    [job] = claim(a)
    assert a.home_of("x") is None
    finish(job, turn(1))
    assert home_of(connection, "x") == "a ="


def n_commands(connection, act):
    connection.config_resetstat()
    act()
    return sum(found["calls"] for name, found in connection.info("commandstats").items() if "config" not in name)


def test_a_turn_costs_one_command_more_than_without_a_shared_store(connection, join, share, submit):
    counts = []
    for worker in (join("a"), share("b")):
        submit(worker._lease.member)
        finish(claim(worker)[0], turn(1))
        submit(worker._lease.member)
        [job] = claim(worker)
        counts.append(n_commands(connection, lambda job=job: finish(job, turn(2))))
        worker.sign_off()
    assert counts[1] == counts[0] + 1


def test_while_the_shared_store_is_away_a_job_waits_for_the_worker_that_has_the_memory(connection, share, submit):
    a, b = share("a"), share("b")
    is_away = [True]
    b.wait_while(lambda: is_away[0])
    submit("x", context="append")
    finish(claim(a)[0], turn(1))
    (second,) = submit("x", context="append")
    assert claim(b) == []
    a.sign_off()
    time.sleep(1.2)  # longer than b waits between two looks
    assert claim(b) == []
    assert home_of(connection, "x") == "a = 1"
    is_away[0] = False
    assert ids(claim_within(b)) == [second]
    assert b.home_of("x") == AgentHome("a", 1, "a")


def test_an_agent_counts_as_moved_until_a_job_has_finished_also_for_a_worker_that_is_started_anew(
    connection, share, submit
):
    a, b = share("a"), share("b")
    submit("x")
    finish(claim(a)[0], turn(1))
    a.sign_off()
    submit("x")
    give_back(claim_within(b), counts_as_attempt=False)
    b.sign_off()
    again = share("b")
    [job] = claim_within(again)
    assert again.home_of("x") == AgentHome("a", 1, "a")
    fail(job, ValueError("x"), may_retry=False)
    again._lease.release()  # as if it had been killed
    killed = share("b")
    submit("x")
    [job] = claim_within(killed)
    assert killed.home_of("x") == AgentHome("a", 1, "a")
    finish(job, turn(2))
    assert home_of(connection, "x") == "b = 2"
