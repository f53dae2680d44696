"""Builds the MLX engine from the settings. Runs on the engine thread: nothing MLX is imported before that."""

import logging
import os
from dataclasses import dataclass
from typing import Any

from stoker_worker.engine.block_pool import BlockPool
from stoker_worker.ports import GenerationEnginePort, LoadedModel
from stoker_worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_CPU_SHARE_OF_RAM = 0.25
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
            store_dtype=self.settings.store_dtype,
            digest_cache=self.settings.store_folder / "model-digests.json",
        ).load()

    def leave_thread(self) -> None:
        """Clear the thread's streams. Streams of a thread that has ended abort the process on its way out: MLX 0.32.4
        does so in one of three exits."""
        import mlx.core as mx

        mx.clear_streams()

    def _engine(self, model: Any, loaded: LoadedModel) -> GenerationEnginePort:
        import mlx.core as mx

        from stoker_worker.engine.batch_engine import BlockPoolBatchEngine

        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        max_bytes = self.settings.kv_max_bytes or _default_kv_bytes(model, on_gpu)
        pool = BlockPool.of_bytes(max_bytes, loaded.spec.bytes_per_block)
        # On a CPU a long prefill chunk would hold up every decoding row for seconds.
        step_tokens = self.settings.prefill_step_tokens or (1024 if on_gpu else 128)
        log.info("KV memory: %d blocks of 256 tokens (%d MB)", pool.total, max_bytes // 2**20)
        return BlockPoolBatchEngine(
            model, loaded, pool=pool, max_batch=self.settings.max_batch, prefill_step_tokens=step_tokens
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
