"""`stoker-worker memory ...`: its output, and the files it changes or leaves alone."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.worker.memory.agents import (
    SNAPSHOT_SPECS,
    Agent,
    FastDisk,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    only,
    open_store,
)

from stoker_worker.cli.main import main
from stoker_worker.memory import access

LONG = ids(1300)
Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "Disk", FastDisk)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def command(folder: Path) -> Command:
    def run(*arguments: str | Path, store: Path = folder, ok: bool = True, **options: Any) -> Result:
        name, *rest = map(str, arguments)
        result = CliRunner().invoke(main, ["memory", name, "--store", str(store), *rest], **options)
        assert (result.exit_code == 0) is ok, result.output
        return result

    return run


@contextmanager
def using(folder: Path) -> Iterator[Callable[[str], Agent]]:
    """A worker at its work, as far as the store can tell; gives agents by name."""
    store = open_store(folder)
    agents: dict[str, Agent] = {}
    try:
        yield lambda name: agents.setdefault(name, Agent(store, name))
    finally:
        store.close()


@pytest.fixture
def two_agents(folder: Path) -> Path:
    """`a` has 1000 tokens and `b` 900; they share the first two blocks."""
    with using(folder) as agent:
        agent("a").say(LONG[:700])
        agent("a").say(LONG[:1000])
        agent("b").say((*LONG[:600], *ids(300, seed=1)))
    return folder


def blocks(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("blocks/*/*/*.safetensors")}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_below(folder) if path.name != "lock"}


# --- reading ---


def test_ls_lists_each_agent(command: Command, two_agents: Path) -> None:
    a, b = sorted(json.loads(command("ls", "--json").stdout), key=lambda agent: agent["agent_id"])
    assert (a["agent_id"], a["version"], a["turns"], a["tokens"], a["messages"]) == ("a", 2, 2, 1000, 1)
    assert (a["cached_tokens"], a["blocks"], b["blocks"], a["state"]) == (1000, 3, 3, "ok")
    assert a["shared_bytes"] == b["shared_bytes"] == a["block_bytes"] * 2 // 3
    assert min(a["record_bytes"], a["tail_bytes"]) > 0
    table = command("ls").stdout
    assert "1 messages" in table
    assert len(table.splitlines()) == 3


def test_ls_marks_unsaved_and_unreadable_agents(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        agent("unsaved").say(LONG[:10])
        agent("unsaved").store.mark_unsaved("unsaved")
        agent("damaged").say(LONG[:10])
        agent("nameless").say(LONG[:10])
    damage(two_agents, "damaged", "HEAD", b"?")
    damage(two_agents, "nameless", "00000001.json", b"?")
    states = {agent["agent_id"]: agent for agent in json.loads(command("ls", "--json").stdout)}
    assert {name: agent["state"] for name, agent in states.items()} == {
        "a": "ok", "b": "ok", "unsaved": "unsaved", "damaged": "unreadable", None: "unreadable",
    }  # fmt: skip
    assert states["damaged"]["problem"] == "HEAD is unusable: its checksum does not match"
    assert "no record can be read" in command("ls").stdout
    assert "unreadable" in command("show", "nameless").stdout


def test_show_lists_versions_and_the_conversation(command: Command, two_agents: Path) -> None:
    shown = json.loads(command("show", "a", "--text", "--json").stdout)
    assert [(x["version"], x["job_id"], x["tokens"], x["new_tokens"]) for x in shown["versions"]] == [
        (1, "job-1", 700, 700),
        (2, "job-2", 1000, 300),
    ]
    assert shown["messages"] == [{"role": "user", "content": "1000 tokens"}]
    text = command("show", "a", "--text").stdout
    assert "job-2" in text
    assert "[user]\n1000 tokens" in text


def test_a_models_text_cannot_steer_the_terminal(command: Command, folder: Path) -> None:
    with using(folder) as agent:
        transcript = make_transcript(LONG[:5], text="\x1b[2J[red]plain[/red]\x9b")
        agent("a").store.save(make_turn(agent("a"), 0, transcript, None))
    text = command("show", "a", "--text").stdout
    assert "\ufffd[2J[red]plain[/red]\ufffd" in text


def test_verify_fails_when_something_is_wrong(command: Command, two_agents: Path) -> None:
    command("verify")
    block = sorted(two_agents.glob("blocks/*/*/*"))[0]
    block.write_bytes(block.read_bytes()[:-1] + b"?")
    assert json.loads(command("verify", "--json", ok=False).stdout) == {"problems": [f"{block}: it is damaged"]}


# --- beside a worker ---


def test_reading_commands_work_beside_a_worker_and_the_others_name_it(
    command: Command, two_agents: Path, tmp_path: Path
) -> None:
    command("export", "a", tmp_path / "a.tar")
    with using(two_agents):
        (two_agents / "tmp" / "0.tmp").write_bytes(b"the worker's")
        before = content(two_agents)
        for reader in (("ls",), ("show", "a"), ("verify",)):
            command(*reader)
        for writer in (
            ("gc",),
            ("gc", "--dry-run"),
            ("rm", "a", "--yes"),
            ("fork", "a", "c"),
            ("export", "a", tmp_path / "again.tar"),
            ("import", tmp_path / "a.tar", "--as", "c"),
        ):
            assert f"is in use by pid {os.getpid()} on" in command(*writer, ok=False).output
            error = json.loads(command(*writer, "--json", ok=False).stdout)["error"]
            assert error["type"] == "StoreUnusable"
        assert content(two_agents) == before


def test_a_command_reads_an_agent_again_that_was_saved_meanwhile(two_agents: Path) -> None:
    folder, old = access.look_at(two_agents).agent("a"), access.look_at(two_agents).agent("b").read()
    torn = dataclasses.replace(old, problem="HEAD is older than the records")
    heads, reads = iter([b"1", b"2", b"2"]), iter([torn, old])
    folder.read_head, folder.read = lambda: next(heads), lambda: next(reads)  # type: ignore[method-assign]
    assert folder.read_settled() is old


def test_help_needs_none_of_the_workers_packages() -> None:
    code = "import sys; import stoker_worker.cli.main; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "stoker_worker.cli.memory_commands" in loaded
    assert not loaded & {"numpy", "rich", "xxhash", "mlx", "redis", "stoker_worker.memory"}


def test_no_command_makes_a_store_where_there_is_none(command: Command, folder: Path) -> None:
    for arguments in (("ls",), ("gc",), ("rm", "a", "--yes")):
        assert "there is no store at" in command(*arguments, ok=False).output
    assert not folder.exists()


# --- gc and rm ---


def test_gc_removes_exactly_the_unused_blocks(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        agent("a").say(ids(600, seed=2))  # the third block of its old transcript is unused now
    (two_agents / "tmp" / "7.tmp").write_bytes(b"half")
    before = content(two_agents)
    planned = json.loads(command("gc", "--dry-run", "--json").stdout)
    assert (planned["blocks"], planned["temp_files"], planned["temp_bytes"]) == (1, 1, 4)
    assert content(two_agents) == before
    done = json.loads(command("gc", "--json").stdout)
    assert done == planned | {"dry_run": False}
    assert len(before) - len(content(two_agents)) == 2
    with using(two_agents) as agent:
        for name in "ab":
            tokens = agent(name).tokens()
            assert agent(name).cached((*tokens, 1)) == len(tokens)
    assert json.loads(command("gc", "--json").stdout)["blocks"] == 0


def test_gc_keeps_the_blocks_of_an_unsaved_agent_and_lists_unreadable_ones(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        agent("b").store.mark_unsaved("b")
    damage(two_agents, "a", "HEAD", b"?")
    result = command("gc")
    assert "cannot be read" in result.stderr
    assert "removed 1 blocks" in result.stdout  # a's third; the first two are b's as well
    assert len(blocks(two_agents)) == 3


def test_rm_removes_every_file_that_no_other_agent_uses(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        kept = blocks(two_agents)
        agent("c").say((*LONG[:256], *ids(600, seed=3)))
        agent("c").say((*LONG[:256], *ids(600, seed=4)))  # its first version's blocks are its own too
        b = agent("b").tokens()
    done = json.loads(command("rm", "c", "--yes", "--json").stdout)
    assert (done["blocks"], done["shared_blocks"]) == (4, 1)
    assert blocks(two_agents) == kept
    command("rm", "a", "--yes")
    assert [agent["agent_id"] for agent in json.loads(command("ls", "--json").stdout)] == ["b"]
    assert len(blocks(two_agents)) == 3
    with using(two_agents) as agent:
        assert agent("b").cached((*b, 1)) == len(b)
        assert agent("a").open().number == 0
    assert list((two_agents / "tmp").iterdir()) == []


def test_rm_asks_first(command: Command, two_agents: Path) -> None:
    before = content(two_agents)
    command("rm", "a", input="n\n", ok=False)
    command("rm", "a", "--json", ok=False)
    assert "there is no agent 'nobody'" in command("rm", "nobody", "--yes", ok=False).output
    assert content(two_agents) == before
    command("rm", "a", input="y\n")
    assert content(two_agents) != before


def test_an_agent_that_cannot_be_read_can_be_removed(command: Command, two_agents: Path) -> None:
    damage(two_agents, "a", "00000001.json", b"?")
    command("rm", "a", "--yes")
    assert [agent["agent_id"] for agent in json.loads(command("ls", "--json").stdout)] == ["b"]


def test_an_interrupted_removal_is_finished_when_the_store_is_next_opened(command: Command, two_agents: Path) -> None:
    agent_folder = access.look_at(two_agents).agent("a").path
    agent_folder.rename(two_agents / "tmp" / f"{agent_folder.name}.removed")
    with using(two_agents) as agent:
        assert agent("a").open().number == 0
    assert list((two_agents / "tmp").iterdir()) == []


# --- fork ---


@pytest.mark.parametrize("tokens", [1000, 1024, 100])
def test_a_fork_continues_token_for_token_and_independently(command: Command, folder: Path, tokens: int) -> None:
    with using(folder) as agent:
        agent("a").say(LONG[:50])
        agent("a").say(LONG[:tokens])
        original = agent("a").open()
    command("fork", "a", "../b")
    with using(folder) as agent:
        fork = agent("../b").open()
        assert fork.transcript == original.transcript
        assert not set(fork.results) & set(original.results)
        assert agent("../b").cached((*LONG[:tokens], 1, 2)) == tokens
        agent("../b").say((*LONG[:tokens], 1, 2), (3,))
        agent("a").say((*LONG[:tokens], 4))
        for name, end in (("../b", (1, 2, 3)), ("a", (4,))):
            assert agent(name).tokens() == (*LONG[:tokens], *end)
            assert agent(name).cached((*agent(name).tokens(), 9)) == tokens + len(end)
    command("rm", "a", "--yes")
    assert json.loads(command("ls", "--json").stdout)[0]["turns"] == 1
    with using(folder) as agent:
        assert agent("../b").cached((*agent("../b").tokens(), 9)) == tokens + 3
    assert json.loads(command("show", "../b", "--json").stdout)["versions"][0]["job_id"] is None
    command("verify")


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("kind", SNAPSHOT_SPECS)
def test_a_fork_copies_snapshots(command: Command, folder: Path, kind: str, versions: int) -> None:
    model = make_model(spec=SNAPSHOT_SPECS[kind])
    store = open_store(folder)
    for version in range(versions):
        Agent(store, "a", model=model).say(LONG[: 600 + version], (1, 2))
    store.close()
    command("fork", "a", "b")
    store = open_store(folder)
    for name in "ab":
        agent = Agent(store, name, model=model)
        assert agent.cached((*LONG[: 599 + versions], 1, 2, 3)) == 601 + versions
        assert agent.cached(LONG[: 599 + versions]) == 598 + versions
    assert store.misses == {}
    store.close()


def test_a_fork_without_one_of_its_snapshots_still_has_the_other(command: Command, folder: Path) -> None:
    model = make_model(spec=SNAPSHOT_SPECS["hybrid"])
    store = open_store(folder)
    Agent(store, "a", model=model).say(LONG[:600], (1, 2))
    store.close()
    only(folder, "snapshot-1-0*").unlink()
    command("fork", "a", "b")
    store = open_store(folder)
    assert Agent(store, "b", model=model).cached((*LONG[:600], 1, 2, 3)) == 602
    assert Agent(store, "b", model=model).restore(LONG[:600]).miss_reason == "snapshot_missing"
    store.close()


@pytest.mark.parametrize("kind", SNAPSHOT_SPECS)
def test_every_command_knows_agents_with_snapshots(command: Command, folder: Path, kind: str) -> None:
    model = make_model(spec=SNAPSHOT_SPECS[kind])
    store = open_store(folder)
    for name in "ab":
        Agent(store, name, model=model).say(LONG[:600], (1, 2))
    store.close()
    a, _ = json.loads(command("ls", "--json").stdout)
    assert a["snapshot_bytes"] == sum(
        path.stat().st_size for path in access.look_at(folder).agent("a").path.glob("snap*")
    )
    assert (a["cached_tokens"], a["blocks"]) == (602, 2 if kind == "hybrid" else 0)
    assert "SNAPSHOTS" in command("ls").stdout
    command("show", "a")
    before = content(folder)
    assert json.loads(command("gc", "--json").stdout)["blocks"] == 0
    assert content(folder) == before
    command("verify")
    done = json.loads(command("rm", "a", "--yes", "--json").stdout)
    assert (done["blocks"], done["shared_blocks"]) == (0, 2 if kind == "hybrid" else 0)
    store = open_store(folder)
    assert Agent(store, "b", model=model).cached((*LONG[:600], 1, 2, 3)) == 602
    store.close()
    next(access.look_at(folder).agent("b").path.glob("snap*")).write_bytes(b"?")
    assert "it is damaged" in command("verify", ok=False).output


def test_fork_refuses_what_it_cannot_do_and_changes_nothing(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        agent("unsaved").say(LONG[:10])
        agent("unsaved").store.mark_unsaved("unsaved")
    before = content(two_agents)
    assert "there is an agent 'b' already" in command("fork", "a", "b", ok=False).output
    assert "there is no agent 'nobody'" in command("fork", "nobody", "c", ok=False).output
    assert "its last turn was not saved" in command("fork", "unsaved", "c", ok=False).output
    assert "cannot be an agent's id" in command("fork", "a", "\n", ok=False).output
    assert content(two_agents) == before


def test_a_rollback_brings_back_what_show_lists(command: Command, two_agents: Path) -> None:
    shown = json.loads(command("show", "a", "--json").stdout)["versions"]
    assert [(x["version"], x["made_by"], x["can_return"]) for x in shown] == [(1, "turn", True), (2, "turn", False)]
    back = json.loads(command("rollback", "a", "--json").stdout)
    assert back == {"agent_id": "a", "version": 3, "to_version": 1, "from_version": 2, "tokens": 700}
    assert "as it was at version 2: 1000 tokens" in command("rollback", "a", "--to", "2").stdout
    shown = json.loads(command("show", "a", "--json").stdout)["versions"]
    assert [x["made_by"] for x in shown] == ["turn", "turn", "rollback", "rollback"]
    assert "rollback" in command("show", "a").stdout
    with using(two_agents) as agent:
        assert (agent("a").open().number, agent("a").tokens()) == (4, LONG[:1000])
        assert agent("a").cached((*LONG[:1000], 1)) == 768
    before = content(two_agents)
    assert "has no version 9" in command("rollback", "a", "--to", "9", ok=False).output
    assert "there is no agent 'nobody'" in command("rollback", "nobody", ok=False).output
    assert content(two_agents) == before


def damage(folder: Path, agent: str, name: str, data: bytes) -> None:
    only(access.look_at(folder).agent(agent).path, name).write_bytes(data)


@pytest.mark.parametrize(
    "arguments",
    [("ls",), ("show", "a"), ("verify",), ("gc",), ("fork", "a", "c"), ("rm", "a", "--yes"), ("show", "nobody")],
)
def test_json_is_one_value(command: Command, two_agents: Path, arguments: tuple[str, ...]) -> None:
    json.loads(command(*arguments, "--json", ok=arguments[-1] != "nobody").stdout)


def test_a_misspelt_variable_is_refused(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_STROE", "elsewhere")
    assert "STOKER_STROE (did you mean STOKER_STORE?)" in command("gc", ok=False).output
    assert not folder.exists()
