"""The numbers of tokens beyond which a model may behave otherwise: windows, chunks, sparse budgets. Pure.

Only a model's config is read, and nothing is known about any architecture: a wrong guess costs time in a trial.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import Any, Final

_NAMES: Final = re.compile(r"^(?!.*(dim|head)).*(window|top_?k|sparse|chunk|block)", re.ASCII)
"""A dimension or a number of heads is no number of tokens."""


def spans(config: Any, windows: Collection[int]) -> set[int]:
    """
    Args:
        config: a dataclass or a mapping; configs and lists inside it count as well.
        windows: those that the layers' caches have.

    Returns:
        `windows`, each number whose name is like that of a span, and the products of two of these: a sparse budget is
        often configured as a number of blocks and their size.
    """
    numbers = {(name, n) for name, n in _numbers("", config) if _NAMES.search(name)}
    products = (first * second for (_, first), (_, second) in combinations(numbers, 2))
    return {*windows, *(n for _, n in numbers), *products}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield name, value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(name, one)
    else:
        fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for inner, one in fields.items():
            yield from _numbers(str(inner), one)
