"""A real full disk: caches make room, answers still come, conversations stay whole, and saving resumes when there is
space."""

import re

import pytest
from tests.support.store_reader import StoreReader
from tests.support.worker_process import running_worker

from stoker_shared.errors import JobFailed

pytestmark = pytest.mark.server

NO_SPACE = r"No space left|database or disk is full"

WORDS = "a sentence of some length that fills a block. " * 24


def test_on_a_full_disk_without_caches_full_jobs_finish_append_jobs_fail_and_saving_resumes(
    producer, redis_url, small_disk
):
    store = small_disk.path / "store"

    def ask(agent_id, context, **fields):
        return producer.submit(
            agent_id=agent_id, context=context, max_tokens=8, **{"prompt": f"{agent_id} {WORDS}", **fields}
        )

    def version(ticket):
        result = ticket.result(timeout_s=30)
        assert (result.cache.saved, result.cache.save_error) == (True, None)
        return result.cache.agent_version

    with running_worker(redis_url, store) as worker:
        assert [version(ask(name, context)) for name, context in (("f", "full"), ("a", "append"))] == [1, 1]
        for agent_id in ("f", "new f"):
            for _ in range(20):  # the caches make room for some turns
                small_disk.fill()
                result = ask(agent_id, "full", prompt=f"{agent_id} {WORDS} again").result(timeout_s=30)
                if not result.cache.saved:
                    break
            right = ask("nobody", "full", cache="off", prompt=f"{agent_id} {WORDS} again").result(timeout_s=30)
            assert result.text == right.text
            assert result.cache.saved is False
            assert re.search(NO_SPACE, result.cache.save_error)
        for agent_id in ("a", "new a"):
            small_disk.fill()
            with pytest.raises(JobFailed, match=rf"AgentVersionNotSaved.*({NO_SPACE})"):
                ask(agent_id, "append", prompt=" more").result(timeout_s=30)
        with pytest.raises(JobFailed, match=r"AgentTranscriptUnreadable.*not saved"):
            ask("f", "append", prompt=" more").result(timeout_s=30)
        small_disk.free()
        # Conversations with failed turns continue from their last version; the others when the next `full` job comes.
        more = ask("a", "append", prompt=" more")
        assert version(more) == 2
        assert more.result().usage.prompt_tokens == len(f"a {WORDS}") + 8 + len(" more")
        assert more.result().usage.cached_tokens in (0, len(f"a {WORDS}") + 8)  # its cache may have made room for marks
        assert version(ask("new a", "append")) == 1
        again = version(ask("f", "full"))
        assert version(ask("f", "append", prompt=" more")) == again + 1
        assert worker.returncode is None
    assert StoreReader(store).problems() == []
    assert list((store / "tmp").iterdir()) == []
