"""Text that people read: other people's can do nothing to a terminal, and no password is in it."""

import pytest

from stoker_shared.text import mask_text, mask_url, message_line, one_line, printable, refusal_line


def test_text_is_shown_as_it_is():
    for text in ("", "plain", "日本語", "👩\u200d💻", "क्\u200dष", "a\u00a0b", "a\\b", "\ue0b0"):
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


def test_an_error_is_one_line_that_begins_with_its_name():
    error = ValueError("missing:\n  - weights\r\n\t- config\n")
    assert one_line(error) == "ValueError: missing: - weights - config"
    assert message_line(error) == "missing: - weights - config"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt: no reason given"
    assert one_line(ValueError("x" * 1000)) == "ValueError: " + 288 * "x"


@pytest.mark.parametrize("words", ["HELLO must be called with ... AUTH <user>", "Authentication required."])
def test_a_server_that_wants_a_password_is_not_quoted_with_the_commands_of_its_protocol(words):
    assert refusal_line(RuntimeError(words)).startswith("it needs a password, as in redis://:PASSWORD@HOST")
    assert refusal_line(RuntimeError("WRONGPASS invalid password")) == "WRONGPASS invalid password"


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:secret@host", "rediss://user:***@host"),
        ("redis://host/0?password=secret&db=1", "redis://host/0?password=***&db=1"),
        ("rediss://host/0?ssl_password=secret", "rediss://host/0?ssl_password=***"),
        ("redis://:sec/ret@host:1/0", "redis://:***@host:1/0"),  # not quoted: to a parser the host ends at the slash
        ("redis://:sec@ret@host:1/0", "redis://:***@host:1/0"),
        ("redis://:sec\nret@host:1/0", "redis://:***@host:1/0"),
        ("secret", "***"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url, masked):
    assert mask_url(url) == masked


def test_an_error_that_quotes_the_password_is_shown_without_it():
    assert mask_text("unknown command 'AUTH' 'secret'", "secret") == "unknown command 'AUTH' '***'"
    assert mask_text("refused", None) == "refused"
    assert mask_text("refused", "") == "refused"
