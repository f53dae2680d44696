"""Forgets an agent in one step, and remembers which delivery did, until the job of it has ended. Finaliser threads.

An agent that is forgotten has no history to answer a second delivery from. So its folder is not removed but renamed: to
a name made of the delivery. That rename is the forgetting. All that is in it then goes, but for the job's answer, which
holds nothing of the conversation, nor who the agent was.
"""

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from stoker_shared.agent_result import AgentForgotten
from stoker_worker.memory.files import DurableWriter, Files
from stoker_worker.memory.sealed import Damaged, seal, unseal
from stoker_worker.ports import Delivery

_log = logging.getLogger(__name__)

KEEP_S: Final = 30 * 86_400
"""An answer whose job never ended here stays for so long: a failed job can be requeued while Redis has it."""

_ANSWER: Final = "ANSWER"


class Tombstones:
    """``STORE/forgotten/<sha256 of agent and delivery>/ANSWER``."""

    def __init__(self, folder: Path, files: Files, writer: DurableWriter) -> None:
        self._folder = folder
        self._files = files
        self._writer = writer

    def answer(self, agent_id: str, delivery: Delivery) -> AgentForgotten | None:
        """What this delivery was answered, if it has forgotten the agent; what was left of the agent is gone then.

        Raises:
            OSError: not all of it could be removed.
        """
        tomb = self.path_of(agent_id, delivery)
        try:
            body = unseal("stoker-forgotten", (tomb / _ANSWER).read_bytes())
            known: dict[str, Any] = json.loads(body)
        except (FileNotFoundError, NotADirectoryError):
            if not tomb.is_dir():
                return None
            known = {}
        except (Damaged, ValueError):  # that it happened is certain: its folder's name tells
            known = {}
        self._clear(tomb)
        return AgentForgotten(job_id=delivery.job_id, agent_id=agent_id, **{"existed": True, **known})

    def bury(self, agent: Path, forgotten: AgentForgotten, delivery: Delivery) -> None:
        """Forget the agent in the folder `agent`.

        Raises:
            OSError: the agent is where it was; or it is forgotten, and not all of it could be removed.
        """
        tomb = self.path_of(forgotten.agent_id, delivery)
        answer = forgotten.model_dump_json(exclude={"job_id", "agent_id"})
        self._writer.put(agent / _ANSWER, [seal("stoker-forgotten", answer.encode() + b"\n")])
        self._files.flush(agent)
        self._files.rename(agent, tomb)
        self._files.flush(agent.parent)
        self._files.flush(self._folder)
        self._clear(tomb)

    def remove(self, agent_id: str, delivery: Delivery) -> None:
        """The job has ended: nobody asks again. Raises `OSError`."""
        tomb = self.path_of(agent_id, delivery)
        if tomb.is_dir():
            self._files.remove_folder(tomb)

    def tidy(self, now: float | None = None) -> None:
        """Finish what a crash cut short, and remove answers that nobody asked for again. Raises `OSError`."""
        oldest = (time.time() if now is None else now) - KEEP_S
        for tomb in list(self._folder.iterdir()):
            if tomb.is_symlink() or not tomb.is_dir():
                continue
            try:
                self._clear(tomb)
                if (tomb / _ANSWER).stat().st_mtime < oldest:
                    self._files.remove_folder(tomb)
            except OSError as error:
                _log.error("what is left of a forgotten agent could not be removed: %s", error)

    def path_of(self, agent_id: str, delivery: Delivery) -> Path:
        parts = [agent_id, delivery.job_id, delivery.created_at, delivery.repeats_left, delivery.request]
        return self._folder / hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def files_of(self, tomb: Path) -> tuple[Path, ...]:
        """What may be in it once all else has gone."""
        return (tomb / _ANSWER,)

    def _clear(self, tomb: Path) -> None:
        for name in os.listdir(tomb):
            if name != _ANSWER:
                self._files.remove(tomb / name)
