"""Answers of a scripted model whose answers have a chosen form."""

import dataclasses
from typing import Any

from stoker_shared import build_request
from stoker_worker.engine.scripted import END, ScriptedProvider
from stoker_worker.pipeline.answer import Answer, read_answer
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.ports import AnswerFormat, CompletedGeneration

SCRIPTED = ScriptedProvider(max_batch=1, steps_per_s=1e9).load()[1]


def answer_to(
    text: str,
    form: AnswerFormat,
    *,
    ended_by: Any = "eos",
    opened: str = "",
    ids: tuple[int, ...] | None = None,
    id_seed: str = "seed",
    prompt: Prompt | None = None,
    **fields: Any,
) -> Answer:
    """The answer in `text`, generated for a request with `fields`."""
    request = build_request({"messages": [{"role": "user", "content": "?"}], **fields})
    generated = (*text.encode(), *([END] if ended_by == "eos" else [])) if ids is None else ids
    done = CompletedGeneration(0, "finished", generated, text, ended_by, len(generated))
    model = dataclasses.replace(SCRIPTED, answer_format=form)
    first = "reasoning" if opened else form.first_state
    markers = form.markers(first, with_calls=bool(request.offered_tools), is_call=request.must_call)
    asked = dataclasses.replace(prompt or Prompt((), None, None, opened=opened), markers=markers)
    return read_answer(request, asked, done, model, id_seed)
