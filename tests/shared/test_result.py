"""The result as producers read it."""

from typing import Any

from stoker_shared import GenerationResult

WIRE: dict[str, Any] = {
    "job_id": "1",
    "agent_id": "a",
    "text": " hi",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 1},
    "cache": {"source": "disk", "agent_version": 4, "saved": True},
    "timing": {"queued_s": 0.1, "prefill_s": 0.2, "first_token_s": 0.3, "decode_s": 0.4, "total_s": 1.0},
    "model": "m",
}


def test_a_result_survives_the_wire():
    result = GenerationResult.model_validate(WIRE)
    assert GenerationResult.model_validate_json(result.model_dump_json()) == result
    assert result.text == " hi"
    assert result.attempt == 1


def test_fields_of_a_newer_worker_are_ignored():
    newer = {**WIRE, "new": 1, "usage": {**WIRE["usage"], "new": 1}}
    assert GenerationResult.model_validate(newer) == GenerationResult.model_validate(WIRE)
