"""Every tool format of mlx-lm: what `stoker serve` sends of an answer, piece by piece, is the answer."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.producer.played_worker import result_fields
from tests.worker.models.tool_formats import CALLS, TOOL, call_text, format_of, wrapper
from tests.worker.pipeline.answers import answer_to

from stoker.api.deltas import Delta, Deltas
from stoker.streaming import TextChunk
from stoker_shared.result import GenerationResult
from stoker_worker.models.answer_formats import answer_format
from stoker_worker.ports import AnswerFormat

pytestmark = pytest.mark.mlx

KIMI = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
FORMS = [*CALLS, "kimi_k3 with its own markers"]


@pytest.fixture(params=FORMS, scope="module")
def form(request: pytest.FixtureRequest) -> AnswerFormat:
    return format_of(request.param) if request.param in CALLS else answer_format(wrapper("kimi_k3", KIMI))


def texts(form: AnswerFormat) -> list[str]:
    call, odd = call_text(form), f"{form.tool_start}odd{form.tool_end}"
    if form.first_state == "header":
        said = "<|eom|><|start|>assistant to=user<|message|> I look. <|eom|><|start|>assistant to=weather<|message|>"
        return [f"to=self<|message|> Hm. {said}{inside}" for inside in (call, odd, f"{call}\n{call} Done. ", "Done")]
    start, end = (
        next(edge.marker for edge in form.edges if (edge.state, edge.to) == way)
        for way in (("normal", "reasoning"), ("reasoning", "normal"))
    )
    return [
        f"{start}\nHm.\n{end}\n\nI look.\n{call}",
        f"\n{start} Hm. {odd}{end}{start}And. {end} I look. {call} Done.\n",
        f"{start}Hm.\n\nI look. {call} Done.",
        f"{start}Hm. {odd} I look. {start[:-1]}",
        f" I <look. {end} {odd} Done.\n",
        f" I look. {call}{call}",
        " I look at < and <| and [. ",
        f"{start}{end}\n",
        "",
    ]


def pieces(text: str) -> Iterator[list[str]]:
    """The text by characters, and in random pieces."""
    yield list(text)
    for seed in range(5):
        draw, cuts = random.Random(seed), [0]
        while cuts[-1] < len(text):
            cuts.append(min(len(text), cuts[-1] + draw.randint(1, 12)))
        yield [text[begin:end] for begin, end in pairwise(cuts)]


def joined(deltas: list[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


@pytest.mark.parametrize("tools", [[TOOL], None], ids=["tools", "no tools"])
@pytest.mark.parametrize("opened", ["<think>\n", ""], ids=["opened", ""])
def test_the_deltas_of_an_answer_are_the_answer(form: AnswerFormat, opened: str, tools: list[object] | None) -> None:
    markers = form.markers("reasoning" if opened else form.first_state, with_calls=bool(tools))
    for text in texts(form):
        answer = answer_to(text, form, opened=opened, tools=tools).choice
        result = GenerationResult.model_validate({**result_fields("j"), **dict(answer)})
        for parts in pieces(text):
            deltas = Deltas(is_raw=False)
            live = [delta for part in parts for delta in deltas.add(TextChunk(part, markers))]
            rest = deltas.rest(result)
            assert joined([*live, *rest], "reasoning") == (answer.reasoning or ""), text
            content = answer.content if answer.content.strip() or not answer.tool_calls else ""
            assert joined([*live, *rest], "text") == content, text
            calls = [delta.call.id for delta in rest if delta.call is not None]
            assert calls == [call.id for call in answer.tool_calls or ()]


def test_thinking_and_the_text_before_a_call_are_sent_before_the_end(form: AnswerFormat) -> None:
    text, deltas = texts(form)[0], Deltas(is_raw=False)
    markers = form.markers(form.first_state, with_calls=True)
    live = [delta for letter in text for delta in deltas.add(TextChunk(letter, markers))]
    assert (joined(live, "reasoning"), joined(live, "text")) == ("Hm.", "I look.")
