"""Lines that are aside stay in order, are never chosen, and come back where they belong."""

from stoker_shared.needs import Needs
from stoker_worker.ports import UNUSED, Busy, MemoryUse
from stoker_worker.queue.fair_queue import FairQueue


def queue_of(*jobs):
    """From `agent`, or `agent+` for a job that continues what is stored; the ids are `agent` and its place."""
    queue, ids = FairQueue(), []
    for place, agent in enumerate(jobs):
        job_id = f"{agent}{place}"
        ids.append(job_id)
        queue.append([job_id])
        use = MemoryUse("write", agent.rstrip("+"), continues=agent.endswith("+"))
        queue.learn(job_id, use, quarantined=agent == "quarantined")
    return queue, ids


def chosen(queue, limit=9):
    return queue.choose(limit, Busy())


def test_a_line_that_is_aside_is_not_chosen_and_comes_back_in_order():
    queue, (a0, b1, a2, _) = queue_of("a", "b", "a", "b")
    queue.lines.put_aside("a", "mac2")
    assert chosen(queue) == [b1]
    assert queue.lines.agents() == {"b"}
    assert queue.next_agents(9) == ["b"]
    queue.lines.take_back(["a"])
    assert chosen(queue) == [a0, b1]
    queue.serve(a0)
    assert a2 in chosen(queue)


def test_jobs_that_come_or_go_while_their_line_is_aside_change_nothing_for_others():
    queue, (a0, b1) = queue_of("a", "b")
    queue.lines.put_aside("a", "mac2")
    queue.append(["late"])
    queue.learn("late", MemoryUse("write", "a"), quarantined=False)
    queue.discard(a0)
    assert chosen(queue) == [b1]
    queue.lines.take_back(["a"])
    assert chosen(queue) == [b1, "late"]


def test_an_agent_without_waiting_jobs_is_not_aside_any_more():
    queue, (a0,) = queue_of("a")
    queue.lines.put_aside("a", "mac2")
    queue.discard(a0)
    assert queue.lines.aside == {}
    queue.lines.put_aside("nobody", "mac2")
    queue.lines.prune_aside()
    assert queue.lines.aside == {}


def test_where_agents_are_at_home_stays_known_when_the_queue_is_read_anew():
    queue, (a0, b1) = queue_of("a", "b")
    queue.lines.put_aside("a", "mac2")
    known = queue.learned()
    queue.clear()
    queue.append([a0, b1])
    for job_id, job in known.items():
        queue.learn(job_id, job.use, quarantined=job.quarantined)
    assert chosen(queue) == [b1]


def test_a_quarantined_job_whose_line_is_aside_is_another_workers():
    queue, (lost,) = queue_of("quarantined")
    assert queue.next_quarantined() == lost
    queue.lines.put_aside("quarantined", "mac2")
    assert queue.next_quarantined() is None


def test_the_first_aside_are_the_oldest_that_any_worker_could_run():
    queue, _ = queue_of("a", "b+", "quarantined", "c", "d")
    for agent in ("d", "c", "b", "quarantined"):
        queue.lines.put_aside(agent, f"home of {agent}")
    assert queue.lines.first_aside(9) == [("c", "home of c"), ("d", "home of d")]
    assert queue.lines.first_aside(1) == [("c", "home of c")]
    assert [agent for agent, _ in queue.lines.first_aside(9, with_memory_from={"home of b"})] == ["b", "c", "d"]
    assert [agent for agent, _ in queue.lines.first_aside(9, with_memory_from={"home of c"})] == ["c", "d"]


def test_the_number_of_lines_ahead_counts_those_that_may_be_chosen():
    queue, _ = queue_of("a", "b", "c", "a")
    assert [queue.lines.n_ahead(agent) for agent in ("a", "b", "c", "nobody")] == [0, 1, 2, None]
    queue.lines.put_aside("a", "mac2")
    assert [queue.lines.n_ahead(agent) for agent in ("a", "c")] == [None, 1]


def leave_to_others(queue, *ids):
    """This worker cannot serve these jobs from now on, and can serve all others."""
    queue.lines.leaves = lambda job: job.job_id in ids
    queue.lines.reconsider()


def test_a_line_whose_next_job_is_left_to_others_is_not_chosen_until_that_job_has_gone():
    queue, (a0, b1, a2) = queue_of("a", "b", "a")
    leave_to_others(queue, a0)
    assert chosen(queue) == [b1]
    assert queue.next_agents(9) == ["b"]
    assert queue.lines.n_ahead("a") is None
    queue.discard(a0)
    assert chosen(queue) == [b1, a2]


def test_jobs_that_are_left_come_up_again_in_order_once_this_worker_can_serve_them():
    queue, (a0, b1, c2) = queue_of("a", "b", "c")
    leave_to_others(queue, a0, c2)
    queue.append(["late"])
    queue.learn("late", MemoryUse("write", "a"), quarantined=False)
    queue.serve(b1)
    leave_to_others(queue)
    assert chosen(queue) == [a0, c2]
    queue.serve(a0)
    assert "late" in chosen(queue)


def test_a_line_may_be_aside_and_left():
    queue, (a0, b1) = queue_of("a", "b")
    leave_to_others(queue, a0)
    queue.lines.put_aside("a", "mac2")
    assert queue.lines.first_aside(9) == []
    leave_to_others(queue)
    assert chosen(queue) == [b1]
    assert queue.lines.first_aside(9) == [("a", "mac2")]
    queue.lines.take_back(["a"])
    assert chosen(queue) == [a0, b1]


def test_a_reading_job_that_is_left_holds_back_those_behind_it():
    queue, ids = queue_of("a", "a", "a")
    queue.clear()
    queue.append(ids)
    for job_id in ids:
        queue.learn(job_id, MemoryUse("read", "a"), quarantined=False)
    leave_to_others(queue, ids[1])
    assert chosen(queue) == ids[:1]


def test_a_quarantined_job_that_is_left_is_another_workers():
    queue, (lost,) = queue_of("quarantined")
    leave_to_others(queue, lost)
    assert queue.next_quarantined() is None


def test_the_number_of_jobs_is_known_by_what_they_need():
    queue, ids = FairQueue(), ["one", "two", "three"]
    queue.append(ids)
    for job_id, model in zip(ids, ["m", "m", None], strict=True):
        queue.learn(job_id, UNUSED, Needs(model), quarantined=False)
    assert queue.lines.asked == {Needs("m"): 2}
    queue.discard("one")
    queue.serve("two")
    assert queue.lines.asked == {}
