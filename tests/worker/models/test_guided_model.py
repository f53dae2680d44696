"""Guides on the real model, in the engine: what it answers is valid, whatever it would rather say."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tests.worker.engine.layouts import run

from stoker_shared import build_request
from stoker_worker.ports import GenerationWork
from stoker_worker.ports.model import Batching, ServingMode

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def test_answers_are_valid_beside_rows_that_are_free(smollm2):
    from stoker_worker.engine.batch_engine import assemble
    from stoker_worker.models.loading import load_model

    network, loaded = load_model(str(smollm2), "float32")
    loaded = replace(loaded, mode=ServingMode(Batching.ROWS))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields: list[dict[str, Any]] = [
        {"response_format": form, "max_tokens": 60},
        {"response_format": form, "max_tokens": 60, "temperature": 1.5, "seed": 3, "logprobs": True},
        {"max_tokens": 12},
    ]

    def work(**more):
        request = build_request({"prompt": "Once upon a time", **more})
        ids = tuple(loaded.tokenizer.encode("Once upon a time", special_start=True))
        return GenerationWork(request, ids, is_saved=False, guide=loaded.guides.guide_for(request, ids))

    def engine():
        return assemble(network, loaded, max_bytes=1 << 30, max_batch=4, prefill_tokens=64, max_step_s=10.0)

    greedy, drawn, free = run(engine(), [work(**one) for one in fields])
    for end in (greedy, drawn):
        assert end.ended_by == "eos"
        jsonschema.validate(json.loads(end.text), SCHEMA)
    (alone,) = run(engine(), [work(**fields[2])])
    assert free.generated_ids == alone.generated_ids
