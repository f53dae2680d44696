"""Conversations of agents that move from machine to machine: exact, each version once, and nothing lost in silence."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    Agent,
    files_below,
    ids,
    make_model,
    open_store,
    problems_of,
)
from tests.worker.memory.replica.sharing import BOTH, Machine, Share, SharedAgent

from stoker_shared.agent_request import build_agent_request
from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict, SharedStoreAway
from stoker_worker.memory import agent_table
from stoker_worker.ports import AgentHome, Delivery

LONG = ids(2000)
Start = Callable[..., Machine]
MODELS = {"full": MODEL, **{name: make_model(name, spec=spec) for name, spec in SNAPSHOT_SPECS.items()}}


def versions(share: Share) -> list[str]:
    return [path.name for path in files_below(share.objects / "agents")]


def moved(*machines: Machine, version: int = 0) -> None:
    """The agents have had another home since the machines looked."""
    for one in machines:
        one.store.know_homes(lambda agent_id: AgentHome("mac1", version, "mac1" if version else "-"))


def cached(agent: SharedAgent, prompt: Sequence[int]) -> int:
    return agent.cached((*prompt, 1))


@BOTH
@pytest.mark.parametrize("kind", MODELS)
def test_a_conversation_goes_on_where_its_machine_is_gone(machine: Start, kind: str) -> None:
    first = machine("first")
    agent = first.agent(model=MODELS[kind])
    turns = []
    for n in (300, 320, 900):
        turns.append(agent.turn(LONG[:n], LONG[n : n + 10]))
        first.store.save(turns[-1])
    before = agent.open()
    first.write_through()
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
    assert not problems_of(second.store.local)


@BOTH
def test_an_agent_goes_back_and_forth(machine: Start, share: Share) -> None:
    one, two = machine("one"), machine("two")
    for n in range(1, 11):
        here = (one, two)[n % 2]
        moved(one, two)
        assert here.agent().say(LONG[: 40 * n]) == n
        here.write_through()
        assert cached(here.agent(), LONG[: 40 * n]) == 40 * n
    assert len(versions(share)) == 10
    assert not [problem for m in (one, two) for problem in problems_of(m.store.local)]


@BOTH
def test_two_machines_never_write_one_version(machine: Start, share: Share) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    assert two.agent().tokens() == LONG[:300]
    saved = {}
    for n in range(4):
        moved(one, two)
        turns = {m: m.agent().turn(LONG[: 400 + 10 * n], (7, i, n)) for i, m in enumerate((one, two))}
        barrier = threading.Barrier(2)

        def save(m: Machine, turns: dict = turns, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                m.store.save(turns[m])
            except AgentVersionConflict:
                return False
            return True

        with ThreadPoolExecutor(2) as threads:
            done = dict(zip(turns, threads.map(save, turns), strict=True))
        assert sorted(done.values()) == [False, True]
        (winner,) = (m for m in turns if done[m])
        saved[n + 2] = turns[winner].transcript.token_ids
        moved(one, two)
        for m, turn in turns.items():  # the loser has the winner's
            assert m.agent().tokens() == saved[n + 2]
            assert m.store.answer("agent", turn.delivery) == (turn.result if m is winner else None)
    assert len(versions(share)) == 5
    assert not [problem for m in (one, two) for problem in problems_of(m.store.local)]


def test_a_stale_machine_cannot_save_and_then_has_what_the_other_wrote(machine: Start) -> None:
    stale, other = machine("stale"), machine("other")
    stale.agent().say(LONG[:300])
    turn = stale.agent().turn(LONG[:400])
    for n in (310, 350, 700):
        other.agent().say(LONG[:n])
    with pytest.raises(AgentVersionConflict, match="another worker"):
        stale.store.save(turn)
    assert (stale.agent().open().number, stale.agent().tokens()) == (4, LONG[:700])
    assert stale.agent().say(LONG[:800]) == 5


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


def test_a_machine_that_died_before_the_end_of_its_job_is_answered_elsewhere(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    turn = one.agent().turn(LONG[:300])
    one.store.save(turn)
    assert two.store.answer("agent", turn.delivery) == turn.result
    assert two.agent().tokens() == LONG[:300]


# --- the shared store is away ---


@BOTH
def test_nothing_waits_for_a_shared_store_that_is_away(
    machine: Start, share: Share, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("one")
    agent = one.agent()
    agent.say(LONG[:300])
    share.go_away()
    agent.say(LONG[:400])
    assert one.store.is_only_here("agent")
    began = time.monotonic()
    for n in range(1, 20):
        assert agent.say(LONG[: 400 + n]) == 2 + n
    assert time.monotonic() - began < 2.0
    assert [r.message[:14] for r in caplog.records if "outage" in r.message] == ["outage begins:"]
    assert one.store.use().away_s > 0
    share.come_back()
    one.notice_return()
    one.write_through()
    assert [r.message[:12] for r in caplog.records if "outage" in r.message][1:] == ["outage over:"]
    assert (one.waiting(), one.store.is_only_here("agent")) == (0, False)
    two = machine("two").agent()
    assert (two.open().number, two.tokens(), cached(two, LONG[:419])) == (21, LONG[:419], 419)


@BOTH
def test_a_start_without_the_shared_store_serves_what_is_here_and_refuses_what_it_cannot_know(
    machine: Start, share: Share
) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    one.store.close()
    share.go_away()
    one = machine("one")
    assert one.agent().say(LONG[:400]) == 2
    with pytest.raises(SharedStoreAway, match="'unknown' may have newer turns in the shared store"):
        one.agent("unknown").open()
    one.store.know_homes(lambda agent_id: AgentHome(None, 5, "mac2"))
    with pytest.raises(SharedStoreAway):
        one.agent().open()
    share.come_back()
    one.notice_return()
    one.store.know_homes(lambda agent_id: None)
    one.write_through()
    assert one.agent("unknown").say(LONG[:10]) == 1
    assert machine("two").agent().tokens() == LONG[:400]


def test_an_agent_of_a_machine_that_has_not_written_it_through_yet_is_not_begun_anew(machine: Start) -> None:
    two = machine("two")
    two.store.know_homes(lambda agent_id: AgentHome("mac1", 0, "mac1"))
    with pytest.raises(AgentTranscriptUnreadable, match="worker 'mac1' has it, and has not written it") as refused:
        two.agent().open()
    assert refused.value.usable is not None  # a job that brings the whole conversation goes on
    assert refused.value.usable.number == 0
    machine("mac1").agent().say(LONG[:300])
    assert two.agent().tokens() == LONG[:300]


def test_turns_of_a_machine_that_is_lost_in_an_outage_are_missed_by_name(machine: Start, share: Share) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    share.go_away()
    one.agent().say(LONG[:400])
    one.agent().say(LONG[:500])
    share.come_back()
    moved(two, version=3)
    with pytest.raises(AgentTranscriptUnreadable, match="worker 'mac1' made version 3, which is not here") as caught:
        two.agent().open()
    assert two.agent("agent").store.answer("agent", Delivery("other", "")) is None
    turn = two.agent().turn(LONG[:50], agent=caught.value.usable)  # the whole conversation, by a `full` job
    two.store.save(turn)
    assert (two.agent().open().number, two.agent().tokens()) == (4, LONG[:50])
    one.notice_return()
    one.write_through()  # the machine was not lost after all
    moved(one, two, version=4)
    for m in (one, two):
        assert (m.agent().open().number, m.agent().tokens()) == (4, LONG[:50])
    assert len(versions(share)) == 2  # what came too late is not kept


def test_a_missing_turn_that_arrives_is_used(machine: Start, share: Share) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    share.go_away()
    one.agent().say(LONG[:400])
    share.come_back()
    moved(two, version=2)
    with pytest.raises(AgentTranscriptUnreadable):
        two.agent().open()
    one.notice_return()
    one.write_through()
    assert (two.agent().open().number, two.agent().tokens()) == (2, LONG[:400])


def test_what_two_machines_did_in_an_outage_is_decided_once(
    machine: Start, share: Share, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    two.agent().open()
    share.go_away()
    for m, last in ((one, 3), (two, 2)):
        for n in range(1, last):
            m.agent().say(LONG[: 300 + n], (5, last))
    share.come_back()
    for m in (two, one):
        m.notice_return()
        m.write_through()
    assert "is replaced by another worker's version 2" in caplog.text
    for m in (one, two):
        moved(m)
        assert (m.agent().open().number, m.agent().tokens()) == (2, (*LONG[:301], 5, 2))
        assert not problems_of(m.store.local)


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
    two.store.save(two.agent().turn(LONG[:40], agent=caught.value.usable))
    assert (two.agent().open().number, two.agent().tokens()) == (4, LONG[:40])
    moved(one)
    assert (one.agent().open().number, one.agent().tokens()) == (4, LONG[:40])


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


@BOTH
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "another"])
def test_a_damaged_cache_is_a_miss(machine: Start, share: Share, harm: str) -> None:
    one = machine("one")
    one.agent().say(LONG[:900])
    one.write_through()
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
    two.write_through()
    three = machine("three")
    assert cached(three.agent(), LONG[:910]) == 910


def test_an_agent_that_is_damaged_here_is_mended_from_there(machine: Start) -> None:
    one = machine("one")
    for n in range(1, 5):
        one.agent().say(LONG[: 100 * n])
    one.write_through()
    one.store.local.parts.database.commit(lambda c: c.execute("UPDATE turns SET about = '{}' WHERE version = 2"))
    assert (one.agent().open().number, one.agent().tokens()) == (4, LONG[:400])
    assert not problems_of(one.store.local)


# --- jobs about an agent's memory ---


def run(one: Machine, action: str, agent_id: str = "agent", **fields: object) -> object:
    request = build_agent_request({"action": action, "agent_id": agent_id, **fields})
    return one.store.agent_jobs.run(request, Delivery(f"{action}-{agent_id}", "now"))


def test_a_rollback_and_a_fork_are_known_elsewhere(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    one.agent().say(LONG[:600])
    assert two.agent().tokens() == LONG[:600]
    moved(two)
    run(one, "rollback")
    run(one, "fork", target="fork")
    assert (two.agent().open().number, two.agent().tokens()) == (3, LONG[:300])
    assert two.agent("fork").tokens() == LONG[:300]
    run(two, "fork", "fork", target="other")
    assert one.agent("other").tokens() == LONG[:300]


@BOTH
def test_a_forgotten_agent_is_forgotten_everywhere_and_its_numbers_stay_used(machine: Start, share: Share) -> None:
    one, two = machine("one"), machine("two")
    for n in (300, 600):
        one.agent().say(LONG[:n])
    one.write_through()
    assert cached(two.agent(), LONG[:600]) == 600
    stale = two.agent().turn(LONG[:650])
    run(one, "forget")
    one.write_through()
    with pytest.raises(AgentVersionConflict):
        two.store.save(stale)
    moved(one, two)
    for m in (one, two):
        assert (m.agent().open().transcript, m.agent().open().number) == (None, 3)
    assert len(versions(share)) == 1
    assert not [path for path in files_below(share.objects) if "tail" in path.name]
    assert two.agent().say(ids(30, seed=3)) == 4
    moved(one)
    assert (one.agent().open().number, one.agent().tokens()) == (4, ids(30, seed=3))


def test_an_agent_forgotten_in_an_outage_does_not_come_back(machine: Start, share: Share) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    share.go_away()
    run(one, "forget")
    assert (one.agent().open().number, one.agent().open().transcript) == (2, None)
    assert one.agent().say(LONG[:20]) == 3
    one.store.close()
    share.come_back()
    one = machine("one")
    one.write_through()
    assert (machine("two").agent().open().number, machine("three").agent().tokens()) == (3, LONG[:20])
    assert one.waiting() == 0


# --- writing through ---


def test_agents_of_before_there_was_a_shared_store_are_written_through(machine: Start, tmp_path: Path) -> None:
    alone = open_store(tmp_path / "one")
    for n in range(1, 41):
        Agent(alone).say(LONG[: 20 * n])
    Agent(alone, "other").say(LONG[:300])
    alone.close()
    one = machine("one")
    one.store.meet()
    assert one.waiting() == 2
    one.write_through()
    assert one.waiting() == 0
    two = machine("two")
    assert (cached(two.agent(), LONG[:800]), cached(two.agent("other"), LONG[:300])) == (800, 300)
    assert two.agent().say(LONG[:900]) == 41


@BOTH
def test_what_a_killed_process_left_is_written_by_the_next(machine: Start, share: Share) -> None:
    one = machine("one")
    one.agent().say(LONG[:600])
    one.store.close()
    assert not (share.objects / "blocks").exists()
    one = machine("one")
    assert one.waiting() == 1
    one.write_through()
    assert cached(machine("two").agent(), LONG[:600]) == 600


def test_the_bandwidth_is_bounded(machine: Start) -> None:
    one = machine("one", max_bps=1_000_000)
    one.agent().say(LONG[:600])
    began = time.monotonic()
    one.write_through()
    assert time.monotonic() - began >= one.store.use().written_bytes / 1e6 > 0.05


def test_a_turn_writes_only_what_is_new(machine: Start) -> None:
    one = machine("one")
    one.agent().say(LONG[:1800])
    one.write_through()
    before = one.store.use().written_bytes
    one.agent().say(LONG[:1810])
    one.write_through()
    assert one.store.use().written_bytes - before < before / 20


def test_the_threads_write_through_and_read_ahead(machine: Start) -> None:
    one, two = machine("one"), machine("two", memory_max_bytes=1 << 30)
    one.store.start_upkeep()
    one.agent().say(LONG[:600])
    until = time.monotonic() + 30
    while one.waiting() and time.monotonic() < until:
        time.sleep(0.02)
    two.store.model_loaded(MODEL)
    two.store.read_ahead(["agent"])
    while "agent" not in two.store.local.ram_cache and time.monotonic() < until:
        time.sleep(0.02)
    restored = two.agent().restore((*LONG[:600], 1))
    assert (restored.source, restored.prefix.n_tokens) == ("memory", 600)


def test_a_long_history_is_brought_in_by_its_last_whole_version(
    machine: Start, share: Share, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("one")
    for n in range(1, 60):
        one.agent().say(LONG[: 10 * n])
    two = machine("two")
    caplog.set_level(logging.INFO)
    assert two.agent().tokens() == LONG[:590]
    with two.store.local.parts.database.snapshot() as connection:
        assert connection.execute("SELECT count(*) FROM turns").fetchone()[0] <= 16
    moved(one, two)
    for n in range(60, 80):
        two.agent().say(LONG[: 10 * n])
    assert one.agent().tokens() == LONG[:790]
    run(one, "rollback", version=70)
    assert not problems_of(one.store.local)


def test_what_was_made_here_under_an_id_that_others_used_gives_way(
    machine: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = open_store(tmp_path / "two")
    for n in (100, 200):
        Agent(alone).say(ids(n, seed=9))
    alone.close()
    one = machine("one")
    for n in (300, 310, 320):
        one.agent().say(LONG[:n])
    two = machine("two")
    two.store.meet()
    two.write_through()
    assert "is replaced by another worker's version 3" in caplog.text
    assert (two.agent().open().number, two.agent().tokens()) == (3, LONG[:320])
    assert (two.waiting(), problems_of(two.store.local)) == (0, [])


def test_reading_ahead_does_not_get_in_the_way_of_the_job_that_brings_the_agent_in(machine: Start) -> None:
    """It looked before the agent came here, and the job is claimed meanwhile: then the agent's home is known."""
    machine("one").agent().say(LONG[:300])
    two = machine("two")
    assert two.agent().open().number == 1
    two.store.know_homes(lambda agent_id: AgentHome("one", 7, "one"))
    two.store._prepare("agent")
    with two.store.local.parts.database.snapshot() as connection:
        row = agent_table.find_agent(connection, "agent")
    assert row is not None
    assert row.version == 1
    with pytest.raises(AgentTranscriptUnreadable, match="made version 7, which is not here"):
        two.agent().open()


