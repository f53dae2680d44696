"""A proxy before a Redis server that loses chosen replies, or holds them back. Loopback only; threads of its own.

Owns the bytes between one client and one server. Only replies are lost: the server has carried the command out, and
the client sees its connection close. An `Exchange` identifies a command: a script or a plain command alone, or all
commands between MULTI and EXEC.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Command = list[bytes]


@dataclass(frozen=True)
class Exchange:
    """One command with its reply; for a transaction the EXEC, with all commands queued before it.

    Attributes:
        commands: the command itself, or the commands inside the transaction.
        is_transaction: whether they were between MULTI and EXEC.
    """

    commands: tuple[tuple[bytes, ...], ...]
    is_transaction: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Command names, in upper case."""
        return tuple(command[0].upper().decode(errors="replace") for command in self.commands)

    @property
    def is_write(self) -> bool:
        """A transaction or a script: a client must not simply repeat it."""
        return self.is_transaction or self.names[0] in {"EVALSHA", "EVAL"}

    def holds(self, *words: str) -> bool:
        """Whether each word is in an argument, or is the name, of one of the commands."""
        text = b" ".join(part for command in self.commands for part in command)
        return all(word.encode() in text for word in words)


Chooses = Callable[[Exchange], bool]


@dataclass
class LossyProxy:
    """Listens on `port` while its context is open.

    Attributes:
        seen: every exchange so far, in the order of the requests.
    """

    server_port: int
    port: int = 0
    seen: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._lose: list[tuple[Chooses, int]] = []
        self._hold: list[tuple[Chooses, float]] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self.lost: list[Exchange] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def lose(self, chooses: Chooses, times: int = 1) -> None:
        """Lose the reply of the next `times` exchanges for which `chooses` is true."""
        with self._lock:
            self._lose.append((chooses, times))

    def hold_back(self, chooses: Chooses, seconds: float) -> None:
        """Delay the reply of the next exchange for which `chooses` is true by `seconds`."""
        with self._lock:
            self._hold.append((chooses, seconds))

    def spare_all(self) -> None:
        """Forget all losses and delays asked for so far."""
        with self._lock:
            self._lose.clear()
            self._hold.clear()

    def take_seen(self) -> list[Exchange]:
        """Return the exchanges since the last call and forget them, for runs with very many."""
        with self._lock:
            seen, self.seen = self.seen, []
            return seen

    def cut_all(self) -> None:
        """Close every open connection."""
        with self._lock:
            ends, self._open = self._open, []
        for end in ends:
            _close(end)

    def __enter__(self) -> "LossyProxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_closed.set()
        _close(self._listener)
        self.cut_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.server_port))
            except OSError:  # the server is away, and may come back
                _close(client)
                continue
            for end in (client, server):  # a transaction is many small frames
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open += [client, server]
            asked: deque[Exchange | None] = deque()
            for work in (self._requests, self._replies):
                threading.Thread(target=work, args=(client, server, asked), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, asked: "deque[Exchange | None]") -> None:
        inside: list[tuple[bytes, ...]] | None = None
        with contextlib.suppress(OSError, EOFError):
            for raw in _frames(client):
                command = _command(raw)
                name = command[0].upper()
                if name == b"MULTI":
                    inside, exchange = [], None
                elif name in {b"EXEC", b"DISCARD"}:
                    exchange = Exchange(tuple(inside or [(name,)]), name == b"EXEC")
                    inside = None
                elif inside is not None:
                    inside.append(tuple(command))
                    exchange = None
                else:
                    exchange = Exchange((tuple(command),), False)
                with self._lock:
                    if exchange is not None:
                        self.seen.append(exchange)
                asked.append(exchange)
                server.sendall(raw)
        _close(client)
        _close(server)

    def _replies(self, client: socket.socket, server: socket.socket, asked: "deque[Exchange | None]") -> None:
        with contextlib.suppress(OSError, EOFError):
            for raw in _frames(server):
                exchange = asked.popleft() if asked else None  # messages of a channel answer no request
                if exchange is not None:
                    if self._is_chosen_for_loss(exchange):
                        break
                    self._is_closed.wait(self._held_back_s(exchange))
                client.sendall(raw)
        _close(client)
        _close(server)

    def _is_chosen_for_loss(self, exchange: Exchange) -> bool:
        with self._lock:
            for index, (chooses, times) in enumerate(self._lose):
                if chooses(exchange):
                    self._lose[index : index + 1] = [(chooses, times - 1)] if times > 1 else []
                    self.lost.append(exchange)
                    return True
        return False

    def _held_back_s(self, exchange: Exchange) -> float:
        with self._lock:
            for index, (chooses, seconds) in enumerate(self._hold):
                if chooses(exchange):
                    del self._hold[index]
                    return seconds
        return 0.0


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _frames(end: socket.socket) -> Iterator[bytes]:
    """Whole RESP values (2 or 3) as they come in, unparsed."""
    buffer = bytearray()
    while True:
        size = _size(buffer, 0)
        if size is not None:
            yield bytes(buffer[:size])
            del buffer[:size]
            continue
        more = end.recv(1 << 16)
        if not more:
            raise EOFError
        buffer += more


def _size(buffer: bytearray, at: int) -> int | None:
    """The end of the value that begins at `at`; ``None`` while it is incomplete."""
    line = buffer.find(b"\r\n", at)
    if line < 0:
        return None
    kind, head, end = buffer[at : at + 1], bytes(buffer[at + 1 : line]), line + 2
    if kind in b"$=!":
        end = end if int(head) < 0 else end + int(head) + 2
        return end if end <= len(buffer) else None
    if kind in b"*~>%|":
        parts = max(0, int(head)) * (2 if kind in b"%|" else 1)
        for _ in range(parts + (kind == b"|")):  # an attribute comes before its value
            found = _size(buffer, end)
            if found is None:
                return None
            end = found
    return end


def _command(raw: bytes) -> Command:
    """The arguments of one command, which clients send as an array of strings."""
    parts, at = [], raw.index(b"\r\n") + 2
    while at < len(raw):
        line = raw.index(b"\r\n", at)
        length = int(raw[at + 1 : line])
        parts.append(raw[line + 2 : line + 2 + length])
        at = line + 2 + length + 2
    return parts
