"""Export and import: a file contains the whole agent, and no file can do harm."""

import dataclasses
import errno
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    Agent,
    FastDisk,
    cache_of,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    open_store,
    states_of,
)
from tests.worker.memory.in_flight_process import another_process_working_on

from stoker_shared.errors import AgentBusy, AgentMemoryError, AgentTranscriptUnreadable
from stoker_shared.message import Message
from stoker_worker.memory.admin.archive import export_agent, import_agent
from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.blocks import BlockChain, CachePiece
from stoker_worker.memory.database import row_checksum
from stoker_worker.memory.store_parts import StoreParts, open_parts
from stoker_worker.memory.summary import VersionSummary, versions_of
from stoker_worker.memory.transcripts import About, find_agent
from stoker_worker.ports import AgentVersion, Delivery, LoadedModel

LONG = ids(1000)
Members = dict[str, bytes]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Agent `a`, three turns and 1000 tokens, in a file with its blocks."""
    store = open_store(tmp_path / "home")
    agent = Agent(store, "a", salt="s")
    agent.say(ids(300, seed=5))
    agent.say(LONG[:600])
    agent.say(LONG)
    export_agent(store.parts, "a", tmp_path / "a.tar", with_blocks=True)
    store.close()
    return tmp_path / "a.tar"


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


def content(store: StoreParts) -> dict[str, bytes]:
    """Every cache file, and every row."""
    files = (path for path in files_below(store.path) if path.suffix in {".safetensors", ".tmp"})
    found = {str(path): path.read_bytes() for path in files}
    with store.database.snapshot() as connection:
        for table in ("agents", "turns", "deliveries", "blocks"):
            found[table] = repr(connection.execute(f"SELECT * FROM {table}").fetchall()).encode()
    return found


def members(archive: Path) -> Members:
    with tarfile.open(archive) as tar:
        return {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]


def pack(path: Path, files: Members) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("new_id", [None, "b/../\U0001f600"])
@pytest.mark.parametrize("with_blocks", [True, False])
def test_an_exported_agent_continues_in_another_store(
    exported: Path, home: StoreParts, away: StoreParts, new_id: str | None, with_blocks: bool
) -> None:
    done = import_agent(away, exported, new_id=new_id, with_blocks=with_blocks)
    assert (done.blocks, done.blocks_left_out) == ((3, 0) if with_blocks else (0, 3))
    original = opened(home.path, "a")
    store = open_store(away.path)
    agent = Agent(store, new_id or "a", salt="s")
    found = agent.open()
    assert (found.number, found.transcript, found.cache) == (3, original.transcript, original.cache)
    assert agent.cached((*LONG, 1)) == (1000 if with_blocks else 0)
    agent.say((*LONG, 1, 2))
    assert agent.cached((*LONG, 1, 2, 3)) == 1002
    assert list(verify_store(store.parts)) == []
    store.close()
    assert list(away.temp.iterdir()) == []
    again = import_agent(away, exported, new_id="c", with_blocks=with_blocks)
    assert (again.blocks, again.blocks_left_out) == (0, 0 if with_blocks else 3)


def opened(folder: Path, name: str) -> AgentVersion:
    with closing(open_store(folder)) as store:
        return store.open_agent(name)


@pytest.mark.parametrize("new_id", [None, "b"])
def test_the_kept_versions_travel_and_an_agent_of_many_turns_too(
    tmp_path: Path, away: StoreParts, new_id: str | None
) -> None:
    """Forty versions, of which the oldest are pruned: whole transcripts with deltas between them."""
    with closing(open_store(tmp_path / "home")) as store:
        agent = Agent(store, "a")
        for n in range(40):
            agent.say(LONG[: 10 + n])
        export_agent(store.parts, "a", tmp_path / "a.tar")
        kept = versions(store.parts, "a")
        tokens = agent.tokens()
    import_agent(away, tmp_path / "a.tar", new_id=new_id)
    assert versions(away, new_id or "a") == kept
    assert len(kept) >= 16
    with closing(open_store(away.path)) as store:
        agent = Agent(store, new_id or "a")
        assert agent.tokens() == tokens
        for n in range(20):  # prunes what was imported
            agent.say((*LONG[:60], n))
        assert list(verify_store(store.parts)) == []


def versions(parts: StoreParts, name: str) -> list[VersionSummary]:
    with parts.database.snapshot() as connection:
        row = find_agent(connection, name)
        assert row is not None
        return versions_of(connection, row)


def test_messages_travel_to_the_last_bit(tmp_path: Path, away: StoreParts) -> None:
    call = {"name": "f", "arguments": {"x": 1.0, "y": 1, "z": 1e22, "w": float("nan"), "t": "\u2028\U0001f600"}}
    messages = (Message(role="user", content="ü"), Message(role="assistant", content=None, tool_calls=(call,)))
    with closing(open_store(tmp_path / "home")) as store:
        agent = Agent(store, "a")
        transcript = dataclasses.replace(make_transcript(LONG[:5]), messages=messages, carry_text="\x1b")
        store.save(make_turn(agent, agent.open(), transcript, None))
        export_agent(store.parts, "a", tmp_path / "a.tar")
    import_agent(away, tmp_path / "a.tar")
    found = opened(away.path, "a").transcript
    assert found is not None
    assert found.messages is not None
    assert [x.model_dump_json() for x in found.messages] == [x.model_dump_json() for x in messages]
    assert repr(found.messages) == repr(messages)
    assert found.carry_text == "\x1b"


def test_a_job_whose_answer_stayed_behind_is_not_done_twice(exported: Path, away: StoreParts) -> None:
    """Under its own id the agent may meet a job again that it has answered elsewhere."""
    delivery = Delivery("job-3", "2024-01-01T00:00:00Z")
    import_agent(away, exported)
    import_agent(away, exported, new_id="b")
    with closing(open_store(away.path)) as store:
        with pytest.raises(AgentTranscriptUnreadable, match="its answer is missing"):
            store.answer("a", delivery)
        assert store.answer("b", delivery) is None


def test_only_the_owner_may_read_what_was_exported(exported: Path) -> None:
    assert exported.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in exported.parent.iterdir() if path.is_file()] == ["a.tar"]
    assert set(members(exported)) >= {"agent.json", "turns/00000001.json", "turns/00000003.json", "tail.safetensors"}


def test_export_replaces_no_file_and_refuses_an_unreadable_agent(exported: Path, home: StoreParts) -> None:
    before = exported.read_bytes()
    with pytest.raises(AgentMemoryError, match="exists already"):
        export_agent(home, "a", exported)
    with pytest.raises(AgentMemoryError, match="there is no agent 'nobody'"):
        export_agent(home, "nobody", exported.with_name("b.tar"))
    home.database.commit(lambda connection: connection.execute("UPDATE turns SET about = '?' WHERE version = 3"))
    with pytest.raises(AgentMemoryError, match="version 3 is unusable"):
        export_agent(home, "a", exported.with_name("b.tar"))
    assert exported.read_bytes() == before
    assert not exported.with_name("b.tar").exists()


def test_export_leaves_out_damaged_cache_and_older_versions(exported: Path, home: StoreParts, away: StoreParts) -> None:
    """They only save time: a flipped bit in them must not make the file worthless."""
    tail = home.pieces.paths("a", 3)[0]
    tail.write_bytes(tail.read_bytes()[:-1] + b"?")
    chain = BlockChain(MODEL.fingerprint, "s", LONG)
    second = home.blocks.path_of(MODEL.fingerprint, chain.addresses[1])
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    home.database.commit(lambda connection: connection.execute("UPDATE turns SET about = '?' WHERE version = 1"))
    again = exported.with_name("again.tar")
    assert export_agent(home, "a", again, with_blocks=True).blocks == 1
    names = set(members(again))
    assert not names & {"tail.safetensors", "turns/00000001.json"}
    import_agent(away, again, with_blocks=True)
    with closing(open_store(away.path)) as store:
        assert Agent(store, "a", salt="s").tokens() == LONG
        assert Agent(store, "a", salt="s").cached((*LONG, 1)) == 256


def test_import_never_replaces_an_agent(exported: Path, away: StoreParts) -> None:
    before = content(away)
    with pytest.raises(AgentMemoryError, match="there is an agent 'other' already"):
        import_agent(away, exported, new_id="other")
    assert content(away) == before


def test_import_and_export_beside_a_worker_at_work(exported: Path, tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "busy")) as store, closing(open_parts(store.parts.path, FastDisk())) as parts:
        other = Agent(store, "other")
        other.say(LONG[:300])
        import_agent(parts, exported, with_blocks=True)
        agent = Agent(store, "a", salt="s")
        assert agent.cached((*LONG, 1)) == 1000
        agent.say((*LONG, 1, 2))
        other.say(LONG[:500])
        assert export_agent(parts, "a", tmp_path / "again.tar", with_blocks=True).version == 4
        assert list(verify_store(parts)) == []
        assert store.budget.total_bytes == pytest.approx(allocated(parts.path), rel=0.01)


def allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (folder, *folder.rglob("*")))


def test_an_agent_that_a_worker_is_making_is_not_imported(exported: Path, away: StoreParts) -> None:
    before = content(away)
    with another_process_working_on(away.path, "a"), pytest.raises(AgentBusy):
        import_agent(away, exported)
    assert content(away) == before


class _FailingDisk(FastDisk):
    """Fails at its nth operation."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "full")

    def write(self, path: Path, chunks: Any) -> None:
        self._step()
        super().write(path, chunks)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)


