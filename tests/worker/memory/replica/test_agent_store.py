"""Conversations of agents that move from machine to machine: exact, each version once, and nothing lost in silence."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import ObjectStore
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    files_below,
    ids,
    make_model,
    problems_of,
)
from tests.worker.memory.replica.sharing import BOTH, Machine, Share, SharedAgent

from stoker_shared.agents import build_agent_request
from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict, SharedStoreAway, VersionTaken
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.blocks import read_place
from stoker_worker.memory.replica.shared_replica import opened_with_shared
from stoker_worker.memory.replica.versions import EMPTIED, versions_folder
from stoker_worker.ports import Delivery, LastVersion

pytestmark = pytest.mark.slow

LONG = ids(2000)
Start = Callable[..., Machine]
MODELS = {"full": MODEL, **{name: make_model(name, spec=spec) for name, spec in SNAPSHOT_SPECS.items()}}


def versions(share: Share) -> list[str]:
    return [path.name for path in files_below(share.objects / "agents")]


def cached(agent: SharedAgent, prompt: Sequence[int]) -> int:
    return agent.cached((*prompt, 1))


@pytest.mark.parametrize(
    ("share", "kind"), [*(("folder", kind) for kind in MODELS), ("bucket", "hybrid")], indirect=["share"]
)
def test_a_conversation_goes_on_where_its_machine_is_gone(machine: Start, kind: str) -> None:
    first = machine("first")
    agent = first.agent(model=MODELS[kind])
    turns = []
    for n in (300, 320, 900):
        turns.append(agent.turn(LONG[:n], LONG[n : n + 10]))
        first.store.save(turns[-1])
    before = agent.open()
    first.write_behind()
    second = machine("second")
    agent = second.agent(model=MODELS[kind])
    after = agent.open()
    assert (after.number, after.head, after.transcript, after.cache) == (
        3,
        before.head,
        before.transcript,
        before.cache,
    )
    assert cached(agent, LONG[:910]) == 910  # `restore` compares each byte
    assert second.store.answer("agent", turns[-1].delivery) == turns[-1].result
    assert agent.say(LONG[:1000]) == 4
    assert not problems_of(second.store)


@pytest.mark.parametrize("kind", SNAPSHOT_SPECS)
def test_an_edited_conversation_goes_on_from_a_checkpoint_of_another_machine(
    machine: Start, share: Share, kind: str
) -> None:
    first = machine("first")
    agent = first.agent(model=MODELS[kind])
    for n_tokens in (500, 700, 1100, 1500, 1900):
        agent.say(ids(n_tokens))
    first.write_behind()
    assert len(list(share.objects.rglob("*-checkpoint.*"))) == 3  # one state for each turn could take any room
    for name, n_same, n_cached, n_brought in (
        ("second", 1000, 500, 1),
        ("third", 1400, 1100, 2),
        ("other", 1600, 1500, 1),
    ):
        other = machine(name)
        agent = other.agent(model=MODELS[kind])
        assert cached(agent, ids(1900)[:n_same]) == n_cached
        brought = list(other.store.parts.path.rglob("*-checkpoint.*"))
        assert len(brought) == n_brought
        with other.store.parts.database.snapshot() as connection:
            counted = cache_index.checkpoint_bytes(connection)
        assert counted == sum(path.stat().st_blocks * 512 for path in brought)
        assert not problems_of(other.store)


@BOTH
def test_two_machines_never_write_one_version(machine: Start, share: Share) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    assert two.agent().tokens() == LONG[:300]
    saved = {}
    for n in range(4):
        turns = {m: m.agent().turn(LONG[: 400 + 10 * n], (7, i, n)) for i, m in enumerate((one, two))}
        barrier = threading.Barrier(2)

        def save(m: Machine, turns: dict = turns, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                m.store.save(turns[m])
            except VersionTaken:
                return False
            return True

        with ThreadPoolExecutor(2) as threads:
            done = dict(zip(turns, threads.map(save, turns), strict=True))
        assert sorted(done.values()) == [False, True]
        (winner,) = (m for m in turns if done[m])
        saved[n + 2] = turns[winner].transcript.token_ids
        for m, turn in turns.items():  # the loser has the winner's
            assert m.agent().tokens() == saved[n + 2]
            assert m.store.answer("agent", turn.delivery) == (turn.result if m is winner else None)
    assert len(versions(share)) == 5
    assert not [problem for m in (one, two) for problem in problems_of(m.store)]


@BOTH
def test_a_lost_reply_is_no_conflict(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one")
    one.agent().say(LONG[:10])
    create, lost = one.bucket.create, []

    def create_and_lose(name: str, content: bytes) -> bool:
        create(name, content)
        lost.append(name)
        return create(name, content)

    monkeypatch.setattr(one.bucket, "create", create_and_lose)
    assert one.agent().say(LONG[:20]) == 2
    assert lost


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("next_one", ["a turn elsewhere", "a rollback", "a fork"])
def test_cache_files_of_a_turn_that_a_crash_cut_short_are_not_those_of_the_next_version(
    machine: Start, monkeypatch: pytest.MonkeyPatch, next_one: str
) -> None:
    one, two = machine("one"), machine("two")
    one.agent("whole blocks").say(LONG[:512])
    if next_one != "a fork":
        one.agent().say(LONG[:300])
    turn = one.agent().turn(LONG[:310])

    def killed(*args: object) -> bool:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(one.bucket, "create", killed)
        with pytest.raises(Killed):
            one.store.save(turn)
    if next_one == "a turn elsewhere":
        two.agent().say(LONG[:320])
        assert one.agent().tokens() == LONG[:320]
    elif next_one == "a rollback":
        one.run("rollback", version=1)
    else:
        one.run("fork", "whole blocks", target="agent")
    assert not problems_of(one.store)


def test_another_run_of_the_job_has_made_the_version(machine: Start) -> None:
    """A worker slept beyond its lease, or its put arrived late: its turn is the job's, not the other run's."""
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    first = one.agent().turn(LONG[:400])
    second = replace(two.agent().turn(LONG[:500]), delivery=first.delivery)
    one.store.save(first)
    one.agent().say(LONG[:600])
    assert two.store.save(second) == first.result
    assert (two.agent().open().number, two.agent().tokens()) == (3, LONG[:600])


def test_only_the_look_of_who_has_made_the_newest_version_asks_nobody(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    assert not one.store.look("agent", LastVersion(1, "one", is_here=True))
    two.agent().say(LONG[:400])
    assert one.store.look("agent", LastVersion(2, "one", is_here=True))  # by what is here, it did not
    assert one.agent().tokens() == LONG[:400]
    for last in (None, LastVersion(2, "two", is_here=False), LastVersion(1, "one", is_here=True)):
        assert one.store.look("agent", last)


def test_a_number_that_is_closed_is_taken_from_a_turn_that_is_on_its_way(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:600])
    late, late_at_first = one.agent().turn(LONG[:700]), one.agent("new").turn(LONG[:10])
    two.store.close_number("agent")
    two.store.close_number("new")
    for turn in (late, late_at_first):
        with pytest.raises(VersionTaken):
            one.store.save(turn)
    for m in (one, two):
        assert (m.agent().open().number, m.agent().tokens()) == (2, LONG[:600])
        assert (m.agent("new").open().number, m.agent("new").open().transcript) == (1, None)
    assert one.agent("new").say(LONG[:20]) == 2
    assert not [problem for m in (one, two) for problem in problems_of(m.store)]


# --- deliveries ---


def test_deliveries_of_an_agent_that_goes_back_and_forth_are_not_kept_for_ever(machine: Start) -> None:
    machines = machine("one"), machine("two")
    for n in range(1, 20):
        turn = machines[n % 2].agent().turn(LONG[: 10 * n])
        machines[n % 2].store.save(turn)
        machines[n % 2].store.ended("agent", turn.delivery, remember_s=86_400)
    for m in machines:
        m.store.look("agent")
        with m.store.parts.database.snapshot() as connection:
            ended = transcripts.ends_for(connection, 1)
        assert len(ended) == 19
        assert sum(one.until > time.time() + 3 * 86_400 for one in ended.values()) <= 1  # of the newest version


@pytest.mark.parametrize("n_turns", [0, 2, 39])
def test_a_delivery_is_answered_elsewhere_though_the_clock_where_it_was_made_was_years_behind(
    machine: Start, monkeypatch: pytest.MonkeyPatch, n_turns: int
) -> None:
    """A Mac whose clock was never set is in 1970."""
    one, two = machine("one"), machine("two")
    with monkeypatch.context() as patch:
        now = time.time
        patch.setattr(time, "time", lambda: now() - 400 * 86_400)
        turn = one.agent().turn(LONG[:10])
        one.store.save(turn)
        for n in range(n_turns):
            one.agent().say(LONG[: 20 + 10 * n])
    two.store.look("agent")
    two.store.parts.database.commit(partial(transcripts.forget_answers, now=time.time()))
    assert two.store.answer("agent", turn.delivery) == turn.result


@pytest.mark.parametrize("n_turns", [0, 1])
def test_a_delivery_from_before_a_forget_never_becomes_a_turn_again(machine: Start, n_turns: int) -> None:
    one, two = machine("one"), machine("two")
    turn = one.agent().turn(LONG[:10])
    one.store.save(turn)
    forgotten = one.run("forget")
    for n in range(n_turns):
        one.agent().say(LONG[: 20 + n])
    for m in (one, two):
        m.store.look("agent")
        with pytest.raises(AgentVersionConflict, match="its answer is not kept any more"):  # fails a `full` job too
            m.store.answer("agent", turn.delivery)
        request = build_agent_request({"action": "forget", "agent_id": "agent"})
        known = m.store.agent_jobs.answer(request, Delivery("forget-agent", "now"))
        assert known is not None
        assert (known.model_dump()["version"], known.agent_id) == (forgotten.model_dump()["version"], "agent")


# --- the shared store is away ---


@BOTH
def test_while_the_shared_store_is_away_nothing_is_saved_and_nothing_is_lost(
    machine: Start, share: Share, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = machine("one"), machine("two")
    agent = one.agent()
    agent.say(LONG[:300])
    turn = agent.turn(LONG[:400])
    share.go_away()
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(SharedStoreAway):
            one.store.save(turn)
    with pytest.raises(SharedStoreAway):
        one.store.look("agent")
    with pytest.raises(SharedStoreAway):
        one.run("forget")
    assert time.monotonic() - began < 30.0
    assert one.store.is_away()
    assert one.store.open_agent("agent").number == 1
    share.come_back()
    one.notice_return()
    assert [r.message[:12] for r in caplog.records if "outage" in r.message] == ["outage begin", "outage over:"]
    assert one.store.save(turn) == turn.result
    assert (two.agent().open().number, two.agent().tokens()) == (2, LONG[:400])


def test_a_put_whose_reply_is_lost_has_made_the_turn(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    turn, create = one.agent().turn(LONG[:400]), one.bucket.create

    def put_and_lose(name: str, content: bytes) -> bool:
        create(name, content)
        raise one.bucket.away("lost")

    monkeypatch.setattr(one.bucket, "create", put_and_lose)
    with pytest.raises(SharedStoreAway):
        one.store.save(turn)
    monkeypatch.setattr(one.bucket, "create", create)
    one.notice_return()
    assert one.store.look("agent", LastVersion(1, "one", is_here=True))  # although it made the newest that is known
    assert one.store.answer("agent", turn.delivery) == turn.result
    assert one.agent().open().number == 2


def test_a_turn_is_saved_though_the_disk_here_refuses_it(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    turn, database = one.agent().turn(LONG[:400]), one.store.parts.database

    def refuse(run: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(database, "commit", refuse)
        assert one.store.save(turn) == turn.result
    assert two.agent().tokens() == LONG[:400]
    assert (one.agent().open().number, one.agent().tokens()) == (2, LONG[:400])
    assert not problems_of(one.store)


def test_caches_make_room_for_a_version_that_comes_to_a_full_disk(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    two.agent("idle").say(LONG)
    database, blocks = two.store.parts.database, two.folder / "blocks"
    n_before, commit = len(files_below(blocks)), database.commit

    def refuse_until_there_is_room(run: Callable[..., Any]) -> Any:
        if len(files_below(blocks)) == n_before:
            raise OSError(errno.ENOSPC, "full")
        return commit(run)

    monkeypatch.setattr(database, "commit", refuse_until_there_is_room)
    assert two.store.look("agent")
    assert (two.agent().open().number, two.agent().tokens()) == (1, LONG[:300])


# --- damage ---


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@BOTH
def test_a_damaged_version_is_an_error_by_name_and_never_another_text(machine: Start, share: Share) -> None:
    one = machine("one")
    for n in range(1, 4):
        one.agent().say(LONG[: 100 * n])
    flip(files_below(share.objects / "agents")[1])
    two = machine("two")
    with pytest.raises(AgentTranscriptUnreadable, match="in the shared store: version 2 is unusable") as caught:
        two.agent().open()
    with pytest.raises(AgentTranscriptUnreadable):  # again
        two.agent().open()
    machine("three").store.close_number("agent")  # the job fails with its own error
    two.store.save(two.agent().turn(LONG[:40], agent=caught.value.usable))
    assert (two.agent().open().number, two.agent().tokens()) == (4, LONG[:40])
    assert (one.agent().open().number, one.agent().tokens()) == (4, LONG[:40])


@BOTH
def test_an_agent_whose_last_version_lost_its_content_keeps_no_other_one_waiting(machine: Start, share: Share) -> None:
    """The version that forgot it is gone, as from a bucket that was put back from a backup."""
    one = machine("one")
    one.agent("other").say(LONG[:100])
    one.agent().say(LONG[:100])
    one.run("forget")
    files_below(share.objects / versions_folder("agent"))[-1].unlink()
    two = machine("two")
    with pytest.raises(AgentTranscriptUnreadable, match="version 1 was forgotten") as caught:
        two.agent().open()
    assert not two.store.is_away()
    assert two.agent("other").tokens() == LONG[:100]
    with pytest.raises(AgentTranscriptUnreadable):  # again
        two.agent().open()
    two.store.save(two.agent().turn(LONG[:40], agent=caught.value.usable))
    assert machine("three").agent().tokens() == LONG[:40]


def test_a_version_that_alone_is_refused_keeps_no_other_agent_waiting(
    machine: Start, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket lists objects that it has moved to an archive, and refuses to read them."""
    one, two = machine("one"), machine("two")
    for name in ("agent", "other"):
        one.agent(name).say(LONG[:100])
    two.store.meet()
    folder, read = versions_folder("agent"), obstore.get

    def refuse(store: ObjectStore, name: str) -> object:
        if name.startswith(folder):
            raise PermissionDeniedError("InvalidObjectState")
        return read(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "get", refuse)
        with pytest.raises(AgentTranscriptUnreadable, match="version 1 is unusable"):
            two.agent().open()
        assert not two.store.is_away()
        assert two.agent("other").tokens() == LONG[:100]
    assert two.agent().tokens() == LONG[:100]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_version_that_is_gone_is_an_error_by_name(machine: Start, share: Share, missing: int) -> None:
    one = machine("one")
    for n in range(1, 4):
        one.agent().say(LONG[: 100 * n])
    files_below(share.objects / "agents")[missing - 1].unlink()
    two = machine("two").agent()
    if missing < 3:
        with pytest.raises(AgentTranscriptUnreadable, match=f"version {missing} is missing"):
            two.open()
    else:  # as if it had not been written yet
        assert two.tokens() == LONG[:200]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "another"])
