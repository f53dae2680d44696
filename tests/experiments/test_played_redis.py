"""The Redis that fleets in virtual time use answers as a real server does, on random histories."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from stoker_worker.queue.claim_scripts import CLAIM, LOOK, READ
from stoker_worker.queue.home_scripts import GIVE_UP

from stoker_shared.wire import (
    CLAIMED_KEY,
    COUNTS_KEY,
    FIELD_AGENT,
    FIELD_ATTEMPTS,
    HOMES_KEY,
    LEASE_KEY,
    LEFT_KEY,
    MEMBERS_KEY,
    TAKEN_KEY,
)

pytestmark = [pytest.mark.server, pytest.mark.scheduled]

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
QUEUE = "generate"
JOBS, HOMES, TAKEN, COUNTS = (
    f"rq:queue:{QUEUE}",
    *(key.format(queue=QUEUE) for key in (HOMES_KEY, TAKEN_KEY, COUNTS_KEY)),
)
STORES = {"mac1": "mac1", "mac2": "mac2", "mac3": "disk3", "mac4": "disk4"}
NAMES = list(STORES)
VERSIONS = ["", " 7", " 0 mac2", " 7 -"]
AGENTS = [b"agent %d" % n for n in range(12)]
NOTES = ["none", *(f"{word} {agent.decode()}" for agent in AGENTS for word in ("write", "read", "append"))]


class RealRedis:
    """A real server, with the names that `PlayedRedis` has for what happens beside the routing."""

    def __init__(self, connection: Redis) -> None:
        self.connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def push(self, job_id, note, *, front=False):
        self.hset(b"rq:job:" + job_id, mapping={"created_at": "then", FIELD_AGENT: f"then {note}"})
        (self.lpush if front else self.rpush)(JOBS, job_id)

    def lose(self, job_id):
        self.hincrby(b"rq:job:" + job_id, FIELD_ATTEMPTS, 1)

    def join(self, member, description):
        value = json.dumps(description, sort_keys=True)
        self.set(LEASE_KEY.format(member=member), value)
        self.hset(MEMBERS_KEY, member, value)
        self.hdel(LEFT_KEY, description["store"])
        return value

    def lose_lease(self, member):
        self.delete(LEASE_KEY.format(member=member))

    def remove(self, member):
        description = json.loads(self.hget(MEMBERS_KEY, member))
        self.hdel(MEMBERS_KEY, member)
        self.lose_lease(member)
        left = [str(self.time()[0]), member, *(["shared"] if description["shared"] else [])]
        self.hset(LEFT_KEY, description["store"], " ".join(left))
        self.hincrby(COUNTS, "moves", 1)

    def set_home(self, agent, entry):
        self.hset(HOMES, agent, entry)

    def state(self):
        homes = {agent: self.hget(HOMES, agent) or b"" for agent in AGENTS}
        claimed = {name: self.lrange(CLAIMED_KEY.format(queue=QUEUE, member=name), 0, -1) for name in NAMES}
        return homes, claimed, self.lrange(JOBS, 0, -1)


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

    def script(self, text, keys, args, shown=lambda found: found):
        real, played = (shown(script(keys=keys, args=args)) for script in self.scripts[text])
        assert real == played, (args, played)
        return real


def without_seconds(found):
    """The reply of `CLAIM` without how long a job waits yet: the clock goes on between the two servers."""
    return [b"" if at % 4 == 2 and found[at - 2] == b"away" else word for at, word in enumerate(found)]


SCRIPTS = (LOOK, READ, CLAIM, GIVE_UP)


@pytest.fixture
def both(redis_url, monkeypatch):
    connection = Redis.from_url(redis_url)
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from played_redis import PlayedRedis  # type: ignore[import-not-found]

    class Played(PlayedRedis):  # type: ignore[misc]
        def lose(self, job_id):
            self.losses[job_id] += 1

        def set_home(self, agent, entry):
            self.homes[agent] = entry

        def state(self):
            homes = {agent: self.homes.get(agent, "").encode() for agent in AGENTS}
            return homes, {name: self.claimed[name] for name in NAMES}, self.jobs

    yield Both(RealRedis(connection), Played(QUEUE, lambda: float(connection.time()[0])))
    connection.close()


class History:
    """Members that join, die and leave, and jobs that come and are claimed, lost and put back."""

    def __init__(self, both: Both, chance: random.Random) -> None:
        self.both, self.chance = both, chance
        self.values: dict[str, str] = {}
        self.seen = dict.fromkeys(NAMES, (0, "0"))  # what each member has seen of the counts
        self.known: list[bytes] = []
        self.n_jobs = 0

    def step(self) -> None:
        acts = [self.push, self.push, self.look, self.read, self.claim, self.claim, self.give_up, self.put_back]
        self.chance.choice([*acts, *acts, self.come_or_go, self.set_home])()

    def push(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            self.n_jobs += 1
            job_id = b"job-%d" % self.n_jobs
            self.both.push(job_id, self.chance.choice(NOTES), front=self.chance.random() < 0.2)
            self.known.append(job_id)

    def put_back(self) -> None:
        _, claimed, _ = self.both.state()
        if ids := [(name, job_id) for name, found in claimed.items() for job_id in found]:
            name, job_id = self.chance.choice(ids)
            real, played = self.both.servers
            real.lrem(CLAIMED_KEY.format(queue=QUEUE, member=name), 1, job_id)
            played.claimed[name].remove(job_id)
            for server in self.both.servers:
                server.lose(job_id)
                server.push(job_id, played.notes[job_id], front=True)

    def look(self) -> None:
        name = self.chance.choice(NAMES)
        waiting = self.both.state()[2]
        pool = [*waiting[:6], *self.chance.sample(self.known, min(4, len(self.known)))]
        firsts = self.chance.sample(pool, min(len(pool), 3))
        lasts = self.chance.sample([*waiting[-4:], *firsts], min(2, len(firsts)))
        page = self.chance.choice([2, 250])
        args = [page, self.chance.choice([1, 1000]), self.seen[name][0], len(firsts), *firsts, *lasts]
        found = self.both.script(LOOK, [JOBS, TAKEN, COUNTS], args)
        self.seen[name] = (found[5], found[6].decode())

    def read(self) -> None:
        if ids := self.chance.sample(self.known, min(5, len(self.known))):
            keys = [MEMBERS_KEY, HOMES, *(b"rq:job:" + job_id for job_id in ids)]
            self.both.script(READ, keys, [self.chance.choice(NAMES), FIELD_AGENT, FIELD_ATTEMPTS, 100_000])

    def claim(self) -> None:
        name = self.chance.choice(NAMES)
        lease = LEASE_KEY.format(member=name)
        travels, wait_s = self.chance.choice("012"), self.chance.choice([0, 300])
        args = [self.values.get(name, "none"), name, STORES[name], self.seen[name][1], wait_s, travels]
        for job_id in self.chance.sample(self.known, min(3, len(self.known))):
            word, _, agent = self.both.servers[1].notes[job_id].partition(" ")
            letter = {"none": b"", "append": b"c"}.get(word, b"n")
            args += [self.chance.choice([-1, 1]), job_id, letter + agent.encode()]
        claimed = CLAIMED_KEY.format(queue=QUEUE, member=name)
        keys = [JOBS, claimed, lease, MEMBERS_KEY, LEFT_KEY, TAKEN, COUNTS, HOMES]
        self.both.script(CLAIM, keys, args, lambda found: found and without_seconds(found))

    def give_up(self) -> None:
        name = self.chance.choice(NAMES)
        args: list[Any] = [self.values.get(name, "none"), name]
        for agent in self.chance.sample(AGENTS, 4):
            args += [agent, self.chance.choice([0, 1])]
        self.both.script(GIVE_UP, [LEASE_KEY.format(member=name), COUNTS, HOMES], args)

    def set_home(self) -> None:
        home, store = self.chance.choice([*NAMES, "-"]), self.chance.choice([*STORES.values(), "-"])
        entry = (
            f"{home} ="
            if home != "-" and self.chance.random() < 0.5
            else f"{home} {store}{self.chance.choice(VERSIONS)}"
        )
        self.both.set_home(self.chance.choice(AGENTS), entry)

    def come_or_go(self) -> None:
        name = self.chance.choice(NAMES)
        if name not in self.values:
            where = {"host": "played", "boot": "", "pid": 1, "started": ""}
            description = {"worker": f"rq-{name}", "queues": [QUEUE], "store": STORES[name], **where}
            description["shared"] = self.chance.choice(["", "b"])
            self.values[name] = self.both.join(name, description)
        elif self.chance.random() < 0.3:
            self.both.lose_lease(name)
        else:
            self.both.remove(name)
            del self.values[name]


@pytest.mark.parametrize("seed", range(3))
def test_the_played_server_answers_as_a_real_one(both, seed):
    chance = random.Random(seed)
    history = History(both, chance)
    for _ in range(3):
        history.come_or_go()
    for _ in range(300):
        history.step()
        both.state()
    leases = [LEASE_KEY.format(member=name) for name in NAMES]
    assert both.hgetall(MEMBERS_KEY) is not None
    assert len(both.mget(leases)) == len(NAMES)
    assert len(both.hmget(HOMES, AGENTS)) == len(AGENTS)
