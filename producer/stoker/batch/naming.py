"""The ids of batches, of their jobs and of their answers. All follow from the input, so that a second start finds them.

A job's id contains its batch, its line and its `custom_id`: ``BATCH-LINE-DIGEST``. Pure.
"""

import hashlib
import json
import re
from typing import Any, Final

MAX_NAME_CHARACTERS: Final = 40
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_NAME_CHARACTERS - 1}}}")
_ANSWER: Final = re.compile(r"batch_req_(.+)-(\d+)-[0-9a-f]{12}")
_ANSWER_PREFIX: Final = "batch_req_"


def is_batch_name(name: str) -> bool:
    """Whether it has only English letters, digits, ``-`` and ``_``: RQ does not allow others in a job's id."""
    return _NAME.fullmatch(name) is not None


def fingerprint_of(file_digest: str, options: Any) -> str:
    """A digest of everything that can change the answers: the bytes of the input, and the options of its requests."""
    return hashlib.sha256(json.dumps([file_digest, options], sort_keys=True).encode()).hexdigest()


def batch_for(name: str | None, fingerprint: str) -> str:
    """The id of the batch: the same input with the same options is the same batch."""
    return f"{name or 'batch'}-{fingerprint[:16]}"


def job_id_for(batch: str, number: int, custom_id: str | None) -> str:
    """
    Args:
        custom_id: ``None`` for a line that never becomes a job.
    """
    digest = hashlib.sha256((custom_id or "").encode()).hexdigest()
    return f"{batch}-{number}-{digest[:12]}"


def answer_id_for(job_id: str) -> str:
    """The `id` of an output line."""
    return f"{_ANSWER_PREFIX}{job_id}"


def line_of_answer(answer_id: object) -> tuple[str, int] | None:
    """The batch and the number of the line that an output line answers; ``None`` if its `id` has another form."""
    found = _ANSWER.fullmatch(answer_id) if isinstance(answer_id, str) else None
    return (found[1], int(found[2])) if found else None
