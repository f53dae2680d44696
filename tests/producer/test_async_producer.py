"""The producer for asyncio: the same methods, many tasks, few connections, and pauses in which other tasks run."""

import asyncio
import inspect
from collections import Counter
from typing import Any

import pytest
from fakeredis import FakeAsyncRedis, FakeRedis, FakeServer
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.producer.played_worker import PlayedWorker, end

import stoker.operations
import stoker.submitting
import stoker.tickets
import stoker.waiting
from stoker import (
    AsyncProducer,
    AsyncTicket,
    DuplicateJob,
    InvalidRequest,
    JobCanceled,
    JobFailed,
    JobNotFound,
    Producer,
    RedisUnavailable,
    ResultTimeout,
    Ticket,
    TicketStatus,
)
from stoker.new_job import NewJob
from stoker.operations import Commands

REQUEST: dict[str, Any] = {"agent_id": "a", "prompt": "x", "max_tokens": 4}


@pytest.fixture
def fake():
    return FakeServer()


@pytest.fixture
def worker(fake):
    return PlayedWorker(FakeRedis(server=fake))


def producer_on(fake):
    return AsyncProducer(FakeAsyncRedis(server=fake))


def test_it_has_the_methods_of_the_other_with_the_same_parameters():
    for ours, theirs in ((AsyncProducer, Producer), (AsyncTicket, Ticket)):
        public = {name for name in vars(theirs) if not name.startswith("_")} - {"close"}
        assert public <= set(vars(ours))
        for name in public - {"job_id"}:
            parameters = inspect.signature(getattr(ours, name)).parameters
            assert list(parameters) == list(inspect.signature(getattr(theirs, name)).parameters), name


def test_a_job_is_submitted_watched_canceled_and_read(fake, worker):
    async def use():
        async with producer_on(fake) as producer:
            await producer.ping()
            first = await producer.submit(**REQUEST)
            second = await producer.submit(**REQUEST, job_id="mine", at_front=True)
            assert await producer.ticket("mine").status() == await second.status() == TicketStatus("queued", position=0)
            assert (await producer.submit(**REQUEST, job_id="mine")).job_id == "mine"
            with pytest.raises(DuplicateJob):
                await producer.submit(**{**REQUEST, "prompt": "y"}, job_id="mine")
            assert await second.cancel()
            assert not await producer.ticket("mine").cancel()
            with pytest.raises(JobCanceled):
                await second.result()
            with pytest.raises(ResultTimeout, match="queued after 0"):
                await first.result(timeout_s=0)
            with pytest.raises(ResultTimeout, match=r"queued after 0\.05"):
                await first.result(timeout_s=0.05)
            worker.finish(first.job_id, text="done")
            assert (await first.result()).text == (await producer.ticket(first.job_id).result()).text == "done"
            assert (await first.result(timeout_s=0)).text == "done"
            for timeout_s in (None, 0, 20):
                with pytest.raises(JobNotFound):
                    await producer.ticket("nobody").result(timeout_s)
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await producer.submit(agent_id="a", prompt="x", max_tokens=0)

    asyncio.run(use())


def test_many_are_awaited_as_they_end_and_in_order(fake, worker):
    async def use():
        async with producer_on(fake) as producer:
            tickets = await producer.submit_many([REQUEST] * 150, retry=2)
            for n, ticket in enumerate(tickets[:-1]):
                worker.finish(ticket.job_id, text=str(n))
            coming = producer.as_completed(tickets, timeout_s=20)
            seen = [await anext(coming) for _ in range(149)]
            assert set(seen) == set(tickets[:-1])
            worker.fail(tickets[-1].job_id, "EngineFailed: x")
            assert [ticket async for ticket in coming] == tickets[-1:]
            assert [result.text for result in await producer.results(tickets[:-1])] == [str(n) for n in range(149)]
            with pytest.raises(JobFailed):
                await producer.results(tickets)
            found = await producer.results([*tickets, producer.ticket("nobody")], return_errors=True)
            assert [type(error) for error in found[-2:]] == [JobFailed, JobNotFound]
            left = await producer.submit(**REQUEST)
            with pytest.raises(ResultTimeout):
                await producer.results([left], timeout_s=0.05)

    asyncio.run(use())


