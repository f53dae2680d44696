"""Compressed data is unpacked up to a limit, and everything else is left as it is."""

import tracemalloc
import zlib

import pytest

from stoker_shared.job_data import unpacked


def test_what_unpacks_to_much_more_is_cut_off():
    packed = zlib.compress(bytes(2**24))
    tracemalloc.start()
    try:
        assert len(unpacked(packed, 1000)) == 1001
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
def test_data_within_the_limit_is_whole(size):
    assert unpacked(zlib.compress(b"a" * size), 1000) == b"a" * size


@pytest.mark.parametrize("data", [b"", b"[]", b"\x80\x05pickle", zlib.compress(b"a" * 500)[:-1]])
def test_data_that_is_no_whole_stream_is_left_as_it_is(data):
    assert unpacked(data, 1000) == data


def test_data_that_is_not_packed_is_cut_off_as_well():
    assert len(unpacked(b"[" * 5000, 1000)) == 1001
