"""The upkeep of a store: what is written later, forgotten and corrected, and that work is never in its way."""

import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.wait import wait_for
from tests.worker.memory.agents import (
    Agent,
    call_of_session,
    disk_bytes,
    files_below,
    ids,
    open_store,
    problems_of,
    rows,
    tidy,
    walk,
)
from tests.worker.memory.faulty_files import FullFiles
from tests.worker.memory.flips import spoil

from stoker_worker import events
from stoker_worker.memory import cache_index, database, transcripts, upkeep
from stoker_worker.memory.database import Damaged
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import Delivery

LONG = ids(1300)
NOBODY = frozenset[str]()
HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def _no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_REST_S", 0.0)
    monkeypatch.setattr(upkeep, "_EVERY_S", 0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentCacheStore]:
    with closing(open_store(tmp_path)) as store:
        yield store


def one_round(store: AgentCacheStore) -> None:
    """All that the thread does in a round."""
    tidy(store)
    walk(store)


def last_used(store: AgentCacheStore, name: str) -> float:
    ((used_at,),) = rows(store, "SELECT last_used FROM agents WHERE agent_id = ?", name)
    return float(used_at)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_uses_and_ends_of_jobs_are_written_although_no_turn_comes(store: AgentCacheStore) -> None:
    agent = Agent(store)
    agent.say(LONG[:10])
    before = last_used(store, "agent")
    agent.restore(LONG[:20])
    store.ended("agent", Delivery("job-1", "2024-01-01T00:00:00Z"), remember_s=-1.0)
    store.start_upkeep()
    wait_for(lambda: rows(store, "SELECT count(*) FROM deliveries") == [(0,)])
    assert last_used(store, "agent") > before


def test_a_disk_that_refuses_is_one_line_in_the_log_and_one_when_it_takes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_QUIET_S", 0.1)
    files = FullFiles()
    with closing(AgentCacheStore(tmp_path, files=files, connector=files.connector, max_bytes=1 << 30)) as store:
        agents = [Agent(store, name) for name in "abc"]
        for agent in agents:
            agent.say(LONG[:300])
        caplog.clear()
        files.arm(1, 10**9)
        store.start_upkeep()
        for agent in agents:
            with pytest.raises(OSError, match=r"No space|is full"):
                agent.say(LONG[:700])
            store.ended(agent.name, Delivery("job-1", ""), remember_s=HOUR_S)  # to be noted
            with pytest.raises(OSError, match=r"No space"):
                store.mark_unsaved(agent.name)
        tidy = Mock(wraps=store._upkeep.tidy)
        monkeypatch.setattr(store._upkeep, "tidy", tidy)
        wait_for(lambda: tidy.call_count > 25)
        files.arm(1, 0)
        wait_for(lambda: "outage over" in caplog.text)
    lines = [record.message for record in caplog.records if "cache missed" not in record.message]
    assert [line.partition(":")[0] for line in lines] == ["outage begins", "outage over"]


