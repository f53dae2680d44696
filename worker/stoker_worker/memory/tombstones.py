"""Forgets an agent in one step, and remembers the delivery that did until its job has ended. Finisher threads.

A forgotten agent has no history to answer a second delivery from. So its folder is first renamed to a name made of the
delivery: this rename forgets the agent. Then everything in it is removed except for the job's answer, which contains
neither the conversation nor the agent's id.
"""

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from stoker_shared.agent_result import AgentForgotten
from stoker_worker.memory.checksummed_file import Damaged, seal, unseal
from stoker_worker.memory.files import DurableWriter, Files
from stoker_worker.ports import Delivery

_log = logging.getLogger(__name__)

KEEP_S: Final = 30 * 86_400
"""How long an answer stays if its job does not end here: a failed job can be requeued while Redis has it."""

_ANSWER: Final = "ANSWER"


class Tombstones:
    """``STORE/forgotten/<sha256 of agent and delivery>/ANSWER``."""

    def __init__(self, folder: Path, files: Files, writer: DurableWriter) -> None:
        self._folder = folder
        self._files = files
        self._writer = writer

    def answer(self, agent_id: str, delivery: Delivery) -> AgentForgotten | None:
        """The answer of this delivery, if it forgot the agent. Removes what is left of the agent.

        Raises:
            OSError: something could not be removed.
        """
        tomb = self._path_of(agent_id, delivery)
        try:
            body = unseal("stoker-forgotten", (tomb / _ANSWER).read_bytes())
            known: dict[str, Any] = json.loads(body)
        except (FileNotFoundError, NotADirectoryError):
            if not tomb.is_dir():
                return None
            known = {}
        except (Damaged, ValueError):  # it happened for certain: the folder exists
            known = {}
        self._clear(tomb)
        return AgentForgotten(job_id=delivery.job_id, agent_id=agent_id, **{"existed": True, **known})

    def bury(self, agent: Path, forgotten: AgentForgotten, delivery: Delivery) -> None:
        """Forget the agent in the folder `agent`.

        Raises:
            OSError: the agent is where it was, or it is forgotten and something of it could not be removed.
        """
        tomb = self._path_of(forgotten.agent_id, delivery)
        answer = forgotten.model_dump_json(exclude={"job_id", "agent_id"})
        self._writer.put(agent / _ANSWER, [seal("stoker-forgotten", answer.encode() + b"\n")])
        self._files.flush(agent)
        self._files.rename(agent, tomb)
        self._files.flush(agent.parent)
        self._files.flush(self._folder)
        self._clear(tomb)

    def remove(self, agent_id: str, delivery: Delivery) -> None:
        """Remove the answer: the job has ended. Raises `OSError`."""
        tomb = self._path_of(agent_id, delivery)
        if tomb.is_dir():
            self._files.remove_folder(tomb)

    def tidy(self, now: float | None = None) -> None:
        """Finish what a crash interrupted, and remove old answers. Raises `OSError`."""
        oldest = (time.time() if now is None else now) - KEEP_S
        for tomb in list(self._folder.iterdir()):
            if tomb.is_symlink() or not tomb.is_dir():
                continue
            try:
                self._clear(tomb)
                if (tomb / _ANSWER).stat().st_mtime < oldest:
                    self._files.remove_folder(tomb)
            except OSError as error:
                _log.error("could not remove what is left of a forgotten agent: %s", error)

    def paths_of(self, agent_id: str, delivery: Delivery) -> tuple[Path, Path]:
        """The folder, and the answer in it."""
        tomb = self._path_of(agent_id, delivery)
        return tomb, tomb / _ANSWER

    def _path_of(self, agent_id: str, delivery: Delivery) -> Path:
        parts = [agent_id, delivery.job_id, delivery.created_at, delivery.repeats_left, delivery.request]
        return self._folder / hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _clear(self, tomb: Path) -> None:
        for name in os.listdir(tomb):
            if name != _ANSWER:
                self._files.remove(tomb / name)
