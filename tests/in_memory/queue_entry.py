"""A job as the in-memory queue keeps it: what a server would hold of it. No behaviour."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stoker_shared.agents import AgentRequest
from stoker_shared.request import GenerationRequest
from stoker_worker.ports import LastVersion, SequenceProgress

State = Literal["queued", "started", "finished", "failed", "stopped", "canceled"]


@dataclass
class Entry:
    """
    Attributes:
        run: claim number of the run that may end it.
    """

    job_id: str
    request: GenerationRequest | AgentRequest
    retries_left: int
    timeout_s: float | None
    created_at: str
    lives_s: float = 3600.0
    enqueued_at: float = field(default_factory=time.time)
    state: State = "queued"
    lost: int = 0
    losses_alone: int = 0
    stop_asked: bool = False
    is_listened_to: bool = False
    text: str = ""
    progress: SequenceProgress | None = None
    result: Mapping[str, Any] | None = None
    error: Exception | None = None
    partial_text: str | None = None
    run: int | None = None
    last: LastVersion | None = None
    was_saving: bool = False
