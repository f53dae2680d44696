"""The store of `stoker serve`: files (uploads, and the answers of batches), batches (their requests and progress), and
responses (input and answer of calls that later calls may continue). Blocking; no Redis, no HTTP.

``files/ID/`` has ``content`` and ``file.json``. ``batches/ID/`` has ``batch.json``, ``state.json`` (written by the
process that runs the batch), ``cancel`` (made when the batch is to be canceled) and ``answers.jsonl``, whose lock
decides which process runs the batch. ``responses/ID/`` has ``response.json`` and, once there is one, ``answer.json``. A
folder appears complete or not at all; ``content`` and the page (``file.json``, ``batch.json``, ``response.json``) never
change. A caller sees only the folders of its own token's name.
"""

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Generic, TypeVar
from uuid import uuid4

from stoker.api.failure import Failure
from stoker.api.responses import REFERENCE, response_id
from stoker_shared.durable_file import draft_of, replace_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owned:
    """
    Attributes:
        owner: the name of the token that made it; others do not see it.
        created_at: Unix seconds.
    """

    id: str
    owner: str
    created_at: int


OwnedT = TypeVar("OwnedT", bound=Owned)
_REMAINS_S: Final = 86_400
"""A hidden folder that is older was left by a killed process."""


class OwnedFolders(Generic[OwnedT]):
    """The folders of one kind in the store. Any thread, any number of processes.

    Attributes:
        place: the name of their parent folder in the store.
        kind: the word for one of them.
        of_page: the class of the page's content.
        id_form: the form of a folder's name; no other name is allowed, so no id leads out of `folder`.
    """

    place: ClassVar[str]
    kind: ClassVar[str]
    of_page: type[OwnedT]
    id_form: ClassVar[re.Pattern[str]]

    def __init__(self, store: Path) -> None:
        """Raises `OSError`: the folder cannot be made."""
        self.folder = store / self.place
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._left_out = set[str]()

    def remove_remains(self) -> None:
        """Remove drafts and discarded folders that a killed process left; not those of a process that runs."""
        for path in self.folder.glob(".*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _REMAINS_S:
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def new(self, item_id: str) -> Iterator[Path]:
        """A folder to fill, also with `write_page`. It appears when the block ends without an error. Raises `OSError`:
        it could not be written, and does not exist."""
        with draft_of(self.folder / item_id) as draft:
            draft.mkdir(mode=0o700)
            yield draft

    def write_page(self, draft: Path, item: OwnedT) -> None:
        """Raises `OSError`."""
        replace_file(draft / self._page, json.dumps(asdict(item)).encode())

    def read(self, item_id: str) -> OwnedT | None:
        """The item, whoever owns it; ``None`` if there is none."""
        try:
            return self.of_page(**json.loads((self.folder / item_id / self._page).read_bytes()))
        except FileNotFoundError:
            return None

    def get(self, owner: str, item_id: str) -> OwnedT:
        """Raises `Failure`: there is none, or another owner's, which looks the same."""
        found = self.read(item_id) if self.id_form.fullmatch(item_id) else None
        if found is None or found.owner != owner:
            kind = self.kind
            raise Failure(404, f"no {kind} {item_id[:64]!r}", code=f"{kind}_not_found", param=f"{kind}_id")
        return found

    def ids(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if self.id_form.fullmatch(path.name)]

    @contextmanager
    def leaving_out(self, item_id: str) -> Iterator[None]:
        """For the block of a loop over many items: if this one cannot be read, the block ends, and the log says so
        once."""
        try:
            yield
        except (OSError, ValueError, TypeError) as error:
            if item_id not in self._left_out:
                self._left_out.add(item_id)
                log.error("%s cannot be read, and is left out: %s", self.folder / item_id, error)

    def readable(self) -> Iterator[OwnedT]:
        """The items of all owners that can be read."""
        for item_id in self.ids():
            with self.leaving_out(item_id):
                if (item := self.read(item_id)) is not None:
                    yield item

    def all_of(self, owner: str) -> list[OwnedT]:
        """The newest first."""
        mine = [item for item in self.readable() if item.owner == owner]
        return sorted(mine, key=lambda item: (item.created_at, item.id), reverse=True)

    def _discard(self, item_id: str) -> None:
        """Remove the item, if it is there. Its folder is renamed first, in one step, because somebody may write into it
        at this moment. Raises `OSError`."""
        gone = self.folder / f".{uuid4().hex}.gone"
        with suppress(FileNotFoundError):
            (self.folder / item_id).rename(gone)
            shutil.rmtree(gone)

    @property
    def _page(self) -> str:
        return f"{self.kind}.json"


_CONTENT: Final = "content"


@dataclass(frozen=True)
class StoredFile(Owned):
    filename: str
    purpose: str
    bytes: int

    def as_object(self) -> dict[str, Any]:
        """In OpenAI's form."""
        about = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {**about, "object": "file", "status": "processed"}


class FileStore(OwnedFolders[StoredFile]):
    place, kind, of_page = "files", "file", StoredFile
    id_form = re.compile("file-[0-9a-f]{32}")

    def add(
        self, owner: str, filename: str, purpose: str, write: Callable[[BinaryIO], None], *, key: str | None = None
    ) -> StoredFile:
        """Make a file; `write` gives it its content. The id follows from `key`, if given; a file made earlier with the
        same key is returned as it is. Raises `OSError`: it could not be written, and does not exist."""
        file_id = f"file-{hashlib.sha256(key.encode()).hexdigest()[:32] if key else uuid4().hex}"
        if key and (found := self.read(file_id)):
            return found
        with self.new(file_id) as draft:
            with (draft / _CONTENT).open("xb") as content:
                write(content)
            n_bytes = (draft / _CONTENT).stat().st_size
            stored = StoredFile(file_id, owner, int(time.time()), filename, purpose, n_bytes)
            self.write_page(draft, stored)
        return stored

    def content(self, file: StoredFile) -> Path:
        return self.folder / file.id / _CONTENT

    def remove(self, file: StoredFile) -> None:
        """Raises `OSError`."""
        self._discard(file.id)


ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
_STATE: Final = "state.json"
_CANCEL: Final = "cancel"


@dataclass(frozen=True)
class StoredBatch(Owned):
    """A batch as a client asked for it. `window_s`: seconds after which unanswered lines are canceled."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None

    @property
    def expires_at(self) -> int:
        return self.created_at + self.window_s


@dataclass(frozen=True)
class BatchState:
    """The progress of a batch, with OpenAI's names.

    Attributes:
        times: Unix seconds by name, such as ``in_progress_at``.
        errors: why the batch failed as a whole.
    """

    status: str = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    times: dict[str, int] = field(default_factory=dict)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class BatchStore(OwnedFolders[StoredBatch]):
    place, kind, of_page = "batches", "batch", StoredBatch
    id_form = re.compile("batch_[0-9a-f]{24}")  # with a line's number and digest, RQ takes it as a job's id

    def add(self, owner: str, **asked: Any) -> StoredBatch:
        """Make a batch with these fields. Raises `OSError`: it could not be written, and does not exist."""
        batch = StoredBatch(f"batch_{uuid4().hex[:24]}", owner, int(time.time()), **asked)
        with self.new(batch.id) as draft:
            self.write_page(draft, batch)
        return batch

    def state(self, batch_id: str) -> BatchState:
        """The last state written; ``cancelling`` if the batch is to be canceled and has not ended."""
        try:
            state = BatchState(**json.loads((self.folder / batch_id / _STATE).read_bytes()))
        except FileNotFoundError:
            state = BatchState()
        canceled_at = self.canceled_at(batch_id)
        if canceled_at is None or state.has_ended:
            return state
        return BatchState("cancelling", state.total, times={**state.times, "cancelling_at": canceled_at})

    def set_state(self, batch_id: str, state: BatchState) -> None:
        """For the process that runs the batch. Raises `OSError`: the state is as it was."""
        replace_file(self.folder / batch_id / _STATE, json.dumps(asdict(state)).encode())

    def cancel(self, batch_id: str) -> None:
        """Ask the process that runs the batch to cancel it."""
        if self.canceled_at(batch_id) is None:
            replace_file(self.folder / batch_id / _CANCEL, str(int(time.time())).encode())

    def canceled_at(self, batch_id: str) -> int | None:
        """When a cancel was requested, in Unix seconds; ``None`` if none was."""
        try:
            return int((self.folder / batch_id / _CANCEL).read_bytes())
        except FileNotFoundError:
            return None

    def answers(self, batch_id: str) -> Path:
        """The file of all answers so far, from which a run continues."""
        return self.folder / batch_id / "answers.jsonl"

    def reads(self, file_id: str) -> bool:
        """True if a batch that has not ended reads this file. Raises `OSError`: perhaps one does."""
        for batch_id in self.ids():
            with suppress(ValueError):  # a damaged record never runs
                batch = self.read(batch_id)
                if batch is not None and batch.input_file_id == file_id and not self.state(batch_id).has_ended:
                    return True
        return False


_ANSWER: Final = "answer.json"
MOST_RESPONSES: Final = 10_000
_KEEP_RESPONSES_S: Final = 7 * 86_400
_MOST_TURNS: Final = 10_000


@dataclass(frozen=True)
class StoredResponse(Owned):
    """A call whose answer later calls may continue.

    Attributes:
        job_id: the job that makes the answer.
        continues: the id of the response before it.
        session: the conversation's session, through which the next response finds this one's cache.
        is_background: its job continues when its client hangs up.
        input: items in OpenAI's form.
        kept: the parts of the body that the answer repeats.
    """

    job_id: str
    continues: str | None
    session: str
    is_background: bool
    input: list[dict[str, Any]]
    kept: dict[str, Any]


class ResponseStore(OwnedFolders[StoredResponse]):
    place, kind, of_page = "responses", "response", StoredResponse
    id_form = re.compile("resp_[A-Za-z0-9_-]{1,200}")

    def __init__(self, store: Path, *, keep_s: float = _KEEP_RESPONSES_S, most: int = MOST_RESPONSES) -> None:
        """Keep responses for `keep_s` seconds, and the newest `most` only. Raises `OSError`: the folder cannot be
        made."""
        super().__init__(store)
        self._keep_s = keep_s
        self._most = most

    def add(self, response: StoredResponse) -> bool:
        """Returns ``False`` if there is one with this id, made by a call with the same key. Raises `OSError`: it could
        not be written, and does not exist."""
        if self.read(response.id) is not None:
            return False
        try:
            with self.new(response.id) as draft:
                self.write_page(draft, response)
        except OSError:
            if self.read(response.id) is None:
                raise
            return False  # another call has made it since
        return True

    def set_answer(self, response_id: str, answer: dict[str, Any]) -> None:
        """Raises `OSError`: the answer was not stored, or the response was removed."""
        replace_file(self.folder / response_id / _ANSWER, json.dumps(answer).encode())

    def answer(self, response_id: str) -> dict[str, Any] | None:
        """The answer; ``None`` while there is none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / response_id / _ANSWER).read_bytes())
        except FileNotFoundError:
            return None
        return found

    def remove(self, response_id: str) -> None:
        with suppress(OSError):
            self._discard(response_id)

    def conversation(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """All items up to the end of a response's answer, the oldest first. Raises `Failure`: the response, or one
        before it, does not exist or has no answer."""
        turns: list[list[dict[str, Any]]] = []
        following: str | None = response_id
        while following is not None and len(turns) < _MOST_TURNS:
            try:
                stored = self.get(owner, following)
            except Failure as failure:
                failure.error["code"], failure.error["param"] = "previous_response_not_found", "previous_response_id"
                raise
            answer = self.answer(following)
            if answer is None or not answer["output"]:
                message = f"the response {following!r} has no answer to continue"
                raise Failure(400, message, code="invalid_value", param="previous_response_id")
            turns.append([*stored.input, *answer["output"]])
            following = stored.continues
        return [item for turn in reversed(turns) for item in turn]

    def dereferenced(self, owner: str, given: list[Any]) -> list[Any]:
        """A response's input with stored items in the place of references to them. Raises `Failure`: there is none."""
        items: list[Any] = []
        for item in given:
            if not isinstance(item, dict) or item.get("type") != REFERENCE:
                items.append(item)
            elif (found := self._item(owner, str(item.get("id")))) not in items:  # a stream had it in two parts
                items.append(found)
        return items

    def _item(self, owner: str, item_id: str) -> dict[str, Any]:
        """An answer's item: its id has its response's, and perhaps a number, which a stream gives to a later text."""
        kind, _, job_id = item_id.partition("_")
        for of in (job_id, job_id.rpartition("_")[0]):
            with suppress(Failure):
                output = (self.answer(self.get(owner, response_id(of)).id) or {"output": ()})["output"]
                for found in output:
                    if found["id"] in (item_id, f"{kind}_{of}"):
                        return dict(found)
        raise Failure(404, f"no item {item_id[:64]!r}", code="item_not_found", param="input")

    def unanswered(self) -> list[StoredResponse]:
        """The background responses without an answer, of all owners."""
        found = []
        for response in self.readable():
            with self.leaving_out(response.id):
                if response.is_background and self.answer(response.id) is None:
                    found.append(response)
        return found

    def sweep(self) -> None:
        """Remove the responses whose time is over, and the oldest of too many."""
        made = []
        for path in self.folder.iterdir():  # also the remains of a response after a crash
            with suppress(FileNotFoundError):  # it was removed meanwhile
                made.append((path.stat().st_mtime, path))
        made.sort()
        too_old = sum(at < time.time() - self._keep_s for at, _ in made)
        for _, path in made[: max(too_old, len(made) - self._most)]:
            self.remove(path.name)
