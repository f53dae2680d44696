"""How many jobs run at once when `--max-batch` is not given. Pure: numbers only."""

from typing import Final

from stoker_worker.engine.kv_cost import KVCost
from stoker_worker.ports.cache_spec import ModelCacheSpec
from stoker_worker.ports.model import USUAL_JOBS, MaxBatch

_USUAL_TOKENS: Final = 1024
"""As many sequences of this length must fit into the KV memory at once: jobs that wait for it hold memory beside it."""


def default_max_batch(spec: ModelCacheSpec, *, kv_bytes: int, prefill_tokens: int) -> MaxBatch:
    """
    Args:
        kv_bytes: KV memory of the batch.
        prefill_tokens: most tokens of a sequence prefilled at once.
    """
    cost = KVCost(spec, prefill_tokens, in_rows=True)
    fitting = kv_bytes // cost.block_bytes // max(1, cost.sequence_blocks(_USUAL_TOKENS))
    if fitting < USUAL_JOBS:
        return MaxBatch(max(1, fitting), f"KV memory for {fitting} sequences of {_USUAL_TOKENS} tokens")
    return MaxBatch(USUAL_JOBS, "the default")
