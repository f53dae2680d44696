"""A worker of some queues, as its lease and its record in Redis describe it. Pure but for `is_certainly_dead`, which
asks the operating system."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from stoker_worker.process_identity import ProcessIdentity, pid_namespace

_UNKNOWN: Final[Mapping[str, Any]] = {
    "worker": "unknown",
    "queues": [],
    "store": "",
    "shared": "",
    "model": "",
    "loading": False,
    "leaving": False,
    "recovers": "",
    "pids": "",
    "host": "unknown",
    "boot": "",
    "pid": 0,
    "started": "",
}


@dataclass(frozen=True)
class Member:
    """
    Attributes:
        name: it stays when the worker is started again.
        worker: its name as an RQ worker: of this life of its process.
        queues: those that it serves.
        store: the name of its store.
        shared: the id of the shared store behind that one; empty: none.
        model: the name of the one that it has loaded or loads.
        is_ready: its model is loaded.
        is_leaving: it drains: it claims nothing more.
        recovers: the dead member whose jobs it puts back in that one's name; empty: none.
        pids: whose pids its own is among: that of a process in another container tells nothing here. Empty: of all.
    """

    name: str
    worker: str
    queues: tuple[str, ...]
    store: str
    process: ProcessIdentity
    shared: str = ""
    model: str = ""
    is_ready: bool = False
    is_leaving: bool = False
    recovers: str = ""
    pids: str = ""

    @property
    def share(self) -> str:
        """The value of `SERVED_KEY` while it serves its queues: members of the same value may serve them together."""
        return f"shared {self.shared} {self.model}" if self.shared else f"only {self.name}"

    @property
    def kept_in(self) -> str:
        """The value of `STORE_KEY` from then on."""
        return f"shared {self.shared}" if self.shared else self.kept_alone

    @property
    def kept_alone(self) -> str:
        """The same, before its store was shared."""
        return f"store {self.store}"

    def described(self) -> str:
        """The JSON that `of` reads."""
        about: dict[str, Any] = {"worker": self.worker, "queues": self.queues, "store": self.store}
        about |= {"shared": self.shared, "model": self.model, "loading": not self.is_ready, "leaving": self.is_leaving}
        about |= {"pids": self.pids, **asdict(self.process)}
        return json.dumps(about | ({"recovers": self.recovers} if self.recovers else {}), sort_keys=True)

    @classmethod
    def of(cls, name: str, value: bytes) -> "Member":
        """From a lease or a record, with placeholders for what is missing or of another type."""
        try:
            parsed = json.loads(value.decode(errors="replace"))
        except (ValueError, RecursionError):
            parsed = None
        given = parsed if isinstance(parsed, dict) else {}
        found = {**_UNKNOWN, **{key: given[key] for key in _UNKNOWN if type(given.get(key)) is type(_UNKNOWN[key])}}
        return cls(
            name,
            found["worker"],
            tuple(queue for queue in found["queues"] if isinstance(queue, str)),
            found["store"],
            ProcessIdentity(found["host"], found["boot"], found["pid"], found["started"]),
            shared=found["shared"],
            model=found["model"],
            is_ready=not found["loading"],
            is_leaving=found["leaving"],
            recovers=found["recovers"],
            pids=found["pids"],
        )

    def is_certainly_dead(self) -> bool:
        return self.pids in ("", pid_namespace()) and self.process.is_certainly_dead()

    def __str__(self) -> str:
        return f"worker {self.worker} on host {self.process.host}, pid {self.process.pid}"
