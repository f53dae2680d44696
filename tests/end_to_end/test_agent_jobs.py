"""Jobs about agents' memory by the asyncio producer; test_mixed_agent_jobs.py has their effects among other jobs."""

import asyncio

import pytest
from tests.support.worker_process import running_worker

from stoker import AsyncProducer

pytestmark = pytest.mark.server


def test_the_asyncio_producer_has_the_same_actions(redis_url, store):
    async def service():
        async with AsyncProducer(redis_url) as producer:
            await (await producer.submit(agent_id="a", prompt="say one", context="append")).result(timeout_s=30)
            forked = await producer.agents.fork("a", "b", job_id="once")
            assert await producer.agents.fork("a", "b", job_id="once") == forked
            assert (await producer.agents.rollback("a", 1)).version == 2
            assert (await producer.agents.forget("a", expect_version=2)).existed
            return [(await producer.agents.info(name)).version for name in ("a", "b")]

    with running_worker(redis_url, store):
        assert asyncio.run(service()) == [0, 1]
