"""Real workers, one after the other on one queue, each with a store of its own and one shared store."""

import signal
from pathlib import Path

import pytest
from tests.worker.memory.agents import files_below
from tests.worker.memory.shared_store.sharing import Share
from tests.worker_process import running_worker

from stoker_shared.errors import JobFailed

pytestmark = pytest.mark.server

pytest.importorskip("obstore")

SHORT = {"STOKER_HEARTBEAT_S": "0.2", "STOKER_LEASE_TTL_S": "1", "STOKER_RECOVER_S": "0.5", "STOKER_GRACE_S": "1"}
PROMPT = "x" * 1200


def mac(share: Share, redis_url: str, folder: Path):
    return running_worker(redis_url, folder, "--shared-store", share.url, env=SHORT)


def shown(producer):
    """Of the one worker's shared store, by `stoker status`."""
    return producer.overview().workers[0].live.now.shared_store


def test_an_agent_outlives_its_mac_with_its_cache(share, redis_url, producer, tmp_path):
    with mac(share, redis_url, tmp_path / "mac1") as first:
        said = producer.submit(agent_id="a", prompt=PROMPT, max_tokens=5).result(timeout_s=60)
        assert (said.cache.agent_version, said.cache.saved) == (1, True)
        first.wait_for(lambda: bool(files_below(share.objects / "caches")))
        first.kill()
    with mac(share, redis_url, tmp_path / "mac2"):
        ticket = producer.submit(agent_id="a", prompt="and", context="append", max_tokens=5)
        again = ticket.result(timeout_s=60)
    assert again.cache.agent_version == 2
    assert again.cache.source in ("disk", "memory")
    known = said.usage.prompt_tokens + said.usage.completion_tokens
    assert known <= again.usage.cached_tokens + 1 <= again.usage.prompt_tokens


def test_turns_are_finished_while_the_shared_store_is_away_and_written_through_after(
    share, redis_url, producer, tmp_path
):
    with mac(share, redis_url, tmp_path / "mac1") as worker:
        producer.submit(agent_id="a", prompt=PROMPT, max_tokens=5).result(timeout_s=60)
        share.go_away()
        for number in range(2, 6):
            ticket = producer.submit(agent_id="a", prompt="and", context="append", max_tokens=5)
            assert ticket.result(timeout_s=60).cache.agent_version == number
        worker.wait_for(lambda: shown(producer).away_s > 0 and shown(producer).waiting_agents == 1)
        with pytest.raises(JobFailed, match="SharedStoreAway"):
            producer.submit(agent_id="new", prompt="x", context="append", max_tokens=5).result(timeout_s=60)
        assert worker.log.count("outage begins: the shared store") == 1
        share.come_back()
        worker.wait_for(lambda: len(files_below(share.objects / "agents")) == 5)
        worker.wait_for(lambda: "outage over: the shared store works again" in worker.log)
        worker.wait_for(lambda: (shown(producer).away_s, shown(producer).waiting_agents) == (0, 0))
    with mac(share, redis_url, tmp_path / "mac2"):
        ticket = producer.submit(agent_id="a", prompt="and", context="append", max_tokens=5)
        assert ticket.result(timeout_s=60).cache.agent_version == 6


def test_a_shared_store_is_introduced_worker_by_worker_and_every_conversation_goes_on(
    share, redis_url, producer, tmp_path
):
    def submit(agent_id):
        return producer.submit(agent_id=agent_id, prompt="x", context="append", max_tokens=5)

    def version(ticket):
        return ticket.result(timeout_s=60).cache.agent_version

    def old(name):
        return running_worker(redis_url, tmp_path / name, "--name", name, env=SHORT)

    def new(name, log_name):
        options = ("--name", name, "--shared-store", share.url)
        return running_worker(redis_url, tmp_path / name, *options, log_name=log_name, env=SHORT)

    with old("mac1") as mac1:
        assert [version(submit(agent)) for agent in ("a", "b")] == [1, 1]
        with new("mac2", "first.log") as mac2:
            mac2.wait_until_ready()
            mac1.signal(signal.SIGTERM)
            mac1.wait()
            waits = submit("a")
            mac2.wait_for(lambda: [one.member for one in producer.workers()] == ["mac2"])
            with new("mac1", "second.log") as again:
                assert version(waits) == 2
                again.wait_for(lambda: len(files_below(share.objects / "agents")) == 3)
                again.kill()
            assert [version(submit(agent)) for agent in ("a", "b")] == [3, 2]
