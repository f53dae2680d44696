"""The rejected attempts of a job, as they are kept in its hash (`FIELD_TRIED`). Pure."""

import json
from collections.abc import Sequence

from stoker_shared.job_data import read_json
from stoker_shared.result import Attempt


def tried_in(value: bytes | None, created_at: str) -> tuple[Attempt, ...]:
    """The attempts; none if they are those of an earlier job with this id, or cannot be read."""
    noted_at, _, text = (value or b"").decode(errors="replace").partition(" ")
    if not text or noted_at != created_at:
        return ()
    try:
        return tuple(Attempt.model_validate(attempt) for attempt in read_json(text.encode()))
    except (ValueError, TypeError, RecursionError):
        return ()


def as_field(attempts: Sequence[Attempt], created_at: str) -> str:
    return f"{created_at} {json.dumps([attempt.model_dump(mode='json') for attempt in attempts])}"
