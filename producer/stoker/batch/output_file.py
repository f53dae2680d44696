"""The output file, which records the lines that are answered. Each answer is in it once, complete and durable.

Answers are appended in groups, each followed by one `fsync`; only then may they leave Redis. A crash can leave an
incomplete last line, which the next start cuts off. The file is locked while a process writes to it. A file with any
other content is not changed.

The lines have OpenAI's form. As there, `error` describes a line without an HTTP response: it could not be run, was
canceled, or has expired. A job that its worker failed has a `response`, with the status that an API would return and an
error object as its body.
"""

import fcntl
import json
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from stoker.api.endpoints import ENDPOINTS
from stoker.api.failure import of_worker
from stoker.batch.input_file import BadLine, LineSet, answer_id_for, line_of_answer
from stoker.tables import Table
from stoker_shared.durable_file import sync
from stoker_shared.errors import StokerError
from stoker_shared.result import Attempt, GenerationResult


def success_line(line_id: str, custom_id: str, url: str, created_s: int, result: GenerationResult) -> dict[str, Any]:
    """The line of a job that finished. `line_id` is from `answer_id_for`; `created_s` is the answer's Unix time."""
    response = {"status_code": 200, "request_id": result.job_id, "body": ENDPOINTS[url].answer([result], created_s, {})}
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": None}


def failure_line(line_id: str, custom_id: str, job_id: str, reason: str, partial_text: str | None) -> dict[str, Any]:
    """The line of a job that its worker failed; `reason` and `partial_text` as for `of_worker`."""
    failed = of_worker(reason, partial_text)
    response = {"status_code": failed.status, "request_id": job_id, "body": failed.body}
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": None}


def not_run_line(line_id: str, bad: BadLine) -> dict[str, Any]:
    """The line of an input line that could not be run."""
    error = {"code": bad.code, "line": bad.number, "message": str(bad), "param": bad.param}
    return {"id": line_id, "custom_id": bad.custom_id, "response": None, "error": error}


def line_bytes(answer: Mapping[str, Any]) -> bytes:
    """The answer as one line, with its line end."""
    return (
        json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")
        + b"\n"
    )


def is_success(answer: Mapping[str, Any]) -> bool:
    return answer["response"] is not None and answer["response"]["status_code"] == 200


def is_cut_off(answer: Mapping[str, Any]) -> bool:
    """True if a token limit ended this answer, which must be a success."""
    body = answer["response"]["body"]
    ends = [choice["finish_reason"] for choice in body.get("choices", ())]
    return "length" in ends or body.get("status") == "incomplete"


_MAX_KINDS: Final = 50
_HINTS: Final[Mapping[str, str]] = {
    "model_not_found": "--any-model, or --model-alias THEIRS=OURS, with another --out runs such lines"
}


