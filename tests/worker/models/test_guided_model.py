"""Guides on the real model, in the engine: what it answers is valid, whatever it would rather say."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tests.worker.engine.layouts import run

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
GUIDED: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "max_tokens": 60,
}


def test_answers_are_valid_beside_rows_that_are_free(real_model, make_engine):
    def guided(**fields):
        one = real_model.work("Once upon a time", is_saved=False, **GUIDED, **fields)
        return replace(one, guide=real_model.loaded.guides.guide_for(one.request, one.prompt_ids))

    free = real_model.work("Once upon a time", is_saved=False, max_tokens=12)
    *ended, beside = run(make_engine(), [guided(), guided(temperature=1.5, seed=3, logprobs=True), free])
    for end in ended:
        assert end.ended_by == "eos"
        jsonschema.validate(json.loads(end.text), SCHEMA)
    assert beside.generated_ids == run(make_engine(), [free])[0].generated_ids
