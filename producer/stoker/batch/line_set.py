"""A set of line numbers, a bit each: 100,000 lines take 12 KiB. Pure."""


class LineSet:
    """Numbers from 1 up."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] & 1 << (number & 7))

    def add(self, number: int) -> None:
        at = number >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits)))
        if not self._bits[at] & 1 << (number & 7):
            self._bits[at] |= 1 << (number & 7)
            self._count += 1