class Causes:
    """Counts of failed lines by kind: the code of the answer's error, or the name of the worker's error."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._news: list[str] = []

    def note(self, number: int, answer: Mapping[str, Any]) -> None:
        """Count a line that failed."""
        error = answer["error"] or answer["response"]["body"]["error"]
        message = str(error["message"]).removeprefix(f"line {number}: ")
        kind = error["code"] or message.partition(":")[0]
        if kind not in self.counts:
            kind = kind if len(self.counts) < _MAX_KINDS else "other"
            hint = f" ({_HINTS[kind]})" if kind in _HINTS else ""
            self._news.append(f"line {number:,} failed: {message}{hint}")
        self.counts[kind] += 1

    def take_news(self) -> list[str]:
        """A message for each kind that first occurred since the last call."""
        news, self._news = self._news, []
        return news

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())


class OutputRefused(StokerError, ValueError):
    """The file cannot be the output file of this batch; the message has the reason."""


class OutputFile:
    """
    Attributes:
        written: numbers of the lines whose answers are in it.
        n_cut_off: the number of these answers that a token limit ended.
        causes: causes of the failures among them.
        attempts: the models' attempts at lines with a check.
    """

    def __init__(self, path: Path, batch: str) -> None:
        """Raises `OutputRefused`: another process writes to it, or it has content other than answers of this batch.
        Raises `OSError`: it cannot be read or written."""
        self._path = path
        self._batch = batch
        is_new = not path.exists()
        self._file = path.open("a+b", buffering=0)
        self.written = LineSet()
        self.n_cut_off = 0
        self.causes = Causes()
        self.attempts = Attempts()
        self._failed = LineSet()
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise OutputRefused(f"{path} is not a regular file")
            self._lock()
            self._read()
            if is_new:
                sync(path.parent)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def n_failed(self) -> int:
        """The number of answers that are not successes."""
        return len(self._failed)

    def has_succeeded(self, number: int) -> bool:
        return number in self.written and number not in self._failed

    @property
    def identity(self) -> str:
        """Identifies this file among all files of all machines; the last part is its path."""
        found = os.fstat(self._file.fileno())
        path = str(self._path.resolve()).encode(errors="replace").decode()
        return f"{os.uname().nodename} {found.st_dev}:{found.st_ino} {path}"

    def append(self, answers: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Write those answers that are not in the file yet; when it returns, they are durable. Raises `OSError`: the
        disk is full or failed; the next start cuts off an incomplete line."""
        new = [(number, answer) for number, answer in answers if number not in self.written]
        data = memoryview(b"".join(line_bytes(answer) for _, answer in new))
        if not new:
            return
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())
        for number, answer in new:
            self._note(number, answer)

    def _note(self, number: int, answer: Mapping[str, Any]) -> None:
        if number not in self.written:
            if is_success(answer):
                self.n_cut_off += is_cut_off(answer)
            else:
                self.causes.note(number, answer)
                self._failed.add(number)
            self.attempts.note(answer)
            self.written.add(number)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputRefused(f"another process writes to {self._path}") from None

    def _read(self) -> None:
        """Note the answers in the file, repair its end, and sync it, because an earlier process may have died before
        its sync. Raises `OutputRefused`: it has other content; nothing was written."""
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
            raise OutputRefused(f"line {at} of {self._path} is not an answer of a batch; the file was not changed")
        if found[0] != self._batch:
            raise OutputRefused(
                f"{self._path} has answers of batch {found[0]}, but this batch is {self._batch}: the input or an "
                f"option has changed, or these are answers to another file. Give another --out"
            )

    def _is_whole(self, last: bytes) -> bool:
        """True if only the line end is missing. Some editors omit it, and the answer has left Redis already."""
        try:
            json.loads(last)
        except (ValueError, RecursionError):
            return False
        return True

    def _require_half_of_ours(self, last: bytes) -> None:
        begin = f'{{"id":"{answer_id_for(self._batch)}-'.encode()
        written = last[: len(begin)].rstrip(b"\0")  # a power failure leaves zeros where blocks were not written
        if not begin.startswith(written):
            raise OutputRefused(f"{self._path} has content other than answers; it was not changed")


@dataclass
class ModelPart:
    """Sums over one model's attempts. `seconds`: prefill and decode."""

    asked: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, attempt: Attempt) -> None:
        self.asked += 1
        self.accepted += attempt.accepted
        self.tokens += attempt.prompt_tokens + attempt.completion_tokens
        self.seconds += attempt.seconds


@dataclass
class Attempts:
    """
    Attributes:
        models: by name; empty for a batch without checks.
        n_lines, n_accepted: the lines with a check, and those whose answer passed.
    """

    models: dict[str, ModelPart] = field(default_factory=dict)
    n_lines: int = 0
    n_accepted: int = 0

    def note(self, answer: Mapping[str, Any]) -> None:
        """Add one line of the output file."""
        found = ((answer["response"] or {}).get("body") or {}).get("attempts")
        if not found:
            return
        attempts = [Attempt.model_validate(attempt) for attempt in found]
        self.n_lines += 1
        self.n_accepted += attempts[-1].accepted
        for attempt in attempts:
            self.models.setdefault(attempt.model, ModelPart()).add(attempt)

    def as_json(self) -> dict[str, Any]:
        models = {name: asdict(part) for name, part in self.models.items()}
        return {"models": models, "checked": self.n_lines, "accepted": self.n_accepted}

    def text(self) -> str:
        rows = [
            [name, f"{part.asked:,}", f"{part.accepted:,}", f"{part.tokens:,}", f"{part.seconds:,.1f}"]
            for name, part in self.models.items()
        ]
        table = Table(["model", "asked", "accepted", "tokens", "seconds"], rows, range(1, 5)).text()
        return f"{table}\n{self.n_accepted:,} of {self.n_lines:,} answers passed the check"
