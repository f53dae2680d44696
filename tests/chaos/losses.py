"""The wires of a chaos run, one for workers and one for producers, and the replies that are lost on them.

What is seen often loses more, but less than in proportion; transactions start and end jobs, so they lose more than
scripts. Owns the proxies.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Self

from tests.lossy_proxy import Exchange, LossyProxy

Kind = tuple[str, ...]
_TRANSACTION = "MULTI"
_TRANSACTIONS = 0.6  # of what is lost
_MOST_AT_ONCE = 3
_MOST_WAITING = 20  # how many of a kind pass before one is lost, at most


class Losses:
    """
    Attributes:
        workers, producers: URLs to reach the server by.
    """

    def __init__(self, server_port: int, random: Random) -> None:
        self._random = random
        self._proxies = [LossyProxy(server_port), LossyProxy(server_port)]
        self._seen: dict[int, Counter[Kind]] = {proxy.port: Counter() for proxy in self._proxies}
        self.workers, self.producers = (proxy.url for proxy in self._proxies)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for proxy in self._proxies:
            self._stack.enter_context(proxy)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def lost(self) -> int:
        """How many replies were lost so far."""
        return sum(len(proxy.lost) for proxy in self._proxies)

    def lose(self) -> None:
        """Soon, on each wire, one reply or a few of each of some kinds."""
        for proxy in self._proxies:
            for _ in range(self._random.randrange(1, _MOST_AT_ONCE + 1)):
                proxy.lose(self._draw(proxy), self._random.randrange(1, _MOST_AT_ONCE + 1))

    def hold_back(self, longest_s: float) -> None:
        """Soon, one reply on each wire."""
        for proxy in self._proxies:
            proxy.hold_back(self._draw(proxy), self._random.uniform(0.05, longest_s))

    def end(self) -> None:
        """From now on nothing is lost."""
        for proxy in self._proxies:
            proxy.spare_all()

    def _draw(self, proxy: LossyProxy) -> Callable[[Exchange], bool]:
        """A kind, and from which on: mostly the next of them."""
        seen = self._seen[proxy.port]
        seen.update(_kind_of(exchange) for exchange in proxy.take_seen() if exchange.is_write)
        kinds = sorted(seen)
        if self._random.random() < _TRANSACTIONS:
            kinds = [kind for kind in kinds if kind[0] == _TRANSACTION] or kinds
        kind = self._random.choices(kinds, [seen[kind] ** 0.5 for kind in kinds])[0] if kinds else None
        passing = iter(range(self._random.randrange(_MOST_WAITING) if self._random.random() < 0.3 else 0))

        def chooses(exchange: Exchange) -> bool:
            return exchange.is_write and kind in {None, _kind_of(exchange)} and next(passing, None) is None

        return chooses


def _kind_of(exchange: Exchange) -> Kind:
    """The script, or the commands of a transaction, each once."""
    if exchange.is_transaction:
        return (_TRANSACTION, *dict.fromkeys(exchange.names))
    return (*exchange.names, exchange.commands[0][1][:40].decode(errors="replace"))
