"""Finds and loads a model: its folder, dtype and identity. Owns no state; engine thread, which owns everything MLX.

Only `load_model` imports MLX. Code that comes with a model runs only if its operator trusts it (`extras.py`).
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from stoker_shared.errors import ModelNotLoadable
from stoker_shared.text import one_line
from stoker_worker.models.answer_formats import answer_format
from stoker_worker.models.device import is_gpu
from stoker_worker.models.extras import NO_EXTRAS, ModelExtras, not_loadable
from stoker_worker.models.fingerprint import ModelFolder
from stoker_worker.models.guides import GrammarGuides
from stoker_worker.models.tokenizer import ModelTokenizer, chat_template_text
from stoker_worker.ports import LoadedModel
from stoker_worker.ports.cache_spec import ModelCacheSpec, StoreDtype

T = TypeVar("T")
Dtype = Literal["auto", "native", "float32"]
"""`auto`: as stored on a GPU; float32 on a CPU, where MLX has no fast path for packed or half-precision weights."""

CONTEXT_FALLBACK_TOKENS: Final = 4096
"""Assumed if the config has no context length: the smallest one among models of recent years."""

_CONTEXT_KEYS: Final = (
    *("max_position_embeddings", "max_sequence_length", "max_seq_len", "model_max_length"),
    *("n_positions", "n_ctx", "seq_length"),
)
_REPO_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_log = logging.getLogger(__name__)


def load_model(
    model: str,
    dtype: Dtype,
    *,
    store_dtype: StoreDtype = "native",
    kv_bits: int | None = None,
    digest_cache: Path | None = None,
    extras: ModelExtras = NO_EXTRAS,
) -> tuple[Any, LoadedModel]:
    """Load a model, and describe it for the rest of the worker.

    Args:
        model: a folder in mlx-lm's format, or a Hugging Face repo such as ``mlx-community/Qwen3-4B-4bit``.
        store_dtype: precision of cache blocks on disk.
        kv_bits: 8: full attention keeps keys and values in 8 bits, in memory and on disk.
        digest_cache: file that remembers digests of weight files between starts.

    Returns:
        mlx-lm's model, and its description in the widest mode; the fingerprint does not cover the mode yet.

    Raises:
        ModelNotLoadable: it is not there, cannot be fetched, or cannot be served; one line has the reason.
    """
    local = local_folder(model)
    extras.check()
    folder = local or _download(model)
    extras.require_trust(folder)
    resolved = _resolved_dtype(dtype)
    try:
        network, wrapper, config = _load(folder, extras, as_float32=resolved == "float32")
    except Exception as error:  # mlx-lm and transformers raise anything from KeyError to RuntimeError here
        raise not_loadable(model, error, extras) from None
    spec = _cache_spec(network, store_dtype, kv_bits)
    files = ModelFolder(folder, digest_cache)
    of_tokenizer, layout = files.tokenizer_fingerprint(chat_template_text(wrapper)), spec.describe()
    form = answer_format(wrapper)
    return network, LoadedModel(
        name=model_name(model, extras),
        fingerprint=files.model_fingerprint(
            tokenizer_fingerprint=of_tokenizer, cache_spec=layout, dtype=resolved, extras=extras
        ),
        tokenizer_fingerprint=of_tokenizer,
        context_tokens=context_tokens(config),
        vocabulary=_vocabulary(network),
        spec=spec,
        tokenizer=ModelTokenizer(wrapper),
        answer_format=form,
        guides=GrammarGuides(wrapper, form),
    )


def _vocabulary(network: Any) -> int:
    """Token ids that the model has logits for. Only the shape is read, so nothing is computed."""
    import mlx.core as mx

    return int(network(mx.array([[0]])).shape[-1])


def model_name(model: str, extras: ModelExtras) -> str:
    """The name by which jobs name the model. Raises `ModelNotLoadable` as `local_folder`."""
    local = local_folder(model)
    name = local.name if local else model
    # With an adapter it is another model: a job that names the bare one must not run on it.
    return f"{name}+{extras.adapter_folder.name}" if extras.adapter_folder else name


def check_exists(model: str) -> None:
    """Look for the model's folder, or fetch its config. Raises `ModelNotLoadable` if that fails."""
    if local_folder(model) is None:
        from huggingface_hub import hf_hub_download

        _fetched(model, lambda: hf_hub_download(model, "config.json"))


