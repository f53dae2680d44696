"""The seams of the worker, and the values that cross them. No I/O, no MLX, no rq; every value is frozen.

Threads hand these to one another through queues and never share anything mutable. Arrays cross as NumPy arrays whose
bytes nobody else writes to; bfloat16 travels as uint16 (`ModelCacheSpec.dtype` says which it is).
"""

from stoker_worker.ports.agents import UNUSED, Busy, MemoryUse
from stoker_worker.ports.engine import (
    Array,
    CacheSlice,
    Completion,
    EndedBy,
    GenerationEnginePort,
    GenerationTiming,
    GenerationWork,
    LayerKV,
    LayerState,
    RestoredPrefix,
    Snapshot,
    as_uint16_if_bfloat16,
)
from stoker_worker.ports.memory import AgentVersion, CacheStorePort, Delivery, Restored, Transcript, Turn
from stoker_worker.ports.model import LoadedModel, ModelProviderPort, TextCodec
from stoker_worker.ports.queue import CancelReason, ClaimedJob, Latch, QueuePort

__all__ = [
    "UNUSED",
    "AgentVersion",
    "Array",
    "Busy",
    "CacheSlice",
    "CacheStorePort",
    "CancelReason",
    "ClaimedJob",
    "Completion",
    "Delivery",
    "EndedBy",
    "GenerationEnginePort",
    "GenerationTiming",
    "GenerationWork",
    "Latch",
    "LayerKV",
    "LayerState",
    "LoadedModel",
    "MemoryUse",
    "ModelProviderPort",
    "QueuePort",
    "Restored",
    "RestoredPrefix",
    "Snapshot",
    "TextCodec",
    "Transcript",
    "Turn",
    "as_uint16_if_bfloat16",
]
