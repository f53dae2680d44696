"""Puts an engine together over a loaded model: generator, pool, cost and budget. Owns nothing; engine thread."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from stoker_worker.engine.batch_engine import BlockPoolBatchEngine
from stoker_worker.engine.batched_generator import MOST_PREFILLING, BatchedGenerator
from stoker_worker.engine.block_pool import BlockPool
from stoker_worker.engine.generator import Generator
from stoker_worker.engine.kv_cost import KVCost
from stoker_worker.engine.prefill_budget import PrefillBudget
from stoker_worker.engine.rows.rows_generator import RowsGenerator
from stoker_worker.engine.single_generator import REFERENCE_CHUNK_TOKENS, SingleGenerator
from stoker_worker.ports import LoadedModel
from stoker_worker.ports.model import Batching

_log = logging.getLogger(__name__)


def assemble(
    model: Any,
    loaded: LoadedModel,
    *,
    max_bytes: int,
    max_batch: int,
    prefill_tokens: int,
    max_step_s: float,
    draft_ngram: bool = False,
    watch: Callable[[Generator], Generator] | None = None,
) -> BlockPoolBatchEngine:
    """An engine over `model` with `max_bytes` of KV memory, in the mode of `loaded`.

    Args:
        draft_ngram: whether rows may get drafts, where the mode is in rows and all layers are full attention.
        watch: wraps each generator that the engine makes; a trial observes it there.
    """
    batching = loaded.mode.batching
    if batching in (Batching.ONE_AT_A_TIME, Batching.AS_MLX_LM):
        max_batch = max_prefilling = 1
        chunk_tokens = REFERENCE_CHUNK_TOKENS if batching == Batching.AS_MLX_LM else None
        make: Callable[[], Generator] = partial(SingleGenerator, model, chunk_tokens=chunk_tokens)
    elif batching == Batching.ROWS:
        max_prefilling = MOST_PREFILLING
        make = partial(RowsGenerator, model, loaded.spec, draft_ngram=draft_ngram)
    else:
        max_prefilling = 1 if batching == Batching.SINGLE_PREFILL else MOST_PREFILLING
        make = partial(
            BatchedGenerator,
            model,
            max_batch=max_batch,
            max_prefilling=max_prefilling,
            max_chunk_tokens=prefill_tokens,
        )
    kv_cost = KVCost(loaded.spec, prefill_tokens, in_rows=batching == Batching.ROWS)
    pool = BlockPool(max_bytes // kv_cost.block_bytes)
    if watch is None:
        _log.info("KV memory: %d blocks of %d bytes (%d MB)", pool.total, kv_cost.block_bytes, max_bytes // 2**20)
    return BlockPoolBatchEngine(
        model,
        loaded,
        make_generator=make if watch is None else lambda: watch(make()),
        pool=pool,
        kv_cost=kv_cost,
        budget=PrefillBudget(max_step_s, prefill_tokens),
        max_batch=max_batch,
        max_prefilling=max_prefilling,
        shares_beginnings=batching == Batching.ROWS and loaded.has_memory and loaded.spec.has_only_full_layers,
    )
