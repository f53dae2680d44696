"""GGUF import: makes an mlx-lm folder of one file of the SmolLM family. A command of its own, on its main thread.

MLX reads the tensors and the metadata; the tokenizer is rebuilt with the `tokenizers` library. A file that would not
compute exactly what mlx-lm's own model computes is refused, with the reason.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from stoker_shared.durable_file import draft_of
from stoker_shared.errors import ModelNotLoadable

ARCHITECTURE: Final = "llama"
PRE_TOKENIZER: Final = "smollm"
"""A file has only the name of its pre-tokenizer. A wrong one still encodes every text, but not as in training."""

FILE_TYPES: Final = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0"}
"""By ``general.file_type``: those that MLX keeps as they are. It converts the others to float16, some of them wrongly
(Q4_K, seen with mlx 0.32.4)."""

_PACKED: Final = frozenset({"Q4_0", "Q4_1", "Q8_0"})
_GROUP: Final = 32
"""Weights per scale in every packed type."""

_CONTROL: Final = 3
"""Token type: comes from the template, never from a text."""
_USER_DEFINED: Final = 4
"""Token type: matched in a text before any merge."""

_SPECIAL_ROLES: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR: Final = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<leaf>weight|scales|biases)")


def import_gguf(file: Path, folder: Path) -> None:
    """Write the model in `file` as an mlx-lm folder, which appears whole or not at all. Takes the file's size in memory
    and on disk.

    Raises:
        ModelNotLoadable: the file is missing, damaged, or of an unsupported type or architecture; or `folder` is in use
            or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelNotLoadable(f"{folder} exists and is not empty: give another folder, or remove it first")
    arrays, metadata = _load(file)
    tokenizer = make_tokenizer(metadata)
    config = _config(metadata, arrays, str(metadata.get("general.name") or file.stem))
    weights = _weights(arrays)
    config.update(_quantization(weights))
    with _appearing(folder) as draft:
        import mlx.core as mx

        mx.save_safetensors(str(draft / "model.safetensors"), weights, metadata={"format": "mlx"})
        tokenizer.save(str(draft / "tokenizer.json"))
        _write_json(draft / "tokenizer_config.json", _tokenizer_config(metadata))
        _write_json(draft / "config.json", config)


def _load(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and metadata as MLX reads them; MLX arrays in the metadata become plain Python values."""
    import mlx.core as mx

    try:
        file.open("rb").close()  # MLX does not give the reason
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
    except OSError as error:
        raise ModelNotLoadable(f"cannot read {file}: {error.strerror or error}") from None
    except (RuntimeError, ValueError) as error:
        raise ModelNotLoadable(f"MLX cannot read {file}: {error}") from None
    arrays, metadata = loaded
    plain = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in metadata.items()}
    if (name := plain.get("general.architecture")) != ARCHITECTURE:
        raise _unsupported(f"architecture {name!r} is", f"{ARCHITECTURE!r} is")
    file_type: Any = plain.get("general.file_type")
    kind = FILE_TYPES.get(file_type)
    if kind is None:
        raise _unsupported("files of this type are", f"{', '.join(FILE_TYPES.values())} are")
    for name, array in arrays.items():
        if kind in _PACKED and array.ndim > 1 and f"{name.rpartition('.')[0]}.scales" not in arrays:
            raise _unsupported(f"tensor {name!r} is not {kind}, which is", f"files with all matrices {kind} are")
    return arrays, plain


def _unsupported(what: str, only: str) -> ModelNotLoadable:
    return ModelNotLoadable(f"GGUF {what} not supported, only {only}: use the model in MLX or Hugging Face format")


def _config(metadata: Mapping[str, Any], arrays: Mapping[str, Any], name: str) -> dict[str, Any]:
    """mlx-lm's ``config.json``, without the quantization."""

    def value(key: str, default: Any = None) -> Any:
        return _required(metadata, f"{ARCHITECTURE}.{key}", default)

    hidden, heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length", hidden // heads)
    if value("attention.value_length", head_dim) != head_dim or value("rope.dimension_count", head_dim) != head_dim:
        raise ModelNotLoadable("GGUF models that rotate only a part of each head are not supported")
    if value("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in arrays:
        raise ModelNotLoadable("GGUF models with scaled rotary positions are not supported")
    return {
        "_name_or_path": name,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _short(value("attention.layer_norm_rms_epsilon")),
        "vocab_size": arrays["token_embd.weight"].shape[0],
        "max_position_embeddings": value("context_length"),
        "rope_theta": _short(value("rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "rope_traditional": True,  # llama.cpp's converter permutes queries and keys: rotated pairs are neighbours
        "tie_word_embeddings": "output.weight" not in arrays,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(metadata),
    }


def _weights(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays under mlx-lm's names, all floating-point ones in one dtype."""
    import mlx.core as mx

    half = any(array.dtype == mx.float16 for array in arrays.values())
    weights = {}
    for name, array in arrays.items():
        # Norms are float32 in every GGUF file; kept so, they would turn the whole half-precision model into float32.
        narrowed = array.astype(mx.float16) if half and array.dtype == mx.float32 else array
        if narrowed is not array and not mx.isfinite(narrowed).all().item():
            raise ModelNotLoadable(f"tensor {name} of the GGUF file does not fit into float16")
        weights[_mlx_name(name)] = narrowed
    return weights


def _mlx_name(name: str) -> str:
    """mlx-lm's name of a tensor such as ``blk.3.attn_q.weight``."""
    match = _TENSOR.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        raise ModelNotLoadable(f"tensor {name!r} is unknown in a {ARCHITECTURE} GGUF file")
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{_NAMES[match['part']]}.{match['leaf']}"


def _quantization(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The bits of the packed layers: the most frequent number as the default, the others layer by layer."""
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


def make_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` that a file's metadata, as plain Python values, describes.

    Raises:
        ModelNotLoadable: this kind of tokenizer is not supported, or its parts are missing or contradict each other.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if (model, pre) != ("gpt2", PRE_TOKENIZER):
        raise _unsupported(f"tokenizer {model!r} with pre-tokenizer {pre!r} is", f"'gpt2' with {PRE_TOKENIZER!r} is")
    if metadata.get("tokenizer.ggml.add_bos_token") or metadata.get("tokenizer.ggml.add_eos_token"):
        raise ModelNotLoadable("GGUF tokenizers that begin or end every text with a token are not supported")
    tokens: Sequence[str] = _required(metadata, "tokenizer.ggml.tokens")
    types: Sequence[int] = _required(metadata, "tokenizer.ggml.token_type")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "tokenizer.ggml.merges")]
    if len(vocab) != len(tokens) or len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise ModelNotLoadable("the GGUF file's tokens, token types and merges contradict each other")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    for kind in (_CONTROL, _USER_DEFINED):
        special = kind == _CONTROL
        found = [token for token, token_type in zip(tokens, types, strict=True) if token_type == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in found]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``, chat template included."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {}
    for role, name in _SPECIAL_ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            names[name] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    return {
        # Not the class of one model: such classes ignore the pre-tokenizer in tokenizer.json and build their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
        **({"chat_template": template} if template else {}),
    }


def _eos_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end a turn: end of sequence, and end of turn if that is another one."""
    ids = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot"))
    return sorted({int(token_id) for token_id in ids if token_id is not None})


def _required(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = metadata.get(key, default)
    if value is None:
        raise ModelNotLoadable(f"the GGUF file has no {key}")
    return value


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A draft folder that replaces `folder`, which must not exist or be empty."""
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
