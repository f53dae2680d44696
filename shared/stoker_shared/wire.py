"""The names and defaults that both sides write into Redis. They are wire format, so none of them may change."""

from typing import Final

DEFAULT_QUEUE: Final = "generate"
"""Queue of producers and workers that name none."""

TASK_PATH: Final = "stoker_shared.task.generate"
"""RQ function path of a generation job. The worker dispatches on this string and imports nothing a job names."""

AGENT_TASK_PATH: Final = "stoker_shared.task.agent"
"""RQ function path of a job that reads or changes an agent's memory and generates nothing."""

REQUEST_KWARG: Final = "request"
"""The one keyword argument of both tasks."""

REQUEST_VERSION: Final = 3
"""Newest `v` of :class:`~stoker_shared.request.GenerationRequest` that this code reads."""

AGENT_REQUEST_VERSION: Final = 1
"""Newest `v` of :class:`~stoker_shared.agent_request.AgentRequest` that this code reads."""

MAX_REQUEST_BYTES: Final = 16 * 2**20
"""Largest request, as UTF-8 JSON, that producers send and workers read."""

DEFAULT_JOB_TIMEOUT_S: Final = 3600
"""Seconds a job may run; RQ's default of 180 is too short for a busy batch."""

DEFAULT_RESULT_TTL_S: Final = 86_400
"""Seconds a result is kept; with RQ's default of 500 it would be gone before a batch producer looks."""

DEFAULT_FAILURE_TTL_S: Final = 7 * 86_400
"""Seconds a failed job is kept; RQ's default is a year, too long for private prompts."""

MAX_ATTEMPTS: Final = 3
"""A job that has lost this many workers while it ran alone is not run again."""

META_PARTIAL: Final = "partial"
"""Key in `job.meta`: the text that a job generated before it timed out."""

META_PROGRESS: Final = "progress"
"""Key in `job.meta`: a running job's progress (`stage`, `tokens`, `tokens_per_s`), written at most twice a second."""

FIELD_ATTEMPTS: Final = "stoker_attempts"
"""Field of the job hash: how many workers were lost while they had the job in flight."""

FIELD_LOST_ALONE: Final = "stoker_lost_alone"
"""Field of the job hash: how many of these workers were running nothing else."""

FIELD_AGENT: Final = "stoker_agent"
"""Field of the job hash, so that a worker need not read the request to know the job's place: `created_at`, the
request's `access` and, unless that is `none`, its agent id, separated by spaces. Optional. If its `created_at` is not
the job's own, the id was enqueued again since, and the field is ignored."""

FIELD_STREAM: Final = "stoker_stream"
"""Field of the job hash, of any value: the worker must publish the text as it is generated."""

STREAM_KEY: Final = "stoker:stream:{job_id}"
"""Stream: the text of a job as it is generated. Each entry has `run` (the run of the job that wrote it), `kind` and
`text`: ``whole`` has all text of the run so far and replaces the entries before it; ``more`` continues the entry
before; ``end`` has no text: the run is over, and the job's hash has the outcome. Entries of kind ``whole`` also have
`markers`, the JSON of :class:`~stoker_shared.markers.Markers`, for the run's entries up to the next one. Expires."""

WORKER_KEY: Final = "stoker:worker:{name}"
"""String: a live worker (JSON: queues, model, context_tokens, mode, max_batch, max_batch_why, host, pid, started_at,
now; those from `model` to `max_batch_why` are null while the model loads). Expires with the worker's heartbeat. RQ's
set of workers has the names. `now` has the worker's figures at its last heartbeat: `at` (Unix time), `tokens_per_s`
(over ten seconds), `jobs_per_min` (over five minutes, without idle time), `in_flight`, `in_batch`, `hit_share` (of the
prompt tokens since the start, 0 to 1; null before any), `done` and `failed` (jobs since the start). It may be empty."""

FIELD_DELIVERY: Final = "stoker_delivery"
"""Field of an execution's hash: the delivery of its job (a hash of `created_at`, `repeats_left` and `data`)."""

LEASE_KEY: Final = "stoker:lease:{queue}"
"""String: the worker that holds this queue (JSON: worker, host, pid, boot, started, fence); expires with its
heartbeat."""

FENCE_KEY: Final = "stoker:fence:{queue}"
"""Integer: the last fencing number handed out for this queue, with its lease."""

ENDED_KEY: Final = "stoker:ended:{queue}"
"""Hash: ends of jobs that still need follow-up work (JSON by `<job id>:<execution id>`)."""

FIELD_PACKED: Final = "stoker_packed"
"""Field of the job hash: the compression that the producer wants for the result's JSON in `return_value`."""

PACKED_WITH_ZLIB: Final = "zlib"
"""The only value of `FIELD_PACKED`."""
