"""`stoker-worker memory ls | show | verify | export | import`: their output; and what all commands have in common."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.worker.cli.conftest import LONG, Command
from tests.worker.memory.agents import ids, make_transcript, make_turn, using

from stoker_worker.cli.main import main
from stoker_worker.memory.admin import listing
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.store_parts import opened

# --- reading ---


def test_ls_lists_each_agent(command: Command, two_agents: Path) -> None:
    a, b = json.loads(command("ls", "--json", "--sort", "name").stdout)
    assert (a["agent_id"], a["version"], a["turns"], a["tokens"]) == ("a", 2, 2, 1000)
    assert (a["cached_tokens"], a["block_bytes"], a["state"]) == (1000, b["block_bytes"], "ok")
    assert min(a["transcript_bytes"], a["piece_bytes"], a["block_bytes"]) > 0
    header, first, second = command("ls", "--sort", "name").stdout.splitlines()
    assert header.split()[:3] == ["AGENT", "VERSION", "TURNS"]
    assert [first.split()[:4], second.split()[:4]] == [["a", "2", "2", "1000"], ["b", "1", "1", "900"]]


def test_ls_shows_fifty_and_tells_of_the_others(command: Command, folder: Path) -> None:
    with using(folder) as agent:
        for n in range(52):
            agent(f"agent-{n}").say((1,))
    first = command("ls")
    assert first.stdout.splitlines()[1].startswith("agent-51")
    assert len(first.stdout.splitlines()) == 1 + 50
    assert first.stderr == "50 of 52 agents; --offset 50 for more; --all for all\n"
    rest = command("ls", "--offset", "50")
    assert [line.split()[0] for line in rest.stdout.splitlines()[1:]] == ["agent-1", "agent-0"]
    assert rest.stderr == "2 of 52 agents; --all for all\n"
    assert len(command("ls", "--all").stdout.splitlines()) == 1 + 52
    assert command("ls", "--all").stderr == ""
    assert len(json.loads(command("ls", "--json").stdout)) == 52
    assert [x["agent_id"] for x in json.loads(command("ls", "--json", "--limit", "1", "--match", "*-7").stdout)] == [
        "agent-7"
    ]
    command("ls", "--all", "--limit", "3", ok=False)


@pytest.mark.parametrize("form", ["--all", "--json"])
def test_ls_holds_nothing_of_the_store_while_it_prints(
    command: Command, folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output may stand still in a pager for days."""
    monkeypatch.setattr(listing, "AT_ONCE", 5)
    printed = []

    def echo(text: str = "", **options: object) -> None:
        printed.append(text)
        agent("busy").say(ids(len(printed)))
        agent("busy").store.parts.database.empty_log()
        assert agent("busy").store.parts.database.log_bytes() == 0
        if len(printed) == 2:  # while most agents are still to come
            forget_agent(agent("busy").store.parts, "agent-11")

    with using(folder) as agent:
        for n in range(12):
            agent(f"agent-{n}").say((1,))
        monkeypatch.setattr("click.echo", echo)
        command("ls", form, "--sort", "turns")
    names = [f"agent-{n}" for n in range(11)]
    assert [name for name in [*names, "agent-11"] if f"{name} " in "".join(printed).replace('"', " ")] == names


def test_unsaved_and_unreadable_agents_are_shown_as_such(command: Command, two_agents: Path) -> None:
    with using(two_agents) as agent:
        for name in ("unsaved", "damaged"):
            agent(name).say(LONG[:10])
        agent("unsaved").store.mark_unsaved("unsaved")
    change(two_agents, "UPDATE agents SET head = x'00' WHERE agent_id = 'damaged'")
    change(two_agents, "UPDATE turns SET new_tokens = x'00' WHERE agent = 1")
    states = {agent["agent_id"]: agent["state"] for agent in json.loads(command("ls", "--json").stdout)}
    # `ls` reads no conversation, and so does not know about that of `a`.
    assert states == {"a": "ok", "b": "ok", "unsaved": "unsaved", "damaged": "unreadable"}
    assert "unsaved: its last turn was not saved" in command("ls").stdout
    for name, problem in (
        ("unsaved", "unsaved: its last turn was not saved"),
        ("damaged", "unreadable: the checksum of its row does not match"),
        ("a", "unreadable: version 2 is unusable: its checksum does not match"),
    ):
        assert problem in command("show", name, "--text").stdout
    assert "(it cannot be read)" in command("show", "a", "--text").stdout
    assert json.loads(command("show", "a", "--text", "--json").stdout)["messages"] is None


