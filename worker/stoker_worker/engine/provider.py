"""From the settings to an engine: loads the model, decides its mode, assembles the engine. Engine thread.

Owns the defaults that depend on the device. MLX is imported inside functions only, after the BLAS has been preloaded.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.engine.kv_memory import KVCost
from stoker_worker.models.device import is_gpu, memory_for_models, ram_bytes
from stoker_worker.models.extras import ModelExtras
from stoker_worker.models.fingerprint import in_mode
from stoker_worker.ports import GenerationEnginePort, LoadedModel, ModelProviderPort
from stoker_worker.ports.cache_spec import ModelCacheSpec
from stoker_worker.ports.model import USUAL_JOBS, Batching, MaxBatch, ServingMode
from stoker_worker.settings import WorkerSettings

_USUAL_TOKENS: Final = 1024
"""By default, no more jobs are in flight than sequences of this length fit into the KV memory: a job that waits for KV
memory holds other memory meanwhile."""


def default_max_batch(spec: ModelCacheSpec, *, kv_bytes: int, prefill_tokens: int) -> MaxBatch:
    """The width for `kv_bytes` of KV memory, if at most `prefill_tokens` tokens of a sequence are prefilled at once."""
    cost = KVCost(spec, prefill_tokens, in_rows=True)
    fitting = kv_bytes // cost.block_bytes // max(1, cost.sequence_blocks(_USUAL_TOKENS))
    if fitting < USUAL_JOBS:
        return MaxBatch(max(1, fitting), f"KV memory for {fitting} sequences of {_USUAL_TOKENS} tokens")
    return MaxBatch(USUAL_JOBS, "the default")


_log = logging.getLogger(__name__)

_CPU_SHARE_OF_RAM: Final = 0.25
_CPU_PREFILL_TOKENS: Final = 256
_GPU_PREFILL_TOKENS: Final = 1024
_GPU_SHARE_OF_MEMORY: Final = 0.8  # the rest is for activations: over the limit a Mac does not fail softly


@dataclass(frozen=True)
class MlxProvider(ModelProviderPort):
    """Loads `settings.model` and makes a `BlockPoolBatchEngine` for it. Implements `ModelProviderPort`."""

    settings: WorkerSettings

    def load(self) -> tuple[GenerationEnginePort, LoadedModel]:
        from stoker_worker.engine.batch_engine import assemble
        from stoker_worker.engine.rows.rows_generator import why_not_in_rows
        from stoker_worker.engine.transfer import MlxRoom
        from stoker_worker.models.loading import load_model

        settings = self.settings
        assert settings.model is not None
        digests = settings.store_folder / "model-digests.json"
        model, loaded = load_model(
            settings.model,
            settings.dtype,
            store_dtype=settings.store_dtype,
            kv_bits=settings.kv_bits,
            digest_cache=digests,
            extras=self._extras(),
        )
        if settings.wired_memory:
            _wire_memory()
        loaded = replace(loaded, max_batch=self._max_batch(model, loaded.spec))
        mode = self._mode(model, loaded)
        if settings.kv_bits is not None and mode.batching != Batching.ROWS:
            reason = why_not_in_rows(model, loaded.spec) or f"with 8 bits it is right only {mode}"
            raise ModelNotLoadable(f"--kv-bits 8 needs a model that runs in rows: {reason}")
        fingerprint = in_mode(loaded.fingerprint, mode)
        loaded = replace(loaded, mode=mode, fingerprint=fingerprint, room_type=MlxRoom)
        engine = assemble(
            model,
            loaded,
            max_bytes=self._kv_bytes(model),
            max_batch=loaded.max_batch.jobs,
            prefill_tokens=self._prefill_tokens(),
            max_step_s=settings.max_step_s,
            draft_ngram=settings.draft_ngram,
        )
        loaded = replace(loaded, kv_tokens=engine.longest_sequence)
        _log.info("KV memory: %d MB; a sequence has at most %d tokens", self._kv_bytes(model) >> 20, loaded.kv_tokens)
        return engine, loaded

    @property
    def model(self) -> str:
        """The name that the loaded model will have."""
        from stoker_worker.models.loading import model_name

        assert self.settings.model is not None
        return model_name(self.settings.model, self._extras())

    def check_model(self) -> None:
        """Look for the model and the operator's additions before anything is started; of a Hugging Face model only the
        config is fetched. Raises `ModelNotLoadable` if one is missing or invalid."""
        from stoker_worker.models.loading import check_exists

        assert self.settings.model is not None
        check_exists(self.settings.model)
        self._extras().check()

    def _extras(self) -> ModelExtras:
        settings = self.settings
        return ModelExtras(settings.adapter, settings.chat_template, settings.trust_remote_code)

    def leave_thread(self) -> None:
        """Clear the thread's streams. MLX 0.32.4 aborts about one process in three at its exit if a thread that has
        ended left streams behind."""
        import mlx.core as mx

        mx.clear_streams()

    def _mode(self, model: Any, loaded: LoadedModel) -> ServingMode:
        """The widest mode that is right for the model, by a proof or a remembered one."""
        import mlx.core as mx

        from stoker_worker.engine.proof import Verdict, prove, remembered_or_proved

        if self.settings.skip_proof:
            _log.warning("NOT PROVED: it is not known whether this model answers correctly in a batch (--skip-proof)")
            return ServingMode(_unproved(model, loaded), proved=False)

        def proved() -> Verdict:
            _log.info("the proof, once for this model, which may take minutes: trying it in a batch")
            return prove(model, loaded, max_batch=loaded.max_batch.jobs, draft_ngram=self.settings.draft_ngram)

        verdict = remembered_or_proved(
            self.settings.store_folder / "model-proofs.json",
            loaded.fingerprint,
            max_batch=loaded.max_batch.jobs,
            draft_ngram=self.settings.draft_ngram,
            device=mx.default_device().type.name,
            prove=proved,
        )
        is_narrow = not verdict.mode.memory or verdict.mode.batching not in (Batching.ROWS, Batching.BATCHED)
        level = logging.WARNING if is_narrow else logging.INFO
        reasons = "; ".join(verdict.why) or "each answers as it does alone"
        _log.log(level, "sequences run %s (%s)", verdict.mode, reasons)
        return verdict.mode

    def _max_batch(self, model: Any, spec: ModelCacheSpec) -> MaxBatch:
        if self.settings.max_batch is not None:
            return MaxBatch(self.settings.max_batch)
        return default_max_batch(spec, kv_bytes=self._kv_bytes(model), prefill_tokens=self._prefill_tokens())

    def _kv_bytes(self, model: Any) -> int:
        return self.settings.kv_max_bytes or _default_kv_bytes(model)

    def _prefill_tokens(self) -> int:
        return self.settings.prefill_step_tokens or (_GPU_PREFILL_TOKENS if is_gpu() else _CPU_PREFILL_TOKENS)


def _wire_memory() -> None:
    """Let the system keep MLX's GPU memory resident, up to the recommended size, until the process ends."""
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    if maybe_set_recommended_wired_limit() is None:
        _log.warning("--wired-memory has no effect: this device has no recommended size")


def _unproved(model: Any, loaded: LoadedModel) -> Batching:
    from stoker_worker.engine.rows.rows_generator import why_not_in_rows
    from stoker_worker.models.cache_probe import can_be_batched

    if why_not_in_rows(model, loaded.spec) is None:
        return Batching.ROWS
    return Batching.BATCHED if can_be_batched(model) else Batching.ONE_AT_A_TIME


def _default_kv_bytes(model: Any) -> int:
    from mlx.utils import tree_flatten

    if not is_gpu():
        return int(ram_bytes() * _CPU_SHARE_OF_RAM)
    weights: int = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return max(1, int(memory_for_models() * _GPU_SHARE_OF_MEMORY) - weights)