def own_content(store: StoreParts) -> dict[str, bytes]:
    """Without blocks: some may be left when an import fails, as of no agent."""
    return {name: data for name, data in content(store).items() if "/blocks/" not in name}


def test_an_import_that_fails_anywhere_leaves_no_agent_and_can_be_repeated(exported: Path, away: StoreParts) -> None:
    before = own_content(away)
    for step in count(1):
        with closing(open_parts(away.path, _FailingDisk(step))) as failing:
            try:
                import_agent(failing, exported, with_blocks=True)
                break
            except OSError:
                pass
        assert own_content(away) == before
        assert list(verify_store(away)) == []
    assert step > 6
    assert opened(away.path, "a").number == 3


def test_a_killed_import_leaves_no_agent(exported: Path, away: StoreParts, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt  # not an error that anything tidies up after

    monkeypatch.setattr(away.database, "commit", kill)
    with pytest.raises(KeyboardInterrupt):
        import_agent(away, exported, with_blocks=True)
    monkeypatch.undo()
    assert list(verify_store(away)) == []
    assert import_agent(away, exported, with_blocks=True).version == 3
    with closing(open_store(away.path)) as store:
        assert Agent(store, "a", salt="s").cached((*LONG, 1)) == 1000


def _turn(number: int) -> str:
    return f"turns/{number:08d}.json"


def _without(*names: str) -> Callable[[Members], object]:
    return lambda files: [files.pop(name) for name in names]


def _copied(source: str, to: str) -> Callable[[Members], None]:
    return lambda files: files.update({to: files[source]})


def _changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Members], None]:
    return lambda files: files.update({name: change(files[name])})


