"""What a result tells of the cache that was used."""

import pytest

from stoker_shared import build_request
from stoker_worker.conversation import Prompt
from stoker_worker.loader import Prepared
from stoker_worker.ports import AgentVersion, Completion, GenerationWork, Restored, RestoredPrefix
from stoker_worker.results import cache_report


def report(restored, cached_tokens):
    request = build_request({"agent_id": "a", "prompt": "x"})
    prompt, work = Prompt((1, 2, 3), None, "x"), GenerationWork(request, (1, 2, 3))
    prepared = Prepared(None, AgentVersion("a", 1, None), prompt, restored, work, None, 0.0)
    done = Completion(0, "finished", ended_by="length", cached_tokens=cached_tokens)
    return cache_report(prepared, done, agent_version=2, saved=True)


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_a_cache_that_was_used_is_told(source):
    found = report(Restored(RestoredPrefix(2, ()), source, miss_reason="block_missing"), 2)
    assert (found.source, found.miss_reason) == (source, "block_missing")


def test_a_cache_that_was_lost_in_a_broken_step_is_not_told_as_used():
    found = report(Restored(RestoredPrefix(2, ()), "disk"), 0)
    assert (found.source, found.miss_reason) == ("none", "step_broke")
