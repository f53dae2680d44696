"""Eviction is a decision on the books alone: who goes first, and who never."""

from pathlib import Path

from stoker_worker.memory.disk_usage import FolderUse
from stoker_worker.memory.eviction import Plan, plan_eviction
from stoker_worker.memory.ledger import Ledger

BLOCK = 100


def ledger_of(clock: list[float] | None = None, **agents: str) -> Ledger:
    """Agents from the least to the most recently used, each with its blocks, a letter each, and 10 bytes of pieces."""
    ledger = Ledger((lambda: clock[0]) if clock else (lambda: 0.0))
    for name, blocks in agents.items():
        for block in blocks:
            ledger.set_block(Path(block), BLOCK)
        ledger.set_agent(Path(name), name, FolderUse(kept_bytes=1000, piece_bytes=10))
        ledger.set_blocks_of(Path(name), tuple(map(Path, blocks)))
        ledger.touch(Path(name), name)
    return ledger


def plan(ledger: Ledger, need: int, protected: str = "", held: str = "", **options: float) -> tuple[str, str]:
    found = plan_eviction(
        ledger,
        need_bytes=need,
        protected=frozenset(protected.split()),
        held=frozenset(map(Path, held)),
        **options,  # type: ignore[arg-type]
    )
    return "".join(map(str, found.blocks)), " ".join(map(str, found.agents))


def test_nothing_goes_while_there_is_room() -> None:
    assert plan(ledger_of(one="abc"), 0) == ("", "")
    assert not Plan()


def test_blocks_without_a_user_go_first() -> None:
    ledger = ledger_of(one="abc", two="xyz")
    ledger.set_blocks_of(Path("two"), (Path("x"),))
    assert plan(ledger, 1) == ("z", "")
    assert plan(ledger, 150) == ("zy", "")
    assert plan(ledger, 201) == ("zy", "one")


def test_the_least_recently_used_agent_goes_first_and_its_chain_from_the_end() -> None:
    ledger = ledger_of(one="abc", two="xyz")
    assert plan(ledger, 210) == ("cb", "one")
    ledger.touch(Path("one"), "one")
    assert plan(ledger, 210) == ("zy", "two")
    assert plan(ledger, 10**9) == ("zyxcba", "two one")


def test_an_agent_with_work_loses_nothing() -> None:
    assert plan(ledger_of(one="abc", two="xyz"), 10**9, protected="one") == ("zyx", "two")
    assert plan(ledger_of(one="abc", two="xyz"), 10**9, protected="one two") == ("", "")


def test_a_shared_block_stays_as_long_as_one_that_stays_uses_it() -> None:
    ledger = ledger_of(one="abc", two="abz")
    assert plan(ledger, 110) == ("c", "one")
    assert plan(ledger, 300) == ("czb", "one two")
    assert plan(ledger, 10**9, protected="two") == ("c", "one")
    assert plan(ledger, 10**9, protected="one") == ("z", "two")


def test_what_is_held_stays_whoever_uses_it() -> None:
    assert plan(ledger_of(one="abc"), 10**9, held="b") == ("ca", "one")
    ledger = ledger_of(one="abc")
    ledger.set_blocks_of(Path("one"), ())
    assert plan(ledger, 10**9, held="ac") == ("b", "one")


def test_what_nobody_has_used_for_long_goes_even_when_there_is_room() -> None:
    clock = [5.0]
    ledger = ledger_of(clock, one="abc")
    ledger.set_blocks_of(Path("one"), (Path("a"), Path("b")))
    clock[0] = 6.0
    ledger.set_blocks_of(Path("one"), (Path("a"),))
    assert plan(ledger, 0, unused_before=4.0) == ("", "")
    assert plan(ledger, 0, unused_before=5.0) == ("c", "")
    ledger.set_blocks_of(Path("one"), (Path("a"), Path("c")))
    assert plan(ledger, 0, unused_before=6.0) == ("b", "")


def test_a_plan_is_no_longer_than_asked_for() -> None:
    assert plan(ledger_of(one="abc", two="xyz"), 10**9, most_blocks=4) == ("cbaz", "one two")


def test_an_agent_that_has_lost_everything_is_not_planned_again() -> None:
    ledger = ledger_of(one="ab", two="x")
    for block in "ab":
        ledger.set_block(Path(block), None)
    ledger.set_agent(Path("one"), "one", FolderUse(1000, 0))
    assert plan(ledger, 1) == ("", "two")
    assert ledger.total_bytes == 2110
