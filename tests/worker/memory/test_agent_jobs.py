"""Jobs about an agent's memory: each delivery takes effect once, also on a full disk."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import (
    SNAPSHOT_SPECS,
    Agent,
    FastDisk,
    ask,
    delivery,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    open_store,
    reopen,
    rows,
    run_job,
)
from tests.worker.memory.faulty_files import FullFiles

from stoker_shared.agents import AgentRequest, AgentResult
from stoker_shared.errors import AgentExists, AgentNotFound, AgentTranscriptUnreadable
from stoker_worker.memory.blocks import PieceFolder
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Delivery

LONG = ids(1300)


def deliver(store: AgentCacheStore, request: AgentRequest, by: Delivery) -> AgentResult:
    """As the worker does it, whichever time this delivery comes."""
    return store.agent_jobs.answer(request, by) or store.agent_jobs.run(request, by)


def change_rows(folder: Path, sql: str) -> None:
    """Behind the store's back."""
    with closing(sqlite3.connect(folder / "agents.db", isolation_level=None)) as connection:
        connection.execute(sql)


def cache_files(folder: Path) -> list[Path]:
    return [path for path in files_below(folder) if path.suffix == ".safetensors"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentCacheStore]:
    store = open_store(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


# --- rollback ---


@pytest.mark.parametrize("pattern", ["say say back back", "back"])
def test_attempts_and_rollbacks_leave_no_more_versions_than_turns_do(store: AgentCacheStore, pattern: str) -> None:
    agent = Agent(store)
    for n_tokens in (300, 310):
        agent.say(LONG[:n_tokens])
    version, goal = 2, agent.tokens()
    for number, step in enumerate(pattern.split() * 60):
        if step == "say":
            agent.say((*LONG[:310], number))
        else:
            run_job(store, "rollback", version=version)
            version = agent.open().number
            assert agent.tokens() == goal
        ((n_kept, n_whole, oldest),) = rows(store, "SELECT count(*), sum(parent IS NULL), min(version) FROM turns")
        assert n_kept <= 31
        assert n_whole <= 3
        assert oldest <= max(1, agent.open().number - 15)
    agent.say((*goal, 1))
    run_job(store, "rollback", version=agent.open().number - 15)
    assert agent.tokens()[:310] == goal


@pytest.mark.parametrize("action", ["rollback", "forget"])
def test_ram_keeps_nothing_of_a_version_that_is_gone(tmp_path: Path, action: str) -> None:
    store = AgentCacheStore(tmp_path / "store", files=FastDisk(), memory_max_bytes=2**30)
    for n_tokens in (300, 1000):
        Agent(store).say(LONG[:n_tokens])
    run_job(store, action)
    assert store.ram_cache.n_bytes == 0
    store.close()


def test_a_rollback_mends_an_agent_whose_newest_version_is_unreadable(store: AgentCacheStore, folder: Path) -> None:
    agent = Agent(store)
    agent.say(LONG[:10])
    agent.say(ids(20, seed=1))
    store.mark_unsaved("agent")
    with pytest.raises(AgentTranscriptUnreadable):
        agent.open()
    assert run_job(store, "rollback", version=2).version == 3
    assert agent.tokens() == ids(20, seed=1)
    for damage in ("UPDATE turns SET new_tokens = x'00' WHERE version = 3", "UPDATE agents SET head = x'00'"):
        change_rows(folder, damage)
        with pytest.raises(AgentTranscriptUnreadable):
            agent.open()
        run_job(store, "rollback", version=1)
    agent = Agent(reopen(store, folder))
    assert (agent.open().number, agent.tokens()) == (5, LONG[:10])
    agent.store.close()


def test_a_rollback_to_an_unreadable_version_is_refused(store: AgentCacheStore, folder: Path) -> None:
    agent = Agent(store)
    agent.say(LONG[:10])
    agent.say(ids(20, seed=2))
    agent.say(ids(30, seed=3))
    change_rows(folder, "UPDATE turns SET new_tokens = x'00' WHERE version = 1")
    with pytest.raises(AgentTranscriptUnreadable, match="version 1 of agent 'agent'"):
        run_job(store, "rollback", version=1)
    assert agent.open().number == 3


def test_a_rollback_reaches_every_version_that_is_kept_and_no_other(tmp_path: Path) -> None:
    store = AgentCacheStore(tmp_path / "store", files=FastDisk(), keep_versions=4)
    agent = Agent(store)
    said = {agent.say(LONG[: 10 + n]): LONG[: 10 + n] for n in range(40)}
    kept = [version.version for version in run_job(store, "info").versions]
    assert len(kept) >= 4
    for n, version in enumerate(kept):
        assert run_job(store, "rollback", version=version).version == 41 + n
        assert agent.tokens() == said[version]
    with pytest.raises(AgentNotFound, match=f"no version {kept[0] - 1} any more: {kept[0]} is the oldest"):
        run_job(store, "rollback", version=kept[0] - 1)
    store.close()


# --- fork ---


@pytest.mark.parametrize("kind", ["full", *SNAPSHOT_SPECS])
def test_a_fork_is_whole_even_if_its_source_goes_on_meanwhile(
    store: AgentCacheStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A command of the shell forks an agent that a worker serves."""
    model = make_model(kind, spec=SNAPSHOT_SPECS[kind]) if kind != "full" else Agent.model
    agent, fork = Agent(store, model=model), Agent(store, "fork", model=model)
    agent.say(LONG[:300])
    paths_of, turns = PieceFolder.paths, iter([LONG[:310]])

    def paths(self: PieceFolder, agent_id: str, version: int) -> list[Path]:
        for prompt in turns if agent_id == "agent" else ():
            agent.say(prompt)
        return paths_of(self, agent_id, version)

    monkeypatch.setattr(PieceFolder, "paths", paths)
    assert run_job(store, "fork", target="fork").from_version == 2
    assert fork.cached((*LONG[:310], 1)) == 310
    assert store.misses == {}


def test_a_fork_into_an_agent_that_begins_meanwhile_leaves_that_as_it_is(
    store: AgentCacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Agent(store).say(LONG[:300])
    target, write = Agent(store, "target"), PieceFolder.write
    turns = iter([target.turn(ids(400, seed=9))])

    def written(self: PieceFolder, pieces: Any) -> int:
        n_bytes = write(self, pieces)
        for turn in turns:
            store.save(turn)
        return n_bytes

    monkeypatch.setattr(PieceFolder, "write", written)
    with pytest.raises(AgentExists):
        run_job(store, "fork", target="target")
    assert (target.open().number, target.tokens()) == (1, ids(400, seed=9))
    assert target.cached((*ids(400, seed=9), 1)) == 400


# --- forget ---


def test_nothing_an_agent_said_is_left_in_the_store(store: AgentCacheStore, folder: Path) -> None:
    agent = Agent(store)
    for n in range(40):  # older versions are pruned meanwhile
        text = "".join(f"secret {n} and {k}; " for k in range(400))
        store.save(make_turn(agent, agent.open(), make_transcript(LONG[: 10 + n], text=text), None))
    assert any(b"secret" in path.read_bytes() for path in files_below(folder))
    request, by = ask("forget"), delivery()
    deliver(store, request, by)
    store.close()
    assert not [path for path in files_below(folder) if b"secret" in path.read_bytes()]


def test_an_unknown_or_unreadable_agent_can_be_forgotten(store: AgentCacheStore, folder: Path) -> None:
    request, by = ask("forget", "nobody"), delivery()
    assert deliver(store, request, by).existed is False  # type: ignore[union-attr]
    Agent(store, "nobody").say(LONG[:10])
    assert deliver(store, request, by).existed is False  # type: ignore[union-attr]
    assert Agent(store, "nobody").open().number == 1
    for damage in ("UPDATE turns SET about = '?', new_tokens = x'00'", "UPDATE agents SET head = x'00'"):
        Agent(store).say(LONG[:600])
        change_rows(folder, damage)
        gone = run_job(store, "forget")
        assert (gone.existed, gone.blocks) == (True, 2)
        assert Agent(store).open().number == 0
        run_job(store, "forget", "nobody")
        assert cache_files(folder) == []


def test_an_agent_that_only_one_index_knows_is_neither_forgotten_nor_forked(store: AgentCacheStore) -> None:
    Agent(store).say(LONG[:10])
    store.parts.database.commit(lambda connection: connection.execute("UPDATE agents SET key = x'00'"))
    for request in (ask("forget"), ask("fork", target="fork"), ask("rollback"), ask("info")):
        with pytest.raises(AgentTranscriptUnreadable, match="its indexes do not agree on the agent"):
            store.agent_jobs.run(request, delivery())


# --- all of them ---


def test_info_of_an_unsaved_or_damaged_agent_has_the_versions_to_return_to(
    store: AgentCacheStore, folder: Path
) -> None:
    agent = Agent(store)
    agent.say(LONG[:300])
    agent.say(LONG[:600])
    store.mark_unsaved("agent")
    assert run_job(store, "info").state == "unsaved"
    change_rows(folder, "UPDATE turns SET new_tokens = x'00' WHERE agent = 1 AND version = 2")
    info = run_job(store, "info")
    assert (info.version, info.tokens, [x.version for x in info.versions]) == (2, None, [1])


def test_an_earlier_delivery_that_comes_again_does_not_hide_that_a_later_turn_is_missing(
    store: AgentCacheStore,
) -> None:
    """The lost turn made no version, so the newest one is that of the delivery before."""
    agent = Agent(store)
    turn = agent.turn(LONG[:10])
    store.save(turn)
    store.mark_unsaved("agent")
    assert store.answer("agent", turn.delivery) == turn.result
    with pytest.raises(AgentTranscriptUnreadable, match="not saved") as refused:
        agent.open()
    agent.say(LONG[:20], agent=refused.value.usable)
    request, by = ask("rollback"), delivery()
    back = deliver(store, request, by)
    store.mark_unsaved("agent")
    assert deliver(store, request, by) == back
    with pytest.raises(AgentTranscriptUnreadable, match="not saved"):
        agent.open()


def test_an_answer_that_is_damaged_is_not_taken_for_none(store: AgentCacheStore, folder: Path) -> None:
    Agent(store).say(LONG[:10])
    Agent(store).say(LONG[:20])
    for request in (ask("rollback"), ask("fork", target="fork"), ask("forget")):
        by = delivery()
        deliver(store, request, by)
        change_rows(folder, "UPDATE deliveries SET result = replace(result, 'tokens', 'nekots') || ' '")
        with pytest.raises(AgentTranscriptUnreadable, match="the answer to this delivery is damaged"):
            deliver(store, request, by)


STORED: dict[str, tuple[Callable[[Agent], int], ...]] = {
    "rollback": (lambda agent: agent.say(LONG[:300]), lambda agent: agent.say(ids(400, seed=1))),
    "fork": (lambda agent: agent.say(LONG[:600]),),
    "forget": (lambda agent: agent.say(LONG[:300]), lambda agent: agent.say(LONG[:600])),
}


def prepared(base: Path, action: str) -> tuple[AgentRequest, Delivery, list[object], list[object], AgentResult]:
    """A store at `base` before the job; the job; what is seen before and after it; its answer."""
    request, by = ask(action, **({"target": "fork"} if action == "fork" else {})), delivery()
    store = open_store(base)
    for say in STORED[action]:
        say(Agent(store))
    before = seen(store)
    store.close()
    whole = shutil.copytree(base, base.with_name("whole"))
    store = open_store(whole)
    answer, after = deliver(store, request, by), seen(store)
    store.close()
    assert after != before
    return request, by, before, after, answer


def seen(store: AgentCacheStore) -> list[object]:
    found: list[object] = []
    for name in ("agent", "fork"):
        agent = Agent(store, name)
        version = agent.open()
        found.append((version.number, version.transcript, agent.cached((*agent.tokens(), 1)) > 0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("action", STORED)
def test_a_job_takes_effect_once_whenever_the_disk_is_full(tmp_path: Path, action: str) -> None:
    base = tmp_path / "base"
    request, by, before, after, answer = prepared(base, action)
    for fail_at in range(200):
        folder, files = shutil.copytree(base, tmp_path / str(fail_at)), FullFiles()
        store = AgentCacheStore(folder, files=files, connector=files.connector)
        files.arm(fail_at + 1, 1000)
        try:
            deliver(store, request, by)
            has_failed = False
        except OSError:
            has_failed = True
        files.arm(10_000, 1)
        assert seen(store) == (before if has_failed else after), fail_at
        if fail_at % 2:
            store = reopen(store, folder)
        assert deliver(store, request, by) == answer, fail_at
        assert seen(store) == after, fail_at
        assert len(cache_files(folder)) == len(cache_files(base.with_name("whole"))), fail_at
        store.close()
        shutil.rmtree(folder)
        if not has_failed:
            break
    assert not has_failed
    assert fail_at > 2, fail_at
