"""Redis in memory, as far as the routing of several workers on one queue sees it. Owns the keys, counts what is sent.

Plays the server's part of the scripts that read ahead and claim, and of the commands that `Claimer`, `Members` and
`Placement` send beside them. It knows one queue, each id once, and jobs with the note of our producers.
`tests/experiments/test_played_redis.py` holds it equal to a real server on random histories.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from stoker_shared.wire import HELD_KEY, LAST_KEY, LEASE_KEY, MEMBERS_KEY
from stoker_worker.queue.claimer import _CLAIM
from stoker_worker.queue.member import Member
from stoker_worker.queue.queue_view import _LOOK, _READ

_JOB: Final = len("rq:job:")
_MOST_TAKEN: Final = 2000
_NEAR_THE_FRONT: Final = 1000
_WORKER: Final = re.compile(r"stoker-(.+)-[0-9a-f]+", re.DOTALL)

Held = tuple[str, list[tuple[str, bytes]]]
"""`w` or `r`, then the member and the id of each job."""


class PlayedRedis:
    """
    Attributes:
        jobs: the ids in the queue.
        notes: of each job that has not ended: a word for how it uses its agent's memory, and the agent.
        losses: how many workers each job has lost, if any.
        started: the ids of jobs that run.
        claimed: the ids that each member has claimed and not started.
        held: the agents that are entered for jobs.
        last: of agents, the RQ worker that made the newest version, and its number.
        sent: how often each script and command was called, and how many jobs `READ` and `CLAIM` were called for.
    """

    def __init__(self, queue: str, last: dict[bytes, str] | None = None) -> None:
        self.jobs: list[bytes] = []
        self._waiting: set[bytes] = set()
        self.notes: dict[bytes, str] = {}
        self.losses: Counter[bytes] = Counter()
        self.started: set[bytes] = set()
        self.claimed: defaultdict[str, list[bytes]] = defaultdict(list)
        self.held: dict[bytes, Held] = {}
        self.last = {} if last is None else last
        self.sent: Counter[str] = Counter()
        self._members: dict[bytes, bytes] = {}
        self._leases: dict[str, bytes] = {}
        self._ready: set[str] = set()
        self._hashes: dict[str, dict[bytes, Any]] = {
            HELD_KEY.format(queue=queue): self.held,
            LAST_KEY.format(queue=queue): self.last,
        }
        self._taken: list[bytes] = []
        self._n_taken = 0
        self._scripts = {_LOOK: self._look, _READ: self._read, _CLAIM: self._claim}

    # --- what happens to the keys beside the routing ---

    def push(self, job_id: bytes, note: str, *, front: bool = False) -> None:
        """Enqueue a job, or put one back."""
        self.started.discard(job_id)
        self.notes[job_id] = note
        self.jobs.insert(0 if front else len(self.jobs), job_id)
        self._waiting.add(job_id)

    def start(self, member: str, job_id: bytes) -> None:
        self.claimed[member].remove(job_id)
        self.started.add(job_id)

    def end(self, job_id: bytes) -> None:
        self.started.discard(job_id)
        del self.notes[job_id], self.losses[job_id]

    def join(self, member: Member) -> str:
        """A worker holds the lease of this name and is a member; returns the lease's value."""
        value = member.described()
        self._leases[LEASE_KEY.format(member=member.name)] = self._members[member.name.encode()] = value.encode()
        self._ready.discard(member.name)
        if member.is_ready and not member.is_leaving:
            self._ready.add(member.name)
        return value

    def lose_lease(self, member: str) -> None:
        self._leases.pop(LEASE_KEY.format(member=member), None)

    def remove(self, member: str) -> None:
        """The jobs of a dead member are back."""
        del self._members[member.encode()]
        self._ready.discard(member)
        self.lose_lease(member)

    def is_member(self, member: str) -> bool:
        return member.encode() in self._members

    def is_ready(self, member: str) -> bool:
        """As `is_ready` of `placement.lua`."""
        return LEASE_KEY.format(member=member) in self._leases and member in self._ready

    # --- commands ---

    def register_script(self, text: str) -> Callable[..., Any]:
        """A script that is not played fails when it is called."""
        return self._scripts.get(text) or _unplayed

    def hset(self, key: str, field: bytes, value: str) -> None:
        self._hashes[key][field] = value

    def hdel(self, key: str, field: bytes) -> None:
        self._hashes[key].pop(field, None)

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        assert key == MEMBERS_KEY
        self.sent["members"] += 1
        return dict(self._members)

    def mget(self, keys: Iterable[str]) -> list[bytes | None]:
        self.sent["members"] += 1
        return [self._leases.get(key) for key in keys]

    def lpos(self, key: str, job_id: bytes) -> int | None:
        self.sent["position"] += 1
        return self.jobs.index(job_id) if job_id in self._waiting else None

    # --- scripts ---

    def _look(self, keys: Sequence[str], args: Sequence[Any]) -> list[Any]:
        self.sent["look"] += 1
        page, most_in_front, n_seen, n_firsts = args[:4]
        n_new = self._n_taken - n_seen
        taken = self._taken[-n_new:] if n_new > 0 else []
        gone = frozenset(taken)
        front, anchor = self._first_of(args[4 : 4 + n_firsts], gone)
        back = self._last_of(args[4 + n_firsts :], gone)
        if front is None or back is None or front > most_in_front or n_new < 0 or n_new > len(taken):
            return [len(self.jobs), 0, [], self.jobs[:page], taken, self._n_taken]
        behind = self.jobs[back + 1 : back + 1 + page]
        return [len(self.jobs), anchor, self.jobs[:front], behind, taken, self._n_taken]

    def _read(self, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        self.sent["read"] += 1
        self.sent["jobs read"] += len(keys)
        job_ids = [key[_JOB:] for key in keys]
        notes = [self.notes[job_id].encode() for job_id in job_ids]
        return [notes, [], [number for number, job_id in enumerate(job_ids, start=1) if self.losses[job_id]]]

    def _claim(self, keys: Sequence[str], args: Sequence[Any]) -> list[bytes] | None:
        """Without keys of agents, the worker has no shared store."""
        self.sent["claim"] += 1
        value, member, _, _, limit = args[:5]
        if self._leases.get(keys[2]) != value.encode():
            return None
        found: list[str] = []
        for job_id, use in zip(args[6::3], args[7::3], strict=True):
            if found[::3].count("claimed") == limit:
                break
            mode, is_impatient, agent = use[:1].decode(), use[1:2] == b"1", use[2:]
            is_entered = bool(mode) and len(keys) > 6
            verdict, maker, number = "claimed", "", 0
            if is_entered:
                verdict, maker, number = self._verdict(job_id, mode, agent, member, is_impatient=is_impatient)
            self.sent[f"jobs {verdict}"] += 1
            if verdict == "claimed":
                if job_id not in self._waiting:
                    verdict = "gone"
                else:
                    self._take(member, job_id)
                    if is_entered:
                        self._hold(member, job_id, mode, agent)
            found += verdict, maker, str(number)
        return [word.encode() for word in found]

    def _verdict(
        self, job_id: bytes, mode: str, agent: bytes, member: str, *, is_impatient: bool
    ) -> tuple[str, str, int]:
        held_as, held = self.held.get(agent, ("r", []))
        for holder, other in held if "w" in (held_as, mode) else ():
            if other != job_id:
                if self._is_in_flight(holder, other):
                    return "held", "", 0
                if other in self._waiting and self._is_before(other, job_id):
                    return "stale", "", 0
        maker, _, number = (self.last.get(agent) or " 0").partition(" ")
        made_by = member_of(maker)
        is_left = made_by not in ("", member) and not is_impatient and self.is_ready(made_by)
        return "passed" if is_left else "claimed", maker, int(number)

    def _hold(self, member: str, job_id: bytes, mode: str, agent: bytes) -> None:
        held_as, held = self.held.get(agent, ("r", []))
        beside = [] if "w" in (mode, held_as) else held
        kept = [one for one in beside if one[1] != job_id and (one[1] in self._waiting or self._is_in_flight(*one))]
        self.held[agent] = mode, [(member, job_id), *kept]

    def _is_in_flight(self, member: str, job_id: bytes) -> bool:
        return job_id in self.started or job_id in self.claimed[member]

    def _is_before(self, first: bytes, second: bytes) -> bool:
        at = self.jobs.index(first)
        return at < _NEAR_THE_FRONT and second not in self.jobs[:at]

    def _take(self, member: str, job_id: bytes) -> None:
        self.jobs.remove(job_id)
        self._waiting.discard(job_id)
        self.claimed[member].append(job_id)
        if len(self._members) > 1:
            self._taken.append(job_id)
            del self._taken[:-_MOST_TAKEN]
            self._n_taken += 1

    def _first_of(self, anchors: Sequence[bytes], gone: Collection[bytes]) -> tuple[int | None, int]:
        for number, job_id in enumerate(anchors, start=1):
            if job_id not in gone and job_id in self._waiting:
                return self.jobs.index(job_id), number
        return None, 0

    def _last_of(self, anchors: Sequence[bytes], gone: Collection[bytes]) -> int | None:
        for job_id in anchors:
            if job_id not in gone and job_id in self._waiting:
                return next(at for at in range(len(self.jobs) - 1, -1, -1) if self.jobs[at] == job_id)
        return None


def _unplayed(**call: Any) -> Any:
    raise NotImplementedError("this script is not played")


def member_of(worker: str) -> str:
    """As `member_of` of `placement.lua`; empty for what is no worker of stoker's."""
    found = _WORKER.fullmatch(worker)
    return found[1] if found else ""
