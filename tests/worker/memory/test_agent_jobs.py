"""Jobs about an agent's memory: each delivery takes effect once, also through power cuts and full disks."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import (
    Agent,
    FastDisk,
    files_below,
    ids,
    open_store,
    reopen,
)
from tests.worker.memory.faulty_files import CutFiles, FullFiles, PowerCut, Survivors

from stoker_shared.agent_request import AgentRequest
from stoker_shared.agent_result import AgentForgotten, AgentInfo, AgentResult
from stoker_shared.errors import AgentExists, AgentNotFound, AgentTranscriptUnreadable
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.tombstones import KEEP_S
from stoker_worker.ports import Delivery

LONG = ids(1300)
_ids = count(1)


def delivery() -> Delivery:
    return Delivery(f"agent-job-{next(_ids)}", "2024-01-01T00:00:00Z", None, "digest")


def ask(action: str, agent_id: str = "agent", **fields: Any) -> AgentRequest:
    return AgentRequest(agent_id=agent_id, action=action, **fields)  # type: ignore[arg-type]


def run(store: AgentCacheStore, action: str, agent_id: str = "agent", **fields: Any) -> Any:
    return store.agent_jobs.run(ask(action, agent_id, **fields), delivery())


def deliver(store: AgentCacheStore, request: AgentRequest, by: Delivery) -> AgentResult:
    """As the worker does it, whichever time this delivery comes."""
    return store.agent_jobs.answer(request, by) or store.agent_jobs.run(request, by)


def assert_usage_is_right(store: AgentCacheStore, folder: Path) -> None:
    on_disk = sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))
    assert store.budget.total_bytes == on_disk


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentCacheStore]:
    store = open_store(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


# --- rollback ---


def test_a_rollback_can_be_undone_and_may_go_to_any_version(store: AgentCacheStore, folder: Path) -> None:
    agent = Agent(store)
    for n_tokens in (10, 20, 30):
        agent.say(LONG[:n_tokens])
    assert run(store, "rollback", version=1).tokens == 10
    assert run(store, "rollback").tokens == 30
    assert run(store, "rollback", version=4).tokens == 10
    agent = Agent(reopen(store, folder))
    assert (agent.open().number, agent.tokens()) == (6, LONG[:10])
    agent.store.close()


def test_after_a_rollback_the_ram_cache_serves_the_tokens_that_agree(tmp_path: Path) -> None:
    store = AgentCacheStore(tmp_path / "store", files=FastDisk(), memory_max_bytes=2**30)
    agent = Agent(store)
    agent.say(LONG[:300])
    agent.say(LONG[:1000])
    run(store, "rollback")
    restored = agent.restore((*LONG[:300], 1))
    assert (restored.source, restored.prefix.n_tokens if restored.prefix else 0) == ("memory", 300)
    assert agent.say((*LONG[:300], 1)) == 4
    run(store, "forget")
    assert store.ram_cache.n_bytes == 0
    store.close()


def test_a_rollback_mends_an_agent_whose_newest_version_is_unreadable(store: AgentCacheStore, folder: Path) -> None:
    agent = Agent(store)
    agent.say(LONG[:10])
    agent.say(LONG[:20])
    store.mark_unsaved("agent")
    with pytest.raises(AgentTranscriptUnreadable):
        agent.open()
    assert run(store, "rollback", version=2).version == 3
    assert agent.tokens() == LONG[:20]
    head = next(folder.rglob("HEAD"))
    head.write_bytes(b"?")
    assert run(store, "rollback", version=1).version == 4
    agent = Agent(reopen(store, folder))
    assert (agent.open().number, agent.tokens()) == (4, LONG[:10])
    agent.store.close()


def test_a_rollback_to_an_unreadable_version_is_refused(store: AgentCacheStore, folder: Path) -> None:
    agent = Agent(store)
    agent.say(LONG[:10])
    agent.say(ids(20, seed=2))
    agent.say(ids(30, seed=3))
    next(folder.rglob("00000001.json")).write_bytes(b"?")
    with pytest.raises(AgentTranscriptUnreadable, match="version 1 of agent 'agent'"):
        run(store, "rollback", version=1)
    assert [version.version for version in run(store, "info").versions] == [2]
    for version in (4, 9):
        with pytest.raises(AgentNotFound, match=f"no version {version}"):
            run(store, "rollback", version=version)
    with pytest.raises(AgentNotFound, match="no agent 'nobody'"):
        run(store, "rollback", "nobody")
    assert agent.open().number == 3


# --- fork ---


def test_a_fork_has_its_own_future_and_is_made_once(store: AgentCacheStore, folder: Path) -> None:
    agent, fork = Agent(store), Agent(store, "fork")
    agent.say(LONG[:700])
    request, by = ask("fork", target="fork"), delivery()
    first = deliver(store, request, by)
    assert (fork.open().number, fork.cached((*LONG[:700], 1))) == (1, 700)
    fork.say(LONG[:800])
    agent.say(LONG[:750])
    assert deliver(store, request, by) == first
    assert (fork.open().number, fork.tokens(), agent.tokens()) == (2, LONG[:800], LONG[:750])
    with pytest.raises(AgentExists):
        run(store, "fork", target="fork")
    with pytest.raises(AgentExists):
        run(store, "fork", target="agent")
    with pytest.raises(AgentNotFound):
        run(store, "fork", "nobody", target="other")
    assert_usage_is_right(store, folder)


def test_a_fork_waits_for_a_save_of_its_target(tmp_path: Path) -> None:
    """The save has looked, and has not written yet."""
    reached, go_on = threading.Event(), threading.Event()

    class Slow(FastDisk):
        armed = False

        def write(self, path: Path, chunks: Any) -> None:
            if self.armed:
                self.armed = False
                reached.set()
                assert go_on.wait(30)
            super().write(path, chunks)

    files = Slow()
    store = AgentCacheStore(tmp_path / "store", files=files)
    Agent(store).say(LONG[:10])
    target = Agent(store, "target")
    turn = target.turn(ids(5, seed=9))
    outcomes: list[object] = []

    def fork() -> None:
        try:
            outcomes.append(run(store, "fork", target="target"))
        except AgentExists as error:
            outcomes.append(error)

    files.armed = True
    saving = threading.Thread(target=lambda: outcomes.append(store.save(turn)[0]))
    saving.start()
    assert reached.wait(30)
    forking = threading.Thread(target=fork)
    forking.start()
    forking.join(0.2)
    go_on.set()
    saving.join(30)
    forking.join(30)
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], AgentExists)
    assert target.tokens() == ids(5, seed=9)
    store.close()


# --- forget ---


def test_forgetting_removes_every_file_that_no_other_agent_uses(store: AgentCacheStore, folder: Path) -> None:
    agent, other = Agent(store), Agent(store, "other")
    agent.say(LONG[:600])
    agent.say((*LONG[:300], *ids(500, seed=4)))  # the blocks of its older version are its own too
    other.say((*LONG[:300], *ids(300, seed=5)))
    request, by = ask("forget"), delivery()
    gone = deliver(store, request, by)
    assert isinstance(gone, AgentForgotten)
    assert (gone.existed, gone.version, gone.blocks, gone.shared_blocks) == (True, 2, 3, 1)
    assert agent.open().number == 0
    assert other.cached((*other.tokens(), 1)) == 600
    assert len(list(folder.glob("blocks/*/*/*.safetensors"))) == 2
    assert_usage_is_right(store, folder)
    store.agent_jobs.ended(request, by)
    assert list((folder / "forgotten").iterdir()) == []
    assert_usage_is_right(store, folder)
    assert agent.say(LONG[:20]) == 1
    assert not [path for path in files_below(folder) if b"agent-job" in path.read_bytes()]


def test_a_second_delivery_of_forget_spares_the_agent_that_came_since(store: AgentCacheStore, folder: Path) -> None:
    agent, request, by = Agent(store), ask("forget"), delivery()
    agent.say(LONG[:600])
    first = deliver(store, request, by)
    agent.say(ids(30, seed=6))
    agent = Agent(reopen(store, folder))
    assert deliver(agent.store, request, by) == first
    assert agent.tokens() == ids(30, seed=6)
    assert deliver(agent.store, request, delivery()).existed  # type: ignore[union-attr]
    assert agent.open().number == 0
    agent.store.close()


def test_an_unknown_or_unreadable_agent_can_be_forgotten(store: AgentCacheStore, folder: Path) -> None:
    assert run(store, "forget", "nobody").existed is False
    Agent(store).say(LONG[:600])
    next(folder.rglob("HEAD")).write_bytes(b"?")
    next(folder.rglob("00000001.json")).write_bytes(b"?")
    assert run(store, "forget").existed is True
    assert Agent(store).open().number == 0


def test_the_answer_of_a_job_that_never_ended_is_removed_after_30_days(store: AgentCacheStore, folder: Path) -> None:
    Agent(store).say(LONG[:6])
    run(store, "forget")
    store.close()
    for tomb in (folder / "forgotten").iterdir():
        (tomb / "left").write_bytes(b"by a crash")
    open_store(folder).close()
    assert [path.name for path in files_below(folder / "forgotten")] == ["ANSWER"]
    old = time.time() - KEEP_S - 60
    os.utime(files_below(folder / "forgotten")[0], (old, old))
    open_store(folder).close()
    assert list((folder / "forgotten").iterdir()) == []


# --- all of them ---


def test_info_describes_the_agent_and_its_earlier_versions(store: AgentCacheStore, folder: Path) -> None:
    assert run(store, "info") == AgentInfo(job_id=f"agent-job-{next(_ids) - 1}", agent_id="agent", exists=False)
    agent = Agent(store)
    agent.say(LONG[:300])
    agent.say(LONG[:600])
    Agent(store, "other").say((*LONG[:256], *ids(300, seed=5)))
    info = run(store, "info")
    assert (info.exists, info.version, info.tokens, info.messages, info.cached_tokens) == (True, 2, 600, 1, 600)
    assert (info.state, info.problem, info.block_bytes) == ("ok", None, 2 * info.shared_bytes)
    assert info.own_bytes > 0 < info.shared_bytes
    assert [(x.version, x.tokens, x.job_id) for x in info.versions] == [(1, 300, "job-1")]
    store.mark_unsaved("agent")
    assert run(store, "info").state == "unsaved"
    next(folder.rglob("HEAD.unsaved")).write_bytes(b"?")
    assert run(store, "info").version == 2


STORED: dict[str, tuple[Callable[[Agent], int], ...]] = {
    "rollback": (lambda agent: agent.say(LONG[:300]), lambda agent: agent.say(ids(400, seed=1))),
    "fork": (lambda agent: agent.say(LONG[:600]),),
    "forget": (lambda agent: agent.say(LONG[:300]), lambda agent: agent.say(LONG[:600])),
}


def seen(store: AgentCacheStore) -> list[object]:
    assert store.verify() == []
    found: list[object] = []
    for name in ("agent", "fork"):
        agent = Agent(store, name)
        version = agent.open()
        found.append((version.number, version.transcript, agent.cached((*agent.tokens(), 1)) > 0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("survivors", ["all", "none", "newest"])
@pytest.mark.parametrize("action", STORED)
def test_a_job_takes_effect_once_whenever_the_power_fails(tmp_path: Path, action: str, survivors: Survivors) -> None:
    base, by = tmp_path / "base", delivery()
    request = ask(action, **({"target": "fork"} if action == "fork" else {}))
    store = open_store(base)
    for say in STORED[action]:
        say(Agent(store))
    before = seen(store)
    store.close()
    store = open_store(shutil.copytree(base, tmp_path / "whole"))
    answer = deliver(store, request, by)
    after = seen(store)
    store.close()
    assert after != before
    was_cut = True
    for cut_at in range(1, 200):
        folder, files = shutil.copytree(base, tmp_path / str(cut_at)), CutFiles(survivors)
        store = AgentCacheStore(folder, files=files)
        files.arm(cut_at)
        try:
            deliver(store, request, by)
            was_cut = False
            files.cut()
        except PowerCut:
            pass
        finally:
            store.close()
        store = open_store(folder)
        assert seen(store) in ((before, after) if was_cut else (after,)), cut_at
        assert deliver(store, request, by) == answer, cut_at
        assert seen(store) == after
        if action != "fork":
            Agent(store).say(ids(7, seed=8))
            assert deliver(store, request, by) == answer
            assert Agent(store).tokens() == ids(7, seed=8)
        store.close()
        shutil.rmtree(folder)
        if not was_cut:
            break
    assert not was_cut
    assert cut_at > 5


@pytest.mark.slow
@pytest.mark.parametrize("n_failures", [1, 2, 3, 4, 1000])
@pytest.mark.parametrize("action", STORED)
def test_a_job_takes_effect_once_whenever_the_disk_is_full(tmp_path: Path, action: str, n_failures: int) -> None:
    base, by = tmp_path / "base", delivery()
    request = ask(action, **({"target": "fork"} if action == "fork" else {}))
    store = open_store(base)
    for say in STORED[action]:
        say(Agent(store))
    store.close()
    store = open_store(shutil.copytree(base, tmp_path / "whole"))
    answer, after = deliver(store, request, by), seen(store)
    store.close()
    failed = True
    for fail_at in range(1, 200):
        folder, files = shutil.copytree(base, tmp_path / str(fail_at)), FullFiles()
        store = AgentCacheStore(folder, files=files)
        files.arm(fail_at, n_failures)
        try:
            deliver(store, request, by)
            failed = False
        except OSError:
            pass
        files.arm(10_000, 1)
        if fail_at % 2:
            store = reopen(store, folder)
        assert deliver(store, request, by) == answer, fail_at
        assert seen(store) == after, fail_at
        store.close()
        shutil.rmtree(folder)
        if not failed:
            break
    assert not failed
    assert fail_at > 5
