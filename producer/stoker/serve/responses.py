"""The responses and the reading of bodies that all endpoints share. No Redis."""

import asyncio
import errno
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive

from stoker.api.endpoint import Endpoint
from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import Failure, of_exception
from stoker_shared.errors import RequestTooLarge, StokerError
from stoker_shared.job_data import read_json
from stoker_shared.wire import MAX_REQUEST_BYTES

log = logging.getLogger(__name__)

REQUEST_ID: Final = "x-request-id"
ANTHROPICS_ID: Final = "request-id"
JOB_ID: Final = "x-stoker-job"
CLIENT_IS_GONE: Final = 499
"""The status of a response that nobody reads."""

READ_BODY_S: Final = 60.0
_IN_MEMORY_BYTES: Final = 16 * 2**10
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def id_headers(job_id: str, given: str | None) -> dict[str, str]:
    """A call's id, as OpenAI and Anthropic name it; `given` is the one that its client chose."""
    return {REQUEST_ID: given or job_id, ANTHROPICS_ID: job_id, JOB_ID: job_id}


def given_id(headers: Mapping[str, str]) -> dict[str, str]:
    """The id that the client chose, for a call without a job."""
    return {REQUEST_ID: headers[REQUEST_ID]} if REQUEST_ID in headers else {}


class Json(JSONResponse):
    """Writes half a surrogate pair, which a caller's text can have, as an escape instead of failing on it."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def failed(endpoint: Endpoint | None, failure: Failure, headers: Mapping[str, str]) -> JSONResponse:
    """The response that describes a failure, in the form of the endpoint's API, or without one in OpenAI's. Its header
    tells the clients' packages whether to try again by themselves."""
    own = {"x-should-retry": "true" if failure.retryable else "false"}
    if failure.retry_after_s is not None:
        own["retry-after"] = str(failure.retry_after_s)
    if failure.status == 401:
        own["www-authenticate"] = "Bearer"
    failure.request_id = headers.get(ANTHROPICS_ID)
    body = failure.body if endpoint is None else endpoint.failure(failure)
    return Json(body, failure.status, headers={**headers, **own})


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """The response to any exception that an endpoint raises."""
    return failed(ENDPOINTS.get(request.url.path), described(error), given_id(request.headers))


def described(error: Exception) -> Failure:
    """The failure of an exception; an unexpected one is logged."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return Failure(503, f"there is no room for it: {error.strerror}", code="no_space", retryable=True)
    failure = of_exception(error)
    if failure.status == 500 and not isinstance(error, Failure | StokerError):
        log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return failure


@asynccontextmanager
async def received(request: Request) -> AsyncIterator[IO[bytes]]:
    """The body, in a file that is open as long as the context, because hundreds of clients may send slowly.
    Raises `Failure`: its type is not JSON, or it does not come in time; `OSError`: it cannot be kept."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Failure(415, "the Content-Type must be application/json", code="unsupported_content_type")
    with SpooledTemporaryFile(_IN_MEMORY_BYTES) as body:
        try:
            async with asyncio.timeout(READ_BODY_S):
                async for chunk in request.stream():
                    body.write(chunk)
        except TimeoutError:
            raise Failure(408, f"the body did not come within {READ_BODY_S:.0f} s", code="body_timeout") from None
        yield body


def json_object(raw: bytes, at_most: int = MAX_REQUEST_BYTES) -> dict[str, Any]:
    """Raises `RequestTooLarge`: as `read_json`; `Failure`: it is not a JSON object."""
    try:
        body = read_json(raw, at_most, is_echoed=True)
    except RequestTooLarge:
        raise
    except ValueError:
        raise Failure(400, "the body is not JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Failure(400, "the body is not a JSON object", code="invalid_json")
    return body


async def until_hung_up(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def page_of(objects: Sequence[Mapping[str, Any]], query: Mapping[str, str], *, most: int) -> dict[str, Any]:
    """The objects after the one whose id is `after`, at most `limit`. Raises `Failure`: there is no such object, or
    `limit` is invalid."""
    start = 0
    if after := query.get("after"):
        ids = [entry["id"] for entry in objects]
        if after not in ids:
            raise Failure(
                400, f"'after' names nothing in this list: {after[:64]!r}", code="invalid_value", param="after"
            )
        start = ids.index(after) + 1
    text = query.get("limit", str(most))
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise Failure(400, f"'limit' must be a whole number from 1 to {most}", code="invalid_value", param="limit")
    page = objects[start : start + int(text)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": list(page), **ends, "has_more": start + len(page) < len(objects)}
