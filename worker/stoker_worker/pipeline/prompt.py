"""Turns requests and transcripts into the model's tokens, and answers into transcripts. Pure; loader, finishers.

`full`: the request is the whole conversation. `append`: it continues the stored *token ids*. They are encoded again
only for another tokenizer or if the template rewrites the history, because encode(decode(ids)) is often not ids.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from stoker_shared.answer_parts import Markers
from stoker_shared.errors import (
    AgentNotFound,
    AgentVersionConflict,
    ContextLimitExceeded,
    InvalidRequest,
    RequestTooLarge,
    TemplateError,
    TranscriptMismatch,
)
from stoker_shared.message import Message
from stoker_shared.request import GenerationRequest
from stoker_worker.ports import AgentVersion, CompletedGeneration, LoadedModel, TokenizerPort, Transcript
from stoker_worker.ports.memory import OwnMessage, common_length, continues

_SYSTEM_ROLES: Final = ("system", "developer")
_MOST_SYSTEM_TOKENS: Final = 2**20
"""Limit for all system prompts that are remembered; some 40 MB."""


class Rendering:
    """Renders the conversation of one job, with its tools and arguments of the template. Texts are in the tokenizer's
    escaped form."""

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
        """The part of `rendered` (the text of the conversation `whole`) that follows `after` (the text of all messages
        but the last `n_new`); ``None``: the template has rewritten `after`."""
        rest = self._tokenizer.rest_of(rendered, after=after)
        return self._rest_as_generated(rendered, whole, n_new, after) if rest is None else rest

    def _rest_as_generated(self, rendered: str, whole: tuple[Message, ...], n_new: int, after: str) -> str | None:
        """As `rest`, for a template that writes calls and thinking in another notation than the model did.

        The conversation is rendered once more with the answers as the model generated them. That text has to begin with
        the stored one, both texts have to end alike before the new messages, and these have to add the same to both:
        some templates write a tool's result only if the call is in the message's parts.
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


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model reads for one job.

    Attributes:
        ids: all of them, history included.
        messages: the conversation in `ids`; ``None`` if it is made of raw prompts.
        text: the text in `ids`; ``None`` if it is made of messages.
        rendered_anew: why the history was rendered and encoded again; ``None`` if it was not.
        opened: the text at the end of `ids` with which the template opens the model's thinking; else empty.
        markers: of the answer.
        decoded: the text of all `ids` for a job that wants its prompt back; else empty.
    """

    ids: tuple[int, ...]
    messages: tuple[Message, ...] | None
    text: str | None
    rendered_anew: str | None = None
    opened: str = ""
    markers: Markers = field(default=Markers(), repr=False)
    decoded: str = ""


def build_prompt(
    request: GenerationRequest, transcript: Transcript | None, model: LoadedModel, tokenizer: TokenizerPort
) -> Prompt:
    """
    Args:
        transcript: the agent's, or ``None`` for an unknown agent; only `append` uses it.

    Raises:
        InvalidRequest: it has a token id that the model does not have.
        RequestTooLarge: longer than any text that fits the context.
        TemplateError: the chat template cannot render the messages.
        TranscriptMismatch: `append` of a prompt to messages, or of messages to prompts.
    """
    _check_token_ids(request, model)
    _check_size(request, model, tokenizer)
    history = transcript if request.context == "append" else None
    if request.messages is not None:
        prompt = _messages_prompt(request, request.messages, history, model, tokenizer)
    else:
        prompt = _text_prompt(request, history, model, tokenizer)
    form = model.answer_format
    opening = form.opening(prompt.ids)
    first = form.state_after(prompt.ids)
    markers = form.markers(first, with_calls=bool(request.offered_tools), is_call=request.must_call)
    return replace(
        prompt,
        opened=tokenizer.decode(opening) if opening else "",
        markers=markers,
        decoded=tokenizer.decode(prompt.ids) if request.return_prompt else "",
    )


def fitted(request: GenerationRequest, n_prompt: int, model: LoadedModel) -> GenerationRequest:
    """The request, with a `max_tokens` that fits if it has `fit_max_tokens`.

    Raises:
        ContextLimitExceeded: the prompt of `n_prompt` tokens and the answer do not fit into the model's context; with
            `fit_max_tokens`, not even the shortest answer fits, into the context or into the worker's KV memory.
        InvalidRequest: `prompt_logprobs_start` is not in the prompt.
    """
    if request.prompt_logprobs_start >= n_prompt:
        raise InvalidRequest(
            f"'prompt_logprobs_start' is {request.prompt_logprobs_start}; the prompt has {n_prompt} tokens"
        )
    most, why, wanted = model.context_tokens, "", request.max_tokens
    if request.fit_max_tokens:
        if model.kv_tokens is not None and model.kv_tokens < most:
            most, why = model.kv_tokens, " with this worker's KV memory (--kv-max-bytes)"
        wanted = min(wanted, max(1, request.min_tokens, most - n_prompt))
    if n_prompt + wanted > most:
        raise ContextLimitExceeded(
            f"prompt of {n_prompt} tokens + max_tokens {wanted} = {n_prompt + wanted}; "
            f"the model's context is {most}{why}"
        )
    return request if wanted == request.max_tokens else request.model_copy(update={"max_tokens": wanted})


def reusable_ids(request: GenerationRequest, prompt: Prompt) -> tuple[int, ...]:
    """The part of the prompt that may come from a cache, except for its last token: all of it, or the tokens before the
    first one that is to be scored."""
    return prompt.ids if request.prompt_logprobs is None else prompt.ids[: request.prompt_logprobs_start]


class SystemPrompts:
    """Counts a prompt's tokens of system prompt and tools. Remembers those used last, because agents share them. One
    thread."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._n_ids = 0

    def n_tokens(self, request: GenerationRequest, prompt: Prompt, tokenizer: TokenizerPort) -> int:
        """0 if the prompt has neither, or if the template cannot render them alone."""
        first = tuple(takewhile(lambda message: message.role in _SYSTEM_ROLES, prompt.messages or ()))
        if prompt.messages is None or not (first or request.offered_tools):
            return 0
        opening = (*first, Message(role="user", content=""))
        try:
            rendered = Rendering(request, tokenizer).text(opening, is_to_be_answered=False)
        except TemplateError:
            return 0
        if rendered not in self._ids:
            self._ids[rendered] = tuple(tokenizer.encode_rendered(rendered))
            self._n_ids += len(self._ids[rendered])
        self._ids.move_to_end(rendered)
        while self._n_ids > _MOST_SYSTEM_TOKENS and len(self._ids) > 1:
            self._n_ids -= len(self._ids.popitem(last=False)[1])
        return common_length(self._ids[rendered], prompt.ids)


