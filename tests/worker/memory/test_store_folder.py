"""The store's folder: one process at a time, one known format, readable by the owner only."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, files_below, ids, make_model, make_transcript, open_store, reopen
from tests.worker.memory.faulty_files import CutFiles, PowerCut, Survivors

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.access import StoreAccess, hold, look_at
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec


def test_a_second_process_is_refused_and_told_the_holder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreUnusable, match=f"in use by pid {os.getpid()} on "):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_a_dead_process_leaves_no_lock(tmp_path: Path) -> None:
    script = "import os, sys, pathlib, stoker_worker.memory.store as s\n"
    script += "s.AgentCacheStore(pathlib.Path(sys.argv[1]))\nos._exit(7)"
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 7
    open_store(tmp_path)


@pytest.mark.parametrize(
    "content", ['{"format": 5}', '{"format": "1"}', '{"format": true}', "{}", "[]", "", "\x00\xff", None]
)
def test_an_unknown_format_is_refused_and_left_alone(tmp_path: Path, content: str | None) -> None:
    store = open_store(tmp_path)
    Agent(store).say(ids(10))
    store.close()
    if content is None:
        (tmp_path / "store.json").unlink()
    else:
        (tmp_path / "store.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StoreUnusable, match=r"store.json has format .* reads format 4 and older"):
        open_store(tmp_path)
    (tmp_path / "store.json").write_text('{"format": 1}')
    assert Agent(open_store(tmp_path)).tokens() == ids(10)


@pytest.fixture
def format_1(tmp_path: Path) -> Path:
    """A store that the last version to write format 1 made: agent `a` at version 3, agent `b` (salt s) at version 2."""
    with tarfile.open(Path(__file__).parent / "data" / "store-v1.tar") as tar:
        tar.extractall(tmp_path / "v1", filter="data")
    return tmp_path / "v1"


V1_MODEL = make_model(spec=ModelCacheSpec((LayerSpec(LayerKind.FULL, 1, 4, 4),) * 2, "float32"))
V1_AGENTS = {
    "a": (3, (*ids(300), 7, 8, *ids(20, seed=3)), 3),
    "b": (2, (*ids(260, seed=1), 5), 2),
}
"""Version, token ids, and how many results are remembered."""


def test_a_store_of_format_1_is_read_whole_and_becomes_format_4(format_1: Path) -> None:
    before = {path: path.read_bytes() for path in files_below(format_1)}
    assert StoreAccess(format_1).verify() == []
    store = open_store(format_1)
    assert json.loads((format_1 / "store.json").read_bytes()) == {"format": 4}
    assert before == {path: path.read_bytes() for path in before} | {format_1 / "store.json": b'{"format": 1}\n'}
    for name, (version, token_ids, n_results) in V1_AGENTS.items():
        agent = Agent(store, name, model=V1_MODEL, salt="s" if name == "b" else None)
        assert (agent.open().number, len(agent.open().results)) == (version, n_results)
        assert agent.open().transcript == make_transcript(token_ids)
        assert agent.cached((*token_ids, 1)) == len(token_ids)  # and it is the cache of these tokens
        assert agent.say((*token_ids, 1, 2)) == version + 1
    store = reopen(store, format_1)
    for name, (_, token_ids, _) in V1_AGENTS.items():
        agent = Agent(store, name, model=V1_MODEL, salt="s" if name == "b" else None)
        assert agent.tokens() == (*token_ids, 1, 2)
        assert agent.cached((*token_ids, 1, 2, 3)) == len(token_ids) + 2
    assert store.misses == {}
    assert store.verify() == []


def test_commands_that_only_read_leave_a_store_of_format_1_as_it_is(format_1: Path) -> None:
    before = {path: path.read_bytes() for path in files_below(format_1)}
    assert look_at(format_1).readable("a").version.number == 3
    with hold(format_1, clear=False) as access:
        assert access.verify() == []
    assert before.items() <= {path: path.read_bytes() for path in files_below(format_1)}.items()


@pytest.mark.parametrize("survivors", ["all", "none", "newest"])
def test_a_power_cut_during_the_upgrade_leaves_a_store_that_opens(
    format_1: Path, tmp_path: Path, survivors: Survivors
) -> None:
    for cut_at in range(1, 30):
        folder, files = shutil.copytree(format_1, tmp_path / str(cut_at)), CutFiles(survivors)
        files.arm(cut_at)
        try:
            AgentCacheStore(folder, files=files).close()
            break
        except PowerCut:
            assert json.loads((folder / "store.json").read_bytes())["format"] in (1, 4)
            store = open_store(folder)
            assert store.open_agent("a").number == 3
            store.close()
    assert cut_at > 4


def test_a_store_of_a_newer_format_keeps_its_unfinished_files(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "store.json").write_text('{"format": 5}')
    (tmp_path / "tmp" / "0.tmp").write_bytes(b"half")
    with pytest.raises(StoreUnusable, match="has format 5; this version of stoker reads format 4 and older"):
        open_store(tmp_path)
    assert (tmp_path / "tmp" / "0.tmp").exists()


def test_an_unusable_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match=r"the store folder .* cannot be used: "):
            open_store(folder)


def test_missing_parent_folders_are_made(tmp_path: Path) -> None:
    open_store(tmp_path / "a" / "b").close()


def test_only_the_owner_may_read_the_store(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = AgentCacheStore(tmp_path / "store")
        Agent(store).say(ids(300))
        store.close()
    finally:
        os.umask(before)
    paths = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "tmp" / "0.tmp").write_bytes(b"half")
    Agent(open_store(tmp_path)).say(ids(10))
    assert list((tmp_path / "tmp").iterdir()) == []
