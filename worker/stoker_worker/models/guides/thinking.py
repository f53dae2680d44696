"""The thinking in an answer: where it is, and when it must end. Pure; one thread at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Thinking:
    """
    Attributes:
        start_ids, end_ids: the markers around it.
        opened: whether the prompt ends inside it.
        most: most tokens that it may have, without its markers; ``None``: any number.
        is_inside: whether the answer is in it now. Elsewhere its start marker may come.
        n_tokens: its tokens so far, with the part of an end marker that has begun.
    """

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    opened: bool
    most: int | None
    is_inside: bool = field(init=False)
    n_tokens: int = field(init=False)
    _newest: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Go back to the beginning of the answer."""
        self.is_inside, self.n_tokens, self._newest = self.opened, 0, ()

    def take(self, token: int) -> None:
        """The answer's next token."""
        marker = self._marker
        self.n_tokens += self.is_inside
        self._newest = (*self._newest, token)[-len(marker) :]
        if self._newest == marker:
            self.n_tokens -= len(marker) * self.is_inside
            self.is_inside, self._newest = not self.is_inside, ()

    @property
    def forced(self) -> int | None:
        """The only token that may come next, when there was enough thinking: it leads to its end."""
        if not self.is_inside or self.most is None or self.n_tokens < self.most:
            return None
        return self.next_of_marker

    @property
    def next_of_marker(self) -> int:
        """The next token of the marker that may come next, or that has begun."""
        return self._marker[self.n_begun]

    @property
    def n_begun(self) -> int:
        """How many tokens of that marker the answer ends with."""
        longest = min(len(self._newest), len(self._marker) - 1)
        return next((n for n in range(longest, 0, -1) if _ends_with(self._newest, self._marker[:n])), 0)

    @property
    def _marker(self) -> tuple[int, ...]:
        return self.end_ids if self.is_inside else self.start_ids


def _ends_with(tokens: Sequence[int], end: tuple[int, ...]) -> bool:
    return tuple(tokens[-len(end) :]) == end
