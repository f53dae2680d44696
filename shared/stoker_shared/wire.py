"""The names and defaults both sides write into Redis. Wire format: stable from day one."""

from typing import Final

DEFAULT_QUEUE: Final = "generate"
"""Queue used when neither side names one."""

TASK_PATH: Final = "stoker_shared.task.generate"
"""RQ function path of a generation job. The worker dispatches on this string and imports nothing a job names."""

AGENT_TASK_PATH: Final = "stoker_shared.task.agent"
"""RQ function path of a job that looks at an agent's memory or changes it, and generates nothing."""

REQUEST_KWARG: Final = "request"
"""The one keyword argument of both tasks."""

REQUEST_VERSION: Final = 2
"""Newest `v` of :class:`~stoker_shared.request.GenerationRequest` that this code reads."""

AGENT_REQUEST_VERSION: Final = 1
"""Newest `v` of :class:`~stoker_shared.agent_request.AgentRequest` that this code reads."""

MAX_REQUEST_BYTES: Final = 16 * 2**20
"""Largest request, as UTF-8 JSON, that producers send and workers read."""

DEFAULT_JOB_TIMEOUT_S: Final = 3600
"""Seconds a job may run; RQ's own default of 180 is short for a busy batch."""

DEFAULT_RESULT_TTL_S: Final = 86_400
"""Seconds a result is kept; RQ's own default of 500 is gone before a batch producer looks."""

DEFAULT_FAILURE_TTL_S: Final = 7 * 86_400
"""Seconds a failed job is kept; RQ's own default is a year, and prompts are private."""

MAX_ATTEMPTS: Final = 3
"""A job whose worker was lost this many times while nothing ran beside it is not generated again."""

META_PARTIAL: Final = "partial"
"""Key in `job.meta` under which a timed-out job's text stands."""

META_PROGRESS: Final = "progress"
"""Key in `job.meta` while the job runs: how far it is (`stage`, `tokens`, `tokens_per_s`), at most twice a second."""

FIELD_ATTEMPTS: Final = "stoker_attempts"
"""Field of the job hash that counts how often a dead worker had the job in flight."""

FIELD_LOST_ALONE: Final = "stoker_lost_alone"
"""Field of the job hash: how many of these times the job ran alone."""

FIELD_AGENT: Final = "stoker_agent"
"""Field of the job hash, so that a worker that looks ahead need not read the request: `created_at`, the request's
`access` and, unless that is `none`, its agent id, with spaces between. Optional; beside another `created_at`, that
of an id enqueued anew, it counts for nothing."""

FIELD_STREAM: Final = "stoker_stream"
"""Field of the job hash, of any value: somebody wants to read the text as it is generated."""

STREAM_KEY: Final = "stoker:stream:{job_id}"
"""Stream: the text of a job that somebody reads along. Each entry has `run` (which try of the job it belongs to),
`kind` and `text`: ``whole`` has all text of the run so far, and those before it are gone; ``more`` goes on from the
entry before; ``end`` has none: the run is over, and the job's hash tells how. Expires."""

WORKER_KEY: Final = "stoker:worker:{name}"
"""String: a live worker (JSON: queues, model, context_tokens, mode, host, pid, started_at; the middle three are null
while its model loads); expires with its heartbeat. RQ's set of workers has the names."""

FIELD_DELIVERY: Final = "stoker_delivery"
"""Field of an execution's hash: which delivery of its job it runs (a hash of `created_at`, `repeats_left`, `data`)."""

LEASE_KEY: Final = "stoker:lease:{queue}"
"""String: who works on this queue (JSON: worker, host, pid, boot, started, fence); expires with its heartbeat."""

FENCE_KEY: Final = "stoker:fence:{queue}"
"""Integer: the last fencing number handed out for this queue, with its lease."""

ENDED_KEY: Final = "stoker:ended:{queue}"
"""Hash: ends of jobs behind which something is left to do (JSON by `<job id>:<execution id>`)."""

FIELD_PACKED: Final = "stoker_packed"
"""Field of the job hash: how the producer wants the result's JSON compressed inside of `return_value`."""

PACKED_WITH_ZLIB: Final = "zlib"
"""The one value of `FIELD_PACKED` there is."""
