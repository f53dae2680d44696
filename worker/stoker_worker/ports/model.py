"""The model's interface: its tokenizer, its identity, how it is served, and the provider that loads it. No I/O, no MLX.

mlx-lm's batches are not right for every architecture. The proof (`engine/proof.py`) finds the widest mode that is.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from stoker_shared.answer_parts import Edge, Markers, State
from stoker_shared.errors import InvalidRequest
from stoker_shared.message import Message
from stoker_shared.request import WORKERS_DEFAULTS, GenerationRequest, build_request
from stoker_worker.ports.cache_spec import ModelCacheSpec
from stoker_worker.ports.engine import GenerationEnginePort, GuideMaker, PrefixRoom, RoomType


@dataclass(frozen=True)
class RequestDefaults:
    """The worker's defaults: a value for each request field that has one."""

    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parsed(cls, text: str) -> "RequestDefaults":
        """The defaults in ``KEY=VALUE,KEY=VALUE``; none in an empty text.

        Raises:
            ValueError: a part has another form, or its key is unknown, occurs twice, or does not accept its value.
        """
        fields: dict[str, Any] = {}
        for pair in filter(None, map(str.strip, text.split(","))):
            name, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or name in fields:
                raise ValueError(f"expected KEY=VALUE, each key once, not {pair!r}")
            if name not in WORKERS_DEFAULTS:
                raise ValueError(f"{name!r} has no default here, only {', '.join(sorted(WORKERS_DEFAULTS))}")
            fields[name] = _number(name, value)
        if fields.get("max_tokens") == 0:
            raise ValueError("max_tokens 0 generates nothing: it is no default")
        try:
            build_request({"prompt": "any", **fields})
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return cls(fields)

    def filled_in(self, request: GenerationRequest) -> GenerationRequest:
        """The request with these values in the fields that it leaves out or sets to ``null``.

        Raises:
            InvalidRequest: the request's `min_tokens` is above the default of `max_tokens`.
        """
        unset = {
            name: value
            for name, value in self.fields.items()
            if name not in request.model_fields_set or getattr(request, name) is None
        }
        if request.min_tokens > unset.get("max_tokens", request.max_tokens):
            raise InvalidRequest(
                f"'min_tokens' is above this worker's default of 'max_tokens', {unset['max_tokens']}: set both"
            )
        return request.model_copy(update=unset) if unset else request


NO_DEFAULTS: Final = RequestDefaults()


def _number(name: str, text: str) -> Any:
    """A JSON number, whole or not (the request's validation tells them apart). Raises `ValueError` for other text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if type(value) not in (int, float):
        raise ValueError(f"{name} needs a number, not {text!r}")
    return value


class Batching(StrEnum):
    """How sequences run, widest first."""

    ROWS = "in rows"
    """Sequences decode together, each with a full-attention cache of its own: nothing is padded."""

    BATCHED = "batched"
    """Sequences of unequal length are prefilled and decoded together, in mlx-lm's padded batch."""

    SINGLE_PREFILL = "batched, prefilled one by one"
    """Sequences decode together; each is prefilled alone, for recurrent layers that cannot tell padding from text."""

    ONE_AT_A_TIME = "one at a time"
    """One sequence runs at a time, and its prompt is prefilled in the same chunks as in a batch."""

    AS_MLX_LM = "one at a time, as mlx-lm does it"
    """One sequence runs at a time, and its prompt is cut exactly where `mlx_lm.generate` cuts it: for models whose
    answer depends on the cuts."""


@dataclass(frozen=True)
class ServingMode:
    """How sequences run, whether caches are kept and restored (`memory`), and whether this was tried on the model
    (`proved`; ``False`` after `--skip-proof`)."""

    batching: Batching = Batching.ROWS
    memory: bool = True
    proved: bool = True

    def __str__(self) -> str:
        text = str(self.batching) if self.memory else f"{self.batching}, without memory"
        return text if self.proved else f"{text}, not proved"


WIDEST: Final = ServingMode()
WIDEST_FIRST: Final = (
    *(ServingMode(batching) for batching in Batching if batching != Batching.AS_MLX_LM),
    *(ServingMode(batching, memory=False) for batching in Batching),
)
"""Modes with memory first: a restored history saves an agent more than a wide batch. The last is mlx-lm's own way."""


USUAL_JOBS: Final = 32
"""The default number of jobs at once, if the KV memory holds as many. Metal computes quantised products in tiles of 32
rows: fewer rows cost nearly as much, and one more costs twice as much. On a CPU each further row costs less than the
one before, at least up to this number."""


@dataclass(frozen=True)
class MaxBatch:
    """The most jobs in flight at once, and what decided that number: ``given`` if the operator did."""

    jobs: int
    why: str = "given"


ONE_JOB = MaxBatch(1)


ToolParser = Callable[[str, Sequence[Mapping[str, Any]] | None], Any]
"""From the text between a call's markers, and the request's tools, to a dict with `name` and `arguments`, or a list of
them. It may raise anything and return anything. Any thread."""

_MOST_AFTER_THINK_START: Final = 4
"""Most tokens that a template writes behind the marker: a line break, perhaps a word. A whole turn is longer."""


