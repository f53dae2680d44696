"""The arrows of docs/lifecycle.md: where a worker dies, and what is so then and in the end. A table, no tests."""

import hashlib
from dataclasses import dataclass
from typing import Any

from rq import Retry

RQ = "stoker_worker.rq_worker."
HEAD_OF_VICTIM = ["HEAD", hashlib.sha256(b"victim").hexdigest()]
CALLED_BACK = "tests.worker.rq_worker.called_back"


@dataclass(frozen=True)
class Arrow:
    """Where the worker dies, what is so then, and what is so in the end.

    Attributes:
        place: where RQ's keys have the job when its worker has just died.
        end: the job's status in the end; `attempt` and `versions` are of a finished one.
        generations: how often the engine was given the job, over both workers.
        turns: whether the job's turn is in its agent's history when the worker has just died.
        act: done to the first worker once the job runs.
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


QUEUED, CLAIMED, STARTED = ["generate"], ["generate:intermediate"], ["wip"]
FAILS = {"prompt": "fail so", "end": "failed", "attempt": None}

ARROWS = {
    "claim: the next jobs are chosen": Arrow(RQ + "lineup:Lineup.choose", "after", QUEUED),
    "claim: the id is moved": Arrow(RQ + "backlog:Backlog.claim", "after", CLAIMED),
    "start: before": Arrow(RQ + "identity:RqIdentity.begin", "before", CLAIMED),
    "start: after": Arrow(RQ + "identity:RqIdentity.begin", "after", STARTED, attempt=2),
    "start: a job that is refused": Arrow(
        RQ + "ender:JobEnder.fail", "before", STARTED, 0, None, "failed", options=(("request", {"max_tokens": 0}),)
    ),
    "start: a job that was refused": Arrow(
        RQ + "ender:JobEnder.fail", "after", ["failed"], 0, None, "failed", options=(("request", {"max_tokens": 0}),)
    ),
    "load: before": Arrow("stoker_worker.loader:Loader._prepare", "before", STARTED, attempt=2),
    "load: after": Arrow("stoker_worker.loader:Loader._prepare", "after", STARTED, attempt=2),
    "generate": Arrow("stoker_worker.engine.scripted:ScriptedEngine._advance", "after", STARTED, 2, 2, nth=9),
    "save: before": Arrow("stoker_worker.memory.store:AgentStore.save", "before", STARTED, 2, 2),
    "save: before HEAD's rename": Arrow(
        "stoker_worker.memory.files:Disk.rename", "before", STARTED, 2, 2, needles=(*HEAD_OF_VICTIM,)
    ),
    "save: after HEAD's rename": Arrow(
        "stoker_worker.memory.files:Disk.rename", "after", STARTED, turn_saved=True, needles=(*HEAD_OF_VICTIM,)
    ),
    "finalise: before": Arrow(RQ + "ender:JobEnder.finish", "before", STARTED, turn_saved=True),
    "finalise: RQ's transaction is put together": Arrow(
        RQ + "ownership:Ownership.watch", "after", STARTED, turn_saved=True
    ),
    "finalise: before what follows it": Arrow(
        RQ + "aftermath:Aftermath.carry_out", "before", ["finished"], turn_saved=True
    ),
    "finalise: after": Arrow(RQ + "ender:JobEnder.finish", "after", ["finished"], turn_saved=True),
    "fail: before": Arrow(RQ + "ender:JobEnder.fail", "before", STARTED, 2, **FAILS),
    "fail: after": Arrow(RQ + "ender:JobEnder.fail", "after", ["failed"], 1, **FAILS),
    "fail: before what follows it": Arrow(RQ + "aftermath:Aftermath.carry_out", "before", ["failed"], 1, **FAILS),
    "fail: it is retried at once": Arrow(
        RQ + "ender:JobEnder.fail", "after", QUEUED, 2, **FAILS, options=(("retry", Retry(max=1)),)
    ),
    "fail: it is retried after an interval": Arrow(
        RQ + "ender:JobEnder.fail", "after", ["scheduled"], 2, **FAILS, options=(("retry", Retry(max=1, interval=1)),)
    ),
    "stop command: before": Arrow(RQ + "ender:JobEnder.stop", "before", STARTED, 2, 2, act="stop"),
    "stop command: after": Arrow(RQ + "ender:JobEnder.stop", "after", ["failed"], 1, None, "stopped", act="stop"),
    "give back: before": Arrow(RQ + "requeue:Requeue.__call__", "before", STARTED, 2, 2, act="terminate"),
    "give back: after": Arrow(RQ + "requeue:Requeue.__call__", "after", QUEUED, 2, 1, act="terminate"),
    "scheduler: before": Arrow(RQ + "scheduler:Scheduler._enqueue_plain", "before", ["scheduled"], act="due"),
    "scheduler: after": Arrow(RQ + "scheduler:Scheduler._enqueue_plain", "after", QUEUED, act="due"),
    "callback: before": Arrow(RQ + "callbacks:_run", "before", ["finished"], turn_saved=True, act="callback"),
    "callback: after": Arrow(RQ + "callbacks:_run", "after", ["finished"], turn_saved=True, act="callback"),
}
