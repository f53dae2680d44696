"""The worker's settings: read once, from options over ``STOKER_*`` variables over a TOML file over defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from stoker_shared.environment import ENV_PREFIX, read_settings_file, require_known_variables, settings_file
from stoker_shared.text import mask_url, seconds_of
from stoker_shared.wire import DEFAULT_QUEUE
from stoker_worker.ports.cache_spec import StoreDtype
from stoker_worker.ports.model import RequestDefaults

EMBEDDED = "embedded"
"""The `redis_url` of a server of the worker's own."""


class WorkerSettings(BaseSettings):
    """Sizes in bytes, times in seconds. Each field is also ``STOKER_<NAME>`` in the environment."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    config: Path | None = None
    redis_url: str = "redis://127.0.0.1:6379"
    redis_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    store: Path = Path("~/.stoker")
    queues: str = DEFAULT_QUEUE
    model: str | None = None
    adapter: Path | None = None
    chat_template: Path | None = None
    trust_remote_code: bool = False
    defaults: str = ""
    engine: Literal["mlx", "scripted"] = "mlx"
    dtype: Literal["auto", "native", "float32"] = "auto"
    skip_proof: bool = False
    max_batch: Annotated[int, Field(ge=1, le=256)] | None = None
    draft_ngram: bool = False
    share_prefixes: bool = True
    store_dtype: StoreDtype = "native"
    store_max_bytes: Annotated[int, Field(gt=0)] | None = None
    memory_max_bytes: Annotated[int, Field(ge=0)] | None = None
    keep_versions: Annotated[int, Field(ge=1)] = 16
    agent_ttl: str | None = None
    shared_store: str | None = None
    shared_store_max_bps: Annotated[int, Field(gt=0)] | None = None
    kv_max_bytes: Annotated[int, Field(gt=0)] | None = None
    kv_bits: Annotated[Literal[8], BeforeValidator(int)] | None = None
    wired_memory: bool = False
    max_step_s: Annotated[float, Field(gt=0)] = 0.5
    prefill_step_tokens: Annotated[int, Field(ge=1)] | None = None
    scripted_steps_per_s: Annotated[float, Field(gt=0)] = 200.0
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    lease_ttl_s: Annotated[float, Field(gt=0)] = 4.0
    poll_s: Annotated[float, Field(gt=0)] = 0.05
    recover_s: Annotated[float, Field(gt=0)] = 5.0
    patience_s: Annotated[float, Field(ge=0)] = 10.0
    ignore_shutdown_command: bool = False
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    stuck_after_s: Annotated[float, Field(gt=0)] = 120.0
    grace_s: Annotated[float, Field(ge=0)] = 60.0
    burst: bool = False
    max_jobs: Annotated[int, Field(ge=1)] | None = None
    max_idle_s: Annotated[float, Field(gt=0)] | None = None
    standby: bool = False
    new_store: bool = False
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    log_format: Literal["text", "json"] = "text"
    quiet: bool = False
    verbose: bool = False

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
        """Of a ``file:`` URL, the file's first line: every user sees the arguments of a process."""
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

    @field_validator("agent_ttl")
    @classmethod
    def _agent_ttl_is_a_duration(cls, value: str | None) -> str | None:
        if value is not None:
            seconds_of(value)
        return value

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> Self:
        if self.lease_ttl_s < 2 * self.heartbeat_s:
            raise ValueError("lease_ttl_s must be at least twice heartbeat_s, or a live worker loses its queue")
        if self.lease_ttl_s < 4 * self.poll_s:
            raise ValueError("lease_ttl_s must be at least four times poll_s, or no dead worker is noticed")
        return self

    @model_validator(mode="after")
    def _quantised_once(self) -> Self:
        if self.kv_bits is not None and self.store_dtype != "native":
            raise ValueError("kv_bits keeps caches in 8 bits on disk too: leave store_dtype at native")
        return self

    @model_validator(mode="after")
    def _port_of_an_own_server(self) -> Self:
        if self.redis_port is not None and self.redis_url != EMBEDDED:
            raise ValueError("redis_port is the port of an embedded server: it needs redis_url embedded")
        return self

    @model_validator(mode="after")
    def _bandwidth_of_a_shared_store(self) -> Self:
        if self.shared_store_max_bps is not None and self.shared_store is None:
            raise ValueError("shared_store_max_bps limits what is written to a shared store: it needs shared_store")
        return self

    @model_validator(mode="after")
    def _quiet_or_verbose(self) -> Self:
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


@dataclass(frozen=True)
class SettingsInForce:
    """
    Attributes:
        origins: where each setting has its value from: ``option``, the variable's name, the file's path, ``default``.
    """

    settings: WorkerSettings
    origins: Mapping[str, str]


def read_settings(options: dict[str, Any]) -> WorkerSettings:
    """As `settings_in_force`, without the origins."""
    return settings_in_force(options).settings


def settings_in_force(options: dict[str, Any]) -> SettingsInForce:
    """
    Args:
        options: values from the command line; ``None`` for an option that was not given.

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
    return SettingsInForce(settings, origins)
