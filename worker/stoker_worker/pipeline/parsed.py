"""The value of a JSON answer that was asked for. Pure; finisher threads."""

import json
from typing import Any

from stoker_shared.request import GenerationRequest
from stoker_worker.ports import CompletedGeneration


def parsed_answer(request: GenerationRequest, completion: CompletedGeneration, content: str) -> Any:
    """
    Args:
        content: the answer's text without thinking.

    Returns:
        ``None`` if no JSON was asked for, or if the answer is not whole: cut off by `max_tokens` or a stop string.
    """
    if not request.is_formed or completion.ended_by != "eos":
        return None
    try:
        return json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError):  # a scripted model follows no grammar; a schema may nest without end
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
