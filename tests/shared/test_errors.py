"""The tree of errors, and the names on the wire."""

import inspect
import re

import pytest

from stoker_shared import errors, wire
from stoker_shared.task import generate

CLASSES = {n: c for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)}


def test_the_drawing_shows_exactly_the_tree():
    drawn = {}
    stack = []
    for depth, name in re.findall(r"^    ((?:[│ ]   )*(?:[├└]── )?)(\w+)", errors.__doc__ or "", re.MULTILINE):
        level = len(depth) // 4
        stack[level:] = [name]
        drawn[name] = stack[level - 1] if level else "Exception"
    assert drawn == {name: cls.__bases__[0].__name__ for name, cls in CLASSES.items()}


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
