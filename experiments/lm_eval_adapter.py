"""lm-evaluation-harness over stoker: its requests become jobs of a producer. Needs `lm_eval` and a tokenizer; no MLX.

    from stoker import Producer
    from transformers import AutoTokenizer

    lm = StokerLM(Producer(), AutoTokenizer.from_pretrained(folder))
    lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])

The tokenizer counts the tokens of a context, so that only those after it are scored, and the context may come from the
worker's cache. Texts are split as mlx-lm's own evaluator splits them. A text that is longer than the model's context is
refused, not cut.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM

from stoker import Producer
from stoker_shared.result import GenerationResult, TokenLogprob

_DEFAULT_MAX_TOKENS = 256
_MOST_STOPS = 16
"""As many as a request may have."""


class StokerLM(LM):  # type: ignore[misc]
    def __init__(self, producer: Producer, tokenizer: Any, *, timeout_s: float | None = None) -> None:
        """
        Args:
            tokenizer: of the worker's model, from `transformers`.
            timeout_s: for all jobs of one call of the harness; ``None``: no limit.
        """
        super().__init__()
        self._producer = producer
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self._tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the continuation's log-likelihood, and whether it is the greedy answer.

        Nothing predicts the first token of an empty context's continuation: that is minus infinity, as in mlx-lm.
        """
        pairs = [request.args for request in requests]
        n_contexts = [len(self._tokenizer.encode(context)) for context, _ in pairs]
        found: list[tuple[float, bool]] = [(-float("inf"), False)] * len(pairs)
        asked = [index for index, n_tokens in enumerate(n_contexts) if n_tokens]
        jobs = [_scoring("".join(pairs[index]), n_contexts[index], n_top=1) for index in asked]
        for index, result in zip(asked, self._results(jobs), strict=True):
            scores = _scores(result)
            is_greedy = all(score.logprob >= score.top_logprobs[0].logprob for score in scores)
            found[index] = sum(score.logprob for score in scores), is_greedy
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of each text after its first token."""
        jobs = [_scoring(request.args[0], 0, n_top=0) for request in requests]
        return [sum(score.logprob for score in _scores(result)) for result in self._results(jobs)]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        return [result.text for result in self._results([_generating(*request.args) for request in requests])]

    def _results(self, jobs: list[dict[str, Any]]) -> list[GenerationResult]:
        return self._producer.results(self._producer.submit_many(jobs), timeout_s=self._timeout_s)


def _scoring(text: str, start: int, n_top: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 0, "prompt_logprobs": n_top, "prompt_logprobs_start": start}


def _scores(result: GenerationResult) -> list[TokenLogprob]:
    assert result.prompt_logprobs is not None
    return [entry for entry in result.prompt_logprobs.content if entry is not None]


def _generating(context: str, options: dict[str, Any]) -> dict[str, Any]:
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"the task has {len(stops)} stop strings; a job takes {_MOST_STOPS}")
    is_sampled = options.get("do_sample", False)
    return {
        "prompt": context,
        "max_tokens": options.get("max_gen_toks", _DEFAULT_MAX_TOKENS),
        "temperature": float(options.get("temperature", 1.0)) if is_sampled else 0.0,
        "stop": stops,
    }
