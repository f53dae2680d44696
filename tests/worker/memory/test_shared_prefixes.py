"""Jobs without an agent: the common beginnings of their prompts are cached, and nothing else of them is on disk."""

from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import (
    MODEL,
    Agent,
    cache_of,
    checked,
    disk_bytes,
    files_below,
    ids,
    open_store,
    run_job,
    squeeze,
    tidy,
)

from stoker_worker.memory import eviction, lookup
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.lookup import BlockLookup, FoundOnDisk, SharedPrefixes
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Restored, SequenceCache

COMMON = ids(600)
SEEDS = count(1)


def ask(store: AgentCacheStore, prompt: tuple[int, ...], *, salt: str | None = None) -> Restored:
    """A whole job: check the restored prefix, and save the shared blocks as the finisher does."""
    restored = checked(store.restore(prompt, agent=None, model=MODEL, salt=salt), prompt)
    if restored.to_share:
        store.save_blocks(
            prompt[: restored.to_share], SequenceCache(len(prompt), cache_of(prompt)), model=MODEL, salt=salt
        )
    return restored


def question() -> tuple[int, ...]:
    return (*COMMON, *ids(300, seed=next(SEEDS)))


def cached(restored: Restored) -> int:
    return restored.prefix.n_tokens if restored.prefix else 0


def test_prompts_without_a_common_beginning_leave_no_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert [cached(ask(store, ids(700, seed=seed))) for seed in range(20)] == [0] * 20
    assert files_below(tmp_path / "blocks") == files_below(tmp_path / "pieces") == []


def test_shared_blocks_are_evicted_before_any_agents(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    agent = Agent(store)
    agent.say(ids(600, seed=1000))
    for _ in range(3):
        ask(store, question())
    tidy(store)
    store.budget.free(1)
    assert agent.restore((*ids(600, seed=1000), 1)).miss_reason is None
    assert cached(ask(store, question())) < 512


def test_recently_used_shared_blocks_stay_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, others = open_store(tmp_path), ids(600, seed=77)
    for start in (COMMON, others, COMMON, others, COMMON):
        ask(store, (*start, *ids(10, seed=next(SEEDS))))
    tidy(store)
    store.parts.database.empty_log()  # which would go first
    monkeypatch.setattr(eviction, "LOW_WATER", 1.0)
    squeeze(store, store.budget.total_bytes - 1)
    assert cached(ask(store, question())) == 512


def test_shared_blocks_are_counted_and_a_damaged_one_is_a_miss_and_is_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(3):
        ask(store, question())
    assert store.budget.total_bytes == disk_bytes(tmp_path)
    for path in files_below(tmp_path / "blocks"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    damaged = ask(store, question())
    assert (cached(damaged), damaged.miss_reason) == (0, "block_corrupt")
    ask(store, question())
    assert cached(ask(store, question())) == 512


def test_the_number_of_remembered_blocks_is_bounded_and_chains_are_forgotten_from_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "_MOST_BLOCKS", 5)
    prefixes = SharedPrefixes()
    one, two = [f"one{n}" for n in range(4)], [f"two{n}" for n in range(3)]
    assert prefixes.note(one) == 0
    assert prefixes.note(one) == 4
    assert prefixes.note(two) == 0
    assert prefixes.note(one) == 2


@pytest.mark.parametrize("how", ["evict", "forget"])
def test_blocks_stay_while_a_job_is_being_restored_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = open_store(tmp_path)
    Agent(store, "a").say(COMMON)
    run = BlockLookup.run

    def interrupted(lookup: BlockLookup) -> FoundOnDisk:
        squeeze(store) if how == "evict" else run_job(store, "forget", "a")
        return run(lookup)

    with monkeypatch.context() as patched:
        patched.setattr(BlockLookup, "run", interrupted)
        assert cached(store.restore((*COMMON[:512], 1), agent=None, model=MODEL, salt=None)) == 512
    squeeze(store)
    assert files_below(tmp_path / "blocks") == []


def test_a_job_that_begins_while_an_agent_is_being_forgotten_finds_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    Agent(store, "a").say(COMMON)
    commit, chain = store.parts.database.commit, BlockChain(MODEL.fingerprint, None, COMMON)
    with ExitStack() as until_the_end:

        def then_a_job_begins(change: Any) -> Any:
            done = commit(change)
            until_the_end.enter_context(store.parts.holds.using(None, chain.addresses))
            return done

        with monkeypatch.context() as patched:
            patched.setattr(store.parts.database, "commit", then_a_job_begins)
            run_job(store, "forget", "a")
        assert len(files_below(tmp_path / "blocks")) == 2
