"""The names and defaults that both sides write into Redis. They are the wire format, so none of them may change."""

from typing import Final

DEFAULT_QUEUE: Final = "generate"
"""Queue of producers and workers that name none."""

TASK_PATH: Final = "stoker_shared.task.generate"
"""RQ function path of a generation job. The worker dispatches on this string and imports nothing that a job names."""

AGENT_TASK_PATH: Final = "stoker_shared.task.agent"
"""RQ function path of a job that reads or changes an agent's memory and generates nothing."""

REQUEST_KWARG: Final = "request"
"""The only keyword argument of both tasks."""

REQUEST_VERSION: Final = 5
"""The `v` of a `GenerationRequest` that this code sends, and the newest that it reads."""

AGENT_REQUEST_VERSION: Final = 1
"""The newest `v` of an `AgentRequest` that this code reads."""

MAX_REQUEST_BYTES: Final = 8 * 2**20
"""Largest request, as UTF-8 JSON, that producers send and workers read."""

DEFAULT_JOB_TIMEOUT_S: Final = 3600
"""Longest run of a job in seconds; RQ's default of 180 is too short for a busy batch."""

DEFAULT_RESULT_TTL_S: Final = 86_400
"""Seconds a result is kept; with RQ's default of 500 it would be gone before a batch producer looks."""

DEFAULT_FAILURE_TTL_S: Final = 7 * 86_400
"""Seconds a failed job is kept; RQ's default is a year, too long for private prompts."""

MAX_ATTEMPTS: Final = 3
"""A job is not run again after so many workers were lost while they ran it alone."""

META_PARTIAL: Final = "partial"
"""Key in `job.meta`: the text that a job generated before it timed out."""

META_PROGRESS: Final = "progress"
"""Key in `job.meta`: a running job's progress (`stage`, `tokens`, `tokens_per_s`), written at most twice a second."""

FIELD_ATTEMPTS: Final = "stoker_attempts"
"""Field of the job hash: how many workers were lost with the job in flight."""

FIELD_LOST_ALONE: Final = "stoker_lost_alone"
"""Field of the job hash: how many of these workers ran nothing else."""

FIELD_BATCH: Final = "stoker_batch"
"""Field of the job hash: the batch to which the job belongs. A worker does not start the jobs of a canceled batch."""

BATCH_KEY: Final = "stoker:batch:{batch}"
"""Hash: the record of a batch, which only producers write. A field `canceled` marks the batch as canceled."""

FIELD_SAVING: Final = "stoker_saving"
"""Field of the job hash: its `created_at` (``-`` without one). A worker sets it when it begins to save the turn of the
job's agent, and it stays until that run ends. Such a job cannot be canceled, not even while it waits again after the
loss of its worker, because the turn may have been saved. A value other than the job's own `created_at` is ignored."""

FIELD_AGENT: Final = "stoker_agent"
"""Field of the job hash that spares a worker reading the request: `created_at`, the request's `access` (``write``,
``read``, ``none``) and, unless that is ``none``, the agent id, separated by spaces. Optional. If `created_at` is not
the job's own, the id was enqueued again since, and the field is ignored."""

FIELD_TRIED: Final = "stoker_tried"
"""Field of the job hash: `created_at`, a space, and the JSON list of the rejected attempts (`Attempt` in result.py).
The next attempt takes the following step of the request's `route`. If `created_at` is not the job's own, the field is
ignored."""

FIELD_FEEDBACK: Final = "stoker_feedback"
"""Field of the job hash: `created_at`, a space, and the verdict given after the job's end, `1` (accepted) or `0`. It
counts once. If `created_at` is not the job's own, the field is ignored."""

TRUST_KEY: Final = "stoker:trust"
"""Hash. Field: a class of tasks, a space, a model. Value: the weights of its accepted and of its rejected answers, two
decimal numbers with a space between them."""

FIELD_STREAM: Final = "stoker_stream"
"""Field of the job hash, of any value: the worker must publish the text as it is generated."""

