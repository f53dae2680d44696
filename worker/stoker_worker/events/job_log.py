"""The log lines of jobs: one for each event, with fields whose names stay. Never a prompt, an answer or their parts.

Any thread. `cli/log_lines.py` writes the fields as text or as JSON.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

from stoker_shared.errors import RequestError, StokerError

JobEvent = Literal[
    "claimed", "finished", "escalated", "replayed", "failed", "cancelled", "dropped", "lost", "given back"
]

FIELDS: Final = "fields"
"""The attribute of a log record that has its fields, in their order."""

_log = logging.getLogger(__name__)


def log_job(event: JobEvent, job_id: str, level: int = logging.INFO, /, **fields: object) -> None:
    """One line about one job. Fields that are ``None`` do not apply and are left out of the text."""
    if not _log.isEnabledFor(level):
        return
    known = {"job": job_id, **fields}
    text = " ".join(f"{name}={_shown(value)}" for name, value in known.items() if value is not None)
    _log.log(level, "%s %s", event, text, extra={FIELDS: {"event": event, **known}})


def log_answer(event: JobEvent, job_id: str, result: Mapping[str, Any], **fields: object) -> None:
    """A result's figures.

    Args:
        result: as JSON, perhaps of an earlier version.
    """
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
    """The kind of the error; and its text, if it is about the worker and can quote nothing of the request."""
    is_ours = isinstance(error, StokerError) and not isinstance(error, RequestError)
    reason = str(error) if is_ours else None
    log_job("failed", job_id, logging.WARNING, **fields, error=type(error).__name__, reason=reason)


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or not text.isprintable() else text
