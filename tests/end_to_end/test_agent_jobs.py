"""Jobs about agents' memory: show, forget, fork and roll back, in order with the agents' other jobs."""

import asyncio

import pytest
from tests.support.worker_process import running_worker

from stoker import AsyncProducer

pytestmark = pytest.mark.server


@pytest.fixture
def worker(redis_url, tmp_path):
    with running_worker(redis_url, tmp_path / "store", "--scripted-steps-per-s", "4000") as worker:
        yield worker.wait_until_ready()


def said(producer, agent_id, text, **fields):
    ticket = producer.submit(agent_id=agent_id, prompt=f"say {text}", **{"context": "append", **fields})
    return ticket.result(timeout_s=30)


def test_a_service_shows_forks_rolls_back_and_forgets_an_agent(producer, worker):
    agents = producer.agents
    assert agents.info("a").exists is False
    said(producer, "a", "one")
    said(producer, "a", "two")
    forked = agents.fork("a", "b")
    assert (forked.target, forked.version, forked.from_version) == ("b", 1, 2)
    lost = said(producer, "a", "other", context="full")
    assert (lost.cache.agent_version, lost.cache.replaced_version) == (3, 2)
    back = agents.rollback("a")
    assert (back.version, back.to_version) == (4, 2)
    kept = said(producer, "a", "three", expect_version=4)
    assert kept.usage.prompt_tokens > said(producer, "c", "three").usage.prompt_tokens
    assert (kept.cache.agent_version, kept.cache.replaced_version) == (5, None)
    info = agents.info("a")
    assert (info.version, [version.version for version in info.versions]) == (5, [1, 2, 3, 4])
    assert agents.forget("a", expect_version=5).version == 5
    assert agents.info("a").exists is False
    assert agents.info("b").tokens == forked.tokens
    assert said(producer, "a", "again").cache.agent_version == 1


def test_the_asyncio_producer_has_the_same_actions(redis_url, worker):
    async def service():
        async with AsyncProducer(redis_url) as producer:
            await (await producer.submit(agent_id="a", prompt="say one", context="append")).result(timeout_s=30)
            forked = await producer.agents.fork("a", "b", job_id="once")
            assert await producer.agents.fork("a", "b", job_id="once") == forked
            assert (await producer.agents.rollback("a", 1)).version == 2
            assert (await producer.agents.forget("a")).existed
            return [(await producer.agents.info(name)).version for name in ("a", "b")]

    assert asyncio.run(service()) == [0, 1]