STREAM_KEY: Final = "stoker:stream:{job_id}"
"""Stream: the text of a job as it is generated. Each entry has `run` (the run of the job that wrote it), `kind` and
`text`: ``whole`` has all text of the run so far and replaces the entries before it; ``more`` continues the entry
before; ``end`` has no text: the run is over, and the job's hash has the outcome. Entries of kind ``whole`` also have
`markers`, the JSON of `answer_parts.Markers`, valid for the run's entries up to the next such one. Expires."""

WORKER_KEY: Final = "stoker:worker:{name}"
"""String: a live worker, as JSON: member, queues, model, context_tokens, mode, max_batch, max_batch_why, host, pid,
started_at, leaving, now. Those from `model` to `max_batch_why` are null while the model loads. Expires with the
worker's heartbeat. RQ's set of workers has the names.

`now` has the worker's figures at its last heartbeat, and may be empty: `at` (Unix time), `tokens_per_s` (over ten
seconds), `jobs_per_min` (over five minutes, without idle time), `in_flight`, `in_batch`, `hit_share` (of the prompt
tokens since the start, 0 to 1; null before any), `done` and `failed` (jobs since the start), `moved_in` (jobs since the
start whose agent's newest version another worker had made), `shared_store` (null, or `away_s`: seconds for which it has
not answered, 0 if it answers), `prompt_token_s` and `token_s` (seconds for a prompt token and for a generated one; null
before they are known), `suspended` (whether `rq suspend` keeps it from claiming jobs), `data_loss` (null, or, for a day
after the worker noticed that Redis had lost data: `ago_s`, and since the start `times` and `jobs`, the number then in
flight).
"""

FIELD_DELIVERY: Final = "stoker_delivery"
"""Field of an execution's hash: the delivery of its job (a hash of `created_at` and `data`)."""

LEASE_KEY: Final = "stoker:holder:{member}"
"""String: a live worker's lease, as JSON: worker, queues, store, the shared store's id, host, pid, boot, started,
fence, model, and whether the worker is still loading it. Expires with the worker's heartbeat. A member is a worker, by
the name that a restart keeps. While another worker puts a dead member's jobs back, the lease is that worker's, and its
`recovers` is the dead member's name."""

FENCE_KEY: Final = "stoker:fence:{member}"
"""Integer: the last fencing number given out with this member's lease; expires long after the member left."""

MEMBERS_KEY: Final = "stoker:members"
"""Hash: the members that joined and have not left, each with its lease's value; `loading` in it is false once the model
is loaded, and `leaving` is true while the member drains. A dead member stays until another worker has put its jobs
back."""

SERVED_KEY: Final = "stoker:lease:{queue}"
"""String: who serves the queue. `only`, a space and a member: that member alone, which has no shared store. `shared`,
the id of the shared store and the model, separated by spaces: all members with these. Expires with their heartbeats."""

STORE_KEY: Final = "stoker:store:{queue}"
"""String: the store with the conversations of the queue's agents: `store`, a space and a store's name; or `shared`, a
space and a shared store's id. It stays when no worker runs."""

RENEWALS_KEY: Final = "stoker:renewals"
"""Hash: for each member in `MEMBERS_KEY`, how often its lease was renewed. If the number does not grow, Redis has lost
data."""

HELD_KEY: Final = "stoker:held:{queue}"
"""Hash: the agents with a job in flight at a worker that has a shared store. An entry is a JSON list: ``w`` (one job,
which writes) or ``r`` (jobs that only read), then for each job its queue, the member that claimed it, and its id. Only
jobs that are claimed and not ended count: void entries are removed some time later."""

LAST_KEY: Final = "stoker:last:{queue}"
"""Hash: for an agent, the RQ worker that made its newest version, a space, and the version's number, a lower bound.
Other workers leave the agent's jobs to that worker for a while. It is a hint, and may be lost."""

TAKEN_KEY: Final = "stoker:taken:{queue}"
"""List: the ids claimed last while there was more than one member, so that the others need not search for them."""

COUNTS_KEY: Final = "stoker:counts:{queue}"
"""Hash: `taken`, the number of ids ever added to `TAKEN_KEY`."""

FIELD_PACKED: Final = "stoker_packed"
"""Field of the job hash: the compression that the producer wants for the result's JSON in `return_value`."""

PACKED_WITH_ZLIB: Final = "zlib"
"""The only value of `FIELD_PACKED`."""