def _blocks(files: Members) -> list[str]:
    return [name for name in files if name.startswith("blocks/")]


def _damaged(data: bytes) -> bytes:
    return data[:-1] + b"?"


def _with_an_older_head(files: Members) -> None:
    head = json.loads(files[_turn(2)])["checksum"]
    files["agent.json"] = json.dumps(json.loads(files["agent.json"]) | {"head": head}).encode()


def _with_an_exchanged_block(files: Members) -> None:
    first, second, *_ = _blocks(files)
    files[first], files[second] = files[second], files[first]


def _with_a_block_of_another_agent(files: Members) -> None:
    chain = BlockChain(MODEL.fingerprint, None, ids(256, seed=9))
    tokens, address = chain.token_ids, chain.last
    piece = CachePiece("block", MODEL.fingerprint, MODEL.spec, chain.root, tokens)
    data = b"".join(bytes(chunk) for chunk in piece.encode(cache_of(tokens), 0))
    files[f"blocks/{MODEL.fingerprint[:16]}/{address[:2]}/{address}.safetensors"] = data


def _resealed(change: Callable[[dict[str, Any]], None]) -> Callable[[Members], None]:
    """Rewrites the newest turn with right checksums, as a forger would."""

    def reseal(files: Members) -> None:
        for name in [name for name in files if name.endswith(".safetensors")]:
            del files[name]  # the turn alone has to give it away
        turn = json.loads(files["turns/00000003.json"])
        change(turn)
        _sign(files, turn, agent_id=turn.pop("agent_id", "a"))

    return reseal


