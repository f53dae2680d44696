"""Masks the passwords of Redis in texts that people read: URLs and error messages. Pure."""

import re
from typing import Final

MASK: Final = "***"


def mask_url(url: str) -> str:
    """The URL with its passwords masked, also where an unquoted one breaks it; masked as a whole if it is no URL."""
    if "://" not in url:
        return MASK
    without_query = re.sub(r"(?i)(password=)[^&]*", rf"\1{MASK}", url)
    return re.sub(r"(?s)(://[^:/@]*):.*@", rf"\1:{MASK}@", without_query)


def mask_text(text: str, password: object) -> str:
    """The text with the password masked: old servers quote the command they refuse, AUTH and its argument included."""
    return text.replace(str(password), MASK) if password else text
