"""The worker's settings: read once, from options over ``STOKER_*`` variables over defaults."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stoker_shared.duration import seconds_of
from stoker_shared.environment import ENV_PREFIX, require_known_variables
from stoker_shared.password_mask import mask_url
from stoker_shared.wire import DEFAULT_QUEUE
from stoker_worker.ports.cache_spec import StoreDtype

EMBEDDED = "embedded"
"""The `redis_url` of a server of the worker's own."""


class WorkerSettings(BaseSettings):
    """Sizes in bytes, times in seconds. Each field is also ``STOKER_<NAME>`` in the environment."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    redis_url: str = "redis://127.0.0.1:6379"
    store: Path = Path("~/.stoker")
    queues: str = DEFAULT_QUEUE
    model: str | None = None
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
    kv_max_bytes: Annotated[int, Field(gt=0)] | None = None
    kv_bits: Annotated[Literal[8], BeforeValidator(int)] | None = None
    max_step_s: Annotated[float, Field(gt=0)] = 0.5
    prefill_step_tokens: Annotated[int, Field(ge=1)] | None = None
    scripted_steps_per_s: Annotated[float, Field(gt=0)] = 200.0
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    lease_ttl_s: Annotated[float, Field(gt=0)] = 4.0
    poll_s: Annotated[float, Field(gt=0)] = 0.05
    recover_s: Annotated[float, Field(gt=0)] = 5.0
    allow_callbacks: str = ""
    grace_s: Annotated[float, Field(ge=0)] = 60.0
    burst: bool = False
    standby: bool = False
    verbose: bool = False

    @field_validator("queues")
    @classmethod
    def _queues_named(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",")]
        if not all(names) or len(set(names)) != len(names):
            raise ValueError("must be a comma-separated list of different queue names")
        return ",".join(names)

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
        return self

    @model_validator(mode="after")
    def _quantised_once(self) -> Self:
        if self.kv_bits is not None and self.store_dtype != "native":
            raise ValueError("kv_bits keeps caches in 8 bits on disk too: leave store_dtype at native")
        return self

    @property
    def queue_names(self) -> list[str]:
        return self.queues.split(",")

    @property
    def agent_ttl_s(self) -> float | None:
        return None if self.agent_ttl is None else seconds_of(self.agent_ttl)

    @property
    def callback_modules(self) -> list[str]:
        return [name.strip() for name in self.allow_callbacks.split(",") if name.strip()]

    @property
    def store_folder(self) -> Path:
        return self.store.expanduser()

    def describe(self) -> str:
        """Every setting on one line, the Redis password masked."""
        redis_url = self.redis_url if self.redis_url == EMBEDDED else mask_url(self.redis_url)
        values = self.model_dump() | {"redis_url": redis_url}
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def read_settings(options: dict[str, Any]) -> WorkerSettings:
    """
    Args:
        options: values from the command line; ``None`` for an option that was not given.

    Raises:
        ValueError: an unknown ``STOKER_*`` variable, or an invalid value (pydantic's `ValidationError`).
    """
    require_known_variables()
    return WorkerSettings(**{name: value for name, value in options.items() if value is not None})
