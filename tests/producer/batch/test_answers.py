"""Output lines in OpenAI's form: the types of its package parse each of them, strictly."""

import json

import pytest
from openai.types import Completion
from openai.types.batch_error import BatchError
from openai.types.shared import ErrorObject
from tests.producer.played_worker import result_fields

from stoker.api.chat import TEXT_URL
from stoker.batch.input_file import BadLine
from stoker.batch.output_file import failure_line, is_success, line_bytes, not_run_line, success_line
from stoker_shared.result import GenerationResult

LOGPROBS = {
    "content": [
        {"token": "he", "logprob": -0.5, "bytes": [104, 101], "top_logprobs": [{"token": "he", "logprob": -0.5}]},
        {"token": "llo", "logprob": -0.25, "top_logprobs": []},
    ]
}


def result(**changes):
    return GenerationResult.model_validate({**result_fields("j"), **changes})


def written(answer):
    """The answer as it is read back from the file."""
    line = line_bytes(answer)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    found = json.loads(line)
    assert set(found) == {"id", "custom_id", "response", "error"}
    return found


@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
def test_a_text_answer_is_a_text_completion_with_logprobs_by_column(logprobs):
    fields = {"finish_reason": "length", "logprobs": logprobs}
    answer = written(success_line("batch_req_j", "one", TEXT_URL, 1, result(**fields)))
    body = Completion.model_validate(answer["response"]["body"], strict=True)
    [choice] = body.choices
    assert (body.object, choice.text, choice.finish_reason) == ("text_completion", "hello", "length")
    if logprobs is None:
        assert choice.logprobs is None
    else:
        assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["he", "llo"], [-0.5, -0.25])
        assert (choice.logprobs.top_logprobs, choice.logprobs.text_offset) == ([{"he": -0.5}, {}], [0, 2])


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("InvalidRequest: top_p: too large", 400, "invalid_value"),
        ("ModelMismatch: the job names 'gpt'", 404, "model_not_found"),
        ("ContextLimitExceeded: 5000 over 4096", 400, "context_length_exceeded"),
        ("RequestTooLarge: the text is 9 MB", 400, "context_length_exceeded"),
        ("BlockPoolTooSmall: Cannot allocate", 400, "context_length_exceeded"),
        ("AgentNotFound: there is no agent 'a'", 404, "agent_not_found"),
        ("AgentVersionConflict: 4 is not 5", 409, "agent_version_conflict"),
        ("GenerationTimedOut: after 3600 s", 504, "generation_timed_out"),
        ("EngineFailed: out of memory", 500, None),
        ("the worker gave no reason", 500, None),
    ],
)
def test_a_failed_job_has_the_status_and_the_body_of_an_api(reason, status, code):
    answer = written(failure_line("batch_req_j", "one", "j", reason, "so far"))
    assert answer["error"] is None
    assert answer["response"]["status_code"] == status
    error = ErrorObject.model_validate(answer["response"]["body"]["error"], strict=True)
    assert (error.message, error.code) == (reason, code)
    assert answer["response"]["body"]["error"]["partial_text"] == "so far"
    assert not is_success(answer)


def test_a_line_that_never_ran_is_an_error_with_its_number():
    bad = BadLine(7, None, "unknown_parameter", "no such field", "\ud800")
    answer = written(not_run_line("batch_req_j", bad))
    assert (answer["custom_id"], answer["response"]) == (None, None)
    error = BatchError.model_validate(answer["error"], strict=True)
    assert (error.line, error.code, error.message) == (7, "unknown_parameter", "line 7: no such field")
