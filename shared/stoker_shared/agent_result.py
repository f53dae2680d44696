"""The results of jobs about an agent's memory. Plain data; written by the worker, read by producers."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from stoker_shared.result import Record


class _AgentResult(Record):
    job_id: str
    agent_id: str


class PastVersion(Record):
    """A version that `rollback` can go back to.

    Attributes:
        tokens: length of its conversation.
        job_id: the job that made it; ``None`` if a command at the store made it.
        saved_at: ISO 8601, UTC.
    """

    version: int
    tokens: int
    job_id: str | None = None
    saved_at: str | None = None


class AgentInfo(_AgentResult):
    """An agent's memory as the worker has it.

    Attributes:
        exists: whether there is such an agent; if not, all other fields have their defaults.
        version: the newest version.
        tokens, messages, text_chars: length of the conversation; ``None`` where the count does not apply or cannot be
            read.
        cached_tokens: how many of `tokens` have a cache.
        own_bytes: size of its records, tail and snapshots on disk.
        block_bytes: size of its cached blocks on disk; other agents use `shared_bytes` of these too.
        last_used: when its newest version was saved, ISO 8601, UTC.
        state: ``ok``; ``unsaved``: its last turn is not in its conversation, so `append` is refused; ``unreadable``.
        problem: explains a `state` that is not ``ok``.
        versions: the newest versions to which `rollback` can return, at most 100, oldest first.
    """

    action: Literal["info"] = "info"
    exists: bool
    version: int = 0
    tokens: int | None = None
    messages: int | None = None
    text_chars: int | None = None
    cached_tokens: int = 0
    own_bytes: int = 0
    block_bytes: int = 0
    shared_bytes: int = 0
    last_used: str | None = None
    state: Literal["ok", "unsaved", "unreadable"] = "ok"
    problem: str | None = None
    versions: tuple[PastVersion, ...] = ()


class AgentForgotten(_AgentResult):
    """An agent was removed: its conversation, its results, and the blocks that only it used.

    Attributes:
        existed: whether there was such an agent.
        version: its last version.
        blocks: how many blocks were removed, of `block_bytes` in all; `shared_blocks` more are in use by other agents.
    """

    action: Literal["forget"] = "forget"
    existed: bool
    version: int = 0
    blocks: int = 0
    block_bytes: int = 0
    shared_blocks: int = 0


class AgentForked(_AgentResult):
    """`target` now exists, at `version`, with the conversation that the agent had at `from_version`."""

    action: Literal["fork"] = "fork"
    target: str
    version: int
    from_version: int
    tokens: int


class AgentRolledBack(_AgentResult):
    """The agent went from `from_version` to `version`, which has the conversation of `to_version`."""

    action: Literal["rollback"] = "rollback"
    version: int
    to_version: int
    from_version: int
    tokens: int


AgentResult = AgentInfo | AgentForgotten | AgentForked | AgentRolledBack

_ANY: TypeAdapter[AgentResult] = TypeAdapter(Annotated[AgentResult, Field(discriminator="action")])


def read_agent_result(fields: Mapping[str, Any]) -> AgentResult:
    """The result in a finished job's return value.

    Raises:
        pydantic.ValidationError: it is not the result of such a job.
    """
    return _ANY.validate_python(fields)
