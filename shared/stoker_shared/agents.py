"""Jobs that read or change an agent's memory and generate nothing: their request and their results. No I/O.

`info` runs beside other reading jobs of the agent; the other actions write, and run in the order of enqueueing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from stoker_shared.request import Access, AgentId, validated
from stoker_shared.result import Record
from stoker_shared.wire import AGENT_REQUEST_VERSION

AgentAction = Literal["info", "forget", "fork", "rollback"]


class AgentRequest(BaseModel):
    """A request to read or change an agent's memory.

    Attributes:
        action: ``info``; ``forget``: remove the agent; ``fork``: make `target`, which continues from here;
            ``rollback``: return to the conversation of `version`.
        target: id of the agent that `fork` makes.
        version: the version to which `rollback` returns; ``None`` for the one before the newest.
        expect_version: fail unless the agent is at this version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Annotated[int, Field(ge=1)] = 1
    agent_id: AgentId
    action: AgentAction
    target: AgentId | None = None
    version: Annotated[int, Field(ge=1)] | None = None
    expect_version: Annotated[int, Field(ge=1)] | None = None

    @property
    def changed_agent(self) -> str:
        """The agent whose memory this job writes, if it writes: `target` for `fork`."""
        return self.target or self.agent_id

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.target is None) == (self.action == "fork"):
            raise ValueError("'fork' needs a 'target', the agent it makes; no other action takes one")
        if self.version is not None and self.action != "rollback":
            raise ValueError("'version' is the version to which 'rollback' returns; no other action takes one")
        if self.expect_version is not None and self.action == "info":
            raise ValueError("'info' changes nothing, so it takes no 'expect_version'")
        return self

    @property
    def access(self) -> Access:
        """As `GenerationRequest.access`."""
        return "read" if self.action == "info" else "write"

    def as_payload(self) -> dict[str, Any]:
        """The JSON object that goes on the wire."""
        return {"v": 1, **self.model_dump(mode="json", exclude_none=True, exclude={"v"})}


def build_agent_request(fields: Mapping[str, Any]) -> AgentRequest:
    """Raises `RequestVersionTooNew`: `v` is above ``AGENT_REQUEST_VERSION``. Raises `InvalidRequest` for any other
    fault; its message names each bad field."""
    return validated(AgentRequest, fields, newest_version=AGENT_REQUEST_VERSION)


class _AgentResult(Record):
    job_id: str
    agent_id: str


class PastVersion(Record):
    """A version to which `rollback` can return.

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
    """An agent's memory, as its worker has it.

    Attributes:
        exists: whether the agent exists; if not, all other fields have their defaults.
        version: the newest version.
        tokens, messages, text_chars: length of the conversation; ``None`` if the count does not apply or cannot be
            read.
        cached_tokens: how many of `tokens` are in the cache.
        own_bytes: size of its records, tail and snapshots on disk.
        block_bytes: size of its cached blocks on disk; other agents may share some of them.
        last_used: when it was last saved or restored, ISO 8601, UTC.
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
    last_used: str | None = None
    state: Literal["ok", "unsaved", "unreadable"] = "ok"
    problem: str | None = None
    versions: tuple[PastVersion, ...] = ()


class AgentForgotten(_AgentResult):
    """An agent was removed: its conversation, its results, and the blocks that no other agent used.

    Attributes:
        existed: whether the agent existed.
        version: its last version.
        blocks, block_bytes: the number of blocks removed, and their bytes in all.
        shared_blocks: the number of its blocks that stay, because other agents use them.
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

_RESULT: TypeAdapter[AgentResult] = TypeAdapter(Annotated[AgentResult, Field(discriminator="action")])


def read_agent_result(fields: Mapping[str, Any]) -> AgentResult:
    """The result in a finished job's return value. Raises `pydantic.ValidationError`: it is not such a result."""
    return _RESULT.validate_python(fields)
