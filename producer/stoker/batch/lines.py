"""Reads and checks one line of an input file and makes a request of it. Pure.

A bad line never stops a batch: its answer is an error with the line's number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker.openai.failures import field_of
from stoker.openai.fields import RULES, request_fields
from stoker.openai.rule import BodyOptions, FieldRefused
from stoker_shared.errors import RequestError, RequestTooLarge
from stoker_shared.job_data import read_json
from stoker_shared.request import GenerationRequest, build_request

MAX_LINE_BYTES: Final = 64 * 2**20
"""Longest line that is read: enough for the largest request with all its JSON escaped, but a limit for memory."""

MAX_CUSTOM_ID_CHARACTERS: Final = 512
_NEEDS_CUSTOM_ID: Final = f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters"


class BadLine(Exception):
    """A line that is not run.

    Attributes:
        number: the line's number, from 1.
        custom_id: ``None`` if it cannot be read, or if another line has it too.
        code, param: as in OpenAI's errors.
    """

    def __init__(self, number: int, custom_id: str | None, code: str, why: str, param: str | None = None) -> None:
        super().__init__(f"line {number}: {why}")
        self.number = number
        self.custom_id = custom_id
        self.code = code
        self.param = param


@dataclass(frozen=True)
class Line:
    """A line that can be run."""

    number: int
    custom_id: str
    url: str
    request: GenerationRequest


def read_line(number: int, raw: bytes, options: BodyOptions) -> Line:
    """
    Raises:
        BadLine: it cannot be run.
    """
    fields, custom_id = _object_of(number, raw)
    if custom_id is None:
        raise BadLine(number, None, "missing_required_parameter", _NEEDS_CUSTOM_ID, "custom_id")
    unknown = sorted(set(fields) - {"custom_id", "method", "url", "body"})
    if unknown:
        name = ascii(unknown[0])[:64]
        raise BadLine(number, custom_id, "unknown_parameter", f"{name} is not a field of a batch line", unknown[0][:64])
    if fields.get("method") != "POST":
        raise BadLine(number, custom_id, "invalid_method", "'method' must be POST", "method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in RULES:
        raise BadLine(number, custom_id, "invalid_url", f"'url' must be one of {', '.join(RULES)}", "url")
    if not isinstance(body, dict):
        raise BadLine(number, custom_id, "missing_required_parameter", "'body' must be an object", "body")
    try:
        return Line(number, custom_id, url, build_request(request_fields(url, body, options)))
    except FieldRefused as refused:
        raise BadLine(number, custom_id, refused.code, str(refused), refused.param) from None
    except RequestError as error:
        raise refused_request(number, custom_id, error) from None


def refused_request(number: int, custom_id: str, error: RequestError) -> BadLine:
    """The error of a line whose request is invalid or too large."""
    if isinstance(error, RequestTooLarge):
        return BadLine(number, custom_id, "request_too_large", str(error))
    return BadLine(number, custom_id, "invalid_value", str(error), field_of(error))


def custom_id_of(number: int, raw: bytes) -> str | None:
    """The line's `custom_id` if it can be read, else ``None``."""
    try:
        return _object_of(number, raw)[1]
    except BadLine:
        return None


def _object_of(number: int, raw: bytes) -> tuple[Mapping[str, Any], str | None]:
    if len(raw) > MAX_LINE_BYTES:
        raise BadLine(number, None, "invalid_json_line", f"over {MAX_LINE_BYTES} bytes")
    try:
        fields = read_json(raw, MAX_LINE_BYTES)
    except UnicodeDecodeError:
        raise BadLine(number, None, "invalid_json_line", "not UTF-8 text") from None
    except RequestTooLarge as error:
        raise BadLine(number, None, "request_too_large", str(error)) from None
    except (ValueError, RecursionError):
        raise BadLine(number, None, "invalid_json_line", "not JSON") from None
    if not isinstance(fields, dict):
        raise BadLine(number, None, "invalid_json_line", "not a JSON object")
    custom_id = fields.get("custom_id")
    usable = isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS and _is_text(custom_id)
    return fields, custom_id if usable else None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True