def test_two_tasks_may_wait_for_one_job_and_one_of_them_may_give_up(fake, worker):
    async def use():
        async with producer_on(fake) as producer:
            ticket = await producer.submit(**REQUEST)
            patient, other = (asyncio.create_task(ticket.result()) for _ in range(2))
            with pytest.raises(ResultTimeout):
                await ticket.result(timeout_s=0.05)
            other.cancel()
            worker.finish(ticket.job_id, text="done")
            assert (await patient).text == "done"
            assert other.cancelled() or other.cancelling()

    asyncio.run(use())


def test_a_task_that_gives_up_a_canceled_job_while_states_are_read_ends_no_other_wait(fake, worker, monkeypatch):
    monkeypatch.setattr(stoker.waiting, "_CHECK_EVERY_S", 0.0)
    answer_to = stoker.operations.answer_to

    async def use():
        async with producer_on(fake) as producer:
            canceled, other = await producer.submit_many([REQUEST] * 2)
            giving_up, patient = (asyncio.create_task(ticket.result()) for ticket in (canceled, other))

            async def answering(connection, step):
                if isinstance(step, Commands) and step.commands[0][0] == "HGET" and not giving_up.done():
                    await canceled.cancel()
                    giving_up.cancel()
                    await asyncio.wait([giving_up])
                return await answer_to(connection, step)

            monkeypatch.setattr(stoker.operations, "answer_to", answering)
            await asyncio.wait([giving_up], timeout=20)
            assert giving_up.cancelled()
            worker.finish(other.job_id, text="done")
            assert (await asyncio.wait_for(patient, 20)).text == "done"

    asyncio.run(use())


def test_a_task_that_waits_on_while_its_program_ends_gets_its_result(fake, worker):
    """Ctrl-C cancels every task of the loop at once, and some have to clean up."""
    texts = []

    async def clean_up(ticket):
        try:
            await ticket.result()
        finally:
            texts.append((await ticket.result(timeout_s=20)).text)

    async def use():
        producer = producer_on(fake)
        ticket = await producer.submit(**REQUEST)
        cleaning = asyncio.create_task(clean_up(ticket))
        await asyncio.sleep(0.1)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.1)
        worker.finish(ticket.job_id, text="done")
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(cleaning, 10)
        await producer.aclose()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(use())
    assert texts == ["done"]


def test_no_result_is_lost_if_the_wait_that_all_share_is_canceled_while_it_hands_them_out(fake, worker, monkeypatch):
    monkeypatch.setattr(stoker.tickets, "_SETTLED_AT_ONCE", 1)

    async def use():
        async with producer_on(fake) as producer:
            tickets = await producer.submit_many([REQUEST] * 3)
            for ticket in tickets:
                worker.finish(ticket.job_id, text="done")

            async def text(ticket):
                found = await ticket.result()
                for task in asyncio.all_tasks() - {*waiting, own}:
                    task.cancel()
                return found.text

            own, waiting = asyncio.current_task(), [asyncio.create_task(text(ticket)) for ticket in tickets]
            assert await asyncio.wait_for(asyncio.gather(*waiting), 20) == ["done"] * 3

    asyncio.run(use())


def test_the_result_of_a_job_just_canceled_waits_for_no_look_at_all_states(fake, worker, monkeypatch):
    monkeypatch.setattr(stoker.waiting, "_CHECK_EVERY_S", 3600.0)

    async def use():
        async with producer_on(fake) as producer:
            ticket = await producer.submit(**REQUEST)
            assert await ticket.cancel()
            with pytest.raises(JobCanceled):
                await asyncio.wait_for(ticket.result(), 10)

    asyncio.run(use())