def change(folder: Path, sql: str) -> None:
    with opened(folder) as parts:
        parts.database.commit(lambda connection: connection.execute(sql))


def test_an_agent_whose_counts_are_lost_is_shown(command: Command, two_agents: Path) -> None:
    set_null(two_agents, "transcript_bytes", "piece_bytes")
    shown = command("show", "a").stdout
    assert "pieces       0 bytes, tail and snapshots" in shown
    assert "1000 tokens, 1 messages" in shown


def set_null(folder: Path, *columns: str) -> None:
    """As a damaged byte can, and SQL cannot."""
    with closing(sqlite3.connect(folder / "agents.db", isolation_level=None)) as connection:
        (sql,) = connection.execute("SELECT sql FROM sqlite_schema WHERE name = 'agents'").fetchone()
        for table in (sql.replace("NOT NULL", ""), sql):
            connection.execute("PRAGMA writable_schema=ON")
            connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'agents'", (table,))
            connection.execute("PRAGMA writable_schema=RESET")
            if table != sql:
                connection.execute(f"UPDATE agents SET {', '.join(f'{name} = NULL' for name in columns)}")


def test_an_agent_that_only_one_index_finds_is_named(command: Command, two_agents: Path) -> None:
    change(two_agents, "UPDATE agents SET key = x'00' WHERE agent_id = 'b'")
    assert "agent 'b': its indexes do not agree on the agent" in command("show", "b", ok=False).output


def test_show_has_everything_about_an_agent(command: Command, two_agents: Path) -> None:
    shown = json.loads(command("show", "a", "--text", "--json").stdout)
    agent = shown["agent"]
    assert (agent["tokens"], agent["messages"], agent["cached_tokens"], agent["blocks"]) == (1000, 1, 1000, 3)
    assert [(x["version"], x["job_id"], x["tokens"], x["new_tokens"]) for x in shown["versions"]] == [
        (1, "job-1", 700, 700),
        (2, "job-2", 1000, 300),
    ]
    assert shown["messages"] == [{"role": "user", "content": "1000 tokens"}]
    text = command("show", "a", "--text").stdout
    assert "1000 tokens, 1 messages" in text
    assert "job-2" in text
    assert "[user]\n1000 tokens" in text


def test_a_models_text_cannot_steer_the_terminal(command: Command, folder: Path) -> None:
    with using(folder) as agent:
        transcript = make_transcript(LONG[:5], text="\x1b[2J[red]plain[/red]\x9b")
        agent("a").store.save(make_turn(agent("a"), agent("a").open(), transcript, None))
    text = command("show", "a", "--text").stdout
    assert r"\x1b[2J[red]plain[/red]\x9b" in text


def test_verify_fails_when_something_is_wrong(command: Command, two_agents: Path) -> None:
    assert command("verify").stdout == "everything is as it was written\n"
    block, other = sorted(two_agents.glob("blocks/*/*/*"))[:2]
    block.write_bytes(block.read_bytes()[:-1] + b"?")
    assert json.loads(command("verify", "--json", ok=False).stdout) == {"problems": [f"{block}: it is damaged"]}
    other.write_bytes(b"")
    assert command("verify", ok=False).stdout.splitlines() == [f"{block}: it is damaged", f"{other}: it is damaged"]


# --- carrying ---


