"""Log lines with fixed words and fields: the events of jobs, and outages. Any thread; no I/O but the log.

They never have any part of a prompt or an answer. `cli/log_lines.py` writes the fields as text or as JSON.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

from stoker_shared.errors import RequestError, StokerError

JobEvent = Literal[
    "claimed", "finished", "escalated", "replayed", "failed", "cancelled", "dropped", "lost", "given back"
]

FIELDS: Final = "fields"
"""The attribute of a log record with its fields, in their order."""

_log = logging.getLogger(__name__)

_QUIET_S: Final = 1.5
"""Three pauses between two tries: a server that answers one call and refuses the next is still away."""


def log_job(event: JobEvent, job_id: str, level: int = logging.INFO, /, **fields: object) -> None:
    """Log one line about a job. The text leaves out fields that are ``None``: they do not apply."""
    if not _log.isEnabledFor(level):
        return
    known = {"job": job_id, **fields}
    text = " ".join(f"{name}={_shown(value)}" for name, value in known.items() if value is not None)
    _log.log(level, "%s %s", event, text, extra={FIELDS: {"event": event, **known}})


def log_answer(event: JobEvent, job_id: str, result: Mapping[str, Any], **fields: object) -> None:
    """Log the figures of a result. `result`: JSON values, perhaps of an earlier version of stoker."""
    usage, cache = result.get("usage", {}), result.get("cache", {})
    save_error = cache.get("save_error")
    log_job(
        event,
        job_id,
        logging.INFO if save_error is None else logging.WARNING,
        **fields,
        prompt=usage.get("prompt_tokens"),
        cached=usage.get("cached_tokens"),
        generated=usage.get("completion_tokens"),
        seconds=result.get("timing", {}).get("total_s"),
        ended_by=result.get("finish_reason"),
        version=cache.get("agent_version"),
        save_error=save_error,
    )


def log_failure(job_id: str, error: Exception, **fields: object) -> None:
    """Log the kind of an error, and its text if that is about the worker and cannot quote the request."""
    is_ours = isinstance(error, StokerError) and not isinstance(error, RequestError)
    reason = str(error) if is_ours else None
    log_job("failed", job_id, logging.WARNING, **fields, error=type(error).__name__, reason=reason)


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or not text.isprintable() else text


class Outage:
    """Logs the begin and end of an outage. Any thread that meets it calls `met`, and a regular caller `answered`."""

    def __init__(self, of: str) -> None:
        """`of`: the service that fails, as the subject of a sentence."""
        self._of = of
        self._lock = threading.Lock()
        self._began: float | None = None
        self._last = 0.0

    @property
    def seconds(self) -> float:
        """How long the present outage has lasted; 0: there is none."""
        with self._lock:
            return 0.0 if self._began is None else time.monotonic() - self._began

    def met(self, why: object) -> None:
        """A call has failed. `why`: an error, or its text, for the log."""
        with self._lock:
            self._last = time.monotonic()
            if self._began is not None:
                return
            self._began = self._last
        _log.warning("outage begins: %s; running jobs go on", why)

    def answered(self) -> None:
        """A call has succeeded."""
        with self._lock:
            now = time.monotonic()
            if self._began is None or now - self._last < _QUIET_S:
                return
            seconds, self._began = now - self._began, None
        _log.warning("outage over: %s works again after %.1f s", self._of, seconds)
