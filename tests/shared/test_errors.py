"""Errors as builtin clauses catch them."""

from stoker_shared import errors


def test_builtin_except_clauses_catch_what_they_should():
    assert issubclass(errors.ResultTimeout, TimeoutError)
    assert issubclass(errors.InvalidRequest, ValueError)
