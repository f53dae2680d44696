"""Results as OpenAI's response bodies. Pure.

What OpenAI has no name for has vLLM's: `reasoning_content` in a message, `prompt_logprobs` in the body. `task` and
`attempts` are stoker's own.
"""

from collections.abc import Sequence
from typing import Any, Final

from stoker.openai.fields import TEXT_URL
from stoker_shared.result import Choice, GenerationResult, Logprobs, TokenLogprob

ID_PREFIX: Final = {True: "cmpl", False: "chatcmpl"}


def answer_body(url: str, created_s: int, result: GenerationResult) -> dict[str, Any]:
    """The body of a successful response.

    Args:
        created_s: when the answer was made, in Unix seconds.
    """
    is_text = url == TEXT_URL
    make = _text_choice if is_text else _chat_choice
    body = {
        "id": f"{ID_PREFIX[is_text]}-{result.job_id}",
        "object": "text_completion" if is_text else "chat.completion",
        "created": created_s,
        "model": result.model,
        "choices": [make(index, choice) for index, choice in enumerate(choices_of(result))],
        "usage": usage_of(result),
    }
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = result.prompt_logprobs.model_dump(mode="json")
    if result.task is not None:
        body["task"] = result.task
    if result.attempts is not None:
        body["attempts"] = [attempt.model_dump(mode="json") for attempt in result.attempts]
    return body


def choices_of(result: GenerationResult) -> Sequence[Choice]:
    return result.choices or [result]


def usage_of(result: GenerationResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def message_of(choice: Choice) -> dict[str, Any]:
    """The assistant's message; its `content` is ``None`` if the model only calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.content if choice.content.strip() else None
        message["tool_calls"] = [call.model_dump(mode="json") for call in choice.tool_calls]
    return message


def chat_logprobs(logprobs: Logprobs | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [entry.model_dump(mode="json") for entry in logprobs.content], "refusal": None}


def text_logprobs(logprobs: Logprobs | None) -> dict[str, Any] | None:
    """The older form, by columns; a token's offset is the length of the text before it."""
    if logprobs is None:
        return None
    entries: list[TokenLogprob] = logprobs.content
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        at += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{top.token: top.logprob for top in entry.top_logprobs} for entry in entries],
        "text_offset": offsets,
    }


def _chat_choice(index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "message": message_of(choice),
        "logprobs": chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _text_choice(index: int, choice: Choice) -> dict[str, Any]:
    logprobs = text_logprobs(choice.logprobs)
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
