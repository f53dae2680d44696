"""An error as one line, for logs, messages and failed jobs. Pure."""

from typing import Final

_MOST_CHARACTERS: Final = 300
"""Some libraries quote their whole input, as chat templates quote the conversation."""


def one_line(error: BaseException) -> str:
    """``ErrorName: message`` in at most 300 characters, for errors of other libraries."""
    return f"{type(error).__name__}: {message_line(error) or 'no reason given'}"[:_MOST_CHARACTERS]


def message_line(error: BaseException) -> str:
    """The whole message with its white space folded."""
    return " ".join(str(error).split())
