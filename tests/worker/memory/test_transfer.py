"""Export and import: a file contains the whole conversation, and no file can do harm."""

import dataclasses
import errno
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import Agent, FastDisk, ids, make_transcript, make_turn, open_store
from tests.worker.memory.in_flight_process import another_process_working_on

from stoker_shared.errors import AgentBusy, AgentMemoryError, AgentTranscriptUnreadable
from stoker_shared.message import Message
from stoker_worker.memory.admin.archive import export_agent, import_agent
from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.database import checksum
from stoker_worker.memory.replica.versions import SharedVersion
from stoker_worker.memory.store_parts import StoreParts, open_parts
from stoker_worker.ports import AgentVersion, Delivery

LONG = ids(1000)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Agent `a`, three turns and 1000 tokens, in a file."""
    store = open_store(tmp_path / "home")
    agent = Agent(store, "a", salt="s")
    agent.say(ids(300, seed=5))
    agent.say(LONG[:600])
    agent.say(LONG)
    export_agent(store.parts, "a", tmp_path / "a.agent")
    store.close()
    return tmp_path / "a.agent"


@pytest.fixture
def home(exported: Path) -> Iterator[StoreParts]:
    """The store that `exported` comes from."""
    with closing(open_parts(exported.parent / "home", FastDisk())) as parts:
        yield parts


@pytest.fixture
def away(tmp_path: Path) -> Iterator[StoreParts]:
    """Another store, with an agent of its own."""
    store = open_store(tmp_path / "away")
    Agent(store, "other").say(LONG[:300])
    store.close()
    with closing(open_parts(tmp_path / "away", FastDisk())) as parts:
        yield parts


def content(store: StoreParts) -> str:
    """Every row."""
    with store.database.snapshot() as connection:
        tables = ("agents", "turns", "deliveries", "blocks")
        return repr([connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables])


def opened(folder: Path, name: str) -> AgentVersion:
    with closing(open_store(folder)) as store:
        return store.open_agent(name)


@pytest.mark.parametrize("new_id", [None, "b/../\U0001f600"])
def test_an_exported_agent_continues_in_another_store(
    exported: Path, home: StoreParts, away: StoreParts, new_id: str | None
) -> None:
    assert import_agent(away, exported, new_id=new_id).version == 3
    original = opened(home.path, "a")
    with closing(open_store(away.path)) as store:
        agent = Agent(store, new_id or "a", salt="s")
        found = agent.open()
        assert (found.number, found.transcript, found.cache) == (3, original.transcript, None)
        agent.say((*LONG, 1, 2))
        assert agent.cached((*LONG, 1, 2, 3)) == 1002
        assert list(verify_store(store.parts)) == []


def test_messages_travel_to_the_last_bit(tmp_path: Path, away: StoreParts) -> None:
    call = {"name": "f", "arguments": {"x": 1.0, "y": 1, "z": 1e22, "w": float("nan"), "t": "\u2028\U0001f600"}}
    messages = (Message(role="user", content="ü"), Message(role="assistant", content=None, tool_calls=(call,)))
    with closing(open_store(tmp_path / "home")) as store:
        agent = Agent(store, "a")
        transcript = dataclasses.replace(make_transcript(LONG[:5]), messages=messages, carry_text="\x1b")
        store.save(make_turn(agent, agent.open(), transcript, None))
        export_agent(store.parts, "a", tmp_path / "a.agent")
    import_agent(away, tmp_path / "a.agent")
    found = opened(away.path, "a").transcript
    assert found is not None
    assert found.messages is not None
    assert [x.model_dump_json() for x in found.messages] == [x.model_dump_json() for x in messages]
    assert repr(found.messages) == repr(messages)
    assert found.carry_text == "\x1b"


def test_a_job_whose_answer_stayed_behind_is_not_done_twice(exported: Path, away: StoreParts) -> None:
    """Under its own id the agent may meet the job again that made its newest version elsewhere."""
    delivery = Delivery("job-3", "2024-01-01T00:00:00Z")
    import_agent(away, exported)
    import_agent(away, exported, new_id="b")
    with closing(open_store(away.path)) as store:
        with pytest.raises(AgentTranscriptUnreadable, match="its answer is missing"):
            store.answer("a", delivery)
        assert store.answer("b", delivery) is None


def test_only_the_owner_may_read_what_was_exported(exported: Path) -> None:
    assert exported.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in exported.parent.iterdir() if path.is_file()] == ["a.agent"]


def test_export_replaces_no_file_and_refuses_an_unreadable_agent(exported: Path, home: StoreParts) -> None:
    before = exported.read_bytes()
    with pytest.raises(AgentMemoryError, match="exists already"):
        export_agent(home, "a", exported)
    with pytest.raises(AgentMemoryError, match="there is no agent 'nobody'"):
        export_agent(home, "nobody", exported.with_name("b"))
    home.database.commit(lambda connection: connection.execute("UPDATE turns SET about = '?' WHERE version = 1"))
    export_agent(home, "a", exported.with_name("without an older version"))
    home.database.commit(lambda connection: connection.execute("UPDATE turns SET about = '?' WHERE version = 3"))
    with pytest.raises(AgentMemoryError, match="version 3 is unusable"):
        export_agent(home, "a", exported.with_name("b"))
    assert exported.read_bytes() == before
    assert not exported.with_name("b").exists()


def test_import_and_export_beside_a_worker_at_work(exported: Path, tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "busy")) as store, closing(open_parts(store.parts.path, FastDisk())) as parts:
        other = Agent(store, "other")
        other.say(LONG[:300])
        import_agent(parts, exported)
        Agent(store, "a", salt="s").say((*LONG, 1, 2))
        other.say(LONG[:500])
        assert export_agent(parts, "a", tmp_path / "again").version == 4
        assert list(verify_store(parts)) == []


def test_an_agent_that_is_there_or_that_a_worker_is_making_is_not_imported(exported: Path, away: StoreParts) -> None:
    before = content(away)
    with pytest.raises(AgentMemoryError, match="there is an agent 'other' already"):
        import_agent(away, exported, new_id="other")
    with another_process_working_on(away.path, "a"), pytest.raises(AgentBusy):
        import_agent(away, exported)
    assert content(away) == before


def test_an_import_that_cannot_be_written_leaves_no_agent_and_can_be_repeated(
    exported: Path, away: StoreParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(change: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    before = content(away)
    with monkeypatch.context() as failing:
        failing.setattr(away.database, "commit", full)
        with pytest.raises(OSError, match="full"):
            import_agent(away, exported)
    assert content(away) == before
    assert import_agent(away, exported).version == 3


def _signed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Changes the fields under a right checksum of the file, as a forger would."""

    def forge(file: bytes) -> bytes:
        fields = json.loads(file.partition(b"\n")[2])
        change(fields)
        body = json.dumps(fields).encode()
        return checksum(body).hex().encode() + b"\n" + body

    return forge


