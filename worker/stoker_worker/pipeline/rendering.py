"""A conversation as the chat template writes it, and the part of it that follows an agent's stored text. Pure; loader
thread."""

from collections.abc import Sequence

from stoker_shared.errors import TemplateError
from stoker_shared.message import Message
from stoker_shared.request import GenerationRequest
from stoker_worker.ports import TokenizerPort
from stoker_worker.ports.own_message import OwnMessage


class Rendering:
    """For one job: with its tools and its template's arguments. Texts are in the tokenizer's escaped form."""

    def __init__(self, request: GenerationRequest, tokenizer: TokenizerPort) -> None:
        self._tools = request.offered_tools or None
        self._template_kwargs = request.chat_template_kwargs
        self._tokenizer = tokenizer

    def text(self, conversation: Sequence[Message], *, is_to_be_answered: bool = True) -> str:
        """Raises `TemplateError`."""
        return self._tokenizer.render(
            conversation,
            add_generation_prompt=is_to_be_answered,
            tools=self._tools,
            template_kwargs=self._template_kwargs,
        )

    def rest(self, rendered: str, whole: tuple[Message, ...], n_new: int, *, after: str) -> str | None:
        """What follows `after`, the plain text of all but the last `n_new` messages, in `rendered`, the text of the
        conversation `whole`; ``None``: the template has rewritten that text."""
        rest = self._tokenizer.rest_of(rendered, after=after)
        return self._rest_as_generated(rendered, whole, n_new, after) if rest is None else rest

    def _rest_as_generated(self, rendered: str, whole: tuple[Message, ...], n_new: int, after: str) -> str | None:
        """For a template that writes calls and thinking in another notation than the model did.

        With the answers as the model generated them, the conversation so far has to begin with the stored text and to
        end alike, and the new messages have to add the same: some templates write a tool's result only if its call is
        in the parts.
        """
        if not any(isinstance(message, OwnMessage) for message in whole):
            return None
        generated = tuple(m.as_generated() if isinstance(m, OwnMessage) else m for m in whole)
        try:
            before, generated_before = (
                self.text(form[:-n_new], is_to_be_answered=False) for form in (whole, generated)
            )
            generated_whole = self.text(generated)
        except TemplateError:  # a tool message after an answer without calls, for example
            return None
        end = self._tokenizer.rest_of(generated_before, after=after)
        added = rendered.removeprefix(before)
        is_alike = rendered == before + added and generated_whole == generated_before + added
        return end + added if end is not None and is_alike and before.endswith(end) else None