def _cache_spec(network: Any, store_dtype: StoreDtype, kv_bits: int | None) -> ModelCacheSpec:
    """The layout of the network's caches, which it makes quantised from now on if `kv_bits` is given."""
    from stoker_worker.models.cache_probe import read_cache_spec
    from stoker_worker.models.quantised_cache import quantise_caches

    spec = read_cache_spec(network, store_dtype)
    if kv_bits is not None:
        quantise_caches(network, spec)
        spec = read_cache_spec(network, store_dtype)
    if not spec.can_be_stored:
        _log.warning("stoker cannot store this model's caches: its agents have transcripts, but no cached tokens")
    return spec


def local_folder(model: str) -> Path | None:
    """The folder that `model` names; ``None`` if it names a Hugging Face repo.

    Raises:
        ModelNotLoadable: it is a path, but not that of an mlx-lm folder; or neither a path nor a repo id.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        raise ModelNotLoadable(f"{model} is a GGUF file: run `stoker-worker model import {model} FOLDER` once")
    if path.is_dir():
        missing = "config.json" if not (path / "config.json").is_file() else None
        if missing is None and not any(path.glob("model*.safetensors")):
            missing = "model*.safetensors"
        if missing:
            raise ModelNotLoadable(f"{model} is not a model folder in mlx-lm's format: it has no {missing}")
        return path.resolve()
    if path.exists():
        raise ModelNotLoadable(f"{model} is a file; a model is a folder in mlx-lm's format")
    if model.startswith(("/", "./", "../", "~")) or model in {"", ".", ".."}:
        raise ModelNotLoadable(f"there is no model folder {model!r}")
    if not _REPO_ID.fullmatch(model):
        raise ModelNotLoadable(f"{model!r} is neither a folder here nor a Hugging Face repo (OWNER/NAME)")
    return None


def context_tokens(config: Mapping[str, Any]) -> int:
    """Most tokens that the model can attend to, from its config; the tokenizer's own limit is something else."""
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            value = part.get(key)
            if type(value) is int and value > 0:
                return value
    if (value := _left_out(config)) is not None:
        return value
    _log.warning(
        "the model's config has none of %s: assuming a context of %d tokens",
        ", ".join(_CONTEXT_KEYS),
        CONTEXT_FALLBACK_TOKENS,
    )
    return CONTEXT_FALLBACK_TOKENS


def _left_out(config: Mapping[str, Any]) -> int | None:
    """The context length of the model's type in transformers, whose configs leave out what equals the type's own value
    (those of Gemma 3 do); ``None`` if the type is unknown or has none."""
    if "model_type" not in config:
        return None
    from transformers import AutoConfig

    try:
        value = AutoConfig.for_model(**config).get_text_config().max_position_embeddings
    except Exception:  # of a type that transformers does not know, without this field, or with others it refuses
        return None
    return value if type(value) is int and value > 0 else None


def _resolved_dtype(dtype: Dtype) -> str:
    if dtype != "auto":
        return dtype
    return "native" if is_gpu() else "float32"


def _download(repo: str) -> Path:
    """The repo's folder in the Hugging Face cache, after fetching what is missing of the files that mlx-lm fetches."""
    from mlx_lm.utils import _download as fetch

    return Path(_fetched(repo, lambda: fetch(repo)))


def _fetched(repo: str, fetch: Callable[[], T]) -> T:
    try:
        return fetch()
    except Exception as error:  # the hub's client raises its own, httpx's and OSError
        raise ModelNotLoadable(
            f"cannot fetch {repo} from the Hugging Face hub: {one_line(error)} (a folder here is written ./{repo})"
        ) from None


def _load(folder: Path, extras: ModelExtras, *, as_float32: bool) -> tuple[Any, Any, Mapping[str, Any]]:
    """Model, tokenizer wrapper and config, evaluated on this thread.

    float32 weights are the stored ones exactly: scales are widened before they are multiplied out.
    """
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

    network, config = load_model(folder, lazy=True, trust_remote_code=extras.trust_remote_code)
    wrapper = load_tokenizer(folder, extras.tokenizer_options, eos_token_ids=config.get("eos_token_id"))
    extras.check_template(wrapper._tokenizer)
    if as_float32:
        network.set_dtype(mx.float32)
        network = dequantize_model(network)
    extras.apply_adapter(network)
    if as_float32:
        network.set_dtype(mx.float32)  # formats whose scales are not floating point come out as bfloat16
    mx.eval(network.parameters())
    return network, wrapper, config
