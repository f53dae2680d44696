"""Writes tiny GGUF files for tests. Owns the byte layout (version 3), independent of the code under test."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
_ALIGNMENT = 32


def byte_level_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, in byte order (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def tokenizer_metadata(
    *, pre: str, merges: list[str] | None = None, control: list[str] | None = None
) -> dict[str, Any]:
    """The tokenizer keys of a file with one token per byte, then the results of `merges`, then the control tokens."""
    merges, control = merges or [], control or ["<|end|>"]
    ordinary = byte_level_alphabet() + [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ordinary + control,
        "tokenizer.ggml.token_type": [1] * len(ordinary) + [3] * len(control),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(ordinary),
        "tokenizer.ggml.bos_token_id": len(ordinary),
    }


def write_gguf(
    file: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any] | tuple[str, tuple[int, ...], bytes]]
) -> Path:
    """Write `file`; a tensor is a float array, or (type name, shape, packed bytes)."""
    keys = b"".join(_string(key) + _value(value) for key, value in metadata.items())
    infos, data = b"", b""
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            kind, shape, payload = tensor
        else:
            kind, shape, payload = ("F16" if tensor.dtype == np.float16 else "F32"), tensor.shape, tensor.tobytes()
        dims = b"".join(struct.pack("<Q", n) for n in reversed(shape))
        infos += _string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", TYPE_IDS[kind], len(data))
        data += _padded(payload)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + infos
    file.write_bytes(_padded(header) + data)
    return file


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if value and isinstance(value[0], int):
        return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(item) for item in value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(payload: bytes) -> bytes:
    return payload + b"\0" * (-len(payload) % _ALIGNMENT)
