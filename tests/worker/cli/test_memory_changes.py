"""`stoker-worker memory rm | fork | rollback`: their output, and what they change or leave alone."""

import json
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.worker.cli.conftest import LONG, Command
from tests.worker.memory.agents import (
    SNAPSHOT_SPECS,
    Agent,
    call_of_session,
    files_below,
    ids,
    make_model,
    open_store,
    using,
)
from tests.worker.memory.in_flight_process import another_process_working_on

from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.store_parts import opened


def blocks(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("blocks/*/*/*.safetensors")}


def content(folder: Path) -> dict[str, bytes]:
    """Of every cache file, and a copy of every table."""
    found = {str(path): path.read_bytes() for path in files_below(folder) if path.suffix in {".safetensors", ".tmp"}}
    with opened(folder) as parts, parts.database.snapshot() as connection:
        for table in ("agents", "turns", "deliveries", "blocks"):
            found[table] = repr(connection.execute(f"SELECT * FROM {table}").fetchall()).encode()
    return found


def assert_sound(folder: Path) -> None:
    with opened(folder) as parts:
        assert list(verify_store(parts)) == []


# --- rm ---


def test_rm_removes_every_file_that_no_other_agent_uses(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        kept = blocks(two_agents)
        agent("c").say((*LONG[:256], *ids(600, seed=3)))
        agent("c").say((*LONG[:256], *ids(600, seed=4)))  # its first version's blocks are its own too
        b = agent("b").tokens()
        done = json.loads(command("rm", "c", "--yes", "--json").stdout)  # beside the worker
        assert (done["agent_id"], done["blocks"], done["shared_blocks"]) == ("c", 4, 1)
        assert blocks(two_agents) == kept
        assert "removed 'a' and 1 blocks" in command("rm", "a", "--yes").stdout
        assert [agent["agent_id"] for agent in json.loads(command("ls", "--json").stdout)] == ["b"]
        assert (len(blocks(two_agents)), len(list(two_agents.glob("pieces/*/*")))) == (3, 1)
        assert agent("b").cached((*b, 1)) == len(b)
        assert agent("a").open().number == 0
        assert agent("a").say(LONG[:300]) == 1
    assert_sound(two_agents)


def test_rm_asks_first(command: Command, two_agents: Path) -> None:
    before = content(two_agents)
    command("rm", "a", input="n\n", ok=False)
    command("rm", "a", "--json", ok=False)
    assert "there is no agent 'nobody'" in command("rm", "nobody", "--yes", ok=False).output
    assert content(two_agents) == before
    command("rm", "a", input="y\n")
    assert content(two_agents) != before


def test_rm_removes_a_session_beside_the_worker_and_no_agent(command: Command, two_agents: Path) -> None:
    with closing(open_store(two_agents)) as store:
        before = blocks(two_agents)
        call_of_session(store, ids(600, seed=5), session="s")
        call_of_session(store, ids(600, seed=6), session="kept")
        sessions = json.loads(command("ls", "--sessions", "--sort", "name", "--json").stdout)
        assert [(one["session"], one["tokens"], one["turns"]) for one in sessions] == [("kept", 600, 1), ("s", 600, 1)]
        assert [
            one["session"] for one in json.loads(command("ls", "--sessions", "--match", "[s-z]", "--json").stdout)
        ] == ["s"]
        assert command("ls", "--sessions", "--limit", "1").stdout.startswith("SESSION ")
        done = json.loads(command("rm", "--session", "s", "--json").stdout)
        assert done == {"session": "s", "conversations": 1, "blocks": 2}
        assert len(blocks(two_agents) - before) == 2
        assert call_of_session(store, ids(610, seed=5), session="s") == (0, None)
        assert call_of_session(store, ids(610, seed=6), session="kept") == (600, None)
    listed = json.loads(command("ls", "--json").stdout)
    assert sorted(agent["agent_id"] for agent in listed) == ["a", "b"]
    command("rm", ok=False)
    command("rm", "a", "--session", "s", ok=False)
    assert_sound(two_agents)


# --- fork and rollback ---


@pytest.mark.parametrize("tokens", [1000, 1024, 100])
def test_a_fork_continues_token_for_token_and_independently(command: Command, folder: Path, tokens: int) -> None:
    with using(folder) as agent:
        agent("a").say(LONG[:50])
        agent("a").say(LONG[:tokens])
        original = agent("a").open()
        command("fork", "a", "../b")
        assert agent("../b").open().transcript == original.transcript
        assert agent("../b").cached((*LONG[:tokens], 1, 2)) == tokens
        agent("../b").say((*LONG[:tokens], 1, 2), (3,))
        agent("a").say((*LONG[:tokens], 4))
        for name, end in (("../b", (1, 2, 3)), ("a", (4,))):
            assert agent(name).tokens() == (*LONG[:tokens], *end)
            assert agent(name).cached((*agent(name).tokens(), 9)) == tokens + len(end)
        command("rm", "a", "--yes")
        assert json.loads(command("ls", "--json").stdout)[0]["turns"] == 1
        assert agent("../b").cached((*agent("../b").tokens(), 9)) == tokens + 3
    assert json.loads(command("show", "../b", "--json").stdout)["versions"][0]["job_id"] is None
    assert_sound(folder)


@pytest.mark.parametrize("kind", SNAPSHOT_SPECS)
def test_every_command_knows_agents_with_snapshots(command: Command, folder: Path, kind: str) -> None:
    model = make_model(spec=SNAPSHOT_SPECS[kind])
    store = open_store(folder)
    for name in "ab":
        Agent(store, name, model=model).say(LONG[:600], (1, 2))
    store.close()
    command("verify")
    done = json.loads(command("rm", "a", "--yes", "--json").stdout)
    assert (done["blocks"], done["shared_blocks"]) == (0, 2)
    store = open_store(folder)
    assert Agent(store, "b", model=model).cached((*LONG[:600], 1, 2, 3)) == 602
    command("rollback", "b", "--to", "1")
    assert Agent(store, "b", model=model).cached((*LONG[:600], 1, 2, 3)) == 512  # at a checkpoint
    store.close()
    assert len(list(folder.glob("pieces/*/*"))) == 0
    assert_sound(folder)


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
    with using(two_agents) as agent:
        shown = json.loads(command("show", "a", "--json").stdout)["versions"]
        assert [(x["version"], x["made_by"], x["can_return"]) for x in shown] == [(1, "turn", True), (2, "turn", False)]
        back = json.loads(command("rollback", "a", "--json").stdout)
        assert back == {"agent_id": "a", "version": 3, "to_version": 1, "from_version": 2, "tokens": 700}
        assert "as it was at version 2: 1000 tokens" in command("rollback", "a", "--to", "2").stdout
        shown = json.loads(command("show", "a", "--json").stdout)["versions"]
        assert [x["made_by"] for x in shown] == ["turn", "turn", "rollback", "rollback"]
        assert (agent("a").open().number, agent("a").tokens()) == (4, LONG[:1000])
        assert agent("a").cached((*LONG[:1000], 1)) == 768
    before = content(two_agents)
    assert "has no version 9" in command("rollback", "a", "--to", "9", ok=False).output
    assert "there is no agent 'nobody'" in command("rollback", "nobody", ok=False).output
    assert content(two_agents) == before
    assert_sound(two_agents)


def test_a_rollback_of_the_shell_keeps_every_version_that_the_worker_keeps(command: Command, folder: Path) -> None:
    with using(folder) as agent:
        for n in range(1, 18):
            agent("a").say(LONG[:n])
        kept = [x["version"] for x in json.loads(command("show", "a", "--json").stdout)["versions"]]
        for _ in range(5):
            command("rollback", "a")
        now = [x["version"] for x in json.loads(command("show", "a", "--json").stdout)["versions"]]
        assert now == [*kept, *range(18, 23)]


# --- agents with work in flight ---

CHANGES: dict[str, list[tuple[str, ...]]] = {
    "a": [("rollback", "a"), ("rm", "a", "--yes")],
    "a2": [("fork", "b", "a2")],
}


@pytest.mark.parametrize("agent_id", CHANGES)
def test_an_agent_with_work_in_flight_is_refused_or_waited_for(
    command: Command, two_agents: Path, agent_id: str
) -> None:
    before = content(two_agents)
    with another_process_working_on(two_agents, agent_id) as other:
        for arguments in CHANGES[agent_id]:
            refused = command(*arguments, ok=False).output
            assert f"AgentBusy: another process is working on agent {agent_id!r}" in refused
            assert json.loads(command(*arguments, "--json", ok=False).stdout)["error"]["type"] == "AgentBusy"
        assert content(two_agents) == before
        waiting = threading.Thread(target=command, args=(*arguments, "--wait"))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert content(two_agents) == before
        other.kill()
        waiting.join(30)
    assert content(two_agents) != before


def test_an_agent_whose_jobs_only_wait_can_be_changed(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        store = agent("a").store
        store.pin(frozenset({"a"}), frozenset({"b"}))
        command("rm", "b", "--yes")
        command("fork", "a", "c")  # of an agent with work
        assert "AgentBusy" in command("rm", "a", "--yes", ok=False).output
        store.pin(frozenset(), frozenset())
        command("rm", "a", "--yes")
        assert [agent["agent_id"] for agent in json.loads(command("ls", "--json").stdout)] == ["c"]
