"""Tiny random models in GGUF files, for tests. Owns the byte layout (version 3), independent of the code under test."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q6_K": 14}
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_K": 15}
HIDDEN, HEADS, KV_HEADS, LAYERS, INTER, VOCAB = 64, 4, 2, 2, 96, 257
HEAD_DIM = HIDDEN // HEADS
PARTS = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INTER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INTER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INTER)),
}
"""Each tensor's name in mlx-lm and its shape; repeated here, so that a wrong name in the importer fails a test."""

_ALIGNMENT = 32


def byte_level_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, in byte order (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def random_weights(*, tied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same random weights under GGUF's names and under mlx-lm's."""
    generator = np.random.default_rng(7)
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}

    def add(gguf_name: str, mlx_name: str, shape: tuple[int, ...]) -> None:
        ours[gguf_name] = theirs[mlx_name] = generator.standard_normal(shape).astype(np.float32) * 0.3

    add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    if not tied:
        add("output.weight", "lm_head.weight", (VOCAB, HIDDEN))
    for layer in range(LAYERS):
        for part, (name, shape) in PARTS.items():
            add(f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{name}.weight", shape)
    return ours, theirs


def metadata(kind: str = "F32", **extra: Any) -> dict[str, Any]:
    """Of a file of SmolLM's form; `extra` keys have ``__`` for a dot."""
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "general.file_type": FILE_TYPES[kind],
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INTER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.context_length": 512,
        "llama.rope.freq_base": 5000.0,
        **tokenizer_metadata(),
        **{key.replace("__", "."): value for key, value in extra.items()},
    }


def permuted(weight: Any, heads: int) -> Any:
    """The permutation of queries and keys by llama.cpp's converter, which makes rotated pairs neighbours."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tokenizer_metadata(*, merges: list[str] | None = None, control: list[str] | None = None) -> dict[str, Any]:
    """The tokenizer keys of a file with one token per byte, then the results of `merges`, then the control tokens."""
    merges, control = merges or [], control or ["<|end|>"]
    ordinary = byte_level_alphabet() + [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
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
