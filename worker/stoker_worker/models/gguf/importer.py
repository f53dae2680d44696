"""GGUF import: one file in, one mlx-lm folder out. Owns the config and the folder; `architectures.py` has the names,
`tokenizer.py` builds the tokenizer, `header.py` reads the tensors' types. Runs in a command of its own, on its main
thread.

Only architectures whose tensors mean the same in GGUF and in mlx-lm are supported; all others are refused by name.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from stoker_shared.durable_file import draft_of
from stoker_shared.errors import ModelNotLoadable
from stoker_worker.models.gguf.architectures import Architecture, architecture_of
from stoker_worker.models.gguf.header import read_tensor_types
from stoker_worker.models.gguf.rope import rope_scaling_of
from stoker_worker.models.gguf.tokenizer import GgufTokenizer

TENSOR_TYPES: Final = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q6_K")
"""Types that MLX reads exactly. Q6_K becomes float16; most Q4_0 files have one such tensor, the output layer."""

_GROUP: Final = 32
"""Weights per scale in every supported packed type."""


def import_gguf(file: Path, folder: Path) -> None:
    """Write the model in `file` as an mlx-lm folder; `folder` appears whole or not at all.

    Needs about the file's size in memory, and again on disk.

    Args:
        folder: must not exist, or be empty.

    Raises:
        ModelNotLoadable: the file is missing, damaged, or of an unsupported type or architecture; or `folder` is in
            use or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelNotLoadable(f"{folder} exists and is not empty: give another folder, or remove it first")
    types = read_tensor_types(file)
    foreign = sorted(set(types.values()) - set(TENSOR_TYPES))
    if foreign:
        raise ModelNotLoadable(
            f"{file.name} has {', '.join(foreign)} tensors; a GGUF file may have {', '.join(TENSOR_TYPES)}"
        )
    arrays, metadata = _load(file)
    tokenizer = GgufTokenizer({key: value for key, value in metadata.items() if key.startswith("tokenizer.")})
    config = _config(metadata, arrays, tokenizer, str(metadata.get("general.name") or file.stem))
    weights = _weights(arrays, architecture_of(metadata))
    config.update(_quantization(weights))
    built = tokenizer.build()
    with _appearing(folder) as draft:
        import mlx.core as mx

        mx.save_safetensors(str(draft / "model.safetensors"), weights, metadata={"format": "mlx"})
        built.save(str(draft / "tokenizer.json"))
        _write_json(draft / "tokenizer_config.json", tokenizer.config())
        _write_json(draft / "config.json", config)


def _load(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and metadata as MLX reads them; scalars and arrays in the metadata become plain Python values."""
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelNotLoadable(f"MLX cannot read {file}: {error}") from None
    arrays, metadata = loaded
    plain = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in metadata.items()}
    architecture_of(plain)  # a file of another one may have arrays that nothing below expects
    return arrays, plain


def _config(
    metadata: Mapping[str, Any], arrays: Mapping[str, Any], tokenizer: GgufTokenizer, name: str
) -> dict[str, Any]:
    """mlx-lm's ``config.json``, without the quantization."""
    architecture = architecture_of(metadata)

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture.name}.{key}", default)
        if found is None:
            raise ModelNotLoadable(f"the GGUF file has no {architecture.name}.{key}")
        return found

    hidden, heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length", hidden // heads)
    if value("attention.value_length", head_dim) != head_dim or value("rope.dimension_count", head_dim) != head_dim:
        raise ModelNotLoadable("GGUF models that rotate only a part of each head are not supported")
    if value("rope.scaling.type", "none") != "none":
        raise ModelNotLoadable("GGUF models with scaled rotary positions are not supported")
    if value("expert_count", 0) and not architecture.expert_keys:
        raise ModelNotLoadable(f"{architecture.name} GGUF models with experts are not supported")
    theta = _short(value("rope.freq_base", 10000.0))
    table = arrays.get("rope_freqs.weight")
    return {
        "_name_or_path": name,
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _short(value("attention.layer_norm_rms_epsilon")),
        "vocab_size": arrays["token_embd.weight"].shape[0],
        "max_position_embeddings": value("context_length"),
        "rope_theta": theta,
        "rope_scaling": None if table is None else rope_scaling_of(table.tolist(), head_dim=head_dim, theta=theta),
        "rope_traditional": architecture.pairs_are_neighbours,
        "tie_word_embeddings": "output.weight" not in arrays,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_ids,
        **architecture.extra_config(value),
    }


def _weights(arrays: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The arrays under mlx-lm's names; all floating-point arrays have one dtype."""
    import mlx.core as mx

    half = any(array.dtype == mx.float16 for array in arrays.values())
    weights = {}
    for gguf_name, array in arrays.items():
        if gguf_name == "rope_freqs.weight":  # in the config
            continue
        # Norms are float32 in every GGUF file; kept so, they would turn the whole half-precision model into float32.
        narrowed = array.astype(mx.float16) if half and array.dtype == mx.float32 else array
        if narrowed is not array and not mx.isfinite(narrowed).all().item():
            raise ModelNotLoadable(f"tensor {gguf_name} of the GGUF file does not fit into float16")
        weights[architecture.mlx_name(gguf_name)] = narrowed
    return weights


def _quantization(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The packed layers' bits: the most frequent number as the default, others layer by layer."""
    bits = {}
    for name in weights:
        if name.endswith(".scales"):
            layer = name.removesuffix(".scales")
            bits[layer] = weights[f"{layer}.weight"].shape[-1] * 32 // (weights[name].shape[-1] * _GROUP)
    if not bits:
        return {}
    default = Counter(bits.values()).most_common(1)[0][0]
    others = {layer: {"group_size": _GROUP, "bits": n} for layer, n in sorted(bits.items()) if n != default}
    return {"quantization": {"group_size": _GROUP, "bits": default, **others}}


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A draft folder that takes the place of `folder`, where nothing or an empty folder may be."""
    try:
        with draft_of(folder) as draft:
            draft.mkdir(parents=True)
            yield draft
    except (OSError, RuntimeError) as error:  # MLX reports a failed write as RuntimeError
        raise ModelNotLoadable(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None


def _short(value: float) -> float:
    """A float32 as it was written by hand: 1e-05 instead of 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
