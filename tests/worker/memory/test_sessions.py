"""Sessions: calls that carry their whole conversation find what the session's calls before them have cached."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    Agent,
    cache_of,
    call_of_session,
    files_below,
    ids,
    make_model,
    open_store,
    problems_of,
    reopen,
    restore_of_session,
    rows,
    tidy,
    walk,
)

from stoker_worker.memory import eviction, lookup, transcripts
from stoker_worker.memory.admin.backup import back_up
from stoker_worker.memory.admin.backup import restore as bring_back
from stoker_worker.memory.admin.listing import Page, count_agents, list_agents
from stoker_worker.memory.admin.salvage import salvage
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.replica.sharing import share
from stoker_worker.memory.sessions import MOST_CONVERSATIONS, remove_session
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.store_parts import opened
from stoker_worker.ports import SequenceCache

call, restore = call_of_session, restore_of_session

LONG = ids(3000)
OTHER = ids(3000, seed=9)


def forget_unused(store: AgentCacheStore) -> None:
    list(store._upkeep.forget_sessions())


def raise_exit(*_: object) -> None:
    raise SystemExit


def conversations(store: AgentCacheStore) -> int:
    return int(rows(store, "SELECT count(*) FROM agents WHERE agent_id < ' '")[0][0])


@pytest.mark.parametrize("n_first", [10, 255, 256, 300, 700])
def test_the_next_call_prefills_only_what_is_new_after_a_restart_too(tmp_path: Path, n_first: int) -> None:
    store = open_store(tmp_path)
    assert call(store, LONG[:n_first], LONG[n_first : n_first + 40]) == (0, None)
    store = reopen(store, tmp_path)
    assert call(store, LONG[: n_first + 90], LONG[n_first + 90 : n_first + 120]) == (n_first + 40, None)
    assert call(store, LONG[: n_first + 400]) == (n_first + 120, None)
    assert conversations(store) == 1
    assert len(files_below(tmp_path / "pieces")) <= 1


def test_a_recent_call_is_found_in_ram(tmp_path: Path) -> None:
    store = AgentCacheStore(tmp_path, memory_max_bytes=1 << 30)
    call(store, LONG[:700], LONG[700:720])
    restored = restore(store, LONG[:800])
    assert (restored.source, restored.prefix and restored.prefix.n_tokens) == ("memory", 720)
    changed = restore(store, (*LONG[:100], *OTHER[:700]))
    assert (changed.source, changed.miss_reason) == ("memory", "prompt_changed")
    assert changed.prefix is not None
    assert changed.prefix.n_tokens == 100
    Agent(store).say(ids(900, seed=4))  # its blocks are on disk, beside the session's RAM
    assert call(store, (*LONG[:720], 1)) == (720, None)


def test_no_agent_comes_of_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store).say(LONG[:10])
    call(store, LONG[:700])
    with store.parts.database.snapshot() as connection:
        assert count_agents(connection, Page()) == 1
    for page in (Page(), Page(match="*"), Page(sort="size")):
        assert [len(lines) for lines in list_agents(store.parts.database.snapshot, page)] == [1]
    assert problems_of(store) == []


def test_side_calls_keep_what_is_theirs(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    system = LONG[:520]
    subagents = [(*system, *ids(100, seed=n)) for n in range(1, 4)]
    assert call(store, LONG[:1000], LONG[1000:1010]) == (0, None)
    assert call(store, OTHER[:100], OTHER[100:120])[0] == 0
    assert [call(store, one, (5, 6))[0] for one in subagents] == [520, 520, 520]
    assert call(store, LONG[:1400]) == (1010, None)
    assert call(store, OTHER[:150]) == (120, None)
    assert [call(store, (*one, 5, 6, 7)) for one in subagents] == [(622, None)] * 3
    assert conversations(store) == 5


def test_an_answer_that_comes_back_without_its_thinking_costs_only_itself(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    opening, thinking, answer = (1, 2, 3), OTHER[:600], OTHER[600:700]
    call(store, (*LONG[:900], *opening), (*thinking, *answer))
    assert call(store, (*LONG[:900], *answer, *LONG[900:950], *opening), answer) == (900, None)
    assert conversations(store) == 1  # the same one, without its thinking


def test_a_prompt_that_changes_early_is_named_as_such(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    call(store, LONG[:900])
    changed = (*LONG[:300], 1, *LONG[301:950])
    assert call(store, changed) == (300, "prompt_changed")
    assert call(store, (*changed, 2)) == (950, None)
    assert call(store, (*LONG[:880], *OTHER[:100])) == (880, None)  # the last message was edited
    assert call(store, OTHER[:50]) == (0, None)  # a side call is shorter
    Agent(store).say(ids(800, seed=3))
    assert call(store, ids(1000, seed=3)) == (768, None)  # others have it


def test_a_session_has_some_conversations_and_the_one_used_longest_ago_makes_room(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for n in range(MOST_CONVERSATIONS + 5):
        call(store, ids(40, seed=100 + n))
        tidy(store)
    assert conversations(store) == MOST_CONVERSATIONS
    assert len(files_below(tmp_path / "pieces")) == MOST_CONVERSATIONS
    cached = [restore(store, (*ids(40, seed=100 + n), 7)).prefix is not None for n in range(MOST_CONVERSATIONS + 5)]
    assert cached == [False] * 5 + [True] * MOST_CONVERSATIONS


def test_its_blocks_are_no_unused_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    call(store, LONG[:700])
    monkeypatch.setattr(eviction, "KEEP_UNUSED_S", 0.0)
    store.budget.make_room()
    assert call(store, LONG[:720]) == (700, None)


def test_the_cache_used_longest_ago_is_evicted_first_of_agents_and_sessions(tmp_path: Path) -> None:
    with closing(AgentCacheStore(tmp_path, max_bytes=10**9)) as store:
        Agent(store, "old").say(ids(1000, seed=1))
        call(store, LONG[:1000])
        Agent(store, "new").say(ids(1000, seed=2))
        store.budget.free(1)
        assert Agent(store, "old").cached(ids(1100, seed=1)) < 1000
        assert call(store, LONG[:1100]) == (1000, None)
        store.budget.free(1 << 40)
        assert files_below(tmp_path / "blocks") == files_below(tmp_path / "pieces") == []
        assert call(store, LONG[:1200]) == (0, "evicted")
        assert problems_of(store) == []


def test_a_session_goes_when_it_was_unused_for_long_and_its_agents_stay(tmp_path: Path) -> None:
    with closing(AgentCacheStore(tmp_path, session_ttl_s=1000)) as store:
        store.pin(frozenset(), frozenset())
        Agent(store).say(LONG[:300])
        call(store, OTHER[:700])
        store.parts.database.commit(partial(transcripts.advance_clock, seconds=900))
        call(store, OTHER[:100], session="t")
        forget_unused(store)
        assert conversations(store) == 2
        store.parts.database.commit(partial(transcripts.advance_clock, seconds=300))
        forget_unused(store)
        assert conversations(store) == 1
        assert Agent(store).cached(LONG[:310]) == 300
        assert len(files_below(tmp_path / "blocks")) == 1
        assert problems_of(store) == []


def test_a_session_without_cache_goes_after_an_hour(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        store.pin(frozenset(), frozenset())
        call(store, LONG[:100])
        store.budget.free(1 << 40)
        call(store, OTHER[:100])
        forget_unused(store)
        assert conversations(store) == 2
        store.parts.database.commit(partial(transcripts.advance_clock, seconds=4000))
        forget_unused(store)
        assert conversations(store) == 1
        assert call(store, OTHER[:110]) == (100, None)


def test_blocks_that_went_while_a_call_ran_are_written_with_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    call(store, LONG[:600])
    restored = restore(store, LONG[:900])
    assert restored.prefix is not None
    store.budget.free(1 << 40)
    assert files_below(tmp_path / "blocks") == []
    cache = SequenceCache(900, cache_of(LONG[:900]))
    store.save_session("s", LONG[:900], cache, prompt_tokens=900, model=MODEL, salt=None)
    assert call(store, LONG[:950]) == (900, None)


@pytest.mark.parametrize("kind", SNAPSHOT_SPECS)
def test_a_model_with_snapshots_resumes_at_the_end_of_the_prompt_or_of_the_answer(tmp_path: Path, kind: str) -> None:
    model, store = make_model(kind, spec=SNAPSHOT_SPECS[kind]), open_store(tmp_path)
    call(store, LONG[:600], LONG[600:640], model=model)
    store = reopen(store, tmp_path)
    assert call(store, LONG[:700], LONG[700:720], model=model) == (640, None)
    assert call(store, (*LONG[:700], *OTHER[:50]), model=model) == (699, None)  # without its answer
    assert call(store, (*LONG[:650], *OTHER[:80]), model=model)[0] == 640  # an answer before that
    restored = restore(store, (*LONG[:610], *OTHER[:90]), model=model)
    assert restored.miss_reason in ("no_snapshot", None)


def test_one_session_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store).say(LONG[:300])
    call(store, LONG[:700])
    call(store, OTHER[:700], salt="salt")
    call(store, OTHER[:100], session="s 2")
    assert remove_session(store.parts, "s") == (2, 3)
    assert remove_session(store.parts, "s") == (0, 0)
    assert conversations(store) == 1
    assert len(files_below(tmp_path / "blocks")) == 1
    assert problems_of(store) == []
    assert call(store, LONG[:800]) == (256, None)


def test_calls_that_go_on_with_one_conversation_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    call(store, LONG[:600])
    forks = [(*LONG[:600], *ids(200, seed=n)) for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(partial(call, store), forks)) == [(600, None)] * 4
    assert [call(store, (*fork, 1)) for fork in forks] == [(800, None)] * 4
    walk(store)
    assert len(files_below(tmp_path / "pieces")) == conversations(store) == 4
    assert problems_of(store) == []


@pytest.mark.parametrize("when", ["during a look", "after a look"])
def test_a_conversation_that_another_call_goes_on_with_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    store, rows_of, find = open_store(tmp_path), transcripts.session_rows, lookup.find_prefix
    call(store, LONG[:600])
    others = [(*LONG[:600], *ids(200, seed=1))]

    def overtaken(found: Any) -> Any:
        if others:
            call(store, others.pop())
        return found

    if when == "during a look":
        monkeypatch.setattr(transcripts, "session_rows", lambda *args: overtaken(rows_of(*args)))
    else:
        monkeypatch.setattr(lookup, "find_prefix", lambda *args: find(*overtaken(args)))
    assert call(store, (*LONG[:600], *ids(200, seed=2))) == (600, None)
    assert others == []


def test_a_crash_before_the_rows_are_written_leaves_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    call(store, LONG[:600])
    with monkeypatch.context() as patched:
        patched.setattr(store.parts.database, "commit", raise_exit)
        with pytest.raises(SystemExit):
            call(store, LONG[:900])
    store = reopen(store, tmp_path)
    assert restore(store, LONG[:950]).prefix is not None
    assert call(store, LONG[:950]) == (768, None)  # the blocks were there already
    walk(store)
    assert call(store, LONG[:990]) == (950, None)
    assert problems_of(store) == []


def test_a_walk_finds_nothing_to_remove(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store).say(LONG[:300])
    call(store, OTHER[:700])
    for path in files_below(tmp_path):
        os.utime(path, (0, 0))
    walk(store)
    tidy(store)
    assert call(store, OTHER[:720]) == (700, None)


def test_a_restored_or_salvaged_store_has_its_agents_and_no_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with closing(open_store(folder)) as store:
        Agent(store).say(LONG[:300])
        call(store, OTHER[:700])
        with opened(folder) as parts:
            assert back_up(parts, tmp_path / "backup").agents == 1
    assert bring_back(folder, tmp_path / "backup").agents == 1
    with closing(open_store(folder)) as store:
        assert conversations(store) == 0
        assert Agent(store).cached(LONG[:310]) == 300
        call(store, OTHER[:700])
        assert problems_of(store) == []
    done = salvage(folder)
    assert (done.whole, dict(done.refused), dict(done.lost)) == (1, {}, {})
    with closing(open_store(folder)) as store:
        assert conversations(store) == 0
        assert Agent(store).cached(LONG[:310]) == 300
        assert problems_of(store) == []


def test_a_store_of_sessions_alone_has_no_agents_to_share(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    with closing(open_store(tmp_path / "store")) as store:
        call(store, OTHER[:700])
        with store.parts.database.snapshot() as connection:
            assert not transcripts.has_agents(connection)
        Agent(store).say(LONG[:300])
        done = share(store.parts, Bucket((tmp_path / "share").as_uri()))
        assert (done.agents, done.n_refused) == (1, 0)
