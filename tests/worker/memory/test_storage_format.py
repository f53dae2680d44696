"""A reader written from ``docs/storage-format.md`` alone, without stoker's own code, gets what was saved."""

import dataclasses
import hashlib
import json
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

from stoker_worker.ports.cache_spec import StoreDtype

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
def test_a_stranger_reads_blocks_tail_and_snapshots(tmp_path: Path, store_dtype: StoreDtype) -> None:
    spec = dataclasses.replace(SNAPSHOT_SPECS["hybrid"], dtype="float32", store_dtype=store_dtype)
    agent = Agent(open_store(tmp_path), model=make_model(spec=spec), salt="salt")
    agent.say(LONG)
    model = agent.model.fingerprint
    folder = next(tmp_path.glob(f"agents/*/{hashlib.sha256(b'agent').hexdigest()}"))
    cache = json.loads((folder / "00000001.json").read_bytes().partition(b"\n")[2])["cache"]
    assert (cache["tokens"], cache["snapshots"]) == (700, [699, 700])

    wanted, found = cache_of(LONG, agent.model), []
    root = b"stoker block chain 1\0" + len(model).to_bytes(4, "little") + model.encode() + b"salt"
    parent = hashlib.sha256(root).digest()
    for start in (0, 256):
        packed = np.array(LONG[start : start + 256], "<u4").tobytes()
        address = hashlib.sha256(parent + packed).digest()
        name = address.hex()
        metadata, tensors = read(tmp_path / "blocks" / model[:16] / name[:2] / f"{name}.safetensors")
        assert metadata["parent"] == parent.hex()
        assert metadata["cache"] == (
            "float32|window:1:4:2:64;full:2:4:2;recurrent:3x5/float32,2/bfloat16;full:2:4:2"
            + ("" if store_dtype == "native" else f"|{store_dtype}")
        )
        found.append(tensors)
        parent = address
    assert cache["last_block"] == parent.hex()
    metadata, tail = read(folder / "tail-1.safetensors")
    assert (metadata["kind"], metadata["parent"]) == ("tail", parent.hex())
    for layer, pair in zip((1, 3), wanted, strict=True):
        for side, array in zip(("keys", "values"), pair, strict=True):
            name = f"layer.{layer}.{side}"
            bits = {"q8": 8, "q4": 4}.get(store_dtype)
            blocks = [dequantised(x, name, bits) if bits else x[name] for x in found]
            assert equal(array[:, :512], np.concatenate(blocks, axis=1), agent.model)
            assert np.array_equal(array[:, 512:], tail[name])

    for index, n_tokens in enumerate((699, 700)):
        metadata, tensors = read(folder / f"snapshot-1-{index}.safetensors")
        assert (metadata["kind"], metadata["after_tokens"]) == ("snapshot", str(n_tokens))
        assert metadata["parent"] == parent.hex()
        names = ["layer.0.keys", "layer.0.values", "layer.2.state.0", "layer.2.state.1"]
        states = [array for arrays in states_of(LONG[:n_tokens], agent.model) for array in arrays]
        assert all(np.array_equal(tensors[name], array) for name, array in zip(names, states, strict=True))


def unsealed(path: Path, name: str) -> tuple[Any, str]:
    """What a record or HEAD says, its checksum verified; and that checksum."""
    first, _, rest = path.read_bytes().partition(b"\n")
    assert first.decode().split(" ") == [name, "1", xxh3_128_hexdigest(rest)]
    return json.loads(rest), xxh3_128_hexdigest(rest)


def test_a_stranger_reads_conversations(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    said = [make_transcript(LONG[:300], text="one two")]
    said += [make_transcript((*LONG[:300], *LONG[400:500]), text="one two three")]
    said += [make_transcript((*LONG[:250], 7, 8), text="one 2"), make_transcript((*LONG[:250], 7, 9), text="one 2 4")]
    for transcript in said:
        agent.store.save(make_turn(agent, agent.open().number, transcript, None))
        folder = next(tmp_path.glob(f"agents/*/{hashlib.sha256(b'agent').hexdigest()}"))
        head, _ = unsealed(folder / "HEAD", "stoker-head")
        chain: list[Any] = []
        number, wanted = head["version"], head["record"]
        while wanted is not None:
            record, checksum = unsealed(folder / f"{number:08d}.json", "stoker-record")
            assert (record["agent_id"], record["version"], checksum) == ("agent", number, wanted)
            chain.insert(0, record)
            number, wanted = number - 1, record["parent"]
        tokens: list[int] = []
        text = ""
        for record in chain:
            tokens[record["keep_tokens"] :] = record["new_tokens"]
            text = text[: record["keep_text"]] + record["new_text"]
        assert (tuple(tokens), text) == (transcript.token_ids, transcript.text)
        newest = chain[-1]
        assert (newest["new_messages"], newest["ended_by"], newest["tokenizer"]) == (None, "eos", "tok")
        assert newest["result"] == {"job_id": newest["delivery"]["job_id"], "version": newest["version"]}
    assert len(chain) == 4
