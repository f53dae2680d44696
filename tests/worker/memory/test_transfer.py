"""Export and import: a file contains the whole agent, and no file can do harm."""

import dataclasses
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
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
    open_store,
    states_of,
)

from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory.access import StoreAccess, hold
from stoker_worker.memory.agent_index import newest_blocks
from stoker_worker.memory.archive import export_agent
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.cache_file import CachePiece
from stoker_worker.memory.checksummed_file import seal, unseal
from stoker_worker.memory.importer import import_agent
from stoker_worker.memory.record import AgentState, CachedPrefix, Head, TurnRecord, record_checksum
from stoker_worker.ports import AgentVersion, LoadedModel

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
    store.close()
    with hold(tmp_path / "home") as home:
        export_agent(home, "a", tmp_path / "a.tar", with_blocks=True)
    return tmp_path / "a.tar"


@pytest.fixture
def away(tmp_path: Path) -> StoreAccess:
    """Another store, with an agent of its own."""
    store = open_store(tmp_path / "away")
    Agent(store, "other").say(LONG[:300])
    store.close()
    return StoreAccess(tmp_path / "away", FastDisk())


def content(store: StoreAccess) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in files_below(store.path)}


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
    exported: Path, away: StoreAccess, new_id: str | None, with_blocks: bool
) -> None:
    done = import_agent(away, exported, new_id=new_id, with_blocks=with_blocks)
    assert (done.blocks, done.blocks_left_out) == ((3, 0) if with_blocks else (0, 3))
    home = open_store(exported.parent / "home")
    original = Agent(home, "a").open()
    home.close()
    store = open_store(away.path)
    agent = Agent(store, new_id or "a", salt="s")
    assert agent.open() == dataclasses.replace(original, agent_id=agent.name)
    assert agent.cached((*LONG, 1)) == (1000 if with_blocks else 0)
    agent.say((*LONG, 1, 2))
    assert agent.cached((*LONG, 1, 2, 3)) == 1002
    assert store.verify() == []
    store.close()
    assert list(away.temp.iterdir()) == []
    again = import_agent(away, exported, new_id="c", with_blocks=with_blocks)
    assert (again.blocks, again.blocks_left_out) == (0, 0 if with_blocks else 3)


def test_only_the_owner_may_read_what_was_exported(exported: Path) -> None:
    assert exported.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in exported.parent.iterdir() if path.is_file()] == ["a.tar"]
    assert set(members(exported)) >= {"HEAD", "00000001.json", "00000003.json", "tail.safetensors"}


def test_export_replaces_no_file_and_refuses_an_unreadable_agent(exported: Path) -> None:
    before = exported.read_bytes()
    home = StoreAccess(exported.parent / "home")
    with pytest.raises(AgentMemoryError, match="exists already"):
        export_agent(home, "a", exported)
    (home.agent("a").path / "HEAD").unlink()
    with pytest.raises(AgentMemoryError, match="HEAD is missing"):
        export_agent(home, "a", exported.with_name("b.tar"))
    assert exported.read_bytes() == before
    assert not exported.with_name("b.tar").exists()


def test_import_never_replaces_an_agent(exported: Path, away: StoreAccess) -> None:
    before = content(away)
    with pytest.raises(AgentMemoryError, match="there is an agent 'other' already"):
        import_agent(away, exported, new_id="other")
    assert content(away) == before


def _without_head(files: Members) -> None:
    del files["HEAD"]


def _without_a_record(files: Members) -> None:
    del files["00000002.json"]


def _with_a_record_above_head(files: Members) -> None:
    files["00000004.json"] = files["00000003.json"]


def _with_a_damaged_record(files: Members) -> None:
    files["00000001.json"] = files["00000001.json"][:-1]


def _with_a_damaged_tail(files: Members) -> None:
    files["tail.safetensors"] = files["tail.safetensors"][:-1] + b"?"


def _with_a_block_as_tail(files: Members) -> None:
    files["tail.safetensors"] = next(data for name, data in files.items() if name.startswith("blocks/"))


def _with_a_damaged_block(files: Members) -> None:
    name = next(name for name in files if name.startswith("blocks/"))
    files[name] = files[name][:-1] + b"?"


def _with_an_exchanged_block(files: Members) -> None:
    first, second, *_ = (name for name in files if name.startswith("blocks/"))
    files[first], files[second] = files[second], files[first]


def _with_a_block_of_another_agent(files: Members) -> None:
    chain = BlockChain(MODEL.fingerprint, None, ids(256, seed=9))
    tokens, address = chain.token_ids, chain.last
    piece = CachePiece("block", MODEL.fingerprint, MODEL.spec, chain.root, tokens)
    data = b"".join(bytes(chunk) for chunk in piece.encode(cache_of(tokens), 0))
    files[f"blocks/{MODEL.fingerprint[:16]}/{address[:2]}/{address}.safetensors"] = data


