"""The output file: the ledger of which lines are answered. Owns that a line is in it once, whole, and on the disk.

Answers are appended in groups, each followed by one `fsync`; only then may they leave Redis. A crash can leave half a
last line, which is cut off at the next start. The file is locked while a process writes to it. A file of anything else
is left as it is.
"""

import fcntl
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from stoker.batch.answers import is_success, to_bytes
from stoker.batch.causes import Causes
from stoker.batch.line_set import LineSet
from stoker.batch.naming import answer_id_for, line_of_answer
from stoker_shared.errors import StokerError

_BEGIN: Final = '{{"id":"{}-'


class OutputRefused(StokerError):
    """The output file cannot be the one of this batch; the message gives the reason."""


class OutputFile:
    """
    Attributes:
        written: the lines that are answered in it.
        causes: why those that failed did.
    """

    def __init__(self, path: Path, batch: str) -> None:
        """
        Raises:
            OutputRefused: another process writes to it, or it holds something else than answers of this batch.
            OSError: it cannot be read or written.
        """
        self._path = path
        self._batch = batch
        is_new = not path.exists()
        self._file = path.open("a+b", buffering=0)
        self.written = LineSet()
        self.causes = Causes()
        self._failed = LineSet()
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise OutputRefused(f"{path} is no file that keeps what is written to it")
            self._lock()
            self._read()
            if is_new:
                _sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def n_failed(self) -> int:
        """Lines that are answered and did not succeed."""
        return len(self._failed)

    def has_succeeded(self, number: int) -> bool:
        return number in self.written and number not in self._failed

    @property
    def identity(self) -> str:
        """Tells this file from others, also of other machines; its last part is the path."""
        found = os.fstat(self._file.fileno())
        path = str(self._path.resolve()).encode(errors="replace").decode()
        return f"{os.uname().nodename} {found.st_dev}:{found.st_ino} {path}"

    def append(self, answers: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Write the answers of these lines that are not there yet, and have them on the disk when it returns.

        Raises:
            OSError: the disk is full, or broken. What was written of the group is cut off at the next start.
        """
        new = [(number, answer) for number, answer in answers if number not in self.written]
        data = memoryview(b"".join(to_bytes(answer) for _, answer in new))
        if not new:
            return
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())
        for number, answer in new:
            self._note(number, answer)

    def _note(self, number: int, answer: Mapping[str, Any]) -> None:
        if number not in self.written:
            if not is_success(answer):
                self.causes.note(number, answer)
                self._failed.add(number)
            self.written.add(number)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputRefused(f"another process writes to {self._path}") from None

    def _read(self) -> None:
        """Note what is answered, mend the end, and have it all on the disk: a process may have died before it synced.

        Raises:
            OutputRefused: there is something else; nothing was written.
        """
        end = 0
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            lines.seek(0)
            for at, raw in enumerate(lines, start=1):
                if not raw.endswith(b"\n") and not self._is_whole(raw):
                    self._require_half_of_ours(raw)
                    self._file.truncate(end)
                    break
                self._note_answer(at, raw)
                end += len(raw)
                if not raw.endswith(b"\n"):
                    self._file.write(b"\n")
                    break
        if end:
            os.fsync(self._file.fileno())
        self.causes.take_news()

    def _note_answer(self, at: int, raw: bytes) -> None:
        try:
            answer = json.loads(raw)
            found = line_of_answer(answer["id"])
            if found is not None and found[0] == self._batch:
                self._note(found[1], answer)
        except (ValueError, TypeError, KeyError, RecursionError):
            found = None
        if found is None:
            raise OutputRefused(f"line {at} of {self._path} is no answer of a batch; it is left as it is")
        if found[0] != self._batch:
            raise OutputRefused(
                f"{self._path} holds answers of batch {found[0]}, and this is {self._batch}: the input or an "
                f"option has changed since, or it is another file's. Give another --out"
            )

    def _is_whole(self, last: bytes) -> bool:
        """Whether only its line end is missing: editors leave that out, and the answer has left Redis."""
        try:
            json.loads(last)
        except (ValueError, RecursionError):
            return False
        return True

    def _require_half_of_ours(self, last: bytes) -> None:
        begin = _BEGIN.format(answer_id_for(self._batch)).encode()
        written = last[: len(begin)].rstrip(b"\0")  # a power cut leaves zeros where blocks were not written
        if not begin.startswith(written):
            raise OutputRefused(f"{self._path} holds something else than answers; it is left as it is")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