def _sign(files: Members, turn: dict[str, Any], *, agent_id: str = "a") -> None:
    """Put the turn into the archive as its newest, and say so in ``agent.json``."""
    row = (
        turn["version"],
        turn["parent"] and bytes.fromhex(turn["parent"]),
        turn["delivery"] and bytes.fromhex(turn["delivery"]),
        TypeAdapter(About).dump_json(TypeAdapter(About).validate_python(turn["about"])).decode(),
        turn["keep_tokens"],
        turn["keep_messages"],
        turn["keep_text"],
        b"".join((x % 2**32).to_bytes(4, "little") for x in turn["new_tokens"]),
        json.dumps(turn["new_messages"], separators=(",", ":")),
        turn["new_text"],
    )
    turn["checksum"] = row_checksum((agent_id, *row)).hex()
    files[f"turns/{turn['version']:08d}.json"] = json.dumps(turn).encode()
    files["agent.json"] = json.dumps(json.loads(files["agent.json"]) | {"head": turn["checksum"]}).encode()


@pytest.mark.parametrize(
    "change",
    [
        _without("agent.json"),
        _without(_turn(2)),
        _without(_turn(3)),
        _without(*map(_turn, (1, 2, 3))),
        _with_an_older_head,
        _copied(_turn(3), _turn(4)),
        _copied(_turn(3), _turn(2)),
        _changed(_turn(1), lambda turn: turn[:-1]),
        _changed(_turn(3), lambda turn: turn.replace(b"1000 tokens", b"1001 tokens")),
        _changed("tail.safetensors", _damaged),
        lambda files: files.update({"tail.safetensors": files[_blocks(files)[0]]}),
        lambda files: files.update({_blocks(files)[0]: _damaged(files[_blocks(files)[0]])}),
        _with_an_exchanged_block,
        _with_a_block_of_another_agent,
        _resealed(lambda turn: turn["about"]["cache"].update(model="../../../" + "a" * 64)),
        _resealed(lambda turn: turn["about"]["cache"].update(tokens=10**9)),
        _resealed(lambda turn: turn["about"]["cache"].update(last_block="0" * 64)),
        *(
            _resealed(lambda turn, counts=counts: turn["about"]["cache"].update(snapshots=counts))  # type: ignore[misc]
            for counts in ([0], [5, 5], [9, 5], [10**9], [1, 2, 3])
        ),
        _resealed(lambda turn: turn["about"].update(tokens=5)),
        _resealed(lambda turn: turn["about"].update(since_full=-(10**6))),
        _resealed(lambda turn: turn["about"].update(saved_at=float("inf"))),
        _resealed(lambda turn: turn["new_tokens"].append(2**32)),
        _resealed(lambda turn: turn["new_tokens"].append(-1)),
        _resealed(lambda turn: turn.update(agent_id="somebody")),
        _resealed(lambda turn: turn.update(keep_tokens=10**6)),
        _resealed(lambda turn: turn.update(keep_tokens=True)),
        _resealed(lambda turn: turn.update(surprise=1)),
    ],
)
def test_an_inconsistent_file_is_refused_and_leaves_nothing(
    exported: Path, away: StoreParts, tmp_path: Path, change: Callable[[Members], object]
) -> None:
    files = members(exported)
    change(files)
    forged = pack(tmp_path / "forged.tar", files)
    before = content(away)
    for new_id in (None, "b"):
        with pytest.raises(AgentMemoryError, match=r"forged.tar is refused: "):
            import_agent(away, forged, new_id=new_id, with_blocks=True)
        assert content(away) == before
        assert list(away.temp.iterdir()) == []


