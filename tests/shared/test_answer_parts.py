"""What is certain of an answer while it is generated, with random markers that overlap one another."""

import random
from typing import Any, get_args

import pytest

from stoker_shared.answer_parts import Cutter, Edge, Markers, State, cut

THINK = Markers(
    edges=(
        Edge("normal", "<think>", "reasoning"),
        Edge("reasoning", "</think>", "normal"),
        Edge("normal", "<call>", "tool"),
        Edge("reasoning", "<call>", "tool"),
    )
)


def drawn(draw: random.Random, states: Any, longest: int) -> Edge:
    marker = "".join(draw.choices("ab", k=draw.randint(1, longest)))
    return Edge(draw.choice([state for state in states if state != "tool"]), marker, draw.choice(states))


def test_what_is_certain_of_a_text_is_the_beginning_of_every_answer_that_goes_on_from_it() -> None:
    states, found = get_args(State), 0
    for seed in range(3000):
        draw = random.Random(seed)
        edges = tuple(drawn(draw, states, longest=4) for _ in range(draw.randint(0, 6)))
        first = draw.choice([state for state in states if state != "tool"])
        markers = Markers(first=first, edges=edges, is_call=draw.random() < 0.2)
        text = "".join(draw.choices("ab \n", weights=[4, 4, 1, 1], k=draw.randint(0, 25)))
        tool_end = draw.choice(["", "b", "aba"])
        whole = cut(text, markers, lambda said, _: "odd" if len(said) % 2 else None, tool_end)
        content = text if whole.said == text else whole.content
        cutter = Cutter(markers)
        for end in range(len(text) + 1):
            certain = cutter.cut_so_far(text[:end])
            assert certain == Cutter(markers).cut_so_far(text[:end]), (seed, end)
            assert content.startswith(certain.content), (seed, end)
            assert whole.reasoning.startswith(certain.reasoning), (seed, end)
            found += bool(certain.content) + bool(certain.reasoning)
    assert found > 10_000


def test_only_what_may_be_a_marker_and_space_that_may_go_are_held_back() -> None:
    for text, reasoning, content in (
        ("Yes <", "", "Yes"),
        ("Yes <thin ", "", "Yes <thin"),
        ("  Yes", "", "  Yes"),
        ("  <think>Hm", "Hm", ""),
        ("<think>\nHm </thin", "Hm", ""),
        ("<think>\nHm </think>", "Hm", ""),
        ("<think>\nHm </think>\n\nYes", "Hm", "Yes"),
        ("<think>Hm. Per <call>haps ", "Hm. Per", ""),
        ("<think>Hm. Per <call>haps</think>", "Hm. Per <call>haps", ""),
        ("I look. <call>{}</call> Ok", "", "I look."),
    ):
        certain = Cutter(THINK).cut_so_far(text)
        assert (certain.reasoning, certain.content) == (reasoning, content), text


@pytest.mark.parametrize(
    ("first", "before", "reasoning"),
    [("normal", "", ""), ("normal", " <think>Hm</think>\n", "Hm"), ("reasoning", "Hm</think>", "Hm")],
)
def test_of_an_answer_that_is_one_call_only_the_thinking_is_certain(first: str, before: str, reasoning: str) -> None:
    thinking = [edge for edge in THINK.edges if edge.to != "tool"]
    markers = Markers.model_validate({"first": first, "edges": thinking, "is_call": True})
    call = '{"name": "f", "arguments": {"x": "<think>"}}'
    for end in range(len(before), len(before + call) + 1):
        certain = Cutter(markers).cut_so_far((before + call)[:end])
        assert (certain.reasoning, certain.content) == (reasoning, "")
    read: list[str] = []
    whole = cut(before + call, markers, lambda said, _: read.append(said.strip()), None)
    assert (whole.reasoning, whole.content, read) == (reasoning, "", [call])
