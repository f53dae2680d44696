"""The worker's settings: read once, from options over ``STOKER_*`` variables over a TOML file over defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from stoker_shared.environment import (
    ENV_PREFIX,
    USUAL_PLACE,
    read_settings_file,
    require_known_variables,
    settings_file,
)
from stoker_shared.text import mask_url, seconds_of
from stoker_shared.wire import DEFAULT_QUEUE
from stoker_worker.ports.cache_spec import StoreDtype
from stoker_worker.ports.model import RequestDefaults

EMBEDDED = "embedded"
"""The `redis_url` for a server of the worker's own."""


@dataclass(frozen=True)
class Option:
    """A setting's option of `stoker-worker run`, which `cli/run_options.py` makes.

    Attributes:
        heading: in the help.
        names: of the option, if they are not made of the field's name.
        is_repeatable: its values are joined with commas.
    """

    heading: str
    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    is_repeatable: bool = False


_serving = partial(Option, "Model and queue")
_memory = partial(Option, "Agent memory")
_batch = partial(Option, "Batch")
_life = partial(Option, "Starting and stopping")
_watching = partial(Option, "Log, metrics and health")
_testing = partial(Option, "Without a model")


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


class WorkerSettings(BaseSettings):
    """Sizes in bytes, times in seconds. Each field is also ``STOKER_<NAME>`` in the environment and a name in the file;
    one with a help is an option of `run`. A text in brackets at the end of the help is the default."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    model: Annotated[str | None, _serving("Hugging Face repo id or mlx-lm folder.")] = None
    adapter: Annotated[Path | None, _serving("LoRA or DoRA adapter of mlx-lm: a folder.  [none]")] = None
    chat_template: Annotated[Path | None, _serving("Jinja file instead of the model's template.  [the model's]")] = None
    defaults: Annotated[
        str,
        _serving(
            "Sampling of jobs that do not set it, such as temperature=0.7; repeatable.",
            names=("--default",),
            metavar="KEY=VALUE",
            is_repeatable=True,
        ),
    ] = ""
    trust_remote_code: Annotated[bool, _serving("Run Python code that is in the model's folder.")] = False
    redis_url: Annotated[
        str,
        _serving(
            "URL, file:///PATH of a file with it, or `embedded` for an own server.  [redis://127.0.0.1:6379]",
            names=("--redis",),
            metavar="URL",
        ),
    ] = "redis://127.0.0.1:6379"
    queues: Annotated[str, _serving("Comma-separated, highest priority first.  [generate]")] = DEFAULT_QUEUE
    dtype: Annotated[Literal["auto", "native", "float32"], _serving("auto: float32 on a CPU.  [auto]")] = "auto"
    skip_proof: Annotated[bool, _serving("Do not try the model in a batch before serving it.")] = False

    store: Annotated[Path, _memory("Folder of the agents' memory.  [~/.stoker]")] = Path("~/.stoker")
    store_dtype: Annotated[StoreDtype, _memory("Cache blocks on disk.  [native]")] = "native"
    store_max_bytes: Annotated[
        int | None, Field(ge=1), _memory("Disk space for the store.  [80 % of its own and the free space]")
    ] = None
    memory_max_bytes: Annotated[
        int | None, Field(ge=0), _memory("RAM for caches of recent agents; 0: none.  [1/16 of all]")
    ] = None
    keep_versions: Annotated[int, Field(ge=1), _memory("Versions of an agent that a rollback can return to.  [16]")] = (
        16
    )
    agent_ttl: Annotated[
        str | None, _memory("Remove agents unused for so long: 30d, 12h, 90m, seconds.  [never]", metavar="DURATION")
    ] = None
    session_ttl: Annotated[
        str, _memory("Remove caches of sessions unused for so long, as above.  [7d]", metavar="DURATION")
    ] = "7d"
    shared_store: Annotated[
        str | None,
        _memory(
            "Bucket or folder in which several workers keep agents: s3://bucket/prefix, file:///mnt/shared.  [none]",
            metavar="URL",
        ),
    ] = None
    shared_store_max_bps: Annotated[
        int | None, Field(ge=1), _memory("Bytes of cache per second written there.  [no limit]")
    ] = None
    share_prefixes: Annotated[
        bool, _memory("Use cached prefixes across agents.  [share]", names=("--share-prefixes/--no-share-prefixes",))
    ] = True

    max_batch: Annotated[
        int | None, Field(ge=1, le=256), _batch("Most jobs in flight at once.  [32, or what the KV memory holds]")
    ] = None
    kv_max_bytes: Annotated[int | None, Field(ge=1), _batch("KV memory of the batch.  [from the device]")] = None
    kv_bits: Annotated[
        Literal[8] | None,
        BeforeValidator(_int_or_none),
        _batch("Keep keys and values in 8 bits.  [the model's own precision]"),
    ] = None
    wired_memory: Annotated[
        bool, _batch("Let macOS keep the GPU's memory resident; Macs have crashed with it (docs/operations.md).")
    ] = False
    max_step_s: Annotated[
        float,
        Field(gt=0),
        _batch("Seconds of prefill in a step; more while a batch fills up, or if a pass takes long.  [0.5]"),
    ] = 0.5
    prefill_step_tokens: Annotated[
        int | None,
        Field(ge=1),
        _batch("Prompt tokens of a sequence between two decode steps, at most.  [from the model and the device]"),
    ] = None
    draft_ngram: Annotated[bool, _batch("Narrow batches: guess answers that repeat their context.")] = False

    config: Annotated[
        Path | None,
        _life(f"TOML file with settings; '' for none.  [{USUAL_PLACE}, if it exists]", metavar="FILE"),
    ] = None
    name: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        _life("The worker's name among those of its queues, kept by restarts.  [that of the store]", metavar="NAME"),
    ] = None
    grace_s: Annotated[float, Field(ge=0), _life("Seconds a stop waits for running jobs.  [60]")] = 60.0
    ignore_shutdown_command: Annotated[
        bool, _life("Ignore RQ's shutdown command, which every client of Redis with the right to publish can send.")
    ] = False
    burst: Annotated[bool, _life("Leave when the queues are empty.")] = False
    max_jobs: Annotated[int | None, Field(ge=1), _life("Leave after so many jobs.  [no limit]")] = None
    max_idle_s: Annotated[float | None, Field(gt=0), _life("Leave after so many seconds without a job.  [never]")] = (
        None
    )
    standby: Annotated[bool, _life("Wait while another worker has the name, queue or store; then run.")] = False
    new_store: Annotated[
        bool,
        _life("Serve a queue whose agents' conversations are in another store; `append` then begins new ones."),
    ] = False
    patience_s: Annotated[
        float,
        Field(ge=0),
        _life("With a shared store: how long an agent's jobs are left to the worker that has its cache.  [10]"),
    ] = 10.0
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    lease_ttl_s: Annotated[float, Field(gt=0)] = 4.0
    poll_s: Annotated[float, Field(gt=0)] = 0.05
    recover_s: Annotated[float, Field(gt=0)] = 5.0

    log_format: Annotated[Literal["text", "json"], _watching("json: an object on each line.  [text]")] = "text"
    quiet: Annotated[bool, _watching("Log warnings and errors only.", names=("-q", "--quiet"))] = False
    verbose: Annotated[bool, _watching("Log more.", names=("-v", "--verbose"))] = False
    metrics_port: Annotated[
        int | None,
        Field(ge=0, le=65535),
        _watching("Loopback port of /metrics, /healthz and /readyz; 0: any.  [none]"),
    ] = None
    stuck_after_s: Annotated[
        float, Field(gt=0), _watching("Report not ready after a step of the engine this long.  [120]")
    ] = 120.0

    engine: Annotated[
        Literal["mlx", "scripted"], _testing("scripted: deterministic, no model; --model names it.  [mlx]")
    ] = "mlx"
    scripted_steps_per_s: Annotated[float, Field(gt=0), _testing("Speed of the scripted engine.  [200]")] = 200.0

    @field_validator("queues")
    @classmethod
    def _queues_named(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",")]
        if not all(names) or len(set(names)) != len(names):
            raise ValueError("must be a comma-separated list of different queue names")
        return ",".join(names)

    @field_validator("redis_url")
    @classmethod
    def _redis_url_from_a_file(cls, value: str) -> str:
        """Replace a ``file:`` URL by the file's first line: every user can see the arguments of a process."""
        if not value.startswith("file:"):
            return value
        try:
            url = Path(unquote(urlsplit(value).path)).read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {value}: {getattr(error, 'strerror', None) or 'no text'}") from None
        if not url or url.startswith("file:"):
            raise ValueError(f"{value} has no Redis URL in its first line")
        return url

    @field_validator("defaults")
    @classmethod
    def _defaults_are_of_requests(cls, value: str) -> str:
        RequestDefaults.parsed(value)
        return value

    @field_validator("agent_ttl", "session_ttl")
    @classmethod
    def _ttl_is_a_duration(cls, value: str | None) -> str | None:
        if value is not None:
            seconds_of(value)
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.lease_ttl_s < 2 * self.heartbeat_s:
            raise ValueError("lease_ttl_s must be at least twice heartbeat_s, or a live worker loses its queue")
        if self.lease_ttl_s < 4 * self.poll_s:
            raise ValueError("lease_ttl_s must be at least four times poll_s, or no dead worker is noticed")
        if self.kv_bits is not None and self.store_dtype != "native":
            raise ValueError("kv_bits keeps caches in 8 bits on disk too: leave store_dtype at native")
        if self.shared_store_max_bps is not None and self.shared_store is None:
            raise ValueError("shared_store_max_bps limits what is written to a shared store: it needs shared_store")
        if self.quiet and self.verbose:
            raise ValueError("quiet and verbose exclude each other")
        return self

    @property
    def queue_names(self) -> list[str]:
        return self.queues.split(",")

    @property
    def request_defaults(self) -> RequestDefaults:
        return RequestDefaults.parsed(self.defaults)

    @property
    def agent_ttl_s(self) -> float | None:
        return None if self.agent_ttl is None else seconds_of(self.agent_ttl)

    @property
    def session_ttl_s(self) -> float:
        return seconds_of(self.session_ttl)

    @property
    def store_folder(self) -> Path:
        return self.store.expanduser()

    def shown(self) -> dict[str, Any]:
        """Every setting by its name, passwords in URLs masked."""
        redis_url = self.redis_url if self.redis_url == EMBEDDED else mask_url(self.redis_url)
        shared_store = None if self.shared_store is None else mask_url(self.shared_store)
        return self.model_dump() | {"redis_url": redis_url, "shared_store": shared_store}

    def describe(self) -> str:
        """Every setting on one line, passwords in URLs masked."""
        return " ".join(f"{name}={value}" for name, value in self.shown().items() if value is not None)


