"""Redis in memory, as far as the routing of several workers on one queue sees it. Owns the keys, counts what is sent.

Plays the server's part of the three scripts of `claim_scripts.py`, of the one that gives agents up, and of the commands
that `Claimer`, `Members` and `Homes` send beside them. It knows one queue, each id once, and jobs with the note of our
producers. `tests/experiments/test_played_redis.py` holds it equal to a real server on random histories.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stoker_shared.wire import LEASE_KEY, LEFT_KEY, MEMBERS_KEY
from stoker_worker.queue.claim_scripts import CLAIM, LOOK, READ
from stoker_worker.queue.home_scripts import GIVE_UP

_JOB: Final = len("rq:job:")
_MOST_TAKEN: Final = 2000


class Left(NamedTuple):
    at: float
    member: str


class PlayedRedis:
    """
    Attributes:
        jobs: the ids in the queue.
        notes: of each job: a word for how it uses its agent's memory, and the agent.
        losses: how many workers each job has lost, if any.
        homes: the entries of agents; an empty one is none.
        claimed: the ids that each member has claimed and not started.
        sent: how often each script and command was called, and how many jobs `READ` and `CLAIM` were called for.
        listeners: for each worker, what takes the agents that others ask it for.
    """

    def __init__(self, queue: str, now: Callable[[], float], homes: dict[bytes, str] | None = None) -> None:
        self._queue = queue
        self._now = now
        self.jobs: list[bytes] = []
        self._waiting: set[bytes] = set()
        self.notes: dict[bytes, str] = {}
        self.losses: Counter[bytes] = Counter()
        self.homes = {} if homes is None else homes
        self.claimed: defaultdict[str, list[bytes]] = defaultdict(list)
        self.sent: Counter[str] = Counter()
        self.listeners: dict[str, Callable[[list[str], int], None]] = {}
        self._members: dict[bytes, bytes] = {}
        self._store_of: dict[str, str] = {}  # of members that serve the queue
        self._sharing: set[str] = set()  # stores whose worker had a shared one when it was here last
        self._leases: dict[str, bytes] = {}
        self._left: dict[str, Left] = {}
        self._taken: list[bytes] = []
        self._n_taken, self._moves = 0, 0
        self._scripts = {LOOK: self._look, READ: self._read, CLAIM: self._claim, GIVE_UP: self._give_up}

    # --- what happens to the keys beside the routing ---

    def push(self, job_id: bytes, note: str, *, front: bool = False) -> None:
        """Enqueue a job, or put one back."""
        self.notes[job_id] = note
        self.jobs.insert(0 if front else len(self.jobs), job_id)
        self._waiting.add(job_id)

    def join(self, member: str, description: Mapping[str, Any]) -> str:
        """A worker holds the lease of this name and is a member; returns the lease's value."""
        value = json.dumps(description, sort_keys=True)
        self._leases[LEASE_KEY.format(member=member)] = value.encode()
        self._members[member.encode()] = value.encode()
        self._left.pop(description["store"], None)
        (self._sharing.add if description["shared"] else self._sharing.discard)(description["store"])
        if self._queue in description["queues"]:
            self._store_of[member] = description["store"]
        return value

    def lose_lease(self, member: str) -> None:
        self._leases.pop(LEASE_KEY.format(member=member), None)

    def remove(self, member: str) -> None:
        """The jobs of a dead member are back: its agents are anybody's."""
        description = json.loads(self._members.pop(member.encode()))
        self.lose_lease(member)
        self._store_of.pop(member, None)
        self._left[description["store"]] = Left(self._now(), member)
        self._moves += 1

    def is_member(self, member: str) -> bool:
        return member.encode() in self._members

    # --- commands ---

    def register_script(self, text: str) -> Callable[..., Any]:
        """A script that is not played fails when it is called."""
        return self._scripts.get(text) or _unplayed

    def hget(self, key: str, field: bytes) -> bytes | None:
        self.sent["homes"] += 1
        return self._home(field)

    def hmget(self, key: str, fields: Sequence[bytes]) -> list[bytes | None]:
        self.sent["homes"] += 1
        return [self._home(field) for field in fields]

    def hset(self, key: str, mapping: Mapping[bytes, str]) -> None:
        self.sent["homes"] += 1
        self.homes.update(mapping)

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        assert key == MEMBERS_KEY
        self.sent["members"] += 1
        return dict(self._members)

    def hvals(self, key: str) -> list[bytes]:
        assert key == LEFT_KEY
        self.sent["members"] += 1
        return [b"%d %s" % (left.at, left.member.encode()) for left in self._left.values()]

    def time(self) -> tuple[int, int]:
        self.sent["members"] += 1
        return int(self._now()), 0

    def mget(self, keys: Iterable[str]) -> list[bytes | None]:
        self.sent["members"] += 1
        return [self._leases.get(key) for key in keys]

    def lpos(self, key: str, job_id: bytes) -> int | None:
        self.sent["position"] += 1
        return self.jobs.index(job_id) if job_id in self._waiting else None

    def publish(self, channel: str, message: str) -> None:
        self.sent["ask"] += 1
        listener = self.listeners.get(channel.rpartition(":")[2])
        if listener is not None:
            asked = json.loads(message)
            listener(asked["agents"], asked["n_with_memory"])

    # --- scripts ---

    def _look(self, keys: Sequence[str], args: Sequence[Any]) -> list[Any]:
        self.sent["look"] += 1
        page, most_in_front, n_seen, n_firsts = args[:4]
        n_new = self._n_taken - n_seen
        taken = self._taken[-n_new:] if n_new > 0 else []
        gone = frozenset(taken)
        front, anchor = self._first_of(args[4 : 4 + n_firsts], gone)
        back = self._last_of(args[4 + n_firsts :], gone)
        counts = [taken, self._n_taken, b"%d" % self._moves]
        if front is None or back is None or front > most_in_front or n_new < 0 or n_new > len(taken):
            return [len(self.jobs), 0, [], self.jobs[:page], *counts]
        return [len(self.jobs), anchor, self.jobs[:front], self.jobs[back + 1 : back + 1 + page], *counts]

    def _read(self, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        self.sent["read"] += 1
        self.sent["jobs read"] += len(keys) - 2
        notes, quarantined, homes = [], [], []
        for number, key in enumerate(keys[2:], start=1):
            job_id = key[_JOB:]
            note = self.notes[job_id]
            home = "-" if note == "none" else _words(self._entry(note.partition(" ")[2].encode()))[0]
            notes.append(note.encode())
            homes.append(home.encode() if home not in ("-", args[0]) and home in self._store_of else b"")
            if self.losses[job_id]:
                quarantined.append(number)
        return [notes, [], quarantined, homes, [b""] * len(notes)]

    def _claim(self, keys: Sequence[str], args: Sequence[Any]) -> list[bytes] | None:
        self.sent["claim"] += 1
        value, me, store, moves, wait_s, travels = args[:6]
        if self._leases.get(keys[2]) != value.encode():
            return None
        asker = _Asker(me, store, wait_s, travels == "1", moves != str(self._moves))
        found: list[str] = []
        for _, job_id, use in _in_threes(args[6:]):
            self.sent["jobs claimed"] += 1
            verdict, kept, former, version = "claimed", "", "", ""
            if use:
                verdict, kept, former, version = self._decide(asker, job_id, use[1:], continues=use[:1] == b"c")
            if verdict in ("claimed", "lost"):
                if job_id in self._waiting:
                    self._take(me, job_id)
                    if verdict == "claimed" and former:
                        self.homes[use[1:]] = _entry_of(me, kept, version, "" if travels == "0" else former)
                else:
                    verdict = "gone"
            found += (verdict, kept, former, version)
        return [word.encode() for word in found]

    def _give_up(self, keys: Sequence[str], args: Sequence[Any]) -> int:
        self.sent["give up"] += 1
        if self._leases.get(keys[0]) != args[0].encode():
            return 0
        given = 0
        for agent, with_memory in zip(args[2::2], args[3::2], strict=True):
            home, kept, version, _ = _words(self._entry(agent))
            if home == args[1] and (kept == "-" or with_memory):
                self.homes[agent] = "" if kept == "-" else _entry_of("-", kept, version)
                given += 1
        self._moves += given > 0
        return given

    def _decide(self, asker: "_Asker", job_id: bytes, agent: bytes, *, continues: bool) -> tuple[str, str, str, str]:
        home, kept, version, before = _words(self._entry(agent))
        is_home = home == asker.me
        if not is_home and home in self._store_of:
            return "home", home, "", ""
        former = before if is_home else home if home != "-" else kept if kept != "-" else ""
        version = "" if kept == "-" else version
        travels = asker.travels and (version or kept in self._sharing)
        if continues and not travels and kept not in ("-", asker.store):
            if is_home:
                self.homes[agent] = _entry_of("-", kept, version)
                self._moves += 1
            its_member = next((member for member, store in self._store_of.items() if store == kept), None)
            if its_member is not None:
                return "home", its_member, "", ""
            left = self._left.get(kept)
            left_s = 0.0 if left is None else asker.wait_s - (int(self._now()) - int(left.at))
            if left_s > 0:
                return "away" if job_id in self._waiting else "gone", kept, f"{left_s:.14g}", ""
            return "lost", kept, left.member if left is not None else kept, version
        if not is_home and asker.has_moved:
            return "stale", "", "", ""
        if not is_home and former in ("", asker.me, asker.store):
            former = "-"
        return "claimed", kept, former, version

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

    def _entry(self, agent: bytes) -> str:
        return self.homes.get(agent, "")

    def _home(self, agent: bytes) -> bytes | None:
        return self._entry(agent).encode() or None


class _Asker(NamedTuple):
    me: str
    store: str
    wait_s: float
    travels: bool
    has_moved: bool  # whether agents were set free since it looked


def _words(entry: str) -> tuple[str, str, str, str]:
    home, kept, version, former = (*entry.split(" "), "", "", "")[:4]
    return home or "-", (home if kept == "=" else kept) or "-", "" if version == "0" else version, former


def _entry_of(home: str, kept: str, version: str, former: str = "") -> str:
    words = [home, "=" if kept == home else kept, version or ("0" if former else ""), former]
    return " ".join(filter(None, words))


def _in_threes(args: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(args[::3], args[1::3], args[2::3], strict=True)


def _unplayed(**call: Any) -> Any:
    raise NotImplementedError("this script is not played")
