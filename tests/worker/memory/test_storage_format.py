"""A reader written from ``docs/storage-format.md`` alone, without stoker's own code, gets what was saved.

The programs on the page are run as they are printed there.
"""

import dataclasses
import hashlib
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.memory.agents import (
    SNAPSHOT_SPECS,
    Agent,
    cache_of,
    equal,
    ids,
    make_model,
    make_transcript,
    make_turn,
    open_store,
    states_of,
)
from xxhash import xxh3_128_hexdigest

from stoker_shared.message import Message
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Delivery, Transcript
from stoker_worker.ports.cache_spec import StoreDtype

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "storage-format.md").read_text()
CONVERSATION, CHECKSUM = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

LONG = ids(700)
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and tensors of a cache file, its checksum verified."""
    data = path.read_bytes()
    assert xxh3_128_hexdigest(data[:37] + b"0" * 32 + data[69:]) == data[37:69].decode()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 64 == 0
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, about in header.items():
        begin, end = (start + at for at in about["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], DTYPES[about["dtype"]]).reshape(about["shape"])
    return metadata, tensors


def dequantised(tensors: dict[str, Any], name: str, bits: int) -> Any:
    q, scales, biases = (tensors[f"{name}.{part}"] for part in ("q", "scales", "biases"))
    if bits == 4:
        q = np.stack([q & 15, q >> 4], axis=-1).reshape(*q.shape[:-1], -1)
    group = q.shape[-1] // scales.shape[-1]
    return q * np.repeat(scales, group, axis=-1) + np.repeat(biases, group, axis=-1)


@pytest.mark.parametrize("store_dtype", ["native", "q8", "q4"])
def test_a_stranger_reads_blocks_and_snapshots(tmp_path: Path, store_dtype: StoreDtype) -> None:
    spec = dataclasses.replace(SNAPSHOT_SPECS["hybrid"], dtype="float32", store_dtype=store_dtype)
    agent = Agent(open_store(tmp_path), model=make_model(spec=spec), salt="salt")
    agent.say(LONG)
    model = agent.model.fingerprint
    ((about,),) = rows(tmp_path, "SELECT about FROM turns")
    cache = json.loads(about)["cache"]
    name = hashlib.sha256(b"agent").hexdigest()[:32]
    pieces = tmp_path / "pieces" / name[:2]
    assert (cache["tokens"], cache["snapshots"]) == (700, [699, 700])

    wanted, found = cache_of(LONG, agent.model), []
    root = b"stoker block chain 1\0" + len(model).to_bytes(4, "little") + model.encode() + b"salt"
    parent = hashlib.sha256(root).digest()
    for start in (0, 256):
        packed = np.array(LONG[start : start + 256], "<u4").tobytes()
        address = hashlib.sha256(parent + packed).digest()
        file = tmp_path / "blocks" / model[:16] / address.hex()[:2] / f"{address.hex()}.safetensors"
        metadata, tensors = read(file)
        assert metadata["parent"] == parent.hex()
        assert metadata["cache"] == (
            "float32|window:1:4:2:64;full:2:4:2;recurrent:3x5/float32,2/bfloat16;full:2:4:2"
            + ("" if store_dtype == "native" else f"|{store_dtype}")
        )
        found.append(tensors)
        parent = address
    assert cache["last_block"] == parent.hex()
    _, last = read(pieces / f"{name}-1-snapshot-1.safetensors")
    for layer, pair in zip((1, 3), wanted, strict=True):
        for side, array in zip(("keys", "values"), pair, strict=True):
            tensor = f"layer.{layer}.{side}"
            bits = {"q8": 8, "q4": 4}.get(store_dtype)
            blocks = [dequantised(x, tensor, bits) if bits else x[tensor] for x in found]
            assert equal(array[:, :512], np.concatenate(blocks, axis=1), agent.model)
            assert np.array_equal(array[:, 512:], last[tensor])

    for index, n_tokens in enumerate((699, 700)):
        metadata, tensors = read(pieces / f"{name}-1-snapshot-{index}.safetensors")
        assert (metadata["kind"], metadata["after_tokens"]) == ("snapshot", str(n_tokens))
        assert metadata["parent"] == parent.hex()
        assert list(tensors)[:4] == ["layer.1.keys", "layer.1.values", "layer.3.keys", "layer.3.values"]
        names = ["layer.0.keys", "layer.0.values", "layer.2.state.0", "layer.2.state.1"]
        states = [array for arrays in states_of(LONG[:n_tokens], agent.model) for array in arrays]
        assert all(np.array_equal(tensors[x], array) for x, array in zip(names, states, strict=True))


def rows(store: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{store / 'agents.db'}?mode=ro", uri=True)) as database:
        return database.execute(sql).fetchall()


def printed(store: Path, agent_id: str) -> str:
    """What the page's program prints."""
    command = [sys.executable, "-c", CONVERSATION, str(store / "agents.db"), agent_id]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def as_printed(transcript: Transcript) -> str:
    messages = (x.as_template_input() for x in transcript.messages or ())
    lines = [f"[{x['role']}] {x.get('content') or x['tool_calls']}\n" for x in messages]
    return "".join(lines) + f"{transcript.text or ''}\n"


def save(agent: Agent, transcript: Transcript) -> None:
    agent.store.save(make_turn(agent, agent.open(), transcript, None))


