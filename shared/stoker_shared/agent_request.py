"""What a job about an agent's memory asks for: it generates nothing. Owns validation; does no I/O.

Such a job is in order with the agent's other jobs: `info` reads beside others that read, the rest writes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stoker_shared.errors import InvalidRequest, RequestVersionTooNew
from stoker_shared.request import Access, AgentId, problems_of
from stoker_shared.wire import AGENT_REQUEST_VERSION

AgentAction = Literal["info", "forget", "fork", "rollback"]


class AgentRequest(BaseModel):
    """One look at an agent's memory, or one change of it.

    Attributes:
        action: ``info``; ``forget``: remove the agent; ``fork``: make `target`, which goes on from here; ``rollback``:
            go back to what the agent was at `version`.
        target: id of the agent that `fork` makes.
        version: which one `rollback` goes back to; ``None``: the one before the newest.
        expect_version: fail unless the agent is at this version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Annotated[int, Field(ge=1)] = 1
    agent_id: AgentId
    action: AgentAction
    target: AgentId | None = None
    version: Annotated[int, Field(ge=1)] | None = None
    expect_version: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.target is None) == (self.action == "fork"):
            raise ValueError("'target' is the agent that 'fork' makes: it needs one, and nothing else takes one")
        if self.version is not None and self.action != "rollback":
            raise ValueError("'version' is where 'rollback' goes back to; nothing else takes one")
        if self.expect_version is not None and self.action == "info":
            raise ValueError("'info' changes nothing, so it takes no 'expect_version'")
        return self

    @property
    def access(self) -> Access:
        """For which of the agent's other jobs it waits; as `GenerationRequest.access`."""
        return "read" if self.action == "info" else "write"

    def as_payload(self) -> dict[str, Any]:
        """The JSON object that goes on the wire."""
        return {"v": 1, **self.model_dump(mode="json", exclude_none=True, exclude={"v"})}


def build_agent_request(fields: Mapping[str, Any]) -> AgentRequest:
    """Validate the fields of one request.

    Raises:
        RequestVersionTooNew: `v` is above ``AGENT_REQUEST_VERSION``.
        InvalidRequest: anything else; the message names each bad field.
    """
    version = fields.get("v", 1)
    if isinstance(version, int) and version > AGENT_REQUEST_VERSION:
        raise RequestVersionTooNew(
            f"the request has v {version}, this side reads up to v {AGENT_REQUEST_VERSION}: update it"
        )
    try:
        return AgentRequest.model_validate(dict(fields))
    except ValidationError as error:
        raise InvalidRequest(problems_of(error)) from None