def test_uses_and_ends_of_jobs_are_written_when_the_store_is_closed(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        for name in "ab":
            Agent(store, name).say(LONG[:10])
        Agent(store, "a").restore(LONG[:20])
        store.ended("b", Delivery("job-1", "2024-01-01T00:00:00Z"), remember_s=-1.0)
    with closing(open_store(tmp_path)) as store:
        assert last_used(store, "a") > last_used(store, "b")
        one_round(store)
        assert rows(store, "SELECT agent_id FROM deliveries JOIN agents ON number = agent") == [("a",)]


def test_what_is_written_later_never_grows_beyond_a_bound_without_upkeep(store: AgentCacheStore) -> None:
    Agent(store).say(LONG[:10])
    for number in range(3000):
        store.ended("agent", Delivery(f"job-{number}", ""), remember_s=HOUR_S)
        assert len(store._notes) <= 1024


def test_agents_unused_for_longer_than_their_ttl_are_removed_with_their_files(tmp_path: Path) -> None:
    names = ["old", "read today", "busy", "waiting", "waiting elsewhere", "new"]
    with closing(open_store(tmp_path, agent_ttl_s=HOUR_S)) as store:
        for name in names:
            Agent(store, name).say(LONG[:300], ids(10, seed=len(name)))
        set_used(store, "UPDATE agents SET used_clock_s = used_clock_s - 3700 WHERE agent_id != 'new'")
        one_round(store)  # nobody knows yet who has work
        store.pin(frozenset({"busy"}), frozenset({"waiting"}), is_all=False)
        one_round(store)
        assert all(Agent(store, name).open().number for name in names)
        store.pin(frozenset({"busy"}), frozenset({"waiting"}))
        store.order_by(lambda agent_id: (0, 7) if agent_id == "waiting elsewhere" else (1, 0))
        Agent(store, "read today").restore(LONG[:300])
        one_round(store)
        assert [name for name in names if Agent(store, name).open().number] == names[1:]
        assert len(list(tmp_path.rglob("*-tail.safetensors"))) == 5
        store.pin(NOBODY, NOBODY)
        one_round(store)
        left = {row[0] for row in rows(store, "SELECT agent_id FROM agents")}
        assert left == {"read today", "waiting elsewhere", "new"}
        assert problems_of(store) == []


def test_no_agent_is_removed_for_what_the_clock_of_the_machine_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time()
    with closing(open_store(tmp_path, agent_ttl_s=HOUR_S)) as store:
        store.pin(NOBODY, NOBODY)
        Agent(store, "before").say(LONG[:10])
        for name, now in (("2001", 1e9), ("ahead", right + 60 * 86_400), ("right", right)):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            one_round(store)
            Agent(store, name).say(LONG[:10])
            Agent(store, "before").restore(LONG[:20])
            one_round(store)
            assert last_used(store, "before") == pytest.approx(right + 60 * 86_400 * (name != "2001"), abs=60)
        assert rows(store, "SELECT count(*) FROM agents") == [(4,)]


def test_the_time_for_which_workers_have_run_is_added_up_over_their_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_s = 0.0

    def run_for(minutes: int, *, used: str) -> set[str]:
        nonlocal boot_s
        boot_s += 12_345.0  # each life has its own monotonic clock, and is down for months
        with closing(open_store(tmp_path, agent_ttl_s=HOUR_S)) as store:
            store._upkeep._ticked_at = boot_s
            store.pin(NOBODY, NOBODY)
            Agent(store, used).say(LONG[:10])
            for minute in range(minutes):
                monkeypatch.setattr(store._upkeep, "_monotonic", lambda m=minute: boot_s + 60.0 * (m + 1))
                one_round(store)
            return {name for (name,) in rows(store, "SELECT agent_id FROM agents")}

    assert run_for(40, used="a") == {"a"}
    assert run_for(20, used="b") == {"a", "b"}
    assert run_for(2, used="c") == {"b", "c"}


def test_a_leap_of_the_clock_that_should_not_leap_removes_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(tmp_path, agent_ttl_s=HOUR_S)) as store:
        store.pin(NOBODY, NOBODY)
        Agent(store).say(LONG[:10])
        for leap_s in (1e7, -1e9, 1e12):
            monkeypatch.setattr(store._upkeep, "_monotonic", lambda s=leap_s: s)
            one_round(store)
        assert rows(store, "SELECT clock_s <= 180 FROM store, agents") == [(1,)]