def test_a_damaged_cache_is_a_miss(machine: Start, share: Share, harm: str) -> None:
    one = machine("one")
    one.agent().say(LONG[:900])
    one.write_behind()
    blocks = files_below(share.objects / "blocks")
    assert len(blocks) == 3
    by_size = {path.name: path for path in blocks}
    chain = [by_size[p.name] for p in sorted(files_below(one.folder / "blocks"), key=lambda p: p.stat().st_mtime_ns)]
    if harm == "flip":
        flip(chain[1])
    elif harm == "cut":
        chain[1].write_bytes(chain[1].read_bytes()[:-9])
    elif harm == "remove":
        chain[1].unlink()
    else:
        chain[1].write_bytes(chain[0].read_bytes())
    two = machine("two")
    assert two.agent().tokens() == LONG[:900]
    assert cached(two.agent(), LONG[:900]) in (0, 256, 512)
    two.agent().say(LONG[:910])
    two.write_behind()
    three = machine("three")
    assert cached(three.agent(), LONG[:910]) == 910


def test_a_cache_that_did_not_come_in_takes_no_block_from_other_work(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:900])
    one.write_behind()
    two.store.look("agent")
    held, *others = (path.stem for path in files_below(one.folder / "blocks"))
    database = two.store.parts.database
    commit = database.commit

    def refuse(run: Callable[..., Any]) -> Any:
        monkeypatch.setattr(database, "commit", commit)
        raise OSError(errno.ENOSPC, "full")

    with two.store.budget.using(None, [held]):  # another agent's turn has just written it, too
        monkeypatch.setattr(database, "commit", refuse)
        cached(two.agent(), LONG[:900])
        assert len(others) == 2
        assert [path.stem for path in files_below(two.folder / "blocks")] == [held]


