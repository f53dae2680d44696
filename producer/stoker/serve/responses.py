"""The responses and the reading of bodies that all endpoints share. No Redis."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive

from stoker.openai.failures import Failure, of_exception
from stoker_shared.errors import StokerError

log = logging.getLogger(__name__)

REQUEST_ID: Final = "x-request-id"
CLIENT_IS_GONE: Final = 499
"""The status of a response that nobody reads."""

_READ_BODY_S: Final = 60.0


class Json(JSONResponse):
    """Writes half a surrogate pair, which a caller's text can have, as an escape instead of failing on it."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def failed(failure: Failure, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response that describes a failure. Its header tells `openai`'s clients whether to try again by themselves."""
    own = {"x-should-retry": "true" if failure.retryable else "false"}
    if failure.retry_after_s is not None:
        own["retry-after"] = str(failure.retry_after_s)
    if failure.status == 401:
        own["www-authenticate"] = "Bearer"
    return Json(failure.body, failure.status, headers={**(headers or {}), **own})


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """The response to any exception that an endpoint raises."""
    return failed(described(error))


def described(error: Exception) -> Failure:
    """The failure of an exception; one that nobody expected is logged."""
    failure = of_exception(error)
    if failure.status == 500 and not isinstance(error, Failure | StokerError):
        log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return failure


async def json_body(request: Request) -> dict[str, Any]:
    """
    Raises:
        Failure: it is not a JSON object, or does not come.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Failure(415, "the Content-Type must be application/json", code="unsupported_content_type")
    try:
        async with asyncio.timeout(_READ_BODY_S):
            raw = await request.body()
        body = json.loads(raw)
    except TimeoutError:
        raise Failure(408, f"the body did not come within {_READ_BODY_S:.0f} s", code="body_timeout") from None
    except (ValueError, RecursionError):
        raise Failure(400, "the body is not JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Failure(400, "the body is not a JSON object", code="invalid_json")
    return body


async def until_hung_up(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body has to be read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
