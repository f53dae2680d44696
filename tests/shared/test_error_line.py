import pytest

from stoker_shared.error_line import message_line, one_line, refusal_line


def test_an_error_of_many_lines_is_one_line_that_begins_with_its_name():
    error = ValueError("missing:\n  - weights\r\n\t- config\n")
    assert one_line(error) == "ValueError: missing: - weights - config"
    assert message_line(error) == "missing: - weights - config"


def test_an_error_without_a_message_still_gives_a_line():
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt: no reason given"


def test_a_long_error_is_cut_off():
    assert one_line(ValueError("x" * 1000)) == "ValueError: " + 288 * "x"


@pytest.mark.parametrize("words", ["HELLO must be called with ... AUTH <user>", "Authentication required."])
def test_a_server_that_wants_a_password_is_not_quoted_with_the_commands_of_its_protocol(words):
    assert refusal_line(RuntimeError(words)).startswith("it needs a password, as in redis://:PASSWORD@HOST")
    assert refusal_line(RuntimeError("WRONGPASS invalid password")) == "WRONGPASS invalid password"