@dataclass(frozen=True)
class AnswerFormat:
    """The form of a model's answers.

    Attributes:
        think_start_ids, think_end_ids: the token ids of the markers around thinking; empty for a model that has none.
        tool_start: the marker before a call; ``None`` for a model without a tool parser.
        tool_end: the marker after it; ``""``: calls last to the end of the answer.
        tool_start_ids: the token ids of `tool_start`.
        tool_parser: the name of mlx-lm's parser, such as ``qwen3_coder``; `parse_call` is that parser.
        edges: which markers lead from which state to which, as in mlx-lm's state machine.
        first_state: the state in which an answer begins, unless its prompt opens the thinking.
    """

    think_start_ids: tuple[int, ...] = ()
    think_end_ids: tuple[int, ...] = ()
    tool_start: str | None = None
    tool_end: str | None = None
    tool_start_ids: tuple[int, ...] = ()
    tool_parser: str | None = None
    parse_call: ToolParser | None = None
    edges: tuple[Edge, ...] = ()
    first_state: State = "normal"

    def markers(self, first: State, *, with_calls: bool, is_call: bool = False) -> Markers:
        """The markers of an answer that begins in the state `first`.

        Args:
            with_calls: whether tools are offered.
            is_call: whether one of them must be called.
        """
        takes_calls = with_calls and self.parse_call is not None and not is_call
        edges = (edge for edge in self.edges if edge.state != "tool" and (takes_calls or edge.to != "tool"))
        return Markers(first=first, edges=tuple(edges), is_call=is_call)

    def opening(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The end of the prompt, from the marker on with which the template opens the thinking; empty if it does not.

        Thinking that `max_tokens` cut off in an earlier answer does not count.
        """
        if not self.think_start_ids:
            return ()
        tail = tuple(prompt_ids[-len(self.think_start_ids) - _MOST_AFTER_THINK_START :])
        opened, closed = last_place(tail, self.think_start_ids), last_place(tail, self.think_end_ids)
        return tail[opened:] if opened > closed else ()

    def state_after(self, prompt_ids: Sequence[int]) -> State:
        """The state in which the answer to a prompt begins."""
        return "reasoning" if self.opening(prompt_ids) else self.first_state


PLAIN_TEXT: Final = AnswerFormat()
"""The format of a model without thinking and tool parser."""


def last_place(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """The last index at which `wanted` begins in `ids`; -1 if it is not there."""
    places = range(len(ids) - len(wanted), -1, -1)
    return next((at for at in places if tuple(ids[at : at + len(wanted)]) == tuple(wanted)), -1)


class TokenizerPort(Protocol):
    """Text to token ids and back, and the chat template. Not thread-safe: each thread uses its own `fork()`."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text in one token: a longer text than `context * max_token_bytes` bytes cannot fit."""
        ...

    def fork(self) -> "TokenizerPort": ...
    def encode(self, text: str, *, special_start: bool) -> list[int]:
        """Token ids of `text`. Control tokens written in it count as control tokens. `special_start` adds the
        tokenizer's own beginning of a text (BOS), unless the text has it already."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of `token_ids`, with control tokens and without any tidying."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The conversation as the model's template writes it, for `encode_rendered` and for comparisons. Text that
        looks like a control token is escaped in every message but the model's own, always in the same way.

        Raises:
            TemplateError: there is no template, it refused the messages, or `template_kwargs` has a reserved name.
        """
        ...

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        """The part of `rendered` after the plain text `after`; ``None`` if it begins otherwise or cannot be cut so."""
        ...

    def encode_rendered(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation, or of its end. Control tokens that the template or the model wrote are
        control tokens; the same characters in other messages are plain text, so no message can forge a turn.

        Raises:
            TemplateError: this tokenizer cannot write them as plain text.
        """
        ...


@dataclass(frozen=True)
class LoadedModel:
    """The model in the engine, as the rest of the worker sees it.

    Attributes:
        name: as given with ``--model`` (or the folder's name), and ``+`` the adapter's folder if there is one.
            `request.model` must equal it, if given.
        fingerprint: hex digest of weights, config, adapter, tokenizer, chat template, cache layout, dtype and mode.
            Cache bytes of another fingerprint are never loaded.
        tokenizer_fingerprint: hex digest of tokenizer and chat template. Token ids of another one mean nothing.
        context_tokens: most tokens, prompt and answer, that the model can attend to.
        vocabulary: the number of token ids that the model has logits for.
        kv_tokens: most tokens of one sequence that the engine has memory for; ``None``: the whole context.
        max_batch: most of its jobs in flight at once.
        room_type: makes engine memory for restored prefixes; ``None``: the engine takes NumPy arrays.
        answer_format: how thinking, tool calls and text are marked in its answers.
        guides: makes guides for its answers; ``None``: no answer can be guided.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    context_tokens: int
    spec: ModelCacheSpec
    tokenizer: TokenizerPort
    mode: ServingMode = WIDEST
    max_batch: MaxBatch = ONE_JOB
    room_type: RoomType | None = None
    vocabulary: int = 2**31
    kv_tokens: int | None = None
    answer_format: AnswerFormat = PLAIN_TEXT
    guides: GuideMaker | None = None

    @property
    def has_memory(self) -> bool:
        """True if caches of this model are saved and restored."""
        return self.mode.memory and self.spec.can_be_stored

    def make_room(self, n_tokens: int, n_left: int) -> PrefixRoom | None:
        """Engine memory for a prompt of `n_tokens` and an answer of at most `n_left`; ``None``: it takes arrays."""
        return None if self.room_type is None else self.room_type(self.spec, n_tokens, n_left)


class ModelProviderPort(Protocol):
    """Makes the engine. Called on the engine thread, which alone runs the model."""

    def load(self) -> tuple["GenerationEnginePort", LoadedModel]:
        """Load the model. Raises `ModelNotLoadable` if it is not there or cannot be served."""
        ...

    def leave_thread(self) -> None:
        """Release everything that belongs to the engine thread: the last call on it, also after a failed `load`."""
        ...
