"""`stoker-worker memory backup | restore | salvage`: their output."""

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.worker.cli.conftest import Command
from tests.worker.memory.agents import using

from stoker_worker.memory.admin import backup as backup_module


def test_backup_and_restore_tell_what_they_did(command: Command, two_agents: Path, tmp_path: Path) -> None:
    assert command("backup", tmp_path / "one").stdout.startswith(f"{tmp_path / 'one'}: 2 agents, ")
    done = json.loads(command("backup", tmp_path / "two", "--json").stdout)
    assert (done["file"], done["agents"]) == (str(tmp_path / "two"), 2)
    refused = command("backup", tmp_path / "one", "--json", ok=False)
    assert json.loads(refused.stdout)["error"]["type"] == "FileExistsError"
    words = command("restore", tmp_path / "one").stdout
    assert words.startswith("2 agents, last used 20")
    assert f"4 blocks of their cache; the database that was there is kept as {two_agents}/agents.db.replaced-" in words
    done = json.loads(command("restore", tmp_path / "one", "--json").stdout)
    assert (done["agents"], done["blocks"]) == (2, 4)
    assert Path(done["kept"]).exists()


def test_backup_names_damaged_agents_and_fails_and_keeps_the_file(
    command: Command, two_agents: Path, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(two_agents / "agents.db")) as connection, connection:
        connection.execute("UPDATE turns SET new_tokens = x'00' WHERE agent = 2")
    problem = "agent 'b': version 1 is unusable: its checksum does not match"
    assert command("backup", tmp_path / "one", ok=False).stdout.splitlines()[1:] == [problem]
    assert json.loads(command("backup", tmp_path / "two", "--json", ok=False).stdout)["problems"] == [problem]
    assert command("restore", tmp_path / "one").stdout.startswith("2 agents")


def test_a_backup_that_is_terminated_leaves_no_conversations_behind(
    command: Command, two_agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(source: object, target: Path) -> None:
        target.write_text("half of them")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(backup_module, "copy_database", terminated)
    assert command("backup", tmp_path / "one", ok=False).exit_code == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_a_backup_is_restored_where_there_is_no_store(command: Command, two_agents: Path, tmp_path: Path) -> None:
    command("backup", tmp_path / "backup")
    new = tmp_path / "new"
    assert "is kept" not in command("restore", tmp_path / "backup", store=new).stdout
    assert {x["agent_id"] for x in json.loads(command("ls", "--json", store=new).stdout)} == {"a", "b"}


def test_a_backup_whose_time_of_use_is_damaged_is_restored(command: Command, two_agents: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(two_agents / "agents.db")) as connection, connection:
        connection.execute("UPDATE agents SET last_used = 1e300 WHERE number = 1")
        connection.execute("UPDATE agents SET last_used = x'00' WHERE number = 2")
    command("backup", tmp_path / "backup")
    assert command("restore", tmp_path / "backup").stdout.startswith("2 agents, and 4 blocks of their cache")
    assert json.loads(command("restore", tmp_path / "backup", "--json").stdout)["agents"] == 2


def test_restore_refuses_what_is_no_backup(command: Command, two_agents: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no backup")
    for file in (tmp_path / "text", tmp_path / "nowhere"):
        refused = command("restore", file, ok=False)
        assert str(file) in refused.stderr
    assert len(json.loads(command("ls", "--json").stdout)) == 2


def test_salvage_names_every_agent_that_is_not_whole(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        for n in range(60):
            agent(f"agent-{n}").say((1,))
            agent(f"agent-{n}").say((1, 2))
        agent("once").say((1,))
    with closing(sqlite3.connect(two_agents / "agents.db")) as connection, connection:
        connection.execute(
            "UPDATE turns SET new_tokens = x'00' WHERE agent IN (SELECT number FROM agents WHERE version = 2 AND"
            " agent_id LIKE 'agent%') AND version = 2 OR agent = (SELECT number FROM agents WHERE agent_id = 'once')"
        )
    copy = (two_agents / "agents.db").read_bytes()
    lines = command("salvage").stdout.splitlines()
    assert lines[0].startswith("2 agents are whole; 4 blocks of their cache are there; the database that was there is")
    assert lines[1].startswith("60 agents whose newest version is not proved ('append' is refused until 'memory rollba")
    assert lines[2] == "  'agent-0': version 2 is missing"
    assert lines[-3] == "  and 10 more; --json names all"
    assert lines[-2].startswith("1 agent of which no version can be read (")
    assert lines[-1] == "  'once': version 1 is missing"
    command("show", "agent-0")
    command("rollback", "agent-0")
    states = {x["agent_id"]: x["state"] for x in json.loads(command("ls", "--json", "--all").stdout)}
    assert (states["a"], states["agent-0"]) == ("ok", "ok")
    (two_agents / "agents.db").write_bytes(copy)
    (two_agents / "agents.commits").unlink()
    done = json.loads(command("salvage", "--json").stdout)
    assert (done["whole"], len(done["refused"]), done["lost"]) == (2, 60, {"once": "version 1 is missing"})


def test_salvage_refuses_where_there_is_nothing(command: Command) -> None:
    assert "there is nothing to salvage" in command("salvage", ok=False).stderr
