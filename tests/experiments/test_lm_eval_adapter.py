"""The harness' adapter asks for the right scores and adds them up; the harness itself is not needed."""

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.experiments.experiments_process import EXPERIMENTS
from tests.producer.played_worker import result_fields

from stoker_shared import build_request
from stoker_shared.result import GenerationResult


class Words:
    """A tokenizer of words."""

    def encode(self, text: str) -> list[str]:
        return text.split()


@dataclass
class Ask:
    args: tuple[Any, ...]


class PlayedProducer:
    """Scores a word by its length, and finds each word the likeliest but "odd"."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def submit_many(self, jobs: list[dict[str, Any]]) -> list[int]:
        self.jobs += jobs
        return list(range(len(self.jobs) - len(jobs), len(self.jobs)))

    def results(self, tickets: list[int], timeout_s: float | None) -> list[GenerationResult]:
        return [self._result(self.jobs[ticket]) for ticket in tickets]

    def _result(self, job: dict[str, Any]) -> GenerationResult:
        request = build_request(job)
        words, start = (request.prompt or "").split(), request.prompt_logprobs_start
        scores = [
            {
                "token": word,
                "logprob": -float(len(word)),
                "top_logprobs": [{"token": "?", "logprob": -1.0 if word == "odd" else -float(len(word))}]
                * (request.prompt_logprobs or 0),
            }
            for word in words[max(1, start) :]
        ]
        prompt = {"start": start, "content": scores if start else [None, *scores]}
        return GenerationResult.model_validate({**result_fields("j", "said"), "prompt_logprobs": prompt})


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in: Any = ModuleType("lm_eval.api.model")
    stand_in.LM = type("LM", (), {})
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.api", ModuleType("lm_eval.api"))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", stand_in)
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    monkeypatch.delitem(sys.modules, "lm_eval_adapter", raising=False)
    adapter: Any = import_module("lm_eval_adapter")
    return SimpleNamespace(producer=(producer := PlayedProducer()), asks=adapter.StokerLM(producer, Words()))


def test_only_the_tokens_after_a_context_are_scored(lm: Any) -> None:
    pairs = [("the first context", " goes on"), ("", "alone"), ("the first context", " is odd")]
    found = lm.asks.loglikelihood([Ask(pair) for pair in pairs])
    assert found == [(-6.0, True), (-float("inf"), False), (-5.0, False)]
    assert [job["prompt_logprobs_start"] for job in lm.producer.jobs] == [3, 3]
    assert {job["max_tokens"] for job in lm.producer.jobs} == {0}


def test_a_whole_text_is_scored_after_its_first_token(lm: Any) -> None:
    assert lm.asks.loglikelihood_rolling([Ask(("one three five",)), Ask(("single",))]) == [-9.0, 0]


def test_answers_are_greedy_unless_the_task_samples_and_end_at_its_strings(lm: Any) -> None:
    options = [
        {"until": ["\n\n", ""], "do_sample": False, "temperature": 0.7, "max_gen_toks": 9},
        {"until": "end", "do_sample": True, "temperature": 0.7},
    ]
    assert lm.asks.generate_until([Ask(("ask", one)) for one in options]) == ["said", "said"]
    first, second = lm.producer.jobs
    assert (first["temperature"], first["max_tokens"], first["stop"]) == (0.0, 9, ["\n\n"])
    assert (second["temperature"], second["stop"]) == (0.7, ["end"])
    with pytest.raises(ValueError, match="17 stop strings"):
        lm.asks.generate_until([Ask(("ask", {"until": [str(n) for n in range(17)]}))])
