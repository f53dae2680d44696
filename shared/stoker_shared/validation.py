"""Validation of what comes over the wire: which error it is, in one line that quotes no prompt. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from stoker_shared.errors import InvalidRequest, RequestVersionTooNew
from stoker_shared.printable import printable

RequestT = TypeVar("RequestT", bound=BaseModel)
_MAX_PROBLEMS_SHOWN: Final = 8
_MAX_PROBLEMS_READ: Final = 1000  # pydantic makes a dict of each
_IN_OUR_WORDS: Final = {
    "extra_forbidden": "there is no such field",
    "model_type": "must be an object",  # pydantic names a Python class
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
}
"""By pydantic's type of the problem."""


def validated(model: type[RequestT], fields: Mapping[str, Any], *, newest_version: int) -> RequestT:
    """A request of this model; `newest_version` is the largest `v` that this code reads.

    Raises:
        RequestVersionTooNew, InvalidRequest: as `build_request`.
    """
    version = fields.get("v", 1)
    if isinstance(version, int) and version > newest_version:
        raise RequestVersionTooNew(f"the request has v {version}, this side reads up to v {newest_version}: update it")
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        raise InvalidRequest(_problems_of(error)) from None


def _problems_of(error: ValidationError) -> str:
    """One line with each problem as `field: message`, without the input: errors must not quote prompts."""
    if error.error_count() > _MAX_PROBLEMS_READ:
        return f"there are {error.error_count()} problems with it, too many to name them"
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(_shown(part) for part in problem["loc"])
        message = _IN_OUR_WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
        problems.append(f"{field}: {message}" if field else message)
    if len(problems) > _MAX_PROBLEMS_SHOWN:
        problems[_MAX_PROBLEMS_SHOWN:] = [f"and {len(problems) - _MAX_PROBLEMS_SHOWN} more"]
    return "; ".join(problems)


def _shown(name: int | str) -> str:
    """A field's name, fit for one short line: an unknown field may have any name."""
    return printable(str(name))[:64]


def is_plain_json(value: object) -> bool:
    """Whether the value can be UTF-8 JSON: pydantic checks neither `Any` nor surrogates in `str`."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False, default=_fields_of_model).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _fields_of_model(value: object) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        raise TypeError
    return dict(value)
