"""Stop strings are found wherever they begin and end, and the text is cut exactly before them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.engine.scripted import ScriptedTokenizer
from stoker_worker.engine.text import StopScanner


@pytest.mark.parametrize(
    ("tokens", "kept", "carry"),
    [
        ([b"ab", b"", b"STOP"], 2, ""),
        ([b"", b"STOP"], 1, ""),
        ([b"ab", b"", b"", b"S", b"", b"TOP"], 3, ""),
        ([b"ab", b"\xe2", b"STOP"], 2, ""),
        ([b"ab", b"\xe2", b"\x82", b"STOP"], 3, ""),
        ([b"ab", b"\xf0\x9f", b"", b"cSTOP"], 3, "c"),
        ([b"ab", b"\xc3", b"\xa9STOP"], 1, "\u00e9"),
        ([b"ab", b"\xe2", b"\xc3", b"\xa9STOP"], 2, "\u00e9"),
    ],
)
def test_tokens_without_text_and_incomplete_bytes_before_a_stop_string_are_kept(tokens, kept, carry):
    class Bytes(ScriptedTokenizer):
        def decode(self, token_ids):
            return b"".join(tokens[i] for i in token_ids).decode(errors="replace")

    scanner = StopScanner(Bytes(), ["STOP"])
    assert [scanner.add(i) for i in range(len(tokens))] == [False] * (len(tokens) - 1) + [True]
    text, n_tokens, rest = scanner.cut()
    assert (n_tokens, rest) == (kept, carry)
    assert text == b"".join(tokens).decode(errors="replace").removesuffix("STOP")


@pytest.mark.parametrize("stop", ["\ufffd", "b\ufffd", "\ufffdc", "\ufffd\ufffd"])
@pytest.mark.parametrize("replaced", ["\ufffd".encode(), b"\xe2\x82", b"\xff"])
@pytest.mark.parametrize("after", [b"", b"c", b"\xe2"])
def test_a_stop_string_with_the_replacement_character_is_found(stop, replaced, after):
    answer = b"ab" + replaced + after
    scanner = StopScanner(ScriptedTokenizer(), [stop])
    found = any([scanner.add(byte) for byte in answer]) or scanner.end()
    at = answer.decode(errors="replace").find(stop)
    assert found == (at >= 0)
    if found:
        assert scanner.cut() == ("ab"[:at], at, "")


def test_an_answer_of_broken_bytes_alone_does_not_hide_a_stop_string():
    scanner = StopScanner(ScriptedTokenizer(), ["\ufffd" * 3])
    assert next(i for i in range(40) if scanner.add(0xFF)) < 8
    assert scanner.cut() == ("", 0, "")


@given(
    text=st.text(alphabet="ab\u00e9\U0001f600 ", max_size=40),
    stop=st.text(alphabet="ab\u00e9 ", min_size=1, max_size=3),
)
def test_scanning_byte_by_byte_agrees_with_searching_the_whole_text(text, stop):
    scanner = StopScanner(ScriptedTokenizer(), [stop])
    found = next((i for i, byte in enumerate(text.encode()) if scanner.add(byte)), None)
    at = text.find(stop)
    assert (found is None) == (at < 0)
    if found is not None:
        assert found + 1 == len(text[: at + len(stop)].encode())
        assert scanner.cut()[0] == text[:at]


def test_a_stop_string_of_the_first_tokens_does_not_count_and_a_later_one_does():
    scanner = StopScanner(ScriptedTokenizer(), ["longer than ab", "ab"], min_tokens=2)
    assert [scanner.add(byte) for byte in b"abcab"] == [False] * 4 + [True]
    assert (scanner.cut(), scanner.found) == (("abc", 3, ""), "ab")


def test_a_token_that_completes_several_stop_strings_is_cut_at_the_earliest():
    class OneToken(ScriptedTokenizer):
        def decode(self, token_ids):
            return "one two three" if token_ids else ""

    scanner = StopScanner(OneToken(), ["three", "two"])
    assert scanner.add(0)
    assert (scanner.cut()[0], scanner.found) == ("one ", "two")
