"""Errors as builtin clauses catch them, and the function that stock workers call."""

import pytest

from stoker_shared import errors, wire
from stoker_shared.task import generate


def test_a_job_error_names_its_job_and_a_failure_its_reason():
    error = errors.JobFailed("42", "ContextLimitExceeded: 9 > 8", partial_text="so far")
    assert str(error) == "job 42: failed: ContextLimitExceeded: 9 > 8"
    assert (error.job_id, error.reason, error.partial_text) == ("42", "ContextLimitExceeded: 9 > 8", "so far")


def test_builtin_except_clauses_catch_what_they_should():
    assert issubclass(errors.ResultTimeout, TimeoutError)
    assert issubclass(errors.InvalidRequest, ValueError)


def test_the_task_path_names_the_function_that_refuses_stock_workers():
    assert f"{generate.__module__}.{generate.__qualname__}" == wire.TASK_PATH
    with pytest.raises(errors.WrongWorker, match="stoker-worker"):
        generate(request={})