def read_settings(options: dict[str, Any]) -> WorkerSettings:
    """As `settings_in_force`, without the origins."""
    return settings_in_force(options)[0]


def settings_in_force(options: dict[str, Any]) -> tuple[WorkerSettings, Mapping[str, str]]:
    """
    Args:
        options: values from the command line; ``None`` for an option that was not given.

    Returns:
        the settings, and the origin of each: ``option``, the variable's name, the file's path, ``default``.

    Raises:
        ValueError: an unknown ``STOKER_*`` variable, a file that cannot be read or has unknown names, or an invalid
            value (pydantic's `ValidationError`).
    """
    require_known_variables()
    given = {name: value for name, value in options.items() if value is not None}
    variables = EnvSettingsSource(WorkerSettings)()
    file = settings_file((variables | given).get("config"))
    in_file = read_settings_file(file, WorkerSettings.model_fields.keys() - {"config"}) if file else {}
    settings = WorkerSettings(**(in_file | variables | given | {"config": file}))
    origins = {
        **dict.fromkeys(WorkerSettings.model_fields, "default"),
        **dict.fromkeys(in_file, str(file)),
        **{name: f"{ENV_PREFIX}{name.upper()}" for name in variables},
        **dict.fromkeys(given, "option"),
    }
    return settings, origins
