"""The worker's own defaults for sampling fields that a request does not set. Pure; any thread."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stoker_shared.errors import InvalidRequest
from stoker_shared.request import WORKERS_DEFAULTS, GenerationRequest, build_request


@dataclass(frozen=True)
class RequestDefaults:
    """
    Attributes:
        fields: a value for each field that has a default; valid in a request.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parsed(cls, text: str) -> "RequestDefaults":
        """The defaults in ``KEY=VALUE,KEY=VALUE``; none in an empty text.

        Raises:
            ValueError: a part is not of this form, or its key is unknown, occurs twice, or does not take its value.
        """
        fields: dict[str, Any] = {}
        for pair in filter(None, map(str.strip, text.split(","))):
            name, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or name in fields:
                raise ValueError(f"expected KEY=VALUE, each key once, not {pair!r}")
            if name not in WORKERS_DEFAULTS:
                raise ValueError(f"{name!r} has no default here, only {', '.join(sorted(WORKERS_DEFAULTS))}")
            fields[name] = _number(name, value)
        try:
            build_request({"prompt": "any", **fields})
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return cls(fields)

    def filled_in(self, request: GenerationRequest) -> GenerationRequest:
        """The request with these values in the fields that it does not set; ``null`` counts as not set.

        Raises:
            InvalidRequest: the request's `min_tokens` is above the default of `max_tokens`.
        """
        unset = {
            name: value
            for name, value in self.fields.items()
            if name not in request.model_fields_set or getattr(request, name) is None
        }
        if request.min_tokens > unset.get("max_tokens", request.max_tokens):
            raise InvalidRequest(
                f"'min_tokens' is above this worker's default of 'max_tokens', {unset['max_tokens']}: set both"
            )
        return request.model_copy(update=unset) if unset else request


NO_DEFAULTS: Final = RequestDefaults()


def _number(name: str, text: str) -> Any:
    """A JSON number; strict validation tells whole numbers from others."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if type(value) not in (int, float):
        raise ValueError(f"{name} needs a number, not {text!r}")
    return value
