"""Lines that are aside stay in order, are never chosen, and come back where they belong."""

from stoker_worker.ports import Busy, MemoryUse
from stoker_worker.queue.waiting import Aside, FairQueue

WHY = Aside("job", "stoker-mac2-00000000", 1.0)


def queue_of(*jobs):
    """The ids are each agent and its place."""
    queue, ids = FairQueue(), []
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
    for job_id, job in known.items():
        queue.learn(job_id, job.use, quarantined=job.quarantined)
    assert chosen(queue) == [b1]


def test_a_quarantined_job_whose_line_is_aside_is_another_workers():
    queue, (lost,) = queue_of("quarantined")
    assert queue.next_quarantined(Busy()) == lost
    queue.lines.put_aside("quarantined", WHY)
    assert queue.next_quarantined(Busy()) is None
