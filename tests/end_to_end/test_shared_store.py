"""Real workers, one after the other on one queue, each with a store of its own and one shared store."""

import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.worker_process import SHORT, running_worker
from tests.worker.memory.agents import files_below
from tests.worker.memory.replica.sharing import Share

from stoker_worker.cli.main import main

pytestmark = pytest.mark.server

pytest.importorskip("obstore")

PROMPT = "x" * 1200


def mac(share: Share, redis_url: str, folder: Path):
    return running_worker(redis_url, folder, "--shared-store", share.url, env=SHORT)


def away_s(producer):
    """For how long the one worker's shared store has been away, by `stoker status`."""
    now = producer.overview().workers[0].live.now
    return now.shared_store.away_s if now else 0


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


def test_jobs_with_memory_wait_for_a_shared_store_that_is_away_others_go_on_and_none_fails(
    share, redis_url, producer, tmp_path
):
    def submit(agent_id, **fields):
        return producer.submit(agent_id=agent_id, prompt="and", max_tokens=5, **fields)

    with mac(share, redis_url, tmp_path / "mac1") as worker:
        assert submit("a", context="append").result(timeout_s=60).cache.agent_version == 1
        share.go_away()
        under_way = submit("a", context="append")
        worker.wait_for(lambda: away_s(producer) > 0)
        waiting = [submit("a", context="append"), submit("new", context="append"), submit("full")]
        assert submit(None).result(timeout_s=60).text
        time.sleep(1)
        assert [ticket.status().state in ("queued", "started") for ticket in (under_way, *waiting)] == [True] * 4
        assert worker.log.count("outage begins: the shared store") == 1
        share.come_back()
        versions = [ticket.result(timeout_s=60).cache.agent_version for ticket in (under_way, *waiting)]
        assert versions == [2, 3, 1, 1]
        worker.wait_for(lambda: away_s(producer) == 0)
    with mac(share, redis_url, tmp_path / "mac2"):
        assert submit("a", context="append").result(timeout_s=60).cache.agent_version == 4


@pytest.mark.parametrize("share", ["folder"], indirect=True)
def test_a_store_is_shared_by_a_command_and_every_conversation_goes_on_at_another_worker(
    share, redis_url, producer, tmp_path
):
    def version(agent_id):
        ticket = producer.submit(agent_id=agent_id, prompt="x", context="append", max_tokens=5)
        return ticket.result(timeout_s=60).cache.agent_version

    with running_worker(redis_url, tmp_path / "mac1", env=SHORT) as alone:
        assert [version(agent_id) for agent_id in ("a", "b", "a")] == [1, 1, 2]
        alone.signal(signal.SIGTERM)
        alone.wait(30)
    with mac(share, redis_url, tmp_path / "mac1") as refused:
        assert refused.wait(60) == 1
        assert "memory share" in refused.log
    done = CliRunner().invoke(main, ["memory", "share", share.url, "--store", str(tmp_path / "mac1")])
    assert done.exit_code == 0, done.output
    with mac(share, redis_url, tmp_path / "mac1") as first:
        assert version("a") == 3
        first.signal(signal.SIGTERM)
        first.wait(30)
    with running_worker(redis_url, tmp_path / "mac1", env=SHORT) as alone:
        assert alone.wait(60) == 1
        assert f"is a copy of the shared store {share.url}" in alone.log
    with mac(share, redis_url, tmp_path / "mac2"):
        assert [version(agent_id) for agent_id in ("a", "b")] == [4, 2]
