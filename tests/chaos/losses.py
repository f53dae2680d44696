"""The connections of a chaos run, one for workers and one for producers, and the replies lost on them.

Frequent requests lose more replies, but less than in proportion; transactions start and end jobs, so they lose more
than scripts. Owns the proxies.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Self

from tests.support.lossy_proxy import Exchange, LossyProxy

Kind = tuple[str, ...]
_TRANSACTION = "MULTI"
_TRANSACTIONS = 0.6  # the share of all losses
_MOST_AT_ONCE = 3
_MOST_WAITING = 20  # at most this many of a kind pass before one is lost


class Losses:
    """
    Attributes:
        workers, producers: URLs of the server behind each proxy.
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
        """The number of replies lost so far."""
        return sum(len(proxy.lost) for proxy in self._proxies)

    def lose(self) -> None:
        """Soon lose one reply or a few of some kinds, on each connection."""
        for proxy in self._proxies:
            for _ in range(self._random.randrange(1, _MOST_AT_ONCE + 1)):
                proxy.lose(self._draw(proxy), self._random.randrange(1, _MOST_AT_ONCE + 1))

    def hold_back(self, longest_s: float) -> None:
        """Soon delay one reply on each connection."""
        for proxy in self._proxies:
            proxy.hold_back(self._draw(proxy), self._random.uniform(0.05, longest_s))

    def end(self) -> None:
        """Lose nothing from now on."""
        for proxy in self._proxies:
            proxy.spare_all()

    def _draw(self, proxy: LossyProxy) -> Callable[[Exchange], bool]:
        """Draw a kind of request, and which of the coming ones to lose: mostly the next."""
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
    """The script, or the distinct commands of a transaction."""
    if exchange.is_transaction:
        return (_TRANSACTION, *dict.fromkeys(exchange.names))
    return (*exchange.names, exchange.commands[0][1][:40].decode(errors="replace"))
