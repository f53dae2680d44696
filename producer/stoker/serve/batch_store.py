"""The batches of the batch store: what was asked for, how far it is, and the answers so far. Blocking; no Redis.

``batches/ID/`` has ``batch.json`` (never changes), ``state.json`` (written by the one process that runs the batch),
``cancel`` (made when it is to be canceled) and ``answers.jsonl``, whose lock decides who runs it.
"""

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from stoker.serve.owned_folders import OwnedFolders
from stoker_shared.durable_file import replace_file

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
_ID: Final = re.compile("batch_[0-9a-f]{24}")  # with a line's number and digest, RQ takes it as a job's id
_STATE: Final = "state.json"
_CANCEL: Final = "cancel"


@dataclass(frozen=True)
class StoredBatch:
    """What a client asked for.

    Attributes:
        owner: the name of the token that made it; others do not see it.
        window_s: seconds after which lines that are not answered are canceled.
        created_at: Unix seconds.
    """

    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    id: str = field(default_factory=lambda: f"batch_{uuid4().hex[:24]}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def expires_at(self) -> int:
        return self.created_at + self.window_s


@dataclass(frozen=True)
class BatchState:
    """How far a batch is; the names are OpenAI's.

    Attributes:
        times: Unix seconds by name, as ``in_progress_at``.
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
    """Any thread, any number of processes."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError: the folder cannot be made.
        """
        super().__init__(folder / "batches", "batch", StoredBatch, _ID)

    def add(self, batch: StoredBatch) -> None:
        """
        Raises:
            OSError: it could not be written; there is no such batch then.
        """
        with self.new(batch.id) as draft:
            self.write_page(draft, batch)

    def state(self, batch_id: str) -> BatchState:
        """The last state that was written; ``cancelling`` if the batch is to be canceled and runs on meanwhile."""
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
        """When the batch was to be canceled, in Unix seconds."""
        try:
            return int((self.folder / batch_id / _CANCEL).read_bytes())
        except FileNotFoundError:
            return None

    def answers(self, batch_id: str) -> Path:
        """The file of all answers so far, by which a run continues."""
        return self.folder / batch_id / "answers.jsonl"

    def reads(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads this file."""
        batches = [self.read(batch_id) for batch_id in self.ids()]
        return any(
            batch is not None and batch.input_file_id == file_id and not self.state(batch.id).has_ended
            for batch in batches
        )
