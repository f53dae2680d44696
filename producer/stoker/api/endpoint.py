"""The interface of an endpoint that answers with generated text, and the table of them. Pure.

One module for each API implements it. Enqueueing, streaming, and what an error is, are the same for all of them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from stoker.api.deltas import Delta, Deltas
from stoker.api.failure import Failure, FieldRefused
from stoker.api.fields import BodyOptions
from stoker_shared.result import GenerationResult


@dataclass(frozen=True)
class ApiCall:
    """A body that was read.

    Attributes:
        requests: the fields of a `GenerationRequest` each; several for several prompts.
        model: as the caller names it.
        is_streamed: the answer is to be sent as events.
        kept: what the answer needs of the body, as plain JSON.
        is_stored: the input and the answer are kept for later calls.
        is_background: the call is answered at once, and its job goes on without it.
        continues: the id of a stored answer whose conversation comes before the input.
        n_instructions: how many of the request's first messages come before that conversation.
        input: as it came, of a call that is stored.
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
        """The only one, for a line of a batch.

        Raises:
            FieldRefused: there are several, or the answer needs a server.
        """
        needs = {"stream": self.is_streamed, "background": self.is_background, "previous_response_id": self.continues}
        for name, is_given in needs.items():
            if is_given:
                raise FieldRefused(name, "is not served in a batch")
        if len(self.requests) > 1:
            raise FieldRefused("prompt", "must be one prompt: give each prompt a line of its own")
        return self.requests[0]


class EventWriter(Protocol):
    """Writes one answer as server-sent events. Every method returns whole events, with their line ends."""

    keep_alive: bytes
    """What is sent while nothing comes."""

    def begin(self) -> Iterable[bytes]:
        """The events before all others; called once, and read with the first delta, keep-alive or end."""
        ...

    def more(self, delta: Delta) -> Iterable[bytes]:
        """The events of a delta of the first choice."""
        ...

    def end(self, results: Sequence[GenerationResult], first: Deltas) -> Iterable[bytes]:
        """The events from the jobs' end on.

        Args:
            results: one for each request.
            first: the deltas of the first choice, of which some may have been sent; of the others none was.

        Raises:
            Failure: as `Deltas.rest`.
        """
        ...

    def failed(self, failure: Failure) -> Iterable[bytes]:
        """The events that end an answer which cannot go on."""
        ...


class Endpoint(Protocol):
    """
    Attributes:
        url: its path.
        is_raw: its text is the generated one, with the markers of thinking and calls.
    """

    url: str
    is_raw: bool

    def read(self, body: dict[str, Any], options: BodyOptions) -> ApiCall:
        """
        Args:
            body: may be changed.

        Raises:
            FieldRefused: a field is unknown, or cannot be served.
        """
        ...

    def answer(self, results: Sequence[GenerationResult], created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a successful response.

        Args:
            results: one for each request.
            created_s: when the answer was made, in Unix seconds.
            kept: of the call; empty where only the result is known.
        """
        ...

    def events(self, job_id: str, call: ApiCall, created_s: int) -> EventWriter:
        """
        Args:
            call: without its requests.
        """
        ...

    def failure(self, failure: Failure) -> dict[str, Any]:
        """The body of a response with an error's status."""
        ...


KEEP_ALIVE: Final = b": still waiting\n\n"


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event. In ASCII: many clients take a line separator such as U+2028, unescaped, for the end of a line."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def take_flag(body: dict[str, Any], name: str, *, default: bool = False) -> bool:
    """Remove a field that concerns only the transport, as `stream`, and read it.

    Raises:
        FieldRefused: it is neither true nor false.
    """
    value = body.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise FieldRefused(name, "is not true or false", "invalid_value")
    return default if value is None else value
