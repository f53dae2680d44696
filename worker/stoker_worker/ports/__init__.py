"""The worker's interfaces, and the values that cross them. No I/O, no MLX, no rq.

Every value but `CancelToken` is frozen, and threads hand them to one another. Arrays cross as NumPy arrays that nothing
writes to any more, or inside a `PrefixRoom`. bfloat16 travels as uint16; `ModelCacheSpec.dtype` has the real dtype.
"""

from stoker_worker.ports.engine import (
    AnswerGuide,
    Array,
    CompletedGeneration,
    EndedBy,
    GenerationEnginePort,
    GenerationTiming,
    GenerationWork,
    GuideMaker,
    KVMemory,
    LayerKV,
    LayerState,
    PrefixRoom,
    RoomType,
    SequenceCache,
    SequenceProgress,
    Snapshot,
    Stage,
    TokenMask,
    as_uint16_if_bfloat16,
)
from stoker_worker.ports.memory import (
    UNKNOWN_VERSION,
    AgentJobsPort,
    AgentVersion,
    CachedPrefix,
    CacheStorePort,
    Restored,
    Transcript,
    Turn,
)
from stoker_worker.ports.metrics import NOT_COUNTED, MetricsPort, QueueDepth, SharedUse, StoreUse, WorkerState
from stoker_worker.ports.model import PLAIN_TEXT, AnswerFormat, LoadedModel, MaxBatch, ModelProviderPort, TokenizerPort
from stoker_worker.ports.queue import (
    NOTHING_LOST,
    UNUSED,
    Busy,
    CancelReason,
    CancelToken,
    ClaimedJob,
    DataLoss,
    Delivery,
    LastVersion,
    MemoryUse,
    PlaceOf,
    QueuePort,
    Serving,
    TextSoFar,
)
