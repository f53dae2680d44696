"""The order of an answer: its thinking, within its limit, then what the grammar allows."""

import numpy as np
import pytest
from tests.worker.models.small_tokenizers import byte_level

from stoker_shared import build_request
from stoker_worker.models.guides import GrammarGuides
from stoker_worker.ports.model import AnswerFormat


@pytest.fixture(scope="module")
def wrapper():
    return byte_level()


@pytest.fixture(params=["one token", "several tokens"], scope="module")
def model(request, wrapper):
    return Model(wrapper, *(("<think>", "</think>") if request.param == "one token" else ("((t", "t))")))


class Model:
    def __init__(self, wrapper, start, end):
        self.wrapper, self.ids = wrapper, lambda text: wrapper._tokenizer.encode(text, False)
        self.start, self.end, self.eos = self.ids(start), self.ids(end), min(wrapper.eos_token_ids)
        form = AnswerFormat(think_start_ids=tuple(self.start), think_end_ids=tuple(self.end))
        self.maker = GrammarGuides(wrapper, form)

    def guide(self, prompt=(), **fields):
        return self.maker.guide_for(build_request({"prompt": "x", **fields}), prompt)


def allowed(mask):
    return None if mask is None else set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def feed(guide, tokens):
    """What is allowed at each place: before the first of `tokens`, and after each."""
    return [allowed(guide.after(None)), *(allowed(guide.after(token)) for token in tokens)]


def test_a_grammar_begins_after_the_thinking_that_the_template_opens(model):
    guide = model.guide([5, *model.start], guide={"regex": "ab"})
    *thinking, after = feed(guide, [*model.ids("b"), *model.end])
    a, b = model.ids("ab")
    for at in thinking:
        assert {a, b, *model.end} <= at
        assert model.eos not in at
    assert after == {a}
    assert allowed(guide.after(a)) == {b}
    assert allowed(guide.after(b)) == {model.eos}


def test_a_model_may_think_before_a_grammar_once_or_not_at_all(model):
    a, b = model.ids("ab")
    guide = model.guide(guide={"regex": "ab"})
    assert feed(guide, [a]) == [{a, model.start[0]}, {b}]
    guide.start(())
    seen = feed(guide, [*model.start, b, *model.end])
    assert seen[1 : len(model.start)] == [{token} for token in model.start[1:]]
    assert seen[-1] == {a}


@pytest.mark.parametrize("most", [0, 1, 4])
@pytest.mark.parametrize("has_grammar", [False, True])
def test_thinking_ends_after_its_most_tokens(model, most, has_grammar):
    a, b = model.ids("ab")
    fields = {"guide": {"regex": "ab"}} if has_grammar else {}
    for prompt, opening in (([5, *model.start], []), ((), model.start)):
        guide = model.guide(prompt, max_reasoning_tokens=most, **fields)
        seen = feed(guide, [*opening, *most * [b], *model.end])[len(opening) :]
        assert all(at is None or len(at) > 1 for at in seen[:most])
        assert seen[most:-1] == [{token} for token in model.end]
        assert seen[-1] == ({a} if has_grammar else None)


def test_an_end_marker_that_has_begun_counts_and_is_finished(model):
    if len(model.end) == 1:
        pytest.skip("it cannot have begun")
    (b,) = model.ids("b")
    guide = model.guide([5, *model.start], max_reasoning_tokens=3)
    seen = feed(guide, [b, b, model.end[0]])
    assert seen == [None, None, None, {model.end[1]}]


def test_thinking_that_begins_again_has_what_is_left(model):
    (b,) = model.ids("b")
    guide = model.guide(max_reasoning_tokens=3)
    feed(guide, [b, *model.start, b, b, *model.end, b, *model.start])
    assert allowed(guide.after(b)) == {model.end[0]}


def test_every_place_of_an_answer_can_be_gone_to(model):
    a, b = model.ids("ab")
    guide = model.guide(guide={"regex": "ab"}, max_reasoning_tokens=2)
    tokens = [*model.start, b, b, *model.end, a, b, model.eos]
    seen = feed(guide, tokens)
    fork = guide.fork()
    for n in range(len(tokens) + 1):
        for one in (guide, fork):
            one.start(tokens[:n])
            assert allowed(one.after(None)) == seen[n]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("end", ["</tool_call>", "]]"], ids=["one token", "several tokens"])
def test_an_answer_with_at_most_one_call_ends_with_the_first(model, opened, end):
    form = AnswerFormat(
        think_start_ids=tuple(model.start),
        think_end_ids=tuple(model.end),
        tool_end=end,
        tool_start_ids=tuple(model.ids("<tool_call>")),
    )
    maker = GrammarGuides(model.wrapper, form)
    tools = {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "f"}]}
    prompt = model.start if opened else ()
    one = maker.guide_for(build_request({**tools, "parallel_tool_calls": False}), prompt)
    called = [*model.ids("<tool_call>{}"), *model.ids(end)]
    thought = [*called, *model.end]  # a call in thinking is a thought
    tokens = [*(thought if opened else model.ids("a")), *called]
    for guide in (one, one.fork()):
        for _ in range(2):
            *before, after = feed(guide, tokens)
            assert all(at is None for at in before)
            assert after == {model.eos}
            guide.start(())
    for free in ({}, {"parallel_tool_calls": False, "tool_choice": "none"}):
        assert maker.guide_for(build_request({**tools, **free}), prompt) is None


def test_thinking_is_free_for_a_request_without_grammar_or_limit(model):
    assert model.guide([5, *model.start]) is None