def chat(*said: str, seed: int = 0) -> Transcript:
    """A user and an assistant by turns; a call of a tool where nothing is said."""
    messages = []
    for n, text in enumerate(said):
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": f"{n} \u2603"}}}
        message = {"content": text} if text else {"tool_calls": [call]}
        messages.append(Message(role=("user", "assistant")[n % 2], **message))
    return Transcript(ids(9 * len(said), seed=seed), "tok", tuple(messages), None, "eos")


def raw(text: str) -> Transcript:
    return make_transcript(ids(len(text)), text=text)


CONVERSATIONS = {
    "messages, a call without content": [chat("Hi \u2603", "Hello"), chat("Hi \u2603", "Hello", "Look", "", "Well?")],
    "a message that was replaced": [chat("a", "b", "c", "d"), chat("a", "b", "other", "d", "e")],
    "another conversation in its place": [chat("a", "b"), chat("x", "y", seed=1), chat("x", "y", "z", seed=1)],
    "raw text, not ASCII": [raw("\u00fcber "), raw("\u00fcber \U0001f600 etwas"), raw("\u00fcber \U0001f600 nichts")],
    "text after messages": [chat("a", "b"), raw("one"), raw("one two")],
    "messages after text": [raw("one"), chat("a", "b"), chat("a", "b", "c")],
    "40 versions of messages": [chat(*map(str, range(n))) for n in range(1, 41)],
    "33 versions of text": [raw("\u00fc" * n) for n in range(1, 34)],
    "an empty text": [raw("something"), raw("")],
}


@pytest.fixture(scope="module")
def talked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An open store, as beside a running worker, in which every conversation was led."""
    store = open_store(tmp_path_factory.mktemp("store"))
    for name, said in CONVERSATIONS.items():
        agent = Agent(store, name=name)
        for transcript in said:
            save(agent, transcript)
    yield store
    store.close()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_program_on_the_page_prints_a_conversation(talked: AgentCacheStore, name: str) -> None:
    transcript = CONVERSATIONS[name][-1]
    assert printed(talked.parts.path, name) == as_printed(transcript)
    assert talked.open_agent(name).transcript == transcript


def test_the_program_reads_a_store_that_is_closed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(Agent(store), raw("once"))
    store.close()
    assert printed(tmp_path, "agent") == "once\n"


def test_a_stranger_verifies_every_row(talked: AgentCacheStore) -> None:
    made: dict[str, Any] = {}
    exec(CHECKSUM, made)
    row_checksum, folder = made["row_checksum"], talked.parts.path
    covered = "number, agent_id, version, head, unsaved"
    agents = rows(folder, f"SELECT checksum, key, {covered} FROM agents")
    assert len(agents) == len(CONVERSATIONS)
    heads: dict[tuple[int, int], bytes] = {}
    for checksum, key, *columns in agents:
        assert checksum == row_checksum(*columns)
        number, agent_id, version, head, _ = columns
        assert key == hashlib.sha256(agent_id.encode()).digest()
        heads[number, version] = head
    columns = (
        "version, parent, delivery, about, keep_tokens, keep_messages, keep_text, new_tokens, new_messages, new_text"
    )
    written = {}
    for number, checksum, agent_id, *turn in rows(
        folder, f"SELECT number, turns.checksum, agent_id, turns.{columns} FROM turns JOIN agents ON number = agent"
    ):
        assert checksum == row_checksum(agent_id, *turn)
        written[number, turn[0]] = checksum, turn[1]
    assert {place: written[place][0] for place in heads} == heads
    for (number, version), (_, parent) in written.items():
        assert parent is None or parent == written[number, version - 1][0]
    answers = rows(folder, "SELECT checksum, agent, key, result FROM deliveries")
    assert len(answers) == sum(map(len, CONVERSATIONS.values()))
    assert all(checksum == row_checksum(*columns) for checksum, *columns in answers)


def test_a_stranger_finds_the_answer_to_a_delivery(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    agent = Agent(store, name="\u2603")
    turn = make_turn(agent, agent.open(), raw("once"), None)
    store.save(dataclasses.replace(turn, delivery=Delivery("a-job", "2026-01-01T00:00:00Z", "ab12")))
    key = hashlib.sha256(b'["\\u2603", "a-job", "2026-01-01T00:00:00Z", null, "ab12"]').digest()
    ((result, made),) = rows(
        tmp_path, "SELECT result, delivery FROM deliveries d JOIN turns t ON (t.agent, t.delivery) = (d.agent, d.key)"
    )
    version, result = result.split(" ", 1)
    assert (version, json.loads(result), made) == ("1", turn.result, key)


def test_the_bytes_of_a_transcript_are_those_of_its_rows(talked: AgentCacheStore) -> None:
    size = " + ".join(
        f"coalesce(length(CAST({name} AS BLOB)), 0)"
        for name in ("parent", "delivery", "about", "new_tokens", "new_messages", "new_text", "turns.checksum")
    )
    counted = rows(
        talked.parts.path,
        f"SELECT agent_id, transcript_bytes, (SELECT sum({size}) FROM turns WHERE agent = number) FROM agents",
    )
    assert {agent_id: seen for agent_id, seen, _ in counted} == {agent_id: real for agent_id, _, real in counted}


def test_the_page_explains_every_column(talked: AgentCacheStore) -> None:
    for (table,) in rows(talked.parts.path, "SELECT name FROM sqlite_schema WHERE type = 'table'"):
        _, section = PAGE.split(f"\n`{table}`", 1)
        explained = re.split(r"\n\n`\w+`:? |\n## ", section)[0]
        for column in rows(talked.parts.path, f"PRAGMA table_info({table})"):
            assert column[1] == "id" or f"`{column[1]}`" in explained, f"{table}.{column[1]}"
