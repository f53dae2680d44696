"""Eviction plans: the order, and the files that are never evicted."""

from pathlib import Path

from stoker_worker.memory.disk_usage import FolderUse
from stoker_worker.memory.eviction import Plan, plan_eviction
from stoker_worker.memory.usage import StoreUsage

BLOCK = 100


def usage_of(clock: list[float] | None = None, **agents: str) -> StoreUsage:
    """Agents from the least to the most recently used, each with its blocks, a letter each, and 10 bytes of pieces."""
    usage = StoreUsage((lambda: clock[0]) if clock else (lambda: 0.0))
    for name, blocks in agents.items():
        for block in blocks:
            usage.set_block(Path(block), BLOCK)
        usage.set_agent(Path(name), name, FolderUse(kept_bytes=1000, piece_bytes=10))
        usage.set_blocks_of(Path(name), tuple(map(Path, blocks)))
        usage.touch(Path(name), name)
    return usage


def plan(usage: StoreUsage, need: int, pinned: str = "", held: str = "", **options: float) -> tuple[str, str]:
    found = plan_eviction(
        usage,
        need_bytes=need,
        pinned=frozenset(pinned.split()),
        held=frozenset(map(Path, held)),
        **options,  # type: ignore[arg-type]
    )
    return "".join(map(str, found.blocks)), " ".join(map(str, found.agents))


def test_nothing_is_evicted_below_the_limit() -> None:
    assert plan(usage_of(one="abc"), 0) == ("", "")
    assert not Plan()


def test_blocks_without_a_user_go_first() -> None:
    usage = usage_of(one="abc", two="xyz")
    usage.set_blocks_of(Path("two"), (Path("x"),))
    assert plan(usage, 1) == ("z", "")
    assert plan(usage, 150) == ("zy", "")
    assert plan(usage, 201) == ("zy", "one")


def test_the_least_recently_used_agent_goes_first_and_its_chain_from_the_end() -> None:
    usage = usage_of(one="abc", two="xyz")
    assert plan(usage, 210) == ("cb", "one")
    usage.touch(Path("one"), "one")
    assert plan(usage, 210) == ("zy", "two")
    assert plan(usage, 10**9) == ("zyxcba", "two one")


def test_an_agent_with_work_loses_nothing() -> None:
    assert plan(usage_of(one="abc", two="xyz"), 10**9, pinned="one") == ("zyx", "two")
    assert plan(usage_of(one="abc", two="xyz"), 10**9, pinned="one two") == ("", "")


def test_a_shared_block_stays_while_a_remaining_agent_uses_it() -> None:
    usage = usage_of(one="abc", two="abz")
    assert plan(usage, 110) == ("c", "one")
    assert plan(usage, 300) == ("czb", "one two")
    assert plan(usage, 10**9, pinned="two") == ("c", "one")
    assert plan(usage, 10**9, pinned="one") == ("z", "two")


def test_a_held_block_is_never_evicted() -> None:
    assert plan(usage_of(one="abc"), 10**9, held="b") == ("ca", "one")
    usage = usage_of(one="abc")
    usage.set_blocks_of(Path("one"), ())
    assert plan(usage, 10**9, held="ac") == ("b", "one")


def test_blocks_unused_for_long_are_removed_even_below_the_limit() -> None:
    clock = [5.0]
    usage = usage_of(clock, one="abc")
    usage.set_blocks_of(Path("one"), (Path("a"), Path("b")))
    clock[0] = 6.0
    usage.set_blocks_of(Path("one"), (Path("a"),))
    assert plan(usage, 0, unused_before=4.0) == ("", "")
    assert plan(usage, 0, unused_before=5.0) == ("c", "")
    usage.set_blocks_of(Path("one"), (Path("a"), Path("c")))
    assert plan(usage, 0, unused_before=6.0) == ("b", "")


def test_a_plan_has_at_most_the_blocks_asked_for() -> None:
    assert plan(usage_of(one="abc", two="xyz"), 10**9, most_blocks=4) == ("cbaz", "one two")


def test_an_agent_without_cache_is_not_planned_again() -> None:
    usage = usage_of(one="ab", two="x")
    for block in "ab":
        usage.set_block(Path(block), None)
    usage.set_agent(Path("one"), "one", FolderUse(1000, 0))
    assert plan(usage, 1) == ("", "two")
    assert usage.total_bytes == 2110