def test_an_id_that_no_job_could_have_is_refused(exported: Path, away: StoreParts, tmp_path: Path) -> None:
    for agent_id in ("\x1b[2J", "", "x" * 201):
        files = members(exported)
        files["agent.json"] = json.dumps(json.loads(files["agent.json"]) | {"agent_id": agent_id}).encode()
        with pytest.raises(AgentMemoryError, match="cannot be an agent's id"):
            import_agent(away, pack(tmp_path / "forged.tar", files))
        if agent_id:
            with pytest.raises(AgentMemoryError, match="cannot be an agent's id"):
                import_agent(away, exported, new_id=agent_id)
    assert list(away.temp.iterdir()) == []


def _member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "/etc/passwd"
    return info


BLOCK = f"blocks/{'a' * 16}/00/{'0' * 64}.safetensors"


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (_member("../../evil"), "does not belong"),
        (_member("/etc/evil"), "does not belong"),
        (_member("agent.json.unsaved"), "does not belong"),
        (_member("turns/1.json"), "does not belong"),
        (_member("turns/../00000009.json"), "does not belong"),
        (_member("blocks/../../../00/" + "0" * 64 + ".safetensors"), "does not belong"),
        (_member("turns/00000009.json", tarfile.SYMTYPE), "not a plain file"),
        (_member("turns/00000009.json", tarfile.LNKTYPE), "not a plain file"),
        (_member("turns/00000009.json", tarfile.FIFOTYPE), "not a plain file"),
        (_member("turns/00000009.json", tarfile.GNUTYPE_SPARSE), "not a plain file"),
        (_member("turns/00000009.json", tarfile.XHDTYPE, 2**33 - 1), "not a plain file"),
        (_member("blocks", tarfile.DIRTYPE), "not a plain file"),
        (_member("agent.json"), "is in it twice"),
        (_member("turns/00000009.json", size=2**33 - 1), "has 8589934591 bytes"),
        (_member(BLOCK, size=2**33 - 1), "has 8589934591 bytes"),
        (_member(BLOCK, size=2**31), "cut short"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_hostile_archive_is_refused_by_its_headers(
    exported: Path, away: StoreParts, tmp_path: Path, info: tarfile.TarInfo, why: str
) -> None:
    data = exported.read_bytes()
    end = max(offset for offset in range(0, len(data), 512) if any(data[offset : offset + 512])) + 512
    hostile = tmp_path / "hostile.tar"
    hostile.write_bytes(data[:end] + info.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    before = content(away)
    with pytest.raises(AgentMemoryError, match=rf"hostile.tar is refused: .*{why}"):
        import_agent(away, hostile, with_blocks=True)
    assert content(away) == before
    assert [path.name for path in tmp_path.iterdir() if "evil" in path.name] == []


@pytest.mark.parametrize("keep", [0, 100, 512, 1024, 5000, -1500])
def test_a_file_cut_short_is_refused(exported: Path, away: StoreParts, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.tar"
    data = exported.read_bytes().rstrip(b"\0")
    cut.write_bytes(data[:keep])
    with pytest.raises(AgentMemoryError, match=r"cut.tar is refused: "):
        import_agent(away, cut, with_blocks=True)


def test_import_never_replaces_a_block(exported: Path, away: StoreParts) -> None:
    store = open_store(away.path)
    Agent(store, "neighbour", salt="s").say(LONG[:600])
    store.close()
    before = {path: path.read_bytes() for path in files_below(away.blocks.path)}
    assert import_agent(away, exported, with_blocks=True).blocks == 1
    assert {path: path.read_bytes() for path in before} == before


# --- snapshots ---


@pytest.fixture(params=SNAPSHOT_SPECS)
def exported_snapshots(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, LoadedModel]:
    """Agent `a` of a model with snapshots, after 699 and 702 tokens, in a file with its blocks."""
    model = make_model("s", spec=SNAPSHOT_SPECS[request.param])
    store = open_store(tmp_path / "home")
    agent = Agent(store, "a", model=model)
    agent.say(LONG[:300])
    agent.say(LONG[:700], (1, 2))
    export_agent(store.parts, "a", tmp_path / "a.tar", with_blocks=True)
    store.close()
    return tmp_path / "a.tar", model


@pytest.mark.parametrize("new_id", [None, "b"])
def test_snapshots_travel_with_their_agent(
    exported_snapshots: tuple[Path, LoadedModel], away: StoreParts, new_id: str | None
) -> None:
    archive, model = exported_snapshots
    assert set(members(archive)) >= {"snapshot-0.safetensors", "snapshot-1.safetensors"}
    import_agent(away, archive, new_id=new_id, with_blocks=True)
    store = open_store(away.path)
    agent = Agent(store, new_id or "a", model=model)
    assert agent.cached((*LONG[:700], 1, 2, 3)) == 702
    assert agent.cached(LONG[:700]) == 699
    assert store.misses == {}
    assert list(verify_store(store.parts)) == []
    store.close()


def _exchanged(files: Members) -> None:
    first, second = files["snapshot-0.safetensors"], files["snapshot-1.safetensors"]
    files["snapshot-0.safetensors"], files["snapshot-1.safetensors"] = second, first


def _that_is_the_tail(files: Members) -> None:
    files["snapshot-0.safetensors"] = files.get("tail.safetensors", files["snapshot-1.safetensors"])


def _without_a_turn_of_them(files: Members) -> None:
    turn = json.loads(files["turns/00000002.json"])
    turn["about"]["cache"]["snapshots"] = []
    _sign(files, turn)


@pytest.mark.parametrize(
    "change",
    [
        _changed("snapshot-1.safetensors", _damaged),
        _exchanged,
        lambda files: files.update(
            {"snapshot-0.safetensors": files.get("tail.safetensors", files["snapshot-1.safetensors"])}
        ),
        _without_a_turn_of_them,
    ],
)
def test_snapshots_of_another_turn_are_refused(
    exported_snapshots: tuple[Path, LoadedModel], away: StoreParts, tmp_path: Path, change: Callable[[Members], object]
) -> None:
    archive, _ = exported_snapshots
    files = members(archive)
    change(files)
    before = content(away)
    with pytest.raises(AgentMemoryError, match=r"forged.tar is refused: its snapshot-. is "):
        import_agent(away, pack(tmp_path / "forged.tar", files), with_blocks=True)
    assert content(away) == before
    assert list(away.temp.iterdir()) == []


def test_a_snapshot_with_another_number_of_tokens_is_refused(tmp_path: Path, away: StoreParts) -> None:
    model = make_model("s", spec=SNAPSHOT_SPECS["recurrent"])
    store = open_store(tmp_path / "home")
    Agent(store, "a", model=model).say(LONG[:300], (1,))
    export_agent(store.parts, "a", tmp_path / "a.tar")
    store.close()
    files = members(tmp_path / "a.tar")
    piece = CachePiece.snapshot(model.spec, BlockChain(model.fingerprint, None, LONG[:299]))
    for after_tokens, is_refused in ((299, False), (298, True)):
        forged = dataclasses.replace(piece, after_tokens=after_tokens).encode_states(states_of(LONG[:299], model))
        files["snapshot-0.safetensors"] = b"".join(bytes(chunk) for chunk in forged)
        pack(tmp_path / "forged.tar", files)
        if is_refused:
            with pytest.raises(AgentMemoryError, match="its snapshot-0 is another agent's"):
                import_agent(away, tmp_path / "forged.tar", new_id="refused")
        else:
            import_agent(away, tmp_path / "forged.tar", new_id="taken")
