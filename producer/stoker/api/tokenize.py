"""vLLM's /tokenize and /detokenize: the tokens of a text or of messages, and the text of tokens. Pure.

Only a worker has the tokenizer, so each is a job that the model does not run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from stoker.api.endpoint import ApiCall, Endpoint, EventWriter
from stoker.api.failure import FieldRefused
from stoker.api.fields import BodyOptions, Rule, apply_rules, checked, copied, model_rule, only, template_kwargs
from stoker_shared.result import GenerationResult


def _prompt(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    fields["prompt"] = checked("prompt", value, str)


def _tokens(fields: dict[str, Any], value: Any, options: BodyOptions) -> None:
    if not isinstance(value, list) or not value or not all(type(id_) is int and id_ >= 0 for id_ in value):
        raise FieldRefused("tokens", "must be a list of token ids, at least one", "invalid_value")
    fields["prompt_token_ids"] = value


class TokenEndpoint(Endpoint):
    is_raw = True

    def __init__(self, url: str, rules: Mapping[str, Rule]) -> None:
        self.url = url
        self._rules = rules

    def read(self, body: dict[str, Any], options: BodyOptions) -> ApiCall:
        fields: dict[str, Any] = {"max_tokens": 0, "return_prompt": True, "cache": "read"}
        body.setdefault("model", None)
        asked = replace(options, any_model=options.any_model or body["model"] is None)
        apply_rules(self._rules, self.url, body, fields, asked)
        return ApiCall((fields,), str(body["model"]))

    def answer(self, results: Sequence[GenerationResult], created_s: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        (result,) = results
        assert result.prompt is not None
        if self.url == DETOKENIZE.url:
            return {"prompt": result.prompt.text}
        token_ids = result.prompt.token_ids
        return {"count": len(token_ids), "tokens": token_ids, "model": result.model}

    def events(self, job_id: str, call: ApiCall, created_s: int) -> EventWriter:
        raise NotImplementedError  # `read` reads no call to be streamed


_TOKENIZE: Final[dict[str, Rule]] = {
    "model": model_rule,
    "prompt": _prompt,
    "content": _prompt,
    "chat_template_kwargs": template_kwargs,
    **copied("messages", "tools"),
    **only("add_special_tokens", True),
    **only("add_generation_prompt", True),
}
TOKENIZE: Final = TokenEndpoint("/tokenize", _TOKENIZE)
DETOKENIZE: Final = TokenEndpoint("/detokenize", {"model": model_rule, "tokens": _tokens})
