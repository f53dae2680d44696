"""Builds the MLX engine from the settings. Runs on the engine thread: nothing MLX is imported before that."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker_worker.engine.block_pool import BlockPool
from stoker_worker.engine.pace import PrefillPace
from stoker_worker.engine.pricing import BatchPricing
from stoker_worker.ports import GenerationEnginePort, LoadedModel
from stoker_worker.serving_mode import WIDEST, Rows, ServingMode
from stoker_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from stoker_worker.engine.batch_engine import BlockPoolBatchEngine
    from stoker_worker.engine.generator import Generator

log = logging.getLogger(__name__)

_CPU_SHARE_OF_RAM = 0.25
_CPU_PREFILL_TOKENS = 256
_GPU_PREFILL_TOKENS = 1024
_GPU_SHARE_OF_WORKING_SET = 0.8  # the rest is for activations: over the limit a Mac does not fail softly


@dataclass(frozen=True)
class MlxProvider:
    """Loads `settings.model` and puts a `BlockPoolBatchEngine` over it. Implements `ModelProviderPort`."""

    settings: WorkerSettings

    def load(self) -> tuple[GenerationEnginePort, LoadedModel]:
        from stoker_worker.engine.provider import MlxModelProvider

        assert self.settings.model is not None
        return MlxModelProvider(
            self.settings.model,
            self.settings.dtype,
            self._engine,
            decide_mode=self._mode,
            store_dtype=self.settings.store_dtype,
            digest_cache=self.settings.store_folder / "model-digests.json",
        ).load()

    def leave_thread(self) -> None:
        """Clear the thread's streams. Streams of a thread that has ended abort the process on its way out: MLX 0.32.4
        does so in one of three exits."""
        import mlx.core as mx

        mx.clear_streams()

    def _mode(self, model: Any, loaded: LoadedModel, load_s: float) -> ServingMode:
        """The widest mode that is right for the model, by proof or from what is remembered of one."""
        import mlx.core as mx

        from stoker_worker.engine.probe import can_be_batched
        from stoker_worker.engine.proof import prove
        from stoker_worker.engine.verdicts import Verdicts

        max_batch = self.settings.max_batch
        if self.settings.skip_proof:
            log.warning("NOT PROVED: nobody has looked whether this model answers rightly in a batch (--skip-proof)")
            return ServingMode(Rows.BATCHED if can_be_batched(model) else Rows.ALONE, proved=False)
        log.info("trying the model in a batch, unless that was done before")
        verdict = Verdicts(self.settings.store_folder / "model-proofs.json").of(
            loaded.fingerprint,
            max_batch=max_batch,
            device=mx.default_device().type.name,
            prove=lambda: prove(model, loaded, max_batch=max_batch, load_s=load_s),
        )
        level = logging.INFO if verdict.mode == WIDEST else logging.WARNING
        log.log(level, "rows run %s (%s)", verdict.mode, "; ".join(verdict.why) or "each says what it says alone")
        return verdict.mode

    def _engine(self, model: Any, loaded: LoadedModel) -> GenerationEnginePort:
        import mlx.core as mx

        settings = self.settings
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        most_tokens = settings.prefill_step_tokens or (_GPU_PREFILL_TOKENS if on_gpu else _CPU_PREFILL_TOKENS)
        max_bytes = settings.kv_max_bytes or _default_kv_bytes(model, on_gpu)
        return assemble(
            model,
            loaded,
            max_bytes=max_bytes,
            max_batch=settings.max_batch,
            prefill_tokens=most_tokens,
            max_step_s=settings.max_step_s,
        )


def assemble(
    model: Any,
    loaded: LoadedModel,
    *,
    max_bytes: int,
    max_batch: int,
    prefill_tokens: int,
    max_step_s: float,
    watch: "Callable[[Generator], Generator] | None" = None,
) -> "BlockPoolBatchEngine":
    """An engine over `model` with `max_bytes` of KV memory, in the mode that `loaded` says.

    Args:
        watch: put around each generator that the engine makes (the proof listens there).
    """
    from stoker_worker.engine.batch_engine import BlockPoolBatchEngine
    from stoker_worker.engine.generator import PREFILL_ROWS, BatchedRows, Generator
    from stoker_worker.engine.lone_generator import REFERENCE_CHUNK_TOKENS, LoneRow

    eos_ids, rows = loaded.codec.eos_ids, loaded.mode.rows
    if rows in (Rows.ALONE, Rows.WHOLE):
        max_batch = prefill_rows = 1
        chunk_tokens = REFERENCE_CHUNK_TOKENS if rows == Rows.WHOLE else None
        make: Callable[[], Generator] = partial(LoneRow, model, eos_ids=eos_ids, chunk_tokens=chunk_tokens)
    else:
        prefill_rows = 1 if rows == Rows.SINGLE_PREFILL else PREFILL_ROWS
        make = partial(
            BatchedRows,
            model,
            eos_ids=eos_ids,
            max_batch=max_batch,
            prefill_rows=prefill_rows,
            most_chunk_tokens=prefill_tokens,
        )
    pricing = BatchPricing(loaded.spec, prefill_tokens)
    pool = BlockPool(max_bytes // pricing.block_bytes)
    if watch is None:
        log.info("KV memory: %d blocks of %d bytes (%d MB)", pool.total, pricing.block_bytes, max_bytes // 2**20)
    return BlockPoolBatchEngine(
        model,
        loaded,
        make_generator=make if watch is None else lambda: watch(make()),
        pool=pool,
        pricing=pricing,
        pace=PrefillPace(max_step_s, prefill_tokens),
        max_batch=max_batch,
        prefill_rows=prefill_rows,
    )


def _default_kv_bytes(model: Any, on_gpu: bool) -> int:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    if not on_gpu:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _CPU_SHARE_OF_RAM)
    weights: int = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    info = mx.device_info()
    working_set = int(info.get("max_recommended_working_set_size", info["memory_size"]))
    return max(1, int(working_set * _GPU_SHARE_OF_WORKING_SET) - weights)
