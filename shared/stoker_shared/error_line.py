"""An error as one line, for logs, messages and failed jobs. Pure."""

import re
from typing import Final

_NO_PASSWORD: Final = re.compile(r"(NOAUTH )?(HELLO must be called|Authentication required)")
_WITH_PASSWORD: Final = (
    "it needs a password, as in redis://:PASSWORD@HOST; the URL of an embedded server is in ~/.stoker/redis.url"
)
_MOST_CHARACTERS: Final = 300
"""Some libraries quote their whole input, as chat templates quote the conversation."""


def one_line(error: BaseException) -> str:
    """``ErrorName: message`` in at most 300 characters, for errors of other libraries."""
    return f"{type(error).__name__}: {message_line(error) or 'no reason given'}"[:_MOST_CHARACTERS]


def message_line(error: BaseException) -> str:
    """The whole message with its white space folded."""
    return " ".join(str(error).split())


def refusal_line(error: BaseException) -> str:
    """The message of a Redis server that refused a client. If it wants a password, it names commands of its protocol,
    which nobody has given."""
    line = message_line(error)
    return _WITH_PASSWORD if _NO_PASSWORD.match(line) else line
