"""What is written through, and in which order: versions wait for no cache, and what is noted is written once."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, files_below, ids, open_store
from tests.worker.memory.shared_store.sharing import Machine, SharedFolder

from stoker_worker.memory.checksum import key_of
from stoker_worker.memory.connection import DatabaseFailed
from stoker_worker.memory.shared_store import caches, write_through
from stoker_worker.memory.shared_store.objects import manifest, manifest_name, version_name

LONG = ids(2000)
Start = Callable[..., Machine]


def until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_no_version_waits_for_a_cache(machine: Start, share: SharedFolder) -> None:
    """A cache of an hour is being written when a turn could not be made in the shared store."""
    one = machine("one", max_bps=1)
    one.agent("large").say(LONG[:600])
    one.store.start_upkeep()
    until(lambda: one.store.use().written_bytes > 0)
    beside = one.store.local  # as if the shared store was away just then
    beside.save(one.agent("other").turn(LONG[:20], agent=beside.open_agent("other")))
    one.store._write_through.add("other")
    until((share.objects / version_name("other", 1)).exists)
    assert one.waiting() == 2


def test_every_version_goes_before_any_cache(
    machine: Start, share: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_through, "_AT_ONCE", 3)
    alone = open_store(tmp_path / "one")
    for n in range(8):
        Agent(alone, f"agent-{n}").say(LONG[:300])
    alone.close()
    one = machine("one")
    one.store.meet()
    seen: list[int] = []
    put = one.bucket.put

    def count_and_put(name: str, content: bytes) -> None:
        seen.append(len(files_below(share.objects / "agents")))
        put(name, content)

    one.bucket.put = count_and_put  # type: ignore[method-assign]
    one.write_through()
    assert set(seen) == {8}
    assert one.waiting() == 0


def test_what_is_noted_is_written_once_however_often_it_is_found(machine: Start) -> None:
    one = machine("one")
    for n in range(5):
        one.agent(f"agent-{n}").say(LONG[:20])
    writer = one.store._write_through
    one.write_through()
    once = one.store.use().written_bytes
    for n in range(5):
        one.agent(f"agent-{n}").say(LONG[:20])
    writer._pace = lambda n_bytes: writer._find()  # type: ignore[method-assign]
    one.write_through()
    assert one.store.use().written_bytes <= 2 * once + once // 10
    assert one.waiting() == 0


def test_agents_of_a_shared_store_that_was_never_reached_are_only_here(
    machine: Start, share: SharedFolder, tmp_path: Path
) -> None:
    alone = open_store(tmp_path / "one")
    Agent(alone).say(LONG[:300])
    alone.close()
    share.go_away()
    one = machine("one")
    assert one.agent().tokens() == LONG[:300]
    assert one.store.is_only_here("agent")
    assert not one.store.is_only_here("unknown")
    share.come_back()
    one.notice_return()
    one.write_through()
    assert not one.store.is_only_here("agent")


def test_a_turn_is_saved_though_the_disk_fails_after_it(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    turn = one.agent().turn(LONG[:400])
    local = one.store._versions._local

    def fail(agent_id: str) -> None:
        raise DatabaseFailed("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(one.store._versions, "_local", fail)
        one.store.save(turn)
    assert one.agent().tokens() == LONG[:400]
    assert one.store.is_only_here("agent")
    one.write_through()
    assert local("agent").is_noted is False
    assert machine("two").agent().tokens() == LONG[:400]


def test_a_disk_that_takes_no_notes_makes_nothing_be_written_again(machine: Start) -> None:
    one = machine("one")
    one.agent().say(LONG[:600])
    database, commit = one.store.local.parts.database, one.store.local.parts.database.commit

    def refuse(change: object) -> None:
        raise DatabaseFailed("database or disk is full")

    database.commit = refuse  # type: ignore[method-assign,assignment]
    for _ in range(3):
        with pytest.raises(DatabaseFailed):
            one.write_through()
    n_bytes = one.store.use().written_bytes
    database.commit = commit  # type: ignore[method-assign]
    one.write_through()
    assert (one.waiting(), one.store.use().written_bytes) == (0, n_bytes)
    assert n_bytes < 1.1 * sum(path.stat().st_size for path in files_below(one.folder / "blocks")) + 20_000


def test_a_full_disk_keeps_nothing_of_a_cache_that_could_not_be_brought(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_AT_ONCE", 1)
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:1800])
    one.write_through()
    writer, n_left = two.store.local.parts.writer, [3]
    stage = writer.stage

    def stage_three(chunks: object) -> Path:
        n_left[0] -= 1
        if n_left[0] < 0:
            raise OSError(28, "No space left on device")
        return stage(chunks)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(writer, "stage", stage_three)
        assert two.agent().cached((*LONG[:1800], 1)) == 0
    assert not files_below(two.folder / "blocks")
    assert two.agent().cached((*LONG[:1800], 1)) == 1800


def test_a_list_that_names_other_files_removes_none_of_them(machine: Start, share: SharedFolder) -> None:
    one = machine("one")
    one.agent("other").say(LONG[:300])
    one.agent().say(LONG[:30])
    one.write_through()
    others = [path for path in files_below(share.objects) if key_of("other").hex()[:32] in path.name]
    assert others
    names = [path.relative_to(share.objects).as_posix() for path in others]
    place = manifest_name(key_of("agent").hex())
    for bad in ([*names, "../x", "pieces/../../x", "stoker.json"], 7, None):
        content = manifest(1, bad) if isinstance(bad, list) else b'{"files": %s}' % str(bad).encode()
        one.bucket.put(place, content)
        one.agent().say((*one.agent().tokens(), 5))
        one.write_through()
    assert one.waiting() == 0
    assert not one.bucket.outage.seconds
    assert all(path.exists() for path in others)


def test_a_cache_that_comes_slowly_is_not_waited_for(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:1500])
    one.write_through()
    monkeypatch.setattr(caches, "_JOB_WAITS_S", -1.0)
    assert two.agent().cached((*LONG[:1500], 1)) == 0
    two.store._prepare("agent")  # nobody waits for this
    assert two.agent().cached((*LONG[:1500], 1)) == 1500


def test_what_came_before_the_shared_store_went_away_is_used_and_counted(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_AT_ONCE", 1)
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:1800])
    one.write_through()
    get, n_got = two.bucket.get, [0]

    def get_three(name: str, limit_s: float | None = None) -> bytes | None:
        if name.startswith("blocks"):
            n_got[0] += 1
            if n_got[0] > 3:
                raise two.bucket.away("no answer")
        return get(name, limit_s)

    two.bucket.get = get_three  # type: ignore[method-assign]
    assert two.agent().cached((*LONG[:1800], 1)) == 768
    with two.store.local.parts.database.snapshot() as connection:
        assert connection.execute("SELECT count(*) FROM blocks").fetchone() == (3,)


def test_blocks_that_a_list_has_and_that_are_gone_are_written_again_by_whoever_missed_them(
    machine: Start, share: SharedFolder
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:900])
    one.write_through()
    for path in files_below(share.objects / "blocks"):
        path.unlink()
    assert two.agent().cached((*LONG[:900], 1)) == 0
    two.agent().say(LONG[:910])
    two.write_through()
    assert machine("three").agent().cached((*LONG[:910], 1)) == 910