def check_expectations(request: GenerationRequest, agent: AgentVersion) -> None:
    """Raises `AgentNotFound` if the agent must exist and does not, `AgentVersionConflict` if its version is not the one
    that the job expects."""
    if request.must_exist and not agent.known_number:
        raise AgentNotFound(f"there is no agent {request.agent_id!r}, and the job has 'must_exist'")
    if request.expect_version not in (None, agent.known_number):
        raise AgentVersionConflict(
            f"agent {request.agent_id!r} is at version {agent.known_number}, the job expects {request.expect_version}"
        )


def replaced_version(prompt: Prompt, agent: AgentVersion) -> int | None:
    """The agent's version if a turn with this prompt replaces its conversation; ``None`` if it continues it, in any
    token ids, because the same conversation sent back as text often has others."""
    stored = agent.transcript
    if stored is None or prompt.ids[: len(stored.token_ids)] == stored.token_ids:
        return None
    if prompt.messages is not None and stored.messages is not None:
        goes_on = len(prompt.messages) >= len(stored.messages) and all(
            continues(ours, theirs) for ours, theirs in zip(prompt.messages, stored.messages, strict=False)
        )
    else:
        goes_on = prompt.text is not None and stored.text is not None and prompt.text.startswith(stored.text)
    return None if goes_on else agent.number


def next_transcript(prompt: Prompt, completion: CompletedGeneration, answer: Message, model: LoadedModel) -> Transcript:
    """The transcript after a turn that finished."""
    assert completion.ended_by is not None
    return Transcript(
        token_ids=(*prompt.ids, *completion.generated_ids[: completion.kept]),
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        messages=(*prompt.messages, answer) if prompt.messages is not None else None,
        text=prompt.text + completion.text if prompt.text is not None else None,
        ended_by=completion.ended_by,
        carry_text=completion.carry_text,
    )


