"""Checks of a model: whether it fits, loads and can be batched, and how much memory its sequences take."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.doctor import device
from stoker_worker.doctor.check import Check, Finding, fail, ok, warn
from stoker_worker.engine.kv_cost import KVCost
from stoker_worker.models.loading import local_folder
from stoker_worker.ports import GenerationEnginePort, LoadedModel, ModelProviderPort
from stoker_worker.ports.model import Batching

_USUAL_TOKENS: Final = 1024
_PREFILL_TOKENS: Final = 1024
_FEW_SEQUENCES: Final = 8
_GB: Final = 2**30


def weights(model: str) -> Finding:
    """Before the model is loaded: a Mac that is asked for more memory than it has does not fail softly.

    Args:
        model: the worker's `--model`.
    """
    room = device.memory_for_models()
    try:
        folder = local_folder(model)
    except ModelNotLoadable as error:
        return fail(str(error), "give a folder in mlx-lm's format or a Hugging Face repo with --model")
    if folder is None:
        return ok(f"{model} comes from Hugging Face, unless it is here already", model=model)
    n_bytes = sum(file.stat().st_size for file in Path(folder).glob("model*.safetensors"))
    line = f"{n_bytes / _GB:.2f} GB of weights, {room / _GB:.1f} GB of memory for them and the caches"
    figures = {"model": folder.name, "weights_file_bytes": n_bytes, "memory_bytes": room}
    if n_bytes > room:
        return fail(line, "choose a smaller or more strongly quantised model", **figures)
    return ok(line, **figures)


class ModelLoad:
    """
    Attributes:
        engine, loaded: ``None`` until the model is loaded.
    """

    def __init__(self, provider: ModelProviderPort) -> None:
        self._provider = provider
        self.engine: GenerationEnginePort | None = None
        self.loaded: LoadedModel | None = None

    def checks(self) -> Iterator[Check]:
        yield Check("model loads", self._load)
        if (engine := self.engine) is not None and (loaded := self.loaded) is not None:
            yield Check("model memory", lambda: memory(engine, loaded))

    def _load(self) -> Finding:
        began = time.perf_counter()
        try:
            self.engine, self.loaded = self._provider.load()
        except ModelNotLoadable as error:
            return fail(str(error), "the worker would refuse it too; docs/serving-a-model.md names what it takes")
        seconds, mode, spec = time.perf_counter() - began, self.loaded.mode, self.loaded.spec
        line = f"{self.loaded.name} in {seconds:.1f} s; sequences run {mode}"
        figures = {
            "model": self.loaded.name,
            "load_s": round(seconds, 2),
            "mode": str(mode),
            "cache_dtype": spec.dtype,
            "layers": len(spec.layers),
            "context_tokens": self.loaded.context_tokens,
            "max_batch": self.loaded.max_batch.jobs,
            "max_batch_why": self.loaded.max_batch.why,
        }
        if not mode.memory or mode.batching not in (Batching.ROWS, Batching.BATCHED):
            advice = "it is served so, slowly; `stoker-worker run` logs the reason, and docs/models.md explains it"
            return warn(line, advice, **figures)
        return ok(line, **figures)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def memory(engine: GenerationEnginePort, loaded: LoadedModel) -> Finding:
    spec = loaded.spec
    cost = KVCost(spec, _PREFILL_TOKENS, in_rows=loaded.mode.batching == Batching.ROWS)
    figures: dict[str, Any] = {"weights_bytes": device.memory_in_use(), "kv_bytes_per_token": spec.bytes_per_token}
    line = f"{figures['weights_bytes'] / _GB:.2f} GB in use, {spec.bytes_per_token} bytes of KV per token"
    if engine.kv is None:
        return ok(line, **figures)
    fitting = engine.kv.total // max(1, cost.sequence_blocks(_USUAL_TOKENS))
    figures |= {"kv_blocks": engine.kv.total, "sequences_of_1024_tokens": fitting}
    line = f"{line}, room for {fitting} sequences of {_USUAL_TOKENS} tokens"
    if fitting < _FEW_SEQUENCES:
        advice = "a smaller model, --kv-bits 8 or --kv-max-bytes: a narrow batch leaves most of the speed unused"
        return warn(line, advice, **figures)
    return ok(line, **figures)
