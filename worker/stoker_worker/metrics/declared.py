"""Every metric of the worker: its name, kind, labels and meaning. Pure; the only place where names are.

Names follow Prometheus' rules. Where vLLM has a metric of the same meaning, the name after `stoker_` is vLLM's.
docs/metrics.md has this list as a table.
"""

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "stoker_"


@dataclass(frozen=True, eq=False)
class Metric:
    """Equal only to itself: it is looked up in every step.

    Attributes:
        name: with the prefix, and with ``_total`` for a counter.
        buckets: upper bounds of a histogram, ascending, in the metric's unit; infinity is not among them.
        values: those of its one label, if they are known: the metric has each of them from the start, with 0.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()


_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0)
"""A backlog of a night waits for hours."""
_SOURCES: Final = ("memory", "disk", "none")


def _counter(name: str, text: str, *labels: str, values: tuple[str, ...] = ()) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", text, labels, values=values)


def _gauge(name: str, text: str, *labels: str, values: tuple[str, ...] = ()) -> Metric:
    return Metric(f"{PREFIX}{name}", "gauge", text, labels, values=values)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str, values: tuple[str, ...] = ()) -> Metric:
    return Metric(f"{PREFIX}{name}", "histogram", text, labels, buckets, values)


# --- counted when a job ends, from its result ---

JOBS_ENDED: Final = _counter(
    "jobs_ended",
    "Jobs that this worker ended. Replayed: answered from the agent's history. Agent_job: about an agent's memory. "
    "Escalated: its answer was rejected, and it went on to another model. Failed: RQ may retry it. "
    "Given_back: by a stop. Dropped: its result came too late, or Redis had lost the job.",
    "outcome",
    values=("finished", "replayed", "agent_job", "escalated", "failed", "withdrawn", "given_back", "dropped"),
)
REQUEST_SUCCESS: Final = _counter(
    "request_success",
    "Results posted, replayed ones included.",
    "finished_reason",
    values=("stop", "length", "tool_calls"),
)
JOB_ERRORS: Final = _counter("job_errors", "Failures of jobs, by the name of the error.", "error")
PROMPT_TOKENS: Final = _counter("prompt_tokens", "Prompt tokens of the results posted, cached ones included.")
CACHED_TOKENS: Final = _counter(
    "prefix_cache_hits", "Prompt tokens of the results posted that were restored, not prefilled."
)
GENERATION_TOKENS: Final = _counter("generation_tokens", "Generated tokens of the results posted.")
REASONING_TOKENS: Final = _counter("reasoning_tokens", "Those of the generated tokens in which the model thinks.")
CACHE_SOURCES: Final = _counter(
    "cache_sources", "Results posted, by where their cached prefix came from.", "source", values=_SOURCES
)
CACHE_MISSES: Final = _counter(
    "cache_misses", "Results posted that reused less than the agent's history allowed.", "reason"
)
UNSAVED: Final = _counter("results_unsaved", "Results posted whose turn could not be saved.")
RECOVERED: Final = _counter("jobs_recovered", "Jobs of dead workers that this worker put back into the queue.")
MOVED_IN: Final = _counter(
    "agents_moved_in", "Jobs of this worker whose agent's newest version another worker had made."
)

QUEUE_TIME: Final = _histogram("request_queue_time_seconds", "From enqueueing to the claim.", _LONG)
FIRST_TOKEN: Final = _histogram("time_to_first_token_seconds", "From enqueueing to the first token.", _LONG)
PREFILL_TIME: Final = _histogram("request_prefill_time_seconds", "From entering the batch to the first token.", _LONG)
DECODE_TIME: Final = _histogram("request_decode_time_seconds", "From the first token to the last one.", _LONG)
LATENCY: Final = _histogram("e2e_request_latency_seconds", "From enqueueing to the result.", _LONG)
SAVE_TIME: Final = _histogram("save_time_seconds", "Saves of an agent's version to disk.", _SHORT)
RESTORE_TIME: Final = _histogram(
    "restore_time_seconds", "Lookups of a prompt's cached prefix.", _SHORT, "source", values=_SOURCES
)

# --- counted by the engine thread, step by step ---

STEP_TIME: Final = _histogram("step_time_seconds", "Steps of the engine.", _SHORT)
STEP_SEQUENCES: Final = _counter(
    "step_sequences", "Sequences in the batch, summed over steps: with the number of steps, the mean occupancy."
)
STEP_TOKENS: Final = _counter(
    "step_tokens", "Tokens as they are generated, also those of jobs that are canceled or lost later."
)

# --- looked up when somebody asks ---

BUILD: Final = _gauge("build_info", "Always 1.", "version", "python", "mlx")
MODEL: Final = _gauge("model_info", "Always 1, once the model is loaded.", "model_name", "mode", "max_model_len")
STARTED: Final = Metric("process_start_time_seconds", "gauge", "When the worker was started, in Unix time.")
READY: Final = _gauge("ready", "Whether /readyz answers with 200.")
STANDBY: Final = _gauge("standby", "Whether it waits, by --standby, for the name, queue or store of another worker.")
RUNNING: Final = _gauge("num_requests_running", "Jobs in the batch.")
WAITING: Final = _gauge("num_requests_waiting", "Jobs that wait in the queue.", "queue")
OLDEST_WAIT: Final = _gauge("queue_oldest_wait_seconds", "How long the queue's oldest job has waited.", "queue")
UNHEARD: Final = _gauge(
    "num_requests_without_worker",
    "Jobs that wait in queues of this Redis server that no live worker listens to: the 100 queues with most.",
    "queue",
)
IN_FLIGHT: Final = _gauge(
    "jobs_in_flight",
    "Claimed jobs. Memory: an agent's memory is loaded or saved. Waiting: for a place in the batch.",
    "stage",
    values=("memory", "waiting", "prefill", "decode"),
)
MAX_BATCH: Final = _gauge("max_num_seqs", "Most jobs in flight at once.")
OCCUPANCY: Final = _gauge("batch_occupancy_ratio", "Jobs in the batch, as a share of the most.")
TOKENS_PER_S: Final = _gauge("tokens_per_second", "Tokens generated per second, over the last 10 seconds.")
KV_BLOCKS: Final = _gauge("kv_cache_blocks", "Blocks of 256 tokens of KV memory.", "state", values=("used", "free"))
KV_USAGE: Final = _gauge("kv_cache_usage_perc", "Used part of the KV memory; 1 is all of it.")
PREEMPTIONS: Final = _counter("num_preemptions", "Sequences that left the batch for a while, for want of KV memory.")
STEP_AGE: Final = _gauge("engine_step_age_seconds", "How long the step under way has taken; 0 while there is no work.")
STORE_BYTES: Final = _gauge("store_bytes", "Bytes of the agents' memory on disk.")
STORE_MAX: Final = _gauge("store_max_bytes", "The limit of that.")
STORE_FREE: Final = _gauge("store_free_bytes", "Free bytes of the store's file system, at most 5 s old.")
STORE_DISK: Final = _gauge("store_disk_bytes", "Size of the store's file system.")
RAM_BYTES: Final = _gauge("ram_cache_bytes", "Bytes of agents' caches in RAM.")
RAM_MAX: Final = _gauge("ram_cache_max_bytes", "The limit of that.")
SHARED_UP: Final = _gauge("shared_store_up", "Whether the shared store answers; only if there is one.")
SHARED_WRITTEN: Final = _counter("shared_store_written_bytes", "Bytes of caches written to the shared store.")
SHARED_READ: Final = _counter("shared_store_read_bytes", "Bytes of caches read from the shared store.")
REDIS_UP: Final = _gauge("redis_up", "Whether Redis answers, and has the last heartbeat.")
REDIS_AWAY: Final = _counter("redis_away_seconds", "Time without a heartbeat that reached Redis.")
DATA_LOST: Final = _counter("redis_data_lost", "How often this worker has noticed that Redis had lost data.")
DATA_LOST_JOBS: Final = _counter("redis_data_lost_jobs", "Jobs that it had in flight then.")
SUSPENDED: Final = _gauge("suspended", "Whether workers are suspended, by `rq suspend`.")

REDIS_SERVER: Final = (
    _gauge("redis_memory_used_bytes", "Memory that the Redis server uses for its data."),
    _gauge("redis_memory_max_bytes", "Its limit (maxmemory); 0: none."),
    _gauge("redis_aof_enabled", "Whether it keeps an append-only file."),
    _gauge("redis_aof_last_write_status", "Whether its last write to that file succeeded."),
    _gauge("redis_rdb_last_bgsave_status", "Whether its last snapshot succeeded."),
    _gauge("redis_rdb_last_save_timestamp_seconds", "When it took its last snapshot, in Unix time."),
)
"""From the server's INFO, where it tells; the names after `stoker_` are those of Prometheus' redis_exporter."""
DECLARED: Final[tuple[Metric, ...]] = (
    *(value for value in list(globals().values()) if isinstance(value, Metric)),
    *REDIS_SERVER,
)
"""In the order of this file."""
