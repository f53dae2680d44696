"""The Redis that fleets in virtual time use answers as a real server does, on random histories."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from stoker_shared.wire import (
    CLAIMED_KEY,
    COUNTS_KEY,
    FIELD_AGENT,
    FIELD_ATTEMPTS,
    HELD_KEY,
    LAST_KEY,
    LEASE_KEY,
    MEMBERS_KEY,
    TAKEN_KEY,
)
from stoker_worker.placement.placement import Placement, Writes
from stoker_worker.process_identity import ProcessIdentity
from stoker_worker.queue.claimer import _CLAIM
from stoker_worker.queue.member import Member
from stoker_worker.queue.queue_view import _LOOK, _READ

pytestmark = [pytest.mark.server, pytest.mark.scheduled]

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
QUEUE = "generate"
JOBS = f"rq:queue:{QUEUE}"
HELD, LAST, TAKEN, COUNTS = (key.format(queue=QUEUE) for key in (HELD_KEY, LAST_KEY, TAKEN_KEY, COUNTS_KEY))
NAMES = ["mac1", "mac-2", "mac3"]
WORKERS = [f"stoker-{name}-0123456{life}" for life, name in enumerate([*NAMES, "mac1"])]
AGENTS = [b"agent %d" % n for n in range(12)]
NOTES = ["none", *(f"{word} {agent.decode()}" for agent in AGENTS for word in ("write", "read", "append"))]
SCRIPTS = (_LOOK, _READ, _CLAIM)


def claimed_by(name: str) -> str:
    return CLAIMED_KEY.format(queue=QUEUE, member=name)


class RealRedis:
    """A real server, with the names that `PlayedRedis` has for what happens beside the routing."""

    def __init__(self, connection: Redis) -> None:
        self.connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def push(self, job_id, note, *, front=False):
        fields = {"created_at": "then", FIELD_AGENT: f"then {note}", "status": "queued"}
        self.hset(b"rq:job:" + job_id, mapping=fields)
        (self.lpush if front else self.rpush)(JOBS, job_id)

    def start(self, member, job_id):
        self.lrem(claimed_by(member), 1, job_id)
        self.hset(b"rq:job:" + job_id, "status", "started")

    def end(self, job_id):
        self.hset(b"rq:job:" + job_id, "status", "finished")

    def lose(self, job_id):
        self.hincrby(b"rq:job:" + job_id, FIELD_ATTEMPTS, 1)

    def join(self, member):
        value = member.described()
        self.set(LEASE_KEY.format(member=member.name), value)
        self.hset(MEMBERS_KEY, member.name, value)
        return value

    def lose_lease(self, member):
        self.delete(LEASE_KEY.format(member=member))

    def remove(self, member):
        self.hdel(MEMBERS_KEY, member)
        self.lose_lease(member)

    def state(self):
        held = {agent: json.loads(entry) for agent, entry in self.hgetall(HELD).items()}
        return (
            held,
            self.hgetall(LAST),
            {name: self.lrange(claimed_by(name), 0, -1) for name in NAMES},
            self.lrange(JOBS, 0, -1),
        )


class Both:
    """Does everything on both servers, and compares what they answer."""

    def __init__(self, real, played) -> None:
        self.servers = (real, played)
        self.scripts = {text: [server.register_script(text) for server in self.servers] for text in SCRIPTS}

    def __getattr__(self, name):
        def call(*args, **options):
            real, played = (getattr(server, name)(*args, **options) for server in self.servers)
            assert real == played, (name, args)
            return real

        return call

    def script(self, text, keys, args):
        real, played = (script(keys=keys, args=args) for script in self.scripts[text])
        assert real == played, (args, played)
        return real


@pytest.fixture
def both(redis_url, monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from played_redis import PlayedRedis  # type: ignore[import-not-found]

    class Played(PlayedRedis):  # type: ignore[misc]
        def lose(self, job_id):
            self.losses[job_id] += 1

        def end(self, job_id):
            self.started.discard(job_id)  # its note stays: other members may still read it

        def state(self):
            held = {
                agent: [mode, *(word for member, job_id in jobs for word in (QUEUE, member, job_id.decode()))]
                for agent, (mode, jobs) in self.held.items()
            }
            last = {agent: entry.encode() for agent, entry in self.last.items()}
            return held, last, {name: self.claimed[name] for name in NAMES}, self.jobs

    with Redis.from_url(redis_url) as connection:
        yield Both(RealRedis(connection), Played(QUEUE))


class History:
    """Members that join, die and leave, and jobs that come and are claimed, started, ended, lost and put back."""

    def __init__(self, both: Both, chance: random.Random) -> None:
        self.both, self.chance = both, chance
        self.values: dict[str, str] = {}
        self.n_seen = dict.fromkeys(NAMES, 0)
        self.known: list[bytes] = []
        self.running: list[bytes] = []
        self.verdicts: Counter[bytes] = Counter()

    def step(self) -> None:
        often = [self.push, self.claim, self.start, self.end]
        self.chance.choice([*often, *often, self.look, self.read, self.put_back, self.put_back, self.come_or_go])()

    def push(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            job_id = b"job-%d" % len(self.known)
            self.both.push(job_id, self.chance.choice(NOTES), front=self.chance.random() < 0.2)
            self.known.append(job_id)

    def a_claimed_one(self) -> tuple[str, bytes] | None:
        ids = [(name, job_id) for name, found in self.both.state()[2].items() for job_id in found]
        return self.chance.choice(ids) if ids else None

    def start(self) -> None:
        if found := self.a_claimed_one():
            self.both.start(*found)
            self.running.append(found[1])

    def end(self) -> None:
        """It finishes, or is canceled: then its agent's entry stays."""
        if not self.running:
            return
        job_id = self.running.pop(self.chance.randrange(len(self.running)))
        word, _, agent = self.both.servers[1].notes[job_id].partition(" ")
        if word in ("write", "append") and self.chance.random() < 0.7:
            worker, known = self.chance.choice(WORKERS), self.chance.choice([0, 3])
            result = {"cache": {"saved": True, "agent_version": self.chance.choice([3, 4])}}
            for server in self.both.servers:
                Placement(server, [QUEUE], worker_name=worker).wrote(server, Writes(agent, agent, known), result)
        self.both.end(job_id)

    def put_back(self) -> None:
        """A job that was claimed or runs, with or without its worker."""
        if self.running and self.chance.random() < 0.5:
            job_id = self.running.pop()
        elif found := self.a_claimed_one():
            self.both.start(*found)
            job_id = found[1]
        else:
            return
        if self.chance.random() < 0.5:
            self.both.lose(job_id)
        self.both.push(job_id, self.both.servers[1].notes[job_id], front=True)

    def look(self) -> None:
        name = self.chance.choice(NAMES)
        waiting = self.both.state()[3]
        pool = [*waiting[:6], *self.chance.sample(self.known, min(4, len(self.known)))]
        firsts = self.chance.sample(pool, min(len(pool), 3))
        lasts = self.chance.sample([*waiting[-4:], *firsts], min(2, len(firsts)))
        page = self.chance.choice([2, 250])
        args = [page, self.chance.choice([1, 1000]), self.n_seen[name], len(firsts), *firsts, *lasts]
        self.n_seen[name] = self.both.script(_LOOK, [JOBS, TAKEN, COUNTS], args)[5]

    def read(self) -> None:
        if ids := self.chance.sample(self.known, min(5, len(self.known))):
            keys = [b"rq:job:" + job_id for job_id in ids]
            self.both.script(_READ, keys, [FIELD_AGENT, FIELD_ATTEMPTS, 100_000, 100_000])

    def claim(self) -> None:
        name = self.chance.choice(NAMES)
        args: list[Any] = [
            self.values.get(name, "none"),
            name,
            self.chance.choice(WORKERS),
            QUEUE,
            self.chance.choice([1, 9]),
        ]
        waiting = self.both.state()[3]
        for job_id in dict.fromkeys([*waiting[:2], *self.chance.sample(self.known, min(1, len(self.known)))]):
            word, _, agent = self.both.servers[1].notes[job_id].partition(" ")
            letter = {"none": b"", "read": b"r"}.get(word, b"w")
            use = letter and letter + self.chance.choice([b"0", b"1"]) + agent.encode()
            args += [self.chance.choice([-1, 1]), job_id, use]
        keys = [JOBS, claimed_by(name), LEASE_KEY.format(member=name), MEMBERS_KEY, TAKEN, COUNTS]
        found = self.both.script(_CLAIM, [*keys, HELD, LAST] if self.chance.random() < 0.9 else keys, args)
        self.verdicts.update((found or [])[::3])

    def come_or_go(self) -> None:
        name = self.chance.choice(NAMES)
        if name not in self.values:
            worker = self.chance.choice([worker for worker in WORKERS if name in worker])
            at = ProcessIdentity("played", "", 1, "")
            ready, leaves = self.chance.random() < 0.8, self.chance.random() < 0.2
            self.values[name] = self.both.join(
                Member(name, worker, (QUEUE,), name, at, "b", "m", is_ready=ready, is_leaving=leaves)
            )
        elif self.chance.random() < 0.5:
            return
        elif self.chance.random() < 0.3:
            self.both.lose_lease(name)
        else:
            self.both.remove(name)
            del self.values[name]


@pytest.mark.parametrize("seed", range(3))
def test_the_played_server_answers_as_a_real_one(both, seed):
    history = History(both, random.Random(seed))
    for _ in range(3):
        history.come_or_go()
    for _ in range(800):
        history.step()
        both.state()
    assert history.verdicts.keys() == {b"claimed", b"held", b"stale", b"passed", b"gone"}
    assert both.hgetall(MEMBERS_KEY) is not None
    assert len(both.mget([LEASE_KEY.format(member=name) for name in NAMES])) == len(NAMES)
