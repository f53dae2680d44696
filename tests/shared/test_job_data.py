"""Compressed data is unpacked up to a limit, and everything else is left as it is."""

import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_shared.errors import RequestTooLarge
from stoker_shared.job_data import MOST_LEVELS, MOST_VALUES, read_json, unpacked
from stoker_shared.wire import MAX_REQUEST_BYTES


def test_what_unpacks_to_much_more_is_cut_off():
    packed = zlib.compress(bytes(2**24))
    tracemalloc.start()
    try:
        assert len(unpacked(packed, 1000)) == 1001
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_data_within_the_limit_is_whole():
    for size in (0, 1, 999, 1000):
        assert unpacked(zlib.compress(b"a" * size), 1000) == b"a" * size


def test_data_that_is_no_whole_stream_is_left_as_it_is_up_to_the_limit():
    for data in (b"", b"[]", b"\x80\x05pickle", zlib.compress(b"a" * 500)[:-1]):
        assert unpacked(data, 1000) == data
    assert len(unpacked(b"[" * 5000, 1000)) == 1001


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('\\"[]{},:a\n', max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\"[]{},:a', max_size=6), inner, max_size=4),
)


def nested(levels):
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "unit", [b"0,", b"[],", b"{},", b'"ab",', b'"",', b'{"a":{}},', b"[[0]],", b'"\\"",', b'"\\\\",']
)
def test_millions_of_values_are_refused_before_they_are_built(unit):
    body = b"[" + unit * (MAX_REQUEST_BYTES // len(unit) - 2) + b"0]"
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLarge, match="values"):
            read_json(body)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_deep_nesting_is_refused():
    for body in (b"[" * 1000, nested(MOST_LEVELS + 1), b'{"a":' * 1000 + b"0" + b"}" * 1000):
        with pytest.raises(RequestTooLarge, match="levels"):
            read_json(body)


def test_a_text_is_not_counted_as_what_it_looks_like():
    text = '[{"a": [1, 2, 3]}, "\\"]\\\\' * 100_000
    body = json.dumps([text, *("x" for _ in range(200))]).encode()
    assert read_json(body)[0] == text


def test_what_is_within_the_bounds_is_read():
    body = b"[" + b"0," * (MOST_VALUES - 2) + b"0]"
    assert len(read_json(body)) == MOST_VALUES - 1
    assert read_json(nested(MOST_LEVELS)) is not None


def test_an_endless_integer_and_a_long_text_are_refused():
    with pytest.raises(RequestTooLarge, match="401 digits"):
        read_json(b"[" + b"9" * 401 + b"]")
    assert read_json(b"[" + b"9" * 400 + b', "' + b"9" * 5000 + b'"]')[0] == 10**400 - 1
    with pytest.raises(RequestTooLarge, match="11 bytes of JSON, the limit is 10"):
        read_json(b'"aaaaaaaaa"', 10)


@pytest.mark.parametrize("body", [b"", b"nothing", b"\xff", b'["', "[1]".encode("utf-16"), b"[" + b'0 "[' * 200])
def test_what_is_no_json_is_a_value_error(body):
    with pytest.raises(ValueError):
        read_json(body)


@given(JSON)
def test_json_is_read_as_by_the_standard_library(value):
    padded = [value, [0] * MOST_LEVELS]  # so that it goes the long way
    assert read_json(json.dumps(padded).encode()) == padded