@pytest.mark.parametrize("is_away", [False, True])
def test_an_agent_that_is_damaged_here_is_mended_from_there_and_waits_while_that_is_away(
    machine: Start, share: Share, is_away: bool
) -> None:
    one = machine("one")
    for n in range(1, 5):
        one.agent().say(LONG[: 100 * n])
    one.store.parts.database.commit(lambda c: c.execute("UPDATE turns SET about = '{}' WHERE version = 2"))
    if is_away:
        share.go_away()
        with pytest.raises(SharedStoreAway):
            one.store.open_agent("agent")
        share.come_back()
        one.notice_return()
    assert (one.agent().open().number, one.agent().tokens()) == (4, LONG[:400])
    assert not problems_of(one.store)


def test_an_agent_that_is_damaged_here_and_forgotten_elsewhere_is_forgotten(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:100])
    one.store.parts.database.commit(lambda c: c.execute("UPDATE turns SET about = '{}'"))
    newest = one.versions.newest

    def list_too_early(*args: Any) -> int:
        monkeypatch.undo()
        number = newest(*args)
        two.run("forget")
        return number

    monkeypatch.setattr(one.versions, "newest", list_too_early)
    assert (one.store.open_agent("agent").number, one.store.open_agent("agent").transcript) == (2, None)