def _resealed(change: Callable[[dict], None]) -> Callable[[Members], None]:  # type: ignore[type-arg]
    """Rewrites the newest record and HEAD with right checksums, as a forger would."""

    def reseal(files: Members) -> None:
        body = json.loads(unseal("stoker-record", files["00000003.json"]))
        change(body)
        for name in [name for name in files if name.endswith(".safetensors")]:
            del files[name]  # the record alone has to give it away
        files["00000003.json"] = seal("stoker-record", json.dumps(body).encode())
        files["HEAD"] = Head(3, record_checksum(files["00000003.json"])).encode()

    return reseal


@pytest.mark.parametrize(
    "change",
    [
        _without_head,
        _without_a_record,
        _with_a_record_above_head,
        _with_a_damaged_record,
        _with_a_damaged_tail,
        _with_a_block_as_tail,
        _with_a_damaged_block,
        _with_an_exchanged_block,
        _with_a_block_of_another_agent,
        _resealed(lambda record: record["cache"].update(model="../../../" + "a" * 64)),
        _resealed(lambda record: record["cache"].update(tokens=10**9)),
        _resealed(lambda record: record["cache"].update(last_block="0" * 64)),
        _resealed(lambda record: record["new_tokens"].append(2**32)),
        _resealed(lambda record: record["new_tokens"].append(-1)),
        _resealed(lambda record: record.update(agent_id="somebody")),
        _resealed(lambda record: record.update(keep_tokens=10**6)),
        _resealed(lambda record: record.update(surprise=1)),
    ],
)
def test_an_inconsistent_file_is_refused_and_leaves_nothing(
    exported: Path, away: StoreAccess, tmp_path: Path, change: Callable[[Members], None]
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


def test_an_id_that_no_job_could_have_is_refused(exported: Path, away: StoreAccess, tmp_path: Path) -> None:
    record = TurnRecord.decode(members(exported)["00000001.json"], agent_id="a", version=1)
    for agent_id in ("\x1b[2J", "", "x" * 201):
        data = record.model_copy(update={"agent_id": agent_id}).encode()
        head = Head(1, record_checksum(data)).encode()
        forged = pack(tmp_path / "forged.tar", {"HEAD": head, "00000001.json": data})
        with pytest.raises(AgentMemoryError, match="cannot be an agent's id"):
            import_agent(away, forged)
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
        (_member("HEAD.unsaved"), "does not belong"),
        (_member("1.json"), "does not belong"),
        (_member("blocks/../../../00/" + "0" * 64 + ".safetensors"), "does not belong"),
        (_member("00000009.json", tarfile.SYMTYPE), "not a plain file"),
        (_member("00000009.json", tarfile.LNKTYPE), "not a plain file"),
        (_member("00000009.json", tarfile.FIFOTYPE), "not a plain file"),
        (_member("00000009.json", tarfile.GNUTYPE_SPARSE), "not a plain file"),
        (_member("00000009.json", tarfile.XHDTYPE, 2**33 - 1), "not a plain file"),
        (_member("blocks", tarfile.DIRTYPE), "not a plain file"),
        (_member("HEAD"), "is in it twice"),
        (_member("00000009.json", size=2**33 - 1), "has 8589934591 bytes"),
        (_member(BLOCK, size=2**33 - 1), "has 8589934591 bytes"),
        (_member(BLOCK, size=2**31), "cut short"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_hostile_archive_is_refused_by_its_headers(
    exported: Path, away: StoreAccess, tmp_path: Path, info: tarfile.TarInfo, why: str
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


def test_a_records_model_never_becomes_a_path_out_of_the_store() -> None:
    state = AgentState(AgentVersion("a", 1, make_transcript(LONG)), cache=CachedPrefix("../..", None, 1000, ""))
    assert newest_blocks(state, Path) == ()


@pytest.mark.parametrize("keep", [0, 100, 512, 1024, 5000, -1500])
def test_a_file_cut_short_is_refused(exported: Path, away: StoreAccess, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.tar"
    data = exported.read_bytes().rstrip(b"\0")
    cut.write_bytes(data[:keep])
    with pytest.raises(AgentMemoryError, match=r"cut.tar is refused: "):
        import_agent(away, cut, with_blocks=True)


def test_import_never_replaces_a_block(exported: Path, away: StoreAccess) -> None:
    store = open_store(away.path)
    Agent(store, "neighbour", salt="s").say(LONG[:600])
    store.close()
    before = content(away)
    assert import_agent(away, exported, with_blocks=True).blocks == 1
    assert {path: data for path, data in content(away).items() if path in before} == before


def test_an_agent_without_a_committed_turn_does_not_exist(exported: Path, away: StoreAccess) -> None:
    folder = away.agent("a")
    away.writer.make_folder(folder.path)
    (folder.path / "HEAD").write_bytes(Head(0).encode())
    import_agent(away, exported)
    assert away.readable("a").version.number == 3
    assert list(away.temp.iterdir()) == []


# --- snapshots ---


@pytest.fixture(params=SNAPSHOT_SPECS)
def exported_snapshots(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, LoadedModel]:
    """Agent `a` of a model with snapshots, after 699 and 702 tokens, in a file with its blocks."""
    model = make_model("s", spec=SNAPSHOT_SPECS[request.param])
    store = open_store(tmp_path / "home")
    agent = Agent(store, "a", model=model)
    agent.say(LONG[:300])
    agent.say(LONG[:700], (1, 2))
    store.close()
    with hold(tmp_path / "home") as home:
        export_agent(home, "a", tmp_path / "a.tar", with_blocks=True)
    return tmp_path / "a.tar", model


@pytest.mark.parametrize("new_id", [None, "b"])
def test_snapshots_travel_with_their_agent(
    exported_snapshots: tuple[Path, LoadedModel], away: StoreAccess, new_id: str | None
) -> None:
    archive, model = exported_snapshots
    assert set(members(archive)) >= {"snapshot-0.safetensors", "snapshot-1.safetensors"}
    import_agent(away, archive, new_id=new_id, with_blocks=True)
    store = open_store(away.path)
    agent = Agent(store, new_id or "a", model=model)
    assert agent.cached((*LONG[:700], 1, 2, 3)) == 702
    assert agent.cached(LONG[:700]) == 699
    assert store.misses == {}
    assert store.verify() == []
    store.close()


def _damaged(files: Members) -> None:
    files["snapshot-1.safetensors"] = files["snapshot-1.safetensors"][:-1] + b"?"


def _exchanged(files: Members) -> None:
    first, second = files["snapshot-0.safetensors"], files["snapshot-1.safetensors"]
    files["snapshot-0.safetensors"], files["snapshot-1.safetensors"] = second, first


def _that_is_the_tail(files: Members) -> None:
    files["snapshot-0.safetensors"] = files.get("tail.safetensors", files["snapshot-1.safetensors"])


def _without_a_record_of_them(files: Members) -> None:
    body = json.loads(unseal("stoker-record", files["00000002.json"]))
    del body["cache"]["snapshots"]
    files["00000002.json"] = seal("stoker-record", json.dumps(body).encode())
    files["HEAD"] = Head(2, record_checksum(files["00000002.json"])).encode()


@pytest.mark.parametrize("change", [_damaged, _exchanged, _that_is_the_tail, _without_a_record_of_them])
def test_snapshots_of_another_record_are_refused(
    exported_snapshots: tuple[Path, LoadedModel], away: StoreAccess, tmp_path: Path, change: Callable[[Members], None]
) -> None:
    archive, _ = exported_snapshots
    files = members(archive)
    change(files)
    before = content(away)
    with pytest.raises(AgentMemoryError, match=r"forged.tar is refused: its snapshot is "):
        import_agent(away, pack(tmp_path / "forged.tar", files), with_blocks=True)
    assert content(away) == before
    assert list(away.temp.iterdir()) == []


def test_a_snapshot_with_another_number_of_tokens_is_refused(tmp_path: Path, away: StoreAccess) -> None:
    model = make_model("s", spec=SNAPSHOT_SPECS["recurrent"])
    store = open_store(tmp_path / "home")
    Agent(store, "a", model=model).say(LONG[:300], (1,))
    store.close()
    with hold(tmp_path / "home") as home:
        export_agent(home, "a", tmp_path / "a.tar")
    files = members(tmp_path / "a.tar")
    piece = CachePiece.snapshot(model.spec, BlockChain(model.fingerprint, None, LONG[:299]))
    for after_tokens, is_refused in ((299, False), (298, True)):
        forged = dataclasses.replace(piece, after_tokens=after_tokens).encode_states(states_of(LONG[:299], model))
        files["snapshot-0.safetensors"] = b"".join(bytes(chunk) for chunk in forged)
        pack(tmp_path / "forged.tar", files)
        if is_refused:
            with pytest.raises(AgentMemoryError, match="its snapshot is another agent's"):
                import_agent(away, tmp_path / "forged.tar", new_id="refused")
        else:
            import_agent(away, tmp_path / "forged.tar", new_id="taken")


@pytest.mark.parametrize("counts", [[0], [5, 5], [9, 5], [10**9], [1, 2, 3]])
def test_a_record_with_impossible_snapshots_is_refused(
    exported: Path, away: StoreAccess, tmp_path: Path, counts: list[int]
) -> None:
    files = members(exported)
    _resealed(lambda record: record["cache"].update(snapshots=counts))(files)
    with pytest.raises(AgentMemoryError, match="its snapshots are at impossible places"):
        import_agent(away, pack(tmp_path / "forged.tar", files))
