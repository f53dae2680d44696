"""The arrows of docs/lifecycle.md: the place of a worker's loss, the state right after it and in the end. A table."""

import hashlib
from dataclasses import dataclass
from typing import Any

from rq import Retry

RQ = "stoker_worker.queue."
FINISH = RQ + "end:JobFinish."
STORE = "stoker_worker.memory."
FILE_OF_VICTIM = (hashlib.sha256(b"victim").hexdigest()[:32],)


@dataclass(frozen=True)
class Arrow:
    """A place to lose a worker at, the state right after the loss, and the state in the end.

    Attributes:
        place: where RQ's keys have the job right after the loss.
        end: the job's last status; `attempt` belongs to a finished job.
        generations: how often the engine got the job, over both workers.
        turn_saved: whether the job's turn is in its agent's history right after the loss.
        act: what else happens to the job: it falls ``due``, is told to ``stop``, or its worker is told to
            ``terminate``.
    """

    target: str
    when: str
    place: list[str]
    generations: int = 1
    attempt: int | None = 1
    end: str = "finished"
    turn_saved: bool = False
    nth: int = 1
    needles: tuple[str, ...] | None = None
    prompt: str = "x"
    act: str = ""
    options: tuple[tuple[str, Any], ...] = ()


QUEUED, CLAIMED, STARTED = ["generate"], ["claimed"], ["wip"]
FAILS: dict[str, Any] = {"prompt": "fail so", "end": "failed", "attempt": None}

ARROWS = {
    "claim: the next jobs are chosen": Arrow(RQ + "waiting:FairQueue.choose", "after", QUEUED),
    "claim: the id is moved": Arrow(RQ + "claim:Claimer.claim", "after", CLAIMED),
    "start: before": Arrow(RQ + "start:StartTransaction.run", "before", CLAIMED),
    "start: after": Arrow(RQ + "start:StartTransaction.run", "after", STARTED, attempt=2),
    "start: a job that is refused": Arrow(
        FINISH + "fail",
        "before",
        STARTED,
        0,
        None,
        "failed",
        options=(("request", {"max_tokens": 0}),),
    ),
    "start: a job that was refused": Arrow(
        FINISH + "fail",
        "after",
        ["failed"],
        0,
        None,
        "failed",
        options=(("request", {"max_tokens": 0}),),
    ),
    "load: before": Arrow("stoker_worker.pipeline.loader:Loader._load", "before", STARTED, attempt=2),
    "load: after": Arrow("stoker_worker.pipeline.loader:Loader._load", "after", STARTED, attempt=2),
    "generate": Arrow("stoker_worker.engine.scripted:ScriptedEngine._advance", "after", STARTED, 2, 2, nth=9),
    "save: before": Arrow(STORE + "store:AgentCacheStore.save", "before", STARTED, 2, 2),
    "save: before its cache file": Arrow(STORE + "files:Disk.rename", "before", STARTED, 2, 2, needles=FILE_OF_VICTIM),
    "save: after its cache file": Arrow(STORE + "files:Disk.rename", "after", STARTED, 2, 2, needles=FILE_OF_VICTIM),
    "save: before the commit": Arrow(STORE + "database:Database.commit", "before", STARTED, 2, 2),
    "save: in the transaction": Arrow(STORE + "transcripts:write_version", "after", STARTED, 2, 2),
    "save: after the commit": Arrow(STORE + "database:Database.commit", "after", STARTED, turn_saved=True),
    "finish: before": Arrow(FINISH + "finish", "before", STARTED, turn_saved=True),
    "finish: RQ's transaction is composed": Arrow(RQ + "ownership:Ownership.watch", "after", STARTED, turn_saved=True),
    "finish: before its later steps": Arrow(RQ + "end:FollowUp.carry_out", "before", ["finished"], turn_saved=True),
    "finish: after": Arrow(FINISH + "finish", "after", ["finished"], turn_saved=True),
    "fail: before": Arrow(FINISH + "fail", "before", STARTED, 2, **FAILS),
    "fail: after": Arrow(FINISH + "fail", "after", ["failed"], 1, **FAILS),
    "fail: before its later steps": Arrow(RQ + "end:FollowUp.carry_out", "before", ["failed"], 1, **FAILS),
    "fail: it is retried at once": Arrow(
        FINISH + "fail", "after", QUEUED, 2, **FAILS, options=(("retry", Retry(max=1)),)
    ),
    "fail: it is retried after an interval": Arrow(
        FINISH + "fail",
        "after",
        ["scheduled"],
        2,
        **FAILS,
        options=(("retry", Retry(max=1, interval=1)),),
    ),
    "stop command: before": Arrow(FINISH + "stop", "before", STARTED, 2, 2, act="stop"),
    "stop command: after": Arrow(FINISH + "stop", "after", ["failed"], 1, None, "stopped", act="stop"),
    "give back: before": Arrow(RQ + "requeue:Requeue.__call__", "before", STARTED, 2, 2, act="terminate"),
    "give back: after": Arrow(RQ + "requeue:Requeue.__call__", "after", QUEUED, 2, 1, act="terminate"),
    "scheduler: before": Arrow(RQ + "scheduler:Scheduler._enqueue_plain", "before", ["scheduled"], act="due"),
    "scheduler: after": Arrow(RQ + "scheduler:Scheduler._enqueue_plain", "after", QUEUED, act="due"),
}
