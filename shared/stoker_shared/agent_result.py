"""What a job about an agent's memory returns. Plain data; written by the worker, read by producers."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Record(BaseModel):
    # As with generation results: a producer may be older than the worker, so unknown fields are ignored.
    model_config = ConfigDict(frozen=True, extra="ignore")


class _AgentResult(_Record):
    job_id: str
    agent_id: str


class PastVersion(_Record):
    """A version that `rollback` can go back to.

    Attributes:
        tokens: in its conversation.
        job_id: whose job made it; ``None`` for one that a command at the store made.
        saved_at: ISO 8601, UTC.
    """

    version: int
    tokens: int
    job_id: str | None = None
    saved_at: str | None = None


class AgentInfo(_AgentResult):
    """What the worker has of an agent.

    Attributes:
        exists: whether there is such an agent; nothing else is known of one that does not.
        version: the newest.
        tokens, messages, text_chars: of the conversation; ``None`` is what does not apply, or cannot be read.
        cached_tokens: how many of `tokens` have a cache.
        own_bytes: of records, tail and snapshots on disk.
        block_bytes: of its cached blocks on disk; `shared_bytes` of them other agents use too.
        last_used: when its newest version was saved, ISO 8601, UTC.
        state: ``ok``; ``unsaved``: its last turn is not in its conversation, so `append` is refused; ``unreadable``.
        problem: `state` in words, unless it is ``ok``.
        versions: the newest of those that `rollback` can go back to, at most 100, oldest first.
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
    """An agent is gone: its conversation, its results, and the blocks that only it used.

    Attributes:
        existed: whether there was one.
        version: the last it had.
        blocks: how many went with it, `block_bytes` large; `shared_blocks` more are in use by others.
    """

    action: Literal["forget"] = "forget"
    existed: bool
    version: int = 0
    blocks: int = 0
    block_bytes: int = 0
    shared_blocks: int = 0


class AgentForked(_AgentResult):
    """`target` is there, at `version`, with the conversation that the agent had at `from_version`."""

    action: Literal["fork"] = "fork"
    target: str
    version: int
    from_version: int
    tokens: int


class AgentRolledBack(_AgentResult):
    """The agent's `version` has the conversation that its version `to_version` had; it was at `from_version`."""

    action: Literal["rollback"] = "rollback"
    version: int
    to_version: int
    from_version: int
    tokens: int


AgentResult = AgentInfo | AgentForgotten | AgentForked | AgentRolledBack

_ANY: TypeAdapter[AgentResult] = TypeAdapter(Annotated[AgentResult, Field(discriminator="action")])


def read_agent_result(fields: Mapping[str, Any]) -> AgentResult:
    """The result in a finished job's return value. Raises pydantic's `ValidationError`."""
    return _ANY.validate_python(fields)
