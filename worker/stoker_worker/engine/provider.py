"""Loads the model. Owns finding it, its dtype and its identity. Engine thread, which owns everything MLX from then on.

The mode it is served in is decided, and the engine made, by functions that are passed in. MLX is imported by `load()`.
Code that comes with a model is never run.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.cache_spec import ModelCacheSpec, StoreDtype
from stoker_worker.engine.codec import ModelCodec, chat_template_text
from stoker_worker.engine.fingerprint import ModelFolder, in_mode
from stoker_worker.ports import GenerationEnginePort, LoadedModel
from stoker_worker.serving_mode import ServingMode

Dtype = Literal["auto", "native", "float32"]
"""`auto`: as stored on a GPU; float32 on a CPU, where MLX has no fast path for packed or half-precision weights."""

CONTEXT_FALLBACK_TOKENS: Final = 4096
"""Taken when the config says nothing: the smallest context among models of the last years."""

_CONTEXT_KEYS: Final = (
    *("max_position_embeddings", "max_sequence_length", "max_seq_len", "model_max_length"),
    *("n_positions", "n_ctx", "seq_length"),
)
_REPO_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_log = logging.getLogger(__name__)


class MlxModelProvider:
    """`ModelProviderPort` over mlx-lm."""

    def __init__(
        self,
        model: str,
        dtype: Dtype,
        make_engine: Callable[[Any, LoadedModel], GenerationEnginePort],
        *,
        decide_mode: Callable[[Any, LoadedModel, float], ServingMode] | None = None,
        store_dtype: StoreDtype = "native",
        digest_cache: Path | None = None,
    ) -> None:
        """
        Args:
            model: a folder in mlx-lm's format, or a Hugging Face repo such as ``mlx-community/Qwen3-4B-4bit``.
            make_engine: called with the mlx-lm model once it is loaded.
            decide_mode: called before that, with the seconds that loading took; ``None``: the widest mode.
            store_dtype: precision of cache blocks on disk.
            digest_cache: file in which digests of weight files are remembered between starts.
        """
        self._model = model
        self._dtype = dtype
        self._make_engine = make_engine
        self._decide_mode = decide_mode
        self._store_dtype = store_dtype
        self._digest_cache = digest_cache

    def load(self) -> tuple[GenerationEnginePort, LoadedModel]:
        """Load the model, and make the engine with it.

        Raises:
            ModelNotLoadable: it is not there, cannot be fetched, or cannot be served; one line says why.
        """
        began = time.perf_counter()
        local = local_folder(self._model)
        folder = local or _download(self._model)
        dtype = self._resolved_dtype()
        try:
            network, wrapper, config = _load(folder, as_float32=dtype == "float32")
        except Exception as error:  # mlx-lm and transformers raise anything from KeyError to RuntimeError here
            raise ModelNotLoadable(f"cannot load {self._model}: {_one_line(error)}") from None
        codec = ModelCodec(wrapper)
        spec = ModelCacheSpec.from_model(network, self._store_dtype)
        if not spec.can_be_stored:
            _log.warning(
                "this model keeps caches that stoker cannot store: its agents have transcripts, no cached tokens"
            )
        files = ModelFolder(folder, self._digest_cache)
        tokenizer_fingerprint = files.tokenizer_fingerprint(chat_template_text(wrapper))
        loaded = LoadedModel(
            name=local.name if local else self._model,
            fingerprint=files.model_fingerprint(
                tokenizer_fingerprint=tokenizer_fingerprint, cache_spec=spec.describe(), dtype=dtype
            ),
            tokenizer_fingerprint=tokenizer_fingerprint,
            context_tokens=context_tokens(config),
            spec=spec,
            codec=codec,
        )
        if self._decide_mode is not None:
            loaded = replace(loaded, mode=self._decide_mode(network, loaded, time.perf_counter() - began))
        loaded = replace(loaded, fingerprint=in_mode(loaded.fingerprint, loaded.mode))
        return self._make_engine(network, loaded), loaded

    def _resolved_dtype(self) -> str:
        if self._dtype != "auto":
            return self._dtype
        import mlx.core as mx

        return "float32" if mx.default_device().type == mx.DeviceType.cpu else "native"


def local_folder(model: str) -> Path | None:
    """The folder that `model` names, or ``None`` when it is to be taken for a Hugging Face repo.

    Raises:
        ModelNotLoadable: it is a path, but not to an mlx-lm folder; or neither a path nor a repo id.
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
    """The most tokens the model can attend to, from its config; the tokenizer's own limit says something else."""
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            value = part.get(key)
            if type(value) is int and value > 0:
                return value
    _log.warning(
        "the model's config has none of %s: taking a context of %d tokens",
        ", ".join(_CONTEXT_KEYS),
        CONTEXT_FALLBACK_TOKENS,
    )
    return CONTEXT_FALLBACK_TOKENS


def _download(repo: str) -> Path:
    """The repo's files in the Hugging Face cache, fetched where missing. Only what mlx-lm itself would fetch."""
    from mlx_lm.utils import _download as fetch

    try:
        return Path(fetch(repo))
    except Exception as error:  # the hub's client raises its own, httpx's and OSError
        raise ModelNotLoadable(
            f"cannot fetch {repo} from the Hugging Face hub: {_one_line(error)} (a folder here is written ./{repo})"
        ) from None


def _load(folder: Path, *, as_float32: bool) -> tuple[Any, Any, Mapping[str, Any]]:
    """Model, tokenizer wrapper and config, evaluated on this thread.

    float32 weights are the stored ones exactly: scales are widened before they are multiplied out.
    """
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

    network, config = load_model(folder, lazy=True, trust_remote_code=False)
    # Said outright, because transformers asks on the terminal when it is not told.
    wrapper = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    if as_float32:
        network.set_dtype(mx.float32)
        network = dequantize_model(network)
        network.set_dtype(mx.float32)  # formats whose scales are not floating point come out as bfloat16
    mx.eval(network.parameters())
    return network, wrapper, config


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"[:400]