def _text_prompt(
    request: GenerationRequest, history: Transcript | None, model: LoadedModel, tokenizer: TokenizerPort
) -> Prompt:
    given = request.prompt_token_ids
    text = tokenizer.decode(given) if given is not None else request.prompt or ""

    def encoded(before: str, *, special_start: bool) -> tuple[int, ...]:
        """Token ids of `before` and `text`; those in the request stay as they are."""
        if given is None:
            return tuple(tokenizer.encode(before + text, special_start=special_start))
        return (*(tokenizer.encode(before, special_start=special_start) if before else ()), *given)

    if history is None:
        return Prompt(encoded("", special_start=True), None, text)
    if history.text is None:
        raise TranscriptMismatch("this agent's transcript is made of messages; append 'messages', not a 'prompt'")
    whole = history.text + text
    if history.tokenizer_fingerprint != model.tokenizer_fingerprint:
        return Prompt(encoded(history.text, special_start=True), None, whole, rendered_anew="other_tokenizer")
    return Prompt((*history.token_ids, *encoded(history.carry_text, special_start=False)), None, whole)


def _messages_prompt(
    request: GenerationRequest,
    messages: tuple[Message, ...],
    history: Transcript | None,
    model: LoadedModel,
    tokenizer: TokenizerPort,
) -> Prompt:
    if history is not None and history.messages is None:
        raise TranscriptMismatch("this agent's transcript is made of prompts; append a 'prompt', not 'messages'")
    whole = (*(history.messages or ()), *messages) if history is not None else messages

    rendering = Rendering(request, tokenizer)
    rendered = rendering.text(whole)
    if history is None:
        return Prompt(tuple(tokenizer.encode_rendered(rendered)), whole, None)
    if history.tokenizer_fingerprint != model.tokenizer_fingerprint:
        return Prompt(tuple(tokenizer.encode_rendered(rendered)), whole, None, rendered_anew="other_tokenizer")
    # The stored ids are continued only if their text is exactly the beginning of the conversation as rendered now. Some
    # templates rewrite earlier messages (they drop old thinking, or the tools have changed): then the conversation is
    # encoded in full, and the cache still serves the tokens up to the first that differs.
    delta = rendering.rest(rendered, whole, len(messages), after=tokenizer.decode(history.token_ids))
    if delta is None:
        return Prompt(tuple(tokenizer.encode_rendered(rendered)), whole, None, rendered_anew="template_rewrote_history")
    return Prompt((*history.token_ids, *_encoded_rest(delta, history.token_ids[-1], tokenizer)), whole, None)


def _encoded_rest(rest: str, last: int, tokenizer: TokenizerPort) -> list[int]:
    """Token ids of the rest of a rendered conversation behind the token `last`. A `last` that ends a turn is encoded
    with it, because some tokenizers put a space before a text."""
    ids = tokenizer.encode_rendered(tokenizer.decode([last]) + rest) if last in tokenizer.eos_ids else []
    return ids[1:] if ids[:1] == [last] else tokenizer.encode_rendered(rest)


def _check_token_ids(request: GenerationRequest, model: LoadedModel) -> None:
    named = {
        "prompt_token_ids": request.prompt_token_ids or (),
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": [int(key) for key in request.logit_bias or ()],
    }
    for name, token_ids in named.items():
        if (largest := max(token_ids, default=0)) >= model.vocabulary:
            raise InvalidRequest(
                f"{name}: there is no token {largest}; this model's ids are 0 to {model.vocabulary - 1}"
            )


def _check_size(request: GenerationRequest, model: LoadedModel, tokenizer: TokenizerPort) -> None:
    """Refuse a text that cannot fit in any encoding before it is encoded: 50 MB take half a minute."""
    texts = [request.prompt] if request.prompt is not None else [m.content for m in request.messages or ()]
    size, limit = sum(len(text.encode()) for text in texts if text), model.context_tokens * tokenizer.max_token_bytes
    if size > limit:
        raise RequestTooLarge(
            f"the text is {size} bytes; the model's context of {model.context_tokens} tokens holds at most {limit}"
        )
