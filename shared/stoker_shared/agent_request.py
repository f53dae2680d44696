"""The request of a job that reads or changes an agent's memory and generates nothing. Owns validation; does no I/O.

Such a job keeps its place among the agent's other jobs: `info` runs beside other readers, all other actions write.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stoker_shared.request import Access, AgentId
from stoker_shared.validation import validated
from stoker_shared.wire import AGENT_REQUEST_VERSION

AgentAction = Literal["info", "forget", "fork", "rollback"]


class AgentRequest(BaseModel):
    """One reading or change of an agent's memory.

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
        """The agent that this job writes, if it writes any."""
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
    """Validate the fields of one request.

    Raises:
        RequestVersionTooNew: `v` is above ``AGENT_REQUEST_VERSION``.
        InvalidRequest: anything else; the message names each bad field.
    """
    return validated(AgentRequest, fields, newest_version=AGENT_REQUEST_VERSION)
