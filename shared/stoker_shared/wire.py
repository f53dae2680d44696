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

REQUEST_VERSION: Final = 5
"""The `v` of a :class:`~stoker_shared.request.GenerationRequest` that this code sends, and the newest that it reads."""

AGENT_REQUEST_VERSION: Final = 1
"""Newest `v` of :class:`~stoker_shared.agents.AgentRequest` that this code reads."""

MAX_REQUEST_BYTES: Final = 8 * 2**20
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

FIELD_BATCH: Final = "stoker_batch"
"""Field of the job hash: the batch whose line it is. A worker does not start the lines of a canceled batch."""

BATCH_KEY: Final = "stoker:batch:{batch}"
"""Hash: the record of a batch, which only producers write. It is canceled if it has the field `canceled`."""

FIELD_SAVING: Final = "stoker_saving"
"""Field of the job hash: its `created_at` (``-`` without one), from the moment in which a worker begins to save the
turn of the job's agent until that run ends. Such a job is not canceled any more, also while it waits again because its
worker was lost: the turn may have been saved. If it is not the job's own `created_at`, the field is ignored."""

FIELD_AGENT: Final = "stoker_agent"
"""Field of the job hash, so that a worker need not read the request to know the job's place: `created_at`, a word for
how the job uses its agent's memory and, unless that is `none`, the agent id, separated by spaces. The word is the
request's `access` (``write``, ``read``, ``none``). Optional. If its `created_at` is not the job's own, the id was
enqueued again since, and the field is ignored."""

FIELD_TRIED: Final = "stoker_tried"
"""Field of the job hash: `created_at`, a space, and the JSON list of the attempts that were rejected (`Attempt` in
result.py). The next one is for the step of the request's `route` behind them. If its `created_at` is not the job's own,
the field is ignored."""

FIELD_FEEDBACK: Final = "stoker_feedback"
"""Field of the job hash: `created_at`, a space, and the verdict that came after its end, `1` (accepted) or `0`. It
counts once. If its `created_at` is not the job's own, the field is ignored."""

TRUST_KEY: Final = "stoker:trust"
"""Hash: for a class of tasks and a model (the class, a space, the model), the weights of its accepted and of its
rejected answers: two decimal numbers with a space between them."""

FIELD_STREAM: Final = "stoker_stream"
"""Field of the job hash, of any value: the worker must publish the text as it is generated."""

STREAM_KEY: Final = "stoker:stream:{job_id}"
"""Stream: the text of a job as it is generated. Each entry has `run` (the run of the job that wrote it), `kind` and
`text`: ``whole`` has all text of the run so far and replaces the entries before it; ``more`` continues the entry
before; ``end`` has no text: the run is over, and the job's hash has the outcome. Entries of kind ``whole`` also have
`markers`, the JSON of `answer_parts.Markers`, for the run's entries up to the next one. Expires."""

WORKER_KEY: Final = "stoker:worker:{name}"
"""String: a live worker (JSON: member, queues, model, context_tokens, mode, max_batch, max_batch_why, host, pid,
started_at, leaving, now; those from `model` to `max_batch_why` are null while the model loads). Expires with the
worker's heartbeat. RQ's set of workers has the names. `now` has the worker's figures at its last heartbeat: `at` (Unix
time), `tokens_per_s` (over ten seconds), `jobs_per_min` (over five minutes, without idle time), `in_flight`,
`in_batch`, `hit_share` (of the prompt tokens since the start, 0 to 1; null before any), `done` and `failed` (jobs since
the start), `moved_in` (jobs since the start whose agent's newest version another worker had made), `shared_store`
(null, or `away_s`, for how long it has not answered, 0 if it does), `prompt_token_s` and `token_s` (seconds for a token
of a prompt and for a generated one; null before they are known), `suspended` (whether it claims no jobs because of `rq
suspend`), `data_loss` (null, or for a day after it has noticed that Redis had lost data: `ago_s`, and since the start
`times` and `jobs`, how many it had in flight then). It may be empty."""

FIELD_DELIVERY: Final = "stoker_delivery"
"""Field of an execution's hash: the delivery of its job (a hash of `created_at` and `data`)."""

LEASE_KEY: Final = "stoker:holder:{member}"
"""String: a live worker's share of its queues (JSON: worker, queues, store, the shared store's id, host, pid, boot,
started, fence, model, and whether it is loading that one); expires with its heartbeat. A member is a worker
by the name that stays when it is started again. While another worker puts a dead member's jobs back, the lease is that
worker's, and has the dead member's name as `recovers`."""

FENCE_KEY: Final = "stoker:fence:{member}"
"""Integer: the last fencing number handed out for this member, with its lease; expires long after it left."""

MEMBERS_KEY: Final = "stoker:members"
"""Hash: the members that joined and have not left, each with its lease's value; `loading` in it is false once its model
is loaded, and `leaving` is true while it drains. A member that died is in it until another worker has put its jobs
back."""

SERVED_KEY: Final = "stoker:lease:{queue}"
"""String: who serves the queue: `only`, a space and a member without a shared store, which serves it alone; or `shared`
and, separated by spaces, the id of the shared store and the model of the members that serve it. Expires with their
heartbeats."""

STORE_KEY: Final = "stoker:store:{queue}"
"""String: which store has the conversations of the queue's agents: `store`, a space and the name of a store; or
`shared`, a space and the id of a shared store. It stays when no worker runs."""

RENEWALS_KEY: Final = "stoker:renewals"
"""Hash: for each member in `MEMBERS_KEY`, how often its lease was renewed in all. A number that is not higher than the
one before shows the worker that Redis has lost data."""

HELD_KEY: Final = "stoker:held:{queue}"
"""Hash: the agents of which a job is in flight at a worker that has a shared store. An entry is a JSON list: ``w`` (one
job, which writes) or ``r`` (jobs that only read), then for each job its queue, the member that claimed it, and its id.
Only those jobs count that have been claimed and not ended: entries are removed some time after they are void."""

LAST_KEY: Final = "stoker:last:{queue}"
"""Hash: for an agent the RQ worker that made its newest version, and the version's number: two words. A hint, which may
be lost, and a lower bound: other workers leave the agent's jobs to that one for a while."""

TAKEN_KEY: Final = "stoker:taken:{queue}"
"""List: the last ids that were claimed while there was more than one member, so that the others need not look for
them."""

COUNTS_KEY: Final = "stoker:counts:{queue}"
"""Hash: `taken`, how many ids were ever added to `TAKEN_KEY`."""

FIELD_PACKED: Final = "stoker_packed"
"""Field of the job hash: the compression that the producer wants for the result's JSON in `return_value`."""

PACKED_WITH_ZLIB: Final = "zlib"
"""The only value of `FIELD_PACKED`."""
