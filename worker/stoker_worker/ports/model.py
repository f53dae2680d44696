"""The model's interface: its tokenizer, its identity, and the provider that loads it. No I/O, no MLX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stoker_shared.message import Message
from stoker_worker.ports.answer_format import PLAIN_TEXT, AnswerFormat
from stoker_worker.ports.cache_spec import ModelCacheSpec
from stoker_worker.ports.engine import GenerationEnginePort, RoomMaker
from stoker_worker.ports.guide import GuideMaker
from stoker_worker.ports.max_batch import ONE_JOB, MaxBatch
from stoker_worker.ports.serving_mode import WIDEST, ServingMode


@runtime_checkable
class TokenizerPort(Protocol):
    """Text to token ids and back, and the chat template. Not thread-safe: each thread uses its own `fork()`."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text in one token: a text of more than `context * max_token_bytes` bytes cannot fit."""
        ...

    def fork(self) -> "TokenizerPort": ...
    def encode(self, text: str, *, special_start: bool) -> list[int]:
        """Token ids of `text`. Control tokens written in it count as control tokens.

        `special_start` adds the tokenizer's own beginning of a text (BOS), unless the text has it already.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of `token_ids`, control tokens included, nothing tidied."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The conversation as the model's template writes it, for `encode_rendered` and for comparisons.

        Text that looks like a control token is escaped in every message but the model's own. Equal messages have equal
        escapes.

        Raises:
            TemplateError: there is no template, or it refused the messages.
        """
        ...

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        """The part of `rendered` after the plain text `after`; ``None`` when it does not begin with it."""
        ...

    def encode_rendered(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation, or of its end.

        Control tokens that the template or the model wrote are control tokens; the same characters inside a system,
        user or tool message are plain text, so no message can forge a turn.

        Raises:
            TemplateError: this tokenizer cannot write them as plain text.
        """
        ...


@dataclass(frozen=True)
class LoadedModel:
    """The model in the engine, as the rest of the worker sees it.

    Attributes:
        name: as given with ``--model`` (or the folder's name), and ``+`` the adapter's folder if there is one;
            `request.model` must equal it, if given.
        fingerprint: hex digest over weights, config, adapter, tokenizer, chat template, cache layout and dtype. Cache
            bytes of another fingerprint, and so those made in another mode, are never loaded.
        tokenizer_fingerprint: hex digest over tokenizer and chat template. Token ids of another one mean nothing.
        context_tokens: most tokens (prompt + generated) that the model can attend to.
        mode: how its sequences run, and whether its caches may be kept.
        max_batch: how many of its jobs are in flight at once.
        make_room: makes the memory that a prefix is restored into; ``None``: the engine takes NumPy arrays.
        answer_format: how its answers tell thinking, tool calls and text apart.
        guides: makes guides for its answers; ``None``: its answers follow no grammar.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    context_tokens: int
    spec: ModelCacheSpec
    tokenizer: TokenizerPort
    mode: ServingMode = WIDEST
    max_batch: MaxBatch = ONE_JOB
    make_room: RoomMaker | None = None
    answer_format: AnswerFormat = PLAIN_TEXT
    guides: GuideMaker | None = None

    @property
    def has_memory(self) -> bool:
        """Whether caches of this model are saved and restored."""
        return self.mode.memory and self.spec.can_be_stored


class ModelProviderPort(Protocol):
    """Makes the engine. Called on the engine thread, which then owns everything MLX."""

    def load(self) -> tuple["GenerationEnginePort", LoadedModel]:
        """Load the model.

        Raises:
            ModelNotLoadable: the model is not there, or cannot be served.
        """
        ...

    def leave_thread(self) -> None:
        """The last call on the engine thread, also after a failed `load`: release everything that belongs to it."""
        ...
