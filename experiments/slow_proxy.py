"""A slow network before an HTTP server of this machine: each request arrives some time later. Owns a thread."""

import asyncio
import re
import threading
from collections import Counter
from typing import Final, Self

_REQUEST: Final = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) /")
_PIECE: Final = 2**16


class SlowProxy:
    """It ends with the context that it is used as.

    Attributes:
        port: where it listens, on loopback.
        requests: how many began so far, by method.
    """

    def __init__(self, to_port: int, delay_s: float) -> None:
        self._to_port, self._delay_s = to_port, delay_s
        self.requests: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._pass_on, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._to_port)
            await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))
        except OSError:
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """A client waits for each reply, so a request begins a piece."""
        while piece := await source.read(_PIECE):
            if found := _REQUEST.match(piece):
                self.requests[found[1].decode()] += 1
                await asyncio.sleep(self._delay_s)
            target.write(piece)
            await target.drain()
        target.close()