def _resealed(**changes: Any) -> Callable[[bytes], bytes]:
    """The same with a right checksum of the row."""

    def forge(file: bytes) -> bytes:
        found = SharedVersion.decode("a", 3, file)
        record = dataclasses.replace(found.record, **changes)  # type: ignore[type-var]
        return dataclasses.replace(found, record=record).encode()

    return forge


@pytest.mark.parametrize(
    "change",
    [
        *(lambda file, keep=keep: file[:keep] for keep in (0, 10, 33, 500, -1)),  # type: ignore[misc]
        lambda file: file.replace(b"1000 tokens", b"1001 tokens"),
        lambda file: b"ustar" * 1000,
        lambda file: file[:33] + b"[" * 100_000,
        _signed(lambda fields: fields.update(version=4)),
        _signed(lambda fields: fields.update(version=10**30)),
        _signed(lambda fields: fields.update(agent_id="somebody")),
        _signed(lambda fields: fields.update(agent_id=5)),
        _signed(lambda fields: fields.update(about="{}")),
        _signed(lambda fields: fields.update(format="stoker-shared 2")),
        _signed(lambda fields: fields.pop("checksum")),
        _signed(lambda fields: fields.pop("new_tokens")),
        _resealed(keep_tokens=10),
        _resealed(keep_tokens="a"),
        _resealed(keep_tokens=None),
        _resealed(new_text=5),
        _resealed(parent=bytes(16)),
    ],
)
def test_an_inconsistent_file_is_refused_and_leaves_nothing(
    exported: Path, away: StoreParts, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    forged = tmp_path / "forged"
    forged.write_bytes(change(exported.read_bytes()))
    before = content(away)
    for new_id in (None, "b"):
        with pytest.raises(AgentMemoryError, match=r"forged is refused: "):
            import_agent(away, forged, new_id=new_id)
    assert content(away) == before


def test_what_a_forger_says_of_caches_and_times_is_not_taken_over(
    exported: Path, away: StoreParts, tmp_path: Path
) -> None:
    record = SharedVersion.decode("a", 3, exported.read_bytes()).record
    assert record is not None
    with closing(open_store(exported.parent / "home")) as store:
        cache = store.open_agent("a").cache
    assert cache is not None
    false = dataclasses.replace(cache, model="../../../" + "a" * 64, tokens=10**9, snapshots=(9, 5))
    forged = tmp_path / "forged"
    for forge in (
        _resealed(about=dataclasses.replace(record.about, cache=false)),
        _resealed(about=dataclasses.replace(record.about, tokens=5, since_full=-(10**6))),
        _resealed(about=dataclasses.replace(record.about, saved_at=1e300, answer_until=1e300)),
        _resealed(keep_tokens=False),
    ):
        forged.write_bytes(forge(exported.read_bytes()))
        import_agent(away, forged)
        with closing(open_store(away.path)) as store:
            agent = Agent(store, "a", salt="s")
            assert (agent.open().cache, agent.tokens()) == (None, LONG)
            assert agent.cached(LONG) == 0
            agent.say((*LONG, 1))
            assert list(verify_store(store.parts)) == []
            forget_agent(store.parts, "a")


@pytest.mark.parametrize("agent_id", ["\x1b[2J", "", "x" * 201, "\ud800"])
def test_an_id_that_no_job_could_have_is_refused(
    exported: Path, away: StoreParts, tmp_path: Path, agent_id: str
) -> None:
    with pytest.raises(AgentMemoryError, match=r"cannot be an agent's id|is refused"):
        import_agent(away, exported, new_id=agent_id)
    forged = tmp_path / "forged"
    forged.write_bytes(_signed(lambda fields: fields.update(agent_id=agent_id))(exported.read_bytes()))
    with pytest.raises(AgentMemoryError):
        import_agent(away, forged)
