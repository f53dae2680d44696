"""Reads the form of a model's answers from mlx-lm's tokenizer wrapper, and adds what that lacks: gpt-oss's channels,
and the ids in Mistral's calls. Pure; imports neither MLX nor transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import regex

from stoker_shared.answer_parts import Edge
from stoker_worker.ports.model import AnswerFormat, ToolParser

_MOST_S: Final = 5.0
"""CPU time of the whole process, as `regex` counts it, for one search. A call of 100 kB takes some milliseconds."""


def with_time_limit(parser: ToolParser | None, most_s: float = _MOST_S) -> ToolParser | None:
    """The parser. From now on, searches of the patterns in its module raise `TimeoutError` after `most_s`."""
    names = getattr(parser, "__globals__", {})
    for name, value in [*names.items()]:
        if isinstance(value, regex.Pattern):
            names[name] = _LimitedPattern(value, most_s)
    return parser


class _LimitedPattern:
    """Replaces a `regex.Pattern`, and has those of its methods that take a timeout."""

    def __init__(self, pattern: Any, most_s: float) -> None:
        self._pattern = pattern
        self._most_s = most_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(self._pattern, name), timeout=self._most_s)


_CALL_ID: Final = regex.compile(r"\[CALL_ID\]([\w-]+)(?=\[ARGS\])")


def with_call_ids(parser: ToolParser) -> ToolParser:
    """The parser of Mistral's calls, also for ``name[CALL_ID]id[ARGS]{...}``: mlx-lm's takes the id there for the name.
    The model's own id is kept, because the tool's result refers to it."""

    def parse(text: str, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        ids = _CALL_ID.findall(text)
        parsed = parser(_CALL_ID.sub("", text), tools)
        if not ids:
            return parsed
        calls = parsed if isinstance(parsed, list) else [parsed]
        return [{**call, "id": own} for call, own in zip(calls, ids, strict=True)]

    return parse


_CHANNELS: Final = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"})
"""The tokens of gpt-oss's channels. mlx-lm does not know them, and the model's template refuses an answer with them."""

_THINKING: Final = ("<|channel|>analysis<|message|>", "<|end|>")
_MARKUP: Final = ("<|end|>", "<|start|>assistant", "<|channel|>commentary<|message|>", "<|channel|>final<|message|>")


def answer_format(wrapper: Any) -> AnswerFormat:
    """`wrapper` is mlx-lm's `TokenizerWrapper`."""
    name = wrapper._tokenizer.init_kwargs.get("tool_parser_type") if wrapper.has_tool_calling else None
    parser = with_time_limit(wrapper.tool_parser)
    form = AnswerFormat(
        think_start_ids=tuple(wrapper.think_start_tokens or ()),
        think_end_ids=tuple(wrapper.think_end_tokens or ()),
        tool_start=wrapper.tool_call_start,
        tool_end=wrapper.tool_call_end,
        tool_start_ids=tuple(wrapper.tool_call_start_tokens or ()),
        tool_parser=name,
        parse_call=with_call_ids(parser) if parser is not None and name == "mistral" else parser,
        edges=tuple(_edges(wrapper)),
        first_state=wrapper.response_initial_state or "normal",
    )
    knows_its_parts = wrapper.has_thinking or wrapper.response_transitions
    return form if knows_its_parts else _with_channels(form, wrapper._tokenizer)


def _with_channels(form: AnswerFormat, tokenizer: Any) -> AnswerFormat:
    """The format with the channels of gpt-oss, if `tokenizer` has them."""
    if not {token.content for token in tokenizer.added_tokens_decoder.values()} >= _CHANNELS:
        return form
    start, end = _THINKING
    edges = [*form.edges, Edge("normal", start, "reasoning"), Edge("reasoning", end, "normal")]
    return replace(
        form,
        think_start_ids=tuple(tokenizer.encode(start, add_special_tokens=False)),
        think_end_ids=tuple(tokenizer.encode(end, add_special_tokens=False)),
        edges=(*edges, *(Edge("normal", marker, "normal") for marker in _MARKUP)),
    )


def _edges(wrapper: Any) -> list[Edge]:
    """The edges of `mlx_lm.generate.make_text_state_machine`, which drops the markers from the text that it splits."""
    given = [Edge(state, marker, to) for state, pairs in wrapper.response_transitions.items() for marker, to in pairs]
    edges: list[Edge] = []
    if wrapper.has_thinking:
        edges += [Edge("normal", wrapper.think_start, "reasoning"), Edge("reasoning", wrapper.think_end, "normal")]
    if wrapper.has_tool_calling:
        if not any(edge.to == "tool" for edge in given):
            edges.append(Edge("normal", wrapper.tool_call_start, "tool"))
        if wrapper.has_thinking:
            edges.append(Edge("reasoning", wrapper.tool_call_start, "tool"))
        if wrapper.tool_call_end:
            edges.append(Edge("tool", wrapper.tool_call_end, "normal"))
    edges += [Edge("normal", marker, "normal") for marker in wrapper.structural_markers]
    return edges + given
