"""The input of a batch, its lines and their requests, and the ids that follow from it. No Redis, and no file format:
`Rows` reads the file.

A bad line never stops a batch: its answer is an error with the line's number. Ids follow from the input, so that a
second start finds them: a job's id is ``BATCH-LINE-DIGEST``, with a digest of the `custom_id`.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from stoker.api.endpoints import BATCH_URLS, ENDPOINTS
from stoker.api.failure import Failure, of_exception
from stoker.api.fields import BodyOptions
from stoker_shared.errors import RequestError, RequestTooLarge
from stoker_shared.job_data import read_json
from stoker_shared.request import GenerationRequest, build_request

MAX_NAME_CHARACTERS: Final = 40
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_NAME_CHARACTERS - 1}}}")
_ANSWER: Final = re.compile(r"batch_req_(.+)-(\d+)-[0-9a-f]{12}")


def is_batch_name(name: str) -> bool:
    """True if it has only English letters, digits, ``-`` and ``_``, the characters that RQ allows in a job's id."""
    return _NAME.fullmatch(name) is not None


def fingerprint_of(file_digest: str, options: Any) -> str:
    """A digest of everything that can change the answers: the bytes of the input, and the options of its requests."""
    return hashlib.sha256(json.dumps([file_digest, options], sort_keys=True).encode()).hexdigest()


def batch_for(name: str | None, fingerprint: str) -> str:
    """The id of the batch: the same input with the same options is the same batch."""
    return f"{name or 'batch'}-{fingerprint[:16]}"


def job_id_for(batch: str, number: int, custom_id: str | None) -> str:
    """`custom_id` is ``None`` for a line that never becomes a job."""
    digest = hashlib.sha256((custom_id or "").encode()).hexdigest()
    return f"{batch}-{number}-{digest[:12]}"


def answer_id_for(job_id: str) -> str:
    """The `id` of an output line."""
    return f"batch_req_{job_id}"


def line_of_answer(answer_id: object) -> tuple[str, int] | None:
    """The batch and the line number that an output line answers; ``None`` if its `id` has another form."""
    found = _ANSWER.fullmatch(answer_id) if isinstance(answer_id, str) else None
    return (found[1], int(found[2])) if found else None


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
    """Raises `BadLine`: the line cannot be run."""
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
    if not isinstance(url, str) or url not in BATCH_URLS:
        raise BadLine(number, custom_id, "invalid_url", f"'url' must be one of {', '.join(BATCH_URLS)}", "url")
    if not isinstance(body, dict):
        raise BadLine(number, custom_id, "missing_required_parameter", "'body' must be an object", "body")
    try:
        return Line(number, custom_id, url, build_request(ENDPOINTS[url].read(body, options).request))
    except (Failure, RequestError) as error:
        raise refused_request(number, custom_id, error) from None


def refused_request(number: int, custom_id: str, error: Failure | RequestError) -> BadLine:
    """The error of a line whose request is invalid or too large."""
    refused = of_exception(error).error
    return BadLine(number, custom_id, refused["code"], str(error), refused["param"])


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
    return fields, usable_custom_id(fields.get("custom_id"))


def usable_custom_id(value: object) -> str | None:
    """`value` if it can be the `custom_id` of a line, else ``None``."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID_CHARACTERS:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    return value


class LineSet:
    """A set of numbers from 1, in a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] & 1 << (number & 7))

    def add(self, number: int) -> None:
        at = number >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits)))
        if not self._bits[at] & 1 << (number & 7):
            self._bits[at] |= 1 << (number & 7)
            self._count += 1


class InputChanged(Exception):
    """The file was changed after it was indexed."""


BLANK: Final = ""
"""Takes the place of a blank row's `custom_id`."""


class SourceFile:
    """A file whose rows are read more than once: the base of `Rows` of a file."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`: it cannot be read. Raises `ValueError`: it is not a regular file, and could not be read
        twice."""
        self._file = path.open("rb")
        self._path = path
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ValueError(f"{path} cannot be read twice; write its lines to a regular file first")
        self._stamp = self._stat()

    def close(self) -> None:
        self._file.close()

    def _require_unchanged(self) -> None:
        """Raises `InputChanged`: the file has been written since it was opened."""
        if self._stat() != self._stamp:
            raise InputChanged(f"{self._path} was changed while it was read")

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


class Rows(Protocol):
    """The rows of one file, numbered from 1, each in the form of OpenAI's lines."""

    def read_through(self) -> Iterator[str | None]:
        """Read the whole file, once and before `row`. Yields each row's `custom_id`: ``None`` if it cannot be read,
        `BLANK` if the row is blank. Raises `OSError`, `ValueError`: the file cannot be read."""
        ...

    @property
    def digest(self) -> str:
        """A digest, in hex, of all that can change the requests. Known once the file is read through."""
        ...

    def row(self, number: int) -> bytes:
        """The line, as JSON. Raises `BadLine`: it cannot be read; `InputChanged`."""
        ...

    def close(self) -> None: ...


class InputFile:
    """A batch's lines, numbered from 1, as in editors; blank lines have a number but no request.

    Attributes:
        rows: the source of the lines, closed with this.
        n_lines, n_requests: the number of lines, with and without blank ones.
    """

    def __init__(self, rows: Rows, *, max_lines: int | None = None) -> None:
        """Raises `OSError`: it cannot be read. Raises `ValueError`: it has another form, or over `max_lines` lines."""
        self.rows = rows
        self._blank, self._repeated = LineSet(), LineSet()
        try:
            self.n_lines = self._read_through(max_lines)
        except BaseException:
            rows.close()
            raise
        self.n_requests = self.n_lines - len(self._blank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rows.close()

    def is_blank(self, number: int) -> bool:
        return number in self._blank

    def line(self, number: int, options: BodyOptions) -> Line:
        """Raises `BadLine`: the line cannot be run; `InputChanged`."""
        raw = self.rows.row(number)
        if number in self._repeated:
            name = custom_id_of(number, raw)
            raise BadLine(
                number, None, "duplicate_custom_id", f"an earlier line has the custom_id {name!r} too", "custom_id"
            )
        return read_line(number, raw, options)

    def custom_id(self, number: int) -> str | None:
        """The `custom_id` of this line's answer."""
        if number in self._repeated:
            return None
        try:
            return custom_id_of(number, self.rows.row(number))
        except BadLine:
            return None

    def _read_through(self, max_lines: int | None) -> int:
        """Note which lines are blank and which repeat a `custom_id`; returns the number of lines."""
        seen, number = set[int](), 0
        for number, custom_id in enumerate(self.rows.read_through(), start=1):
            if max_lines is not None and number > max_lines:
                raise ValueError(f"it has over {max_lines} lines")
            if custom_id == BLANK:
                self._blank.add(number)
            elif custom_id is not None:
                # 8 bytes of a digest: a million ids have a false match in about one of 10 ** 7 files.
                short = int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest())
                if short in seen:
                    self._repeated.add(number)
                seen.add(short)
        return number