def test_a_connection_that_is_lost_right_after_enqueueing_is_endured(fake, worker, monkeypatch):
    lost, answer_to = [], stoker.operations.answer_to

    async def answering(connection, step):
        if not lost:
            lost.append(step)
            raise RedisConnectionError
        return await answer_to(connection, step)

    async def use():
        async with producer_on(fake) as producer:
            ticket = await producer.submit(**REQUEST)
            worker.finish(ticket.job_id, text="done")
            monkeypatch.setattr(stoker.operations, "answer_to", answering)
            assert (await ticket.result(timeout_s=20)).text == "done"

    asyncio.run(use())
    assert lost


def test_closing_a_producer_ends_all_waits(fake):
    async def use():
        producer = producer_on(fake)
        waiting = asyncio.create_task((await producer.submit(**REQUEST)).result())
        await asyncio.sleep(0.05)
        await producer.aclose()
        with pytest.raises(RedisUnavailable, match="closed"):
            await waiting

    asyncio.run(use())


# --- on a real server ---


@pytest.mark.slow
@pytest.mark.server
def test_hundreds_of_tasks_that_submit_and_wait_open_few_connections(redis_url, server):
    most = 0

    def play():
        nonlocal most
        for _ in range(500):
            job_id = server.blpop("rq:queue:generate", timeout=20)[1].decode()
            end(server, job_id, job_id)
            most = max(most, sum(client["name"] == "ours" for client in server.client_list()))

    async def use():
        async with AsyncProducer(f"{redis_url}?client_name=ours") as producer:

            async def one():
                ticket = await producer.submit(**REQUEST)
                assert (await ticket.result(timeout_s=300)).text == ticket.job_id

            await asyncio.gather(asyncio.to_thread(play), *(one() for _ in range(500)))

    asyncio.run(use())
    assert 2 <= most <= 20


@pytest.mark.server
def test_more_than_a_hundred_tasks_may_stream_at_a_time(redis_url, server):
    async def use():
        async with AsyncProducer(redis_url) as producer:
            ticket = await producer.submit(**REQUEST, stream=True)

            async def text():
                return "".join([event.text async for event in ticket.stream(timeout_s=60)])

            reading = asyncio.gather(*(text() for _ in range(120)))
            await asyncio.sleep(0.1)  # so that many of them wait
            PlayedWorker(server).finish(ticket.job_id, text="done")
            assert await reading == ["done"] * 120

    asyncio.run(use())


@pytest.mark.server
def test_other_tasks_have_their_turn_while_thousands_are_submitted_and_read(redis_url, server, monkeypatch):
    """The work done between two turns of another task; the clock decides where to pause, not this test."""
    monkeypatch.setattr(stoker.submitting, "_BUSY_S", 0.0)
    done, most = Counter(), Counter()
    make, answer_to = NewJob.__init__, stoker.operations.answer_to

    def making(self, *args):
        done["made"] += 1
        make(self, *args)

    async def answering(connection, step):
        reply = await answer_to(connection, step)
        done["answered"] += len(getattr(step, "commands", ()))
        return reply

    async def others():
        while True:
            for name in done:
                most[name] = max(most[name], done[name])
            done.clear()
            await asyncio.sleep(0)

    async def use():
        beside = asyncio.create_task(others())
        async with AsyncProducer(redis_url) as producer:
            tickets = await producer.submit_many([REQUEST] * 300)
            worker = PlayedWorker(server)
            for ticket in tickets:
                worker.finish(ticket.job_id)
            assert len(await producer.results(tickets, timeout_s=60)) == 300
        beside.cancel()

    monkeypatch.setattr(NewJob, "__init__", making)
    monkeypatch.setattr(stoker.operations, "answer_to", answering)
    asyncio.run(use())
    assert most["made"] == 1
    assert most["answered"] <= 101


@pytest.mark.server
def test_a_job_submitted_while_others_are_awaited_is_seen_soon(redis_url, server):
    async def use():
        async with AsyncProducer(redis_url) as producer:
            waiting = asyncio.create_task((await producer.submit(**REQUEST)).result(timeout_s=60))
            await asyncio.sleep(0.1)  # so that the wait has begun
            second = await producer.submit(**REQUEST)
            PlayedWorker(server).finish(second.job_id, text="second")
            assert (await second.result(timeout_s=20)).text == "second"
            assert not waiting.done()
            waiting.cancel()

    asyncio.run(use())