def test_an_agent_that_a_command_brings_in_at_the_same_time_fails_no_look(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:100])
    two.agent().say(LONG[:200])
    versions = one.versions
    read = versions.chain

    def read_and_be_overtaken(*args: Any) -> Any:
        monkeypatch.undo()
        with opened_with_shared(one.folder) as parts:
            parts.replica.look("agent")
        return read(*args)

    monkeypatch.setattr(versions, "chain", read_and_be_overtaken)
    assert one.store.look("agent")
    assert (one.store.open_agent("agent").number, one.agent().tokens()) == (2, LONG[:200])


# --- jobs about an agent's memory ---


def test_a_rollback_and_a_fork_are_known_elsewhere(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    one.agent().say(LONG[:600])
    assert two.agent().tokens() == LONG[:600]
    back = one.run("rollback")
    one.run("fork", target="fork")
    assert (two.agent().open().number, two.agent().tokens()) == (3, LONG[:300])
    assert two.agent("fork").tokens() == LONG[:300]
    two.run("fork", "fork", target="other")
    assert one.agent("other").tokens() == LONG[:300]
    for n in range(3, 30):
        one.agent().say(LONG[: 10 * n])
    request = build_agent_request({"action": "rollback", "agent_id": "agent"})
    assert two.store.agent_jobs.answer(request, Delivery("rollback-agent", "now")) == back


@BOTH
def test_a_forgotten_agent_is_forgotten_everywhere_and_its_numbers_stay_used(machine: Start, share: Share) -> None:
    one, two = machine("one"), machine("two")
    for n in (300, 600):
        one.agent().say(LONG[:n])
    one.write_behind()
    assert cached(two.agent(), LONG[:600]) == 600
    stale = two.agent().turn(LONG[:650])
    one.run("forget")
    one.write_behind()
    with pytest.raises(VersionTaken):
        two.store.save(stale)
    for m in (one, two):
        assert (m.agent().open().transcript, m.agent().open().number) == (None, 3)
    contents = [path.read_bytes() for path in files_below(share.objects / "agents")]
    assert contents[:2] == [EMPTIED, EMPTIED]
    assert b"tokens" not in contents[2]
    assert b"agent_id" not in contents[2]
    assert not [path for path in files_below(share.objects) if "tail" in path.name]
    assert two.agent().say(ids(30, seed=3)) == 4
    assert (one.agent().open().number, one.agent().tokens()) == (4, ids(30, seed=3))


def test_an_agent_that_a_command_forgot_is_named_nowhere_in_the_shared_store(machine: Start, share: Share) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    one.write_behind()
    assert forget_agent(one.store.parts, "agent").version == 1
    assert not [path for path in files_below(share.objects / "agents") if b"agent_id" in path.read_bytes()]
    assert machine("two").agent().open().number == 2


@BOTH
def test_a_checkpoint_there_has_no_tokens_that_were_forgotten_or_replaced(machine: Start, share: Share) -> None:
    one = machine("one")

    def n_behind(name: str, prompt: Sequence[int]) -> list[int]:
        one.agent(name, model=MODELS["hybrid"], system_tokens=600).say(prompt)
        one.write_behind()
        places = map(read_place, share.objects.rglob("*-checkpoint.*"))
        return sorted(len(place[1]) for place in places if place is not None)

    assert n_behind("agent", LONG[:700]) == [88]
    assert n_behind("other", ids(700, seed=1)) == [88, 88]
    one.run("forget", "other")
    # One that leaves the first agent's prompt before the end of its system prompt gets a checkpoint for both.
    assert n_behind("third", (*LONG[:520], *ids(180, seed=2))) == [0]


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_cache_that_is_written_after_its_agent_was_forgotten_elsewhere_does_not_stay(
    machine: Start, share: Share, kind: str
) -> None:
    one, two = machine("one"), machine("two")
    one.agent(model=MODELS[kind]).say(LONG[:300])
    two.run("forget")
    one.write_behind()  # this machine does not know of it yet
    left = [path.name for path in files_below(share.objects) if path.suffix == ".safetensors"]
    assert not [name for name in left if "tail" in name or "snapshot" in name]
    assert not files_below(share.objects / "caches")


# --- caches ---


def test_the_bandwidth_is_bounded(machine: Start) -> None:
    one = machine("one", max_bps=1_000_000)
    one.agent().say(LONG[:600])
    began = time.monotonic()
    one.write_behind()
    assert time.monotonic() - began >= one.store.shared_use().written_bytes / 1e6 > 0.05


def test_a_turn_writes_only_what_is_new(machine: Start) -> None:
    one = machine("one")
    one.agent().say(LONG[:1800])
    one.write_behind()
    before = one.store.shared_use().written_bytes
    one.agent().say(LONG[:1810])
    one.write_behind()
    assert one.store.shared_use().written_bytes - before < before / 20


def test_a_long_history_is_brought_in_by_its_last_whole_version(
    machine: Start, share: Share, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("one")
    for n in range(1, 60):
        one.agent().say(LONG[: 10 * n])
    two = machine("two")
    caplog.set_level(logging.INFO)
    assert two.agent().tokens() == LONG[:590]
    with two.store.parts.database.snapshot() as connection:
        assert connection.execute("SELECT count(*) FROM turns").fetchone()[0] <= 16
    for n in range(60, 80):
        two.agent().say(LONG[: 10 * n])
    assert one.agent().tokens() == LONG[:790]
    one.run("rollback", version=70)
    assert not problems_of(one.store)


def test_a_machine_that_only_reads_an_agent_keeps_no_more_versions_than_one_that_writes_it(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    for n in range(1, 51):
        one.agent().say(LONG[: 10 * n])
        assert two.agent().tokens() == LONG[: 10 * n]
    kept: list[tuple[int, int]] = []
    for m in (one, two):
        with m.store.parts.database.snapshot() as connection:
            kept += connection.execute("SELECT count(*), min(version) FROM turns").fetchall()
    assert kept == kept[:1] * 2
    assert kept[0][0] < 32
    assert not problems_of(two.store)


def test_an_agent_that_nobody_uses_is_forgotten_everywhere_and_a_copy_of_one_that_went_on_goes(
    machine: Start, share: Share
) -> None:
    one, two = machine("one"), machine("two")
    for name in ("unused", "moved", "young"):
        one.agent(name).say(LONG[:300])
    one.store.pin(frozenset(), frozenset())
    two.agent("moved").say(LONG[:400])
    for name in ("unused", "moved"):
        for path in files_below(share.objects / versions_folder(name)):
            os.utime(path, (time.time() - 1000, time.time() - 1000))

    def is_here(name: str) -> bool:
        list(one.store._upkeep._forget_unused(500, f"NOT {transcripts.IS_OF_SESSION}"))
        with one.store.parts.database.snapshot() as connection:
            return transcripts.find_agent(connection, name) is not None

    one.store.parts.database.commit(partial(transcripts.advance_clock, seconds=2000))
    assert [is_here(name) for name in ("unused", "moved", "young")] == [False, False, True]
    assert (two.agent("unused").open().number, two.agent("unused").open().transcript) == (2, None)
    assert one.agent("moved").tokens() == LONG[:400]
    assert one.agent("unused").say(LONG[:20]) == 3


def test_an_agent_whose_removal_was_cut_short_is_emptied_by_the_next_one(
    machine: Start, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    replica = one.store.parts.replica

    def be_cut_short(*args: object) -> None:
        raise one.bucket.away("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(one.versions, "empty_below", be_cut_short)
        assert not replica.expire("agent", -1000.0)
    one.notice_return()
    assert replica.expire("agent", -1000.0)
    first, last = (path.read_bytes() for path in files_below(share.objects / "agents"))
    assert first == EMPTIED
    assert b"tokens" not in last


def test_the_upkeep_waits_for_no_job_of_an_agent(machine: Start) -> None:
    """The job may wait for the upkeep, which has the agent locked against other processes."""
    one = machine("one")
    one.agent().say(LONG[:300])
    with ThreadPoolExecutor(1) as upkeep:
        with one.store.parts.replica.changing("agent"):
            expired = upkeep.submit(one.store.parts.replica.expire, "agent", -1000.0)
            assert not expired.result(10)
        assert upkeep.submit(one.store.parts.replica.expire, "agent", -1000.0).result(10)


def test_a_turn_that_is_missing_is_never_noted_on_one_machine_alone(machine: Start) -> None:
    """Then the job fails; its producer must not take a turn for made that other workers go on without."""
    one = machine("one")
    with pytest.raises(OSError, match="only be noted here"):
        one.store.mark_unsaved("agent")
