"""Fifty agents with one system prompt: stored once and prefilled once, unless their salts differ."""

import pytest
from tests.support.worker_process import running_worker

from stoker import Producer

pytestmark = pytest.mark.server

AGENTS = 50
BRIEF = ("You are one of fifty agents. " * 40)[:970]  # 1,000 tokens with a digit and the template's tokens around it


@pytest.mark.parametrize("apart", ["not at all", "by tenant", "by agent"])
def test_a_system_prompt_is_stored_and_prefilled_once_for_all_agents_that_may_share_it(redis_url, tmp_path, apart):
    producer, store = Producer(redis_url), tmp_path / "store"

    def submit(n):
        messages = [{"role": "system", "content": BRIEF}, {"role": "user", "content": f"{n}"}]
        salt = f"tenant {n % 2}" if apart == "by tenant" else None
        return producer.submit(agent_id=f"agent {n}", messages=messages, max_tokens=4, cache_salt=salt)

    firsts = range(2 if apart == "by tenant" else 1)
    options = ["--burst", "--max-batch", str(AGENTS), *(["--no-share-prefixes"] * (apart == "by agent"))]
    results = []
    for batch in (firsts, range(len(firsts), AGENTS)):
        tickets = [submit(n) for n in batch]
        with running_worker(redis_url, store, *options, log_name=f"{len(batch)}.log") as worker:
            assert worker.wait() == 0, worker.log
        results.append([ticket.result(timeout_s=1) for ticket in tickets])
    first, others = results
    assert {result.usage.cached_tokens for result in first} == {0}
    assert {result.usage.cached_tokens for result in others} == {0 if apart == "by agent" else 768}
    assert {result.usage.prompt_tokens for result in others} == {1000, 1001}
    assert {result.cache.miss_reason for result in others} == {None}
    copies = {"not at all": 1, "by tenant": 2, "by agent": AGENTS}[apart]
    assert len(list((store / "blocks").rglob("*.safetensors"))) == 3 * copies
    assert len(list((store / "pieces").rglob("*-tail.*"))) == AGENTS
