"""The seam of the model: its tokenizer, what the worker knows of it, and who loads it. No I/O, no MLX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stoker_shared.request import Message
from stoker_worker.cache_spec import ModelCacheSpec
from stoker_worker.ports.engine import GenerationEnginePort
from stoker_worker.serving_mode import WIDEST, ServingMode


@runtime_checkable
class TextCodec(Protocol):
    """Text to token ids and back, and the chat template. Not thread-safe: each thread uses its own `fork()`."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: no text of more than `context * max_token_bytes` bytes can fit."""
        ...

    def fork(self) -> "TextCodec": ...
    def encode(self, text: str, *, special_start: bool) -> list[int]:
        """Token ids of `text`. Control tokens written in it count as control tokens.

        `special_start` adds what the tokenizer puts before a text (BOS), unless the text begins with it already.
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
        """The conversation as the model's template writes it, for `encode_rendered` and for comparing.

        What looks like a control token in a message that is not the model's own is written in an escaped form; equal
        messages have equal escapes.

        Raises:
            TemplateError: there is no template, or it refused the messages.
        """
        ...

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        """What of `rendered` follows the plain text `after`; ``None`` when it does not begin with it."""
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
    """What the rest of the worker knows of the model in the engine.

    Attributes:
        name: as given with ``--model`` (or the folder's name); `request.model` must equal it, if given.
        fingerprint: hex digest over weights, config, tokenizer, chat template, cache layout and dtype. Cache bytes of
            another fingerprint, and so those made in another mode, are never loaded.
        tokenizer_fingerprint: hex digest over tokenizer and chat template: token ids of another one mean nothing.
        context_tokens: the most tokens (prompt + generated) the model can attend to.
        mode: how its rows run, and whether its caches may be kept.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    context_tokens: int
    spec: ModelCacheSpec
    codec: TextCodec
    mode: ServingMode = WIDEST

    @property
    def has_memory(self) -> bool:
        """Whether caches of this model are saved and restored."""
        return self.mode.memory and self.spec.can_be_stored


class ModelProviderPort(Protocol):
    """Makes the engine. Called on the engine thread, which then owns everything MLX."""

    def load(self) -> tuple["GenerationEnginePort", LoadedModel]:
        """Load the model.

        Raises:
            ModelNotLoadable: it is not there, or cannot be served.
        """
        ...

    def leave_thread(self) -> None:
        """The last call on the engine thread, also after a failed `load`: let go of what belongs to the thread."""
        ...
