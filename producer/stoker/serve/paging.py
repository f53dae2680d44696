"""OpenAI's pages of a list. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.openai.answers import Failure


def page_of(objects: Sequence[Mapping[str, Any]], query: Mapping[str, str], *, most: int) -> dict[str, Any]:
    """The objects after the one whose id is `after`, at most `limit`.

    Raises:
        Failure: there is no such object, or `limit` is invalid.
    """
    start = 0
    if after := query.get("after"):
        ids = [entry["id"] for entry in objects]
        if after not in ids:
            raise Failure(
                400, f"'after' names nothing in this list: {after[:64]!r}", code="invalid_value", param="after"
            )
        start = ids.index(after) + 1
    text = query.get("limit", str(most))
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise Failure(400, f"'limit' must be a whole number from 1 to {most}", code="invalid_value", param="limit")
    page = objects[start : start + int(text)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": list(page), **ends, "has_more": start + len(page) < len(objects)}
