"""The interface of an endpoint that answers with generated text. Pure.

One module for each API implements it. Enqueueing, streaming and errors are the same for all of them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.api.deltas import Delta, Deltas
from stoker.api.failure import Failure, FieldRefused
from stoker.api.fields import BodyOptions, checked, settle_memory
from stoker_shared.result import GenerationResult


@dataclass(frozen=True)
class ApiCall:
    """A body that was read.

    Attributes:
        requests: the fields of one `GenerationRequest` for each prompt.
        model: as the caller names it.
        is_streamed: send the answer as events.
        kept: the parts of the body that the answer needs, as plain JSON.
        is_stored: keep the input and the answer for later calls.
        is_background: answer the call at once; its job continues without it.
        continues: the id of a stored answer whose conversation comes before the input.
        n_instructions: how many of the request's first messages come before that conversation.
        input: the input of a call that is stored, as a list of items, with references resolved.
    """

    requests: tuple[dict[str, Any], ...]
    model: str
    is_streamed: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)
    is_stored: bool = False
    is_background: bool = False
    continues: str | None = None
    n_instructions: int = 0
    input: Any = None

    @property
    def request(self) -> dict[str, Any]:
        """The only request, for a line of a batch. Raises `FieldRefused`: there are several, or the answer needs a
        server."""
        needs = {"stream": self.is_streamed, "background": self.is_background, "previous_response_id": self.continues}
        for name, is_given in needs.items():
            if is_given:
                raise FieldRefused(name, "is not served in a batch")
        if len(self.requests) > 1:
            raise FieldRefused("prompt", "must be one prompt: give each prompt a line of its own")
        request = dict(self.requests[0])
        settle_memory(request)  # for a call, this is done once the fields from its headers are known
        return request


class EventWriter(Protocol):
    """Writes one answer as server-sent events. Every method returns complete events, with their line ends."""

    def keep_alive(self) -> bytes:
        """What to send while there is nothing else to send."""
        return b": still waiting\n\n"

    def begin(self) -> Iterable[bytes]:
        """The first events. It is called once, and they are sent with the first delta, keep-alive or end."""
        return ()

    def more(self, delta: Delta) -> Iterable[bytes]:
        """The events of a delta of the first choice."""
        ...

    def end(self, results: Sequence[GenerationResult], first: Deltas) -> Iterable[bytes]:
        """The events from the jobs' end on.

        Args:
            results: one for each request.
            first: the deltas of the first choice, some of which may have been sent; none of the other choices has been.

        Raises:
            Failure: as `Deltas.rest`.
        """
        ...

    def failed(self, failure: Failure) -> Iterable[bytes]:
        """The events that end an answer which cannot continue."""
        ...


class Endpoint(Protocol):
    """
    Attributes:
        url: its path.
        is_raw: its text is as generated, with the markers of thinking and calls.
    """

    url: str
    is_raw: bool

    def read(self, body: dict[str, Any], options: BodyOptions) -> ApiCall:
        """Read a body, which it may change. Raises `FieldRefused`: a field is unknown, or cannot be served."""
        ...

    def answer(self, results: Sequence[GenerationResult], created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a successful response.

        Args:
            results: one for each request.
            created_s: the time that the answer names as its own, in Unix seconds.
            kept: `kept` of the call; empty if only the result is known.
        """
        ...

    def events(self, job_id: str, call: ApiCall, created_s: int) -> EventWriter:
        """`call` may be without its requests."""
        ...

    def failure(self, failure: Failure) -> dict[str, Any]:
        """The body of a response with an error's status."""
        return failure.body


def own_fields(result: GenerationResult) -> dict[str, Any]:
    """The fields of an answer that are stoker's own: `task` and `attempts`, where the result has them."""
    fields = result.model_dump(mode="json", include={"task", "attempts"})
    return {name: value for name, value in fields.items() if value is not None}


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event, in ASCII: many clients take an unescaped separator such as U+2028 for the end of a line."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def take_flag(body: dict[str, Any], name: str, *, default: bool = False) -> bool:
    """Remove a field such as `stream`, which concerns only the transport, and read it. Raises `FieldRefused`: it is
    neither true nor false."""
    value = body.pop(name, None)
    return default if value is None else checked(name, value, bool)