def test_a_worker_of_seconds_counts_its_seconds(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(open_store(tmp_path)) as store:
            store._upkeep._ticked_at -= 5.0
            store.start_upkeep()
    with closing(open_store(tmp_path)) as store:
        assert 10 <= rows(store, "SELECT clock_s FROM store")[0][0] < 60


def test_without_a_ttl_no_agent_is_removed(store: AgentCacheStore) -> None:
    Agent(store).say(LONG[:10])
    set_used(store, "UPDATE agents SET used_clock_s = -1e9")
    one_round(store)
    assert Agent(store).tokens() == LONG[:10]


def test_cache_files_that_a_crash_left_are_removed_when_no_save_can_be_writing_them(
    tmp_path: Path, store: AgentCacheStore
) -> None:
    agent = Agent(store)
    agent.say(LONG[:600])
    kept = files_below(tmp_path / "blocks") + files_below(tmp_path / "pieces")
    left = []
    for path in kept:
        young, old = (path.with_name(path.name.replace("-1-", f"-{n}-")) for n in (8, 9))
        if path.parent.parent.parent.name == "blocks":
            young, old = (path.with_name(path.name.replace(path.stem[2:18], x * 16)) for x in "ab")
        for copy in (young, old):
            copy.write_bytes(path.read_bytes())
        age(old, 700)
        age(path, 700)
        left.append(young)
    one_round(store)
    assert files_below(tmp_path / "blocks") + files_below(tmp_path / "pieces") == sorted(kept + left)
    assert agent.cached(LONG[:700]) == 600


def test_a_block_that_work_counts_on_stays_although_no_row_names_it(tmp_path: Path, store: AgentCacheStore) -> None:
    Agent(store).say(LONG[:600])
    for path in files_below(tmp_path / "blocks"):
        store.parts.database.commit(partial(cache_index.remove_block, address=path.stem, now=0.0))
        age(path, 700)
    store.pin(frozenset({"other"}), NOBODY)
    other = Agent(store, "other")
    turn = other.turn((*LONG[:600], 1))
    one_round(store)
    store.save(turn)
    store.pin(NOBODY, NOBODY)
    one_round(store)
    assert other.cached((*LONG[:600], 1, 2)) == 601
    assert problems_of(store) == []


def test_the_index_follows_the_files(tmp_path: Path, store: AgentCacheStore) -> None:
    for name, length in (("a", 700), ("b", 900), ("c", 300)):
        Agent(store, name).say(ids(length, seed=ord(name)))
    blocks, pieces = files_below(tmp_path / "blocks"), files_below(tmp_path / "pieces")
    for path in (blocks[0], blocks[3], pieces[1]):
        path.unlink()
    with pieces[2].open("ab") as file:
        file.write(bytes(50_000))
    blocks[1].write_bytes(blocks[1].read_bytes() * 5)
    store.parts.database.commit(lambda connection: database.count_bytes(connection, 12_345))
    one_round(store)
    one_round(store)  # rows without a file are noted, and written with the next round
    assert store.budget.total_bytes == disk_bytes(tmp_path)
    assert len(rows(store, "SELECT * FROM blocks")) == len(files_below(tmp_path / "blocks"))
    ((counted,),) = rows(store, "SELECT (SELECT sum(n_bytes) FROM blocks) + (SELECT sum(piece_bytes) FROM agents)")
    assert rows(store, "SELECT cache_bytes FROM store") == [(counted,)]


def test_folders_of_cache_files_may_be_removed_at_any_moment(tmp_path: Path, store: AgentCacheStore) -> None:
    for name in ("a", "b"):
        Agent(store, name).say(ids(700, seed=ord(name)))
    for folder in (*tmp_path.glob("blocks/*"), *tmp_path.glob("pieces/*")):
        shutil.rmtree(folder)
    one_round(store)
    one_round(store)  # what the first one has noted is written
    assert store.budget.total_bytes == disk_bytes(tmp_path)
    assert rows(store, "SELECT 1 FROM blocks UNION ALL SELECT 1 FROM agents WHERE last_block NOTNULL") == []
    assert Agent(store, "a").say(ids(800, seed=ord("a"))) == 2
    assert problems_of(store) == []


def test_a_walk_changes_nothing_in_a_store_that_is_right(store: AgentCacheStore) -> None:
    for number in range(100):
        Agent(store, f"agent {number}").say(ids(270, seed=number % 30), (number,))
    tidy(store)
    before = rows(store, "SELECT commits FROM store")
    walk(store)
    assert rows(store, "SELECT commits FROM store") == before


def test_the_log_is_emptied_beside_the_turns(tmp_path: Path, store: AgentCacheStore) -> None:
    for number in range(60):
        Agent(store, f"agent {number}").say(ids(10), ids(3000, seed=number))
    assert store.parts.database.log_bytes() > 1 << 20
    size = (tmp_path / "agents.db").stat().st_size
    one_round(store)
    assert (tmp_path / "agents.db").stat().st_size > size


def test_a_round_that_fails_does_not_end_the_thread(
    store: AgentCacheStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = iter([OSError("disk away"), ValueError("a bug")])
    rounds = []

    def no_folders(parts: StoreParts) -> list[Path]:
        rounds.append(1)
        if (error := next(errors, None)) is not None:
            raise error
        return []

    monkeypatch.setattr(upkeep, "_WALK_EVERY_S", 0.0)
    monkeypatch.setattr(upkeep, "cache_folders", no_folders)
    store.start_upkeep()
    wait_for(lambda: len(rounds) > 2)
    assert "disk away" in caplog.text
    assert "a bug" in caplog.text


def with_a_damaged_answer(folder: Path, **options: Any) -> AgentCacheStore:
    """A store with an expired answer that SQLite refuses to remove."""
    with closing(open_store(folder)) as store:
        Agent(store, "answered").say(LONG[:10])
        store.parts.database.commit(lambda connection: connection.execute("UPDATE deliveries SET expires = 1.5"))
        ((result,),) = rows(store, "SELECT result FROM deliveries")
    spoil(folder, result.encode(), struct.pack(">d", 1.5))
    return open_store(folder, **options)


def test_a_damaged_answer_keeps_no_cache_from_eviction_and_no_agent_from_its_end(tmp_path: Path) -> None:
    with closing(with_a_damaged_answer(tmp_path, agent_ttl_s=HOUR_S)) as store:
        for name in ("old", "new"):
            Agent(store, name).say(LONG[:600])
        set_used(store, "UPDATE agents SET used_clock_s = used_clock_s - 3700 WHERE agent_id = 'old'")
        store.pin(NOBODY, NOBODY)
        store.budget.max_bytes = 1
        with pytest.raises(Damaged):
            tidy(store)
        assert list(tmp_path.rglob("*.safetensors")) == []
        assert {name for (name,) in rows(store, "SELECT agent_id FROM agents")} == {"answered", "new"}


def test_what_stops_one_part_of_the_upkeep_stops_no_other(tmp_path: Path) -> None:
    orphan = tmp_path / "pieces" / "ab" / f"{'ab' * 16}-1-tail.safetensors"
    with closing(with_a_damaged_answer(tmp_path, session_ttl_s=HOUR_S)) as store:
        call_of_session(store, LONG[:600])
        set_used(store, f"UPDATE agents SET used_clock_s = used_clock_s - 3700 WHERE {transcripts.IS_OF_SESSION}")
        orphan.parent.mkdir(exist_ok=True)
        orphan.touch()
        age(orphan, 700)
        store.pin(NOBODY, NOBODY)
        store.start_upkeep()
        wait_for(lambda: not orphan.exists())
        assert rows(store, "SELECT agent_id FROM agents") == [("answered",)]


def set_used(store: AgentCacheStore, sql: str) -> None:
    store._notes.write()
    store.parts.database.commit(lambda connection: connection.execute(sql))


def test_an_agent_that_cannot_be_removed_keeps_no_other_from_it(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, agent_ttl_s=HOUR_S)) as store:
        damaged = [f"damaged {number}" for number in range(20)]  # more than are removed at once
        for name in (*damaged, "old"):
            Agent(store, name).say(LONG[:10])
        set_used(store, "UPDATE agents SET used_clock_s = used_clock_s - 3700")
        spoilt = "used_clock_s = used_clock_s - 1, key = CAST(number AS BLOB)"
        set_used(store, f"UPDATE agents SET {spoilt} WHERE agent_id != 'old'")
        store.pin(NOBODY, NOBODY)
        one_round(store)
        assert [row[0] for row in rows(store, "SELECT agent_id FROM agents ORDER BY number")] == damaged


@pytest.mark.parametrize("damage", ["piece_bytes = 'z'", "last_block = 'zz'"])
def test_a_damaged_size_stops_no_turn_of_another_agent_and_no_eviction(tmp_path: Path, damage: str) -> None:
    with closing(open_store(tmp_path, max_bytes=200_000)) as store:
        for name in ("damaged", "idle", "busy"):
            Agent(store, name).say(ids(600, seed=len(name)))
        set_used(store, f"UPDATE agents SET {damage} WHERE agent_id = 'damaged'")
        store.budget.max_bytes = 60_000
        busy = Agent(store, "busy")
        assert busy.say((*busy.tokens(), 1, 2)) == 2
        assert store.open_agent("idle").evicted


def test_a_note_that_a_damaged_row_refuses_is_dropped_alone(store: AgentCacheStore, tmp_path: Path) -> None:
    agent = Agent(store)
    agent.say(LONG[:600])
    set_used(store, "UPDATE blocks SET n_bytes = 'q'")
    for path in tmp_path.rglob("blocks/*/*/*.safetensors"):
        path.unlink()
    agent.restore((*agent.tokens(), 1))
    one_round(store)
    store._notes.write()
    assert len(store._notes) == 0


def test_a_note_that_a_damaged_row_refuses_takes_no_other_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["first", "damaged", "last"]
    with closing(open_store(tmp_path)) as store:
        for name in names:
            Agent(store, name).say(LONG[:10])
        before = {name: last_used(store, name) for name in names}
    spoil(tmp_path, b"damaged" + database.key_of("damaged"), struct.pack(">d", before["damaged"]))
    with closing(open_store(tmp_path)) as store:
        for name in names:
            Agent(store, name).restore(LONG[:20])
        for _ in range(2):
            tidy(store)
        assert [name for name in names if last_used(store, name) > before[name] + 1e-4] == ["first", "last"]
    assert caplog.text.count("cannot be noted") == 1