def test_a_copy_that_is_unused_here_goes_once_it_is_there_and_comes_back(machine: Start, share: Share) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    one.store.pin(frozenset(), frozenset())

    def is_here() -> bool:
        list(one.store.local._upkeep._forget_unused_agents(-120))
        with one.store.local.parts.database.snapshot() as connection:
            return agent_table.find_agent(connection, "agent") is not None

    assert is_here()
    one.write_through()
    assert not is_here()
    assert (one.agent().open().number, one.agent().tokens()) == (1, LONG[:300])
    assert one.agent().say(LONG[:310]) == 2
    assert len(versions(share)) == 2


def test_what_a_move_costs_is_known_once_the_cache_is_written(machine: Start) -> None:
    one = machine("one")
    assert one.store.move_s("agent") is None
    one.agent().say(LONG[:300])
    assert one.store.move_s("agent") is None  # it would be computed
    one.write_through()
    short = one.store.move_s("agent")
    one.agent().say(LONG)
    one.write_through()
    long = one.store.move_s("agent")
    assert short is not None
    assert long is not None
    assert 0 < short < long < 10


def test_an_agent_that_comes_back_in_an_outage_may_have_a_turn_whose_job_had_not_ended_elsewhere(
    machine: Start, share: Share
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    two.agent().say(LONG[:400])  # and it is lost before the job ends
    share.go_away()
    one.store.know_homes(lambda agent_id: AgentHome("two", 1, "one"))
    with pytest.raises(SharedStoreAway):
        one.agent().open()
    share.come_back()
    one.notice_return()
    assert one.agent().tokens() == LONG[:400]
