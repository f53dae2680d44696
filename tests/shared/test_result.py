"""The result as producers read it."""

from typing import Any

from tests.producer.played_worker import result_fields

from stoker_shared import GenerationResult


def test_fields_of_a_newer_worker_are_ignored_and_missing_ones_have_defaults():
    known: dict[str, Any] = result_fields("j")
    newer = {**known, "new": 1, "usage": {**known["usage"], "new": 1}}
    assert GenerationResult.model_validate(newer) == GenerationResult.model_validate(known)
    assert GenerationResult.model_validate(known).attempt == 1