def test_an_agent_is_carried_to_another_store_beside_workers(
    command: Command, two_agents: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with using(two_agents), using(elsewhere) as agent:
        done = json.loads(command("export", "a", tmp_path / "a.agent", "--json").stdout)
        assert (done["agent_id"], done["version"]) == ("a", 2)
        done = json.loads(command("import", tmp_path / "a.agent", "--json", store=elsewhere).stdout)
        assert done == {"agent_id": "a", "version": 2}
        text = command("import", tmp_path / "a.agent", "--as", "c", store=elsewhere).stdout
        assert text == "'c' at version 2\n"
        for name in "ac":
            assert agent(name).tokens()[:1000] == LONG[:1000]
        assert "there is an agent 'a' already" in command("import", tmp_path / "a.agent", ok=False).output


# --- all commands ---


def test_reading_changes_nothing(command: Command, two_agents: Path, tmp_path: Path) -> None:
    with using(two_agents):
        (two_agents / "tmp" / "0.tmp").write_bytes(b"the worker's")
        before = content(two_agents)
        for reader in (("ls",), ("show", "a"), ("verify",), ("export", "a", tmp_path / "a.agent")):
            command(*reader)
        assert content(two_agents) == before


def content(folder: Path) -> dict[str, bytes]:
    """Every file but those by which SQLite's readers and writers find each other."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".db-shm")
    return {str(path): path.read_bytes() for path in found}


def test_help_needs_none_of_the_workers_packages() -> None:
    code = "import sys; import stoker_worker.cli.main; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "stoker_worker.cli.memory_commands" in loaded
    assert not loaded & {"numpy", "rich", "xxhash", "mlx", "redis", "stoker_worker.memory"}


def test_help_names_the_commands_that_need_a_stopped_worker(command: Command, two_agents: Path, tmp_path: Path) -> None:
    command("backup", tmp_path / "backup")
    commands = (("share", "file:///nowhere"), ("restore", tmp_path / "backup"), ("salvage",))
    with using(two_agents):
        refused = {name for name, *rest in commands if "in use by pid" in command(name, *rest, ok=False).output}
    about = " ".join(CliRunner().invoke(main, ["memory", "--help"]).output.split())
    assert set(about.partition("(except for ")[2].partition(")")[0].replace(" and", ",").split(", ")) == refused


def test_ls_loads_nothing_that_takes_long(two_agents: Path) -> None:
    """It is asked about a hundred thousand agents, and answers within a second."""
    code = "import sys; from stoker_worker.cli.main import main\ntry: main()\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", code, "memory", "ls", "--store", str(two_agents)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loaded = set(output.splitlines()[-1].split())
    assert "stoker_worker.memory.admin.listing" in loaded
    assert not loaded & {"numpy", "stoker_worker.ports", "rich.console", "mlx", "redis"}


def test_no_command_makes_a_store_where_there_is_none(command: Command, folder: Path, tmp_path: Path) -> None:
    changes = ("rm", "a", "--yes"), ("fork", "a", "b"), ("rollback", "a")
    others = ("show", "a"), ("export", "a", tmp_path / "a.agent"), ("share", "file:///nowhere")
    for arguments in (("ls",), ("verify",), *others, *changes):
        assert "there is no store at" in command(*arguments, ok=False).output
    assert not folder.exists()


@pytest.mark.parametrize("arguments", [("show",), ("rm", "--yes"), ("rollback",), ("fork", "a"), ("export", "\udcff")])
def test_an_id_in_another_encoding_is_refused(command: Command, two_agents: Path, arguments: tuple[str, ...]) -> None:
    name, *more = arguments
    refused = command(name, "\udcff", *more, ok=False)
    assert (refused.exit_code, refused.output.splitlines()[-1]) == (2, "Error: the arguments must be UTF-8")


@pytest.mark.parametrize(
    "arguments",
    [
        *(("ls",), ("show", "a"), ("verify",), ("fork", "a", "c"), ("rollback", "a"), ("rm", "a", "--yes")),
        *(("show", "nobody"), ("fork", "nobody", "c")),
    ],
)
def test_json_is_one_value(command: Command, two_agents: Path, arguments: tuple[str, ...]) -> None:
    json.loads(command(*arguments, "--json", ok="nobody" not in arguments).stdout)


def test_the_store_in_the_settings_file_is_the_one_of_the_commands(
    two_agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.toml").write_text(f'store = "{two_agents}"\n')
    monkeypatch.setenv("STOKER_CONFIG", str(tmp_path / "worker.toml"))
    result = CliRunner().invoke(main, ["memory", "ls", "--json"])
    assert (result.exit_code, len(json.loads(result.stdout))) == (0, 2), result.output


def test_a_misspelt_variable_is_refused(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_STROE", "elsewhere")
    assert "STOKER_STROE (did you mean STOKER_STORE?)" in command("ls", ok=False).output
    assert not folder.exists()
