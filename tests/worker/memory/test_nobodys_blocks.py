"""Jobs without an agent: what one begins with like another is cached, and nothing else of them is on disk."""

from itertools import count
from pathlib import Path

from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    Agent,
    cache_of,
    cut,
    files_below,
    ids,
    make_model,
    open_store,
)

from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.shared_prefixes import SharedPrefixes
from stoker_worker.memory.store import AgentStore
from stoker_worker.ports import CacheSlice, Restored

COMMON = ids(600)
SEEDS = count(1)


def ask(store: AgentStore, prompt: tuple[int, ...], *, salt: str | None = None) -> Restored:
    """A job's whole way: what is restored is checked, and what is shared is saved as the finaliser does."""
    restored = store.restore(prompt, agent=None, model=MODEL, salt=salt)
    if restored.prefix is not None:
        for ours, theirs in zip(cache_of(prompt[: restored.prefix.n_tokens]), restored.prefix.layers, strict=True):
            assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    if restored.shared_blocks > restored.saved_blocks:
        start, stop = restored.saved_blocks * BLOCK_TOKENS, len(prompt)
        cache = CacheSlice(start, stop, cut(cache_of(prompt), start, stop))
        store.save_blocks(prompt[: restored.shared_blocks * BLOCK_TOKENS], cache, model=MODEL, salt=salt)
    return restored


def question() -> tuple[int, ...]:
    return (*COMMON, *ids(300, seed=next(SEEDS)))


def cached(restored: Restored) -> int:
    return restored.prefix.n_tokens if restored.prefix else 0


def test_the_third_of_those_that_begin_alike_finds_what_the_second_left(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert [cached(ask(store, question())) for _ in range(4)] == [0, 0, 512, 512]
    assert len(files_below(tmp_path / "blocks")) == 2
    assert files_below(tmp_path / "agents") == []


def test_prompts_that_have_nothing_in_common_leave_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert [cached(ask(store, ids(700, seed=seed))) for seed in range(20)] == [0] * 20
    assert files_below(tmp_path / "blocks") == files_below(tmp_path / "agents") == []


def test_nobody_shares_across_salts(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(3):
        ask(store, question(), salt="one")
    assert cached(ask(store, question(), salt="another")) == 0
    assert cached(ask(store, question(), salt="one")) == 512


def test_they_use_what_an_agent_has_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    Agent(store).say(COMMON)
    assert cached(ask(store, question())) == 512


def test_a_prompt_that_comes_again_is_cached_but_for_its_last_token(tmp_path: Path) -> None:
    store, prompt = open_store(tmp_path), ids(512)
    assert [cached(ask(store, prompt)) for _ in range(3)] == [0, 0, 511]


def test_their_blocks_go_before_an_agent_loses_anything(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    agent = Agent(store)
    agent.say(ids(600, seed=1000))
    for _ in range(3):
        ask(store, question())
    store.budget.max_bytes = store.budget.total_bytes - 1
    store.budget.make_room()
    assert agent.restore((*ids(600, seed=1000), 1)).miss_reason is None
    assert cached(ask(store, question())) < 512


def test_those_used_last_stay_longest(tmp_path: Path) -> None:
    store, others = open_store(tmp_path), ids(600, seed=77)
    for start in (COMMON, others, COMMON, others, COMMON):
        ask(store, (*start, *ids(10, seed=next(SEEDS))))
    store.budget.max_bytes = store.budget.total_bytes - 1
    store.budget.make_room()
    assert cached(ask(store, question())) == 512


def test_the_books_are_true(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(3):
        ask(store, question())
    on_disk = sum(path.lstat().st_blocks * 512 for path in (tmp_path, *tmp_path.rglob("*")))
    assert store.budget.total_bytes == on_disk


def test_a_damaged_one_is_a_miss_and_is_written_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(3):
        ask(store, question())
    for path in files_below(tmp_path / "blocks"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    damaged = ask(store, question())
    assert (cached(damaged), damaged.miss_reason) == (0, "block_corrupt")
    ask(store, question())
    assert cached(ask(store, question())) == 512


def test_a_model_whose_state_cannot_be_cut_shares_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for spec in SNAPSHOT_SPECS.values():
        for _ in range(3):
            restored = store.restore(question(), agent=None, model=make_model(spec=spec), salt=None)
            assert (restored.prefix, restored.shared_blocks) == (None, 0)


def test_what_is_remembered_of_prompts_is_bounded_and_a_chain_loses_its_end_first() -> None:
    prefixes = SharedPrefixes(most_blocks=5)
    one, two = [Path(f"one{n}.x") for n in range(4)], [Path(f"two{n}.x") for n in range(3)]
    assert prefixes.note(one) == 0
    assert prefixes.note(one) == 4
    assert prefixes.note(two) == 0
    assert prefixes.note(one) == 2
