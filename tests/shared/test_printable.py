"""What other people's text may do to a terminal: nothing."""

import pytest

from stoker_shared.printable import printable


@pytest.mark.parametrize("text", ["", "plain", "日本語", "👩\u200d💻", "क्\u200dष", "a\u00a0b", "a\\b", "\ue0b0"])
def test_text_is_shown_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J", r"\x9b2J"),
        ("a\rb\x08\x7f\x00", r"a\rb\x08\x7f\x00"),
        ("abc\u202edcba\u2066x", r"abc\u202edcba\u2066x"),
        ("\u2028\u2029\ufeff\u200b", r"\u2028\u2029\ufeff\u200b"),
        ("\U000e0041", r"\U000e0041"),
        ("half \ud800", r"half \ud800"),
        ("a\nb\tc", r"a\nb\tc"),
    ],
)
def test_what_steers_a_terminal_or_is_invisible_is_escaped(text, shown):
    assert printable(text) == shown


def test_of_several_lines_line_feeds_and_tabs_stay():
    assert printable("a\n\tb\x1b\r\n", lines=True) == "a\n\tb\\x1b\\r\n"
