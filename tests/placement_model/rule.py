"""The rule for several workers: what Redis' scripts and a member's threads do, one network operation at a time.

`real_world.py` plays the same histories with the product. Each method of `Redis` is one script. Each ``yield`` is one
network operation: the member may crash, sleep or lose the reply there, and nowhere else. Redis' operations have the
name of a script; ``list``, ``get``, ``put``, ``remove`` and ``empty`` are the bucket's, ``compute`` is the engine's.
Pure: it knows neither the faults nor the invariants, and each member sees its own clock only.
"""

import copy
from contextlib import suppress
from dataclasses import dataclass, field, replace

LEASE = 10  # how long a member lives without renewing
PATIENCE = 4  # how long an agent's jobs are left to the member that has its cache
GRACE = 20  # how long a name stays after the next one was put: longer than a lease, and than a listing lags
KEEP = 1  # numbers below the newest that stay in any case
LIMIT = 5  # turns that fit into the context
PLACES = 2  # jobs that a member runs at once
LOSSES = 3  # members that a job may take along
TTL = 30  # how long an agent is kept that nobody uses


class Lost(Exception):
    """No reply: the operation was carried out, or was not, or will be."""


class Deposed(Exception):
    """The job is not run by this execution any more."""


@dataclass(frozen=True)
class Version:
    """One object of the bucket. It is complete: no other one has to be read to continue from it."""

    number: int = 0
    id: str = ""
    parent: str = ""  # the id of the version that it was made from
    kind: str = "nothing"  # of the job that made it; or "closed", "import", "expired", "emptied"
    by: tuple = ()  # the job, its enqueueing and its execution
    turns: tuple = ()
    seen: dict = field(default_factory=dict)  # each delivery that has ended in a version: how, and which enqueueing
    floor: int = 0  # the number of the last forget: nothing below comes back

    def then(self, me, kind, turns, job, outcome="finished"):
        number, seen = self.number + 1, {**self.seen, job.id: (outcome, job.place)}
        floor = number if kind in ("forget", "expired") else self.floor
        return Version(number, me.new_id(), self.id, kind, (job.id, job.place, job.execution), turns, seen, floor)


NOTHING = Version()


@dataclass
class Job:
    id: str  # of its delivery
    kind: str  # append, full, rollback, forget, fork; read; plain (without an agent)
    agent: str | None = None
    argument: object = None  # rollback: the number; fork: the new agent
    place: int = 0  # which enqueueing it is; never used twice, also after Redis has lost data
    status: str = "queued"
    member: str | None = None
    execution: str | None = None  # a run of it: each claim begins another one
    sent: int = 0  # the highest number for which a put may have been sent
    losses: int = 0
    last: tuple | None = None  # when it was claimed

    @property
    def writes(self):  # its own agent
        return self.kind in ("append", "full", "rollback", "forget")

    @property
    def chain(self):
        return self.argument if self.kind == "fork" else self.agent


@dataclass
class Lease:
    until: int
    ready: bool


class Redis:
    def __init__(self):
        self.now = 0
        self.queue, self.jobs, self.leases = [], {}, {}
        self.held = {}  # agent: the member that writes it
        self.reading = {}  # agent: how many jobs read it
        self.last = {}  # agent: the member that wrote its newest version, and the number; a hint

    def copy(self):
        return copy.deepcopy(self)

    # What producers call.

    def submit(self, job):
        self.jobs[job.id] = job
        self.queue.append(job.id)

    def cancel(self, job_id):
        """Whether it will never become a turn."""
        job = self.jobs[job_id]
        if job.status not in ("queued", "started") or job.sent:
            return False
        if job.status == "queued":
            self.queue.remove(job_id)
        self._end(job, "canceled")
        return True

    def retry(self, job_id, place):
        job = self.jobs[job_id]
        if job.status in ("failed", "canceled"):
            job.status, job.place, job.sent, job.losses = "queued", place, 0, 0
            self.queue.append(job_id)

    # What members call.

    def renew(self, life, known, ready):
        """A life may come back after its lease: what was given back meanwhile is checked by execution.

        Also gives back what this life does not know that it has claimed, and what the dead have.
        """
        self.leases[life] = Lease(self.now + LEASE, ready)
        for job in self._started():
            if job.member == life and job.execution not in known:
                self._give_back(job)
            elif not self._lives(job.member):
                job.losses += 1
                self._give_back(job)

    def leave(self, life):
        self.leases.pop(life, None)

    def view(self, life):
        """Of each agent that is free the first job, with the member that has its cache; the members that are ready."""
        ready = [one for one, lease in self.leases.items() if lease.ready and self._lives(one)]
        return [(job.id, job.agent, self.last.get(job.chain, (None,))[0]) for job in self._free()], ready

    def claim(self, life, job_id, execution):
        if job_id not in [job.id for job in self._free()]:
            return None
        job = self.jobs[job_id]
        self.queue.remove(job_id)
        job.status, job.member, job.execution = "started", life, execution
        if job.writes:
            self.held[job.agent] = life
        elif job.agent is not None:
            self.reading[job.agent] = self.reading.get(job.agent, 0) + 1
        return replace(job, last=self.last.get(job.chain))

    def sending(self, life, job_id, execution, number):
        """The check of ownership before a put. From here on no cancel answers true."""
        job = self._own(life, job_id, execution)
        job.sent = max(job.sent, number)

    def give_back(self, life, job_id, execution):
        self._give_back(self._own(life, job_id, execution))

    def end(self, life, job_id, execution, status, number):
        job = self._own(life, job_id, execution)
        self._end(job, status)
        if job.chain is not None and job.kind != "read" and status == "finished":
            self.last[job.chain] = (life, number)

    # Parts of the above.

    def _lives(self, life):
        return life in self.leases and self.leases[life].until > self.now

    def _own(self, life, job_id, execution):
        """An execution, because one life may have run a job before: it was canceled and retried, or Redis went back."""
        job = self.jobs.get(job_id)
        if job is None or (job.status, job.execution) != ("started", execution):
            raise Deposed
        return job

    def _started(self):
        return [job for job in self.jobs.values() if job.status == "started"]

    def _free(self):
        taken = set(self.held)
        for job_id in self.queue:
            job = self.jobs[job_id]
            if job.agent not in taken and not (job.writes and job.agent in self.reading):
                yield job
            if job.agent is not None:
                taken.add(job.agent)

    def _release(self, job):
        if job.status == "started" and job.writes:
            self.held.pop(job.agent, None)
        elif job.status == "started" and job.agent is not None:
            self.reading[job.agent] -= 1
            if not self.reading[job.agent]:
                del self.reading[job.agent]

    def _give_back(self, job):
        self._release(job)
        job.status = "queued"
        self.queue.insert(0, job.id)

    def _end(self, job, status):
        self._release(job)
        job.status = status


@dataclass
class Member:
    """One life of a process. `local` outlives it: the copy of each agent's newest version that was met."""

    life: str
    local: dict
    lags: bool  # listings of this bucket may lag (NFS, SMB)
    now: int = 0
    away: bool = False  # the bucket
    stopping: bool = False
    jobs: dict = field(default_factory=dict)
    passed: dict = field(default_factory=dict)
    ids: int = 0

    def new_id(self):
        self.ids += 1
        return f"{self.life}.{self.ids}"


def ask(*operation):
    """Redis, until there is a reply: each script may be carried out twice."""
    while True:
        try:
            return (yield operation)
        except Lost:
            pass


def fetch(me):
    """The fetcher's loop."""
    while not (me.stopping and not me.jobs):
        if me.away:
            try:
                yield "list", ""
                me.away = False
            except Lost:
                pass
        yield from ask("renew", me.life, list(me.jobs), not (me.away or me.stopping))
        if me.stopping or len(me.jobs) >= PLACES:
            continue
        job_id = choose(me, *(yield from ask("view", me.life)))
        if job_id is None:
            continue
        try:
            job = yield "claim", me.life, job_id, me.new_id()
        except Lost:  # renew gives it back
            continue
        if job is not None:
            me.jobs[job.execution] = job
    yield from ask("leave", me.life)


def choose(me, waiting, ready):
    me.passed = {job_id: me.passed[job_id] for job_id, _, _ in waiting if job_id in me.passed}
    for job_id, agent, home in waiting:
        if agent is None:
            return job_id
        if me.away:
            continue
        if home == me.life or home not in ready:
            return job_id
        if me.now - me.passed.setdefault(job_id, me.now) >= PATIENCE:
            return job_id
    return None


def run(me, job):
    """A claimed job to its end."""
    try:
        yield from (write if job.chain is not None and job.kind != "read" else read)(me, job)
    except Lost:  # of the bucket
        me.away = True
        with suppress(Deposed):
            yield from ask("give_back", me.life, job.id, job.execution)
    except Deposed:  # somebody else has it, or nobody
        pass
    finally:
        del me.jobs[job.execution]


def read(me, job):
    base = (yield from look(me, job.agent)) if job.agent is not None else NOTHING
    failure = "failed" if job.losses >= LOSSES else (yield "compute", job.execution)
    yield from ask("end", me.life, job.id, job.execution, failure or "finished", base.number)


def look(me, agent, put=None):
    """The newest version. `put`: one that was certainly made."""
    while True:
        known = put or me.local.get(agent, NOTHING)
        _, listed = yield "list", agent
        newest = known if known.number >= max(listed, default=0) else (yield "get", agent, max(listed))
        while me.lags and newest is not None and (above := (yield "get", agent, newest.number + 1)):
            newest = above
        if newest is not None and newest.kind != "emptied":  # else it was removed meanwhile
            me.local[agent] = newest
            return newest


def write(me, job):
    """Look, compute, put, look: until the newest version knows how the job has ended."""
    base = me.local.get(job.chain, NOTHING)
    looked = job.last != (me.life, base.number)
    if looked:
        base = yield from look(me, job.chain)
    failure, answered = "failed" if job.losses >= LOSSES else None, False
    while True:
        outcome, place = base.seen.get(job.id, (None, None))
        if outcome == "finished" or place == job.place:
            return (yield from ask("end", me.life, job.id, job.execution, outcome, base.number))
        if me.stopping:
            return (yield from ask("give_back", me.life, job.id, job.execution))
        if failure is None and not (answered and job.kind == "full"):
            failure, answered = (yield "compute", job.execution), True
        turns = None if failure else (yield from turns_after(me, job, base))
        if turns is not None:
            new = base.then(me, job.kind, turns, job)
        elif failure is None and not looked:  # who has not looked refuses nothing
            base, looked = (yield from look(me, job.chain)), True
            continue
        elif job.sent <= base.number:
            return (yield from ask("end", me.life, job.id, job.execution, failure or "failed", base.number))
        else:  # a put that was sent may still arrive: its number is taken first
            new = base.then(me, "closed", base.turns, job, failure or "failed")
        yield from ask("sending", me.life, job.id, job.execution, new.number)
        job.sent = max(job.sent, new.number)
        try:
            created = yield "put", job.chain, new
        except Lost:
            created = False
        base, looked = (yield from look(me, job.chain, new if created else None)), True


def turns_after(me, job, base):
    """The conversation with this job; ``None``: refused."""
    if job.kind == "append":
        return (*base.turns, job.id) if len(base.turns) < LIMIT else None
    if job.kind == "full":
        return (job.id,)
    if job.kind == "forget":
        return ()
    if job.kind == "fork":
        source = yield from look(me, job.agent)
        return None if base.turns or not source.turns else source.turns
    version = base  # rollback: by the parents, because another version may have got a number that was pruned
    while version.number > max(job.argument, base.floor):
        below = yield "get", job.agent, version.number - 1
        if below is None or below.id != version.parent:
            return None
        version = below
    return version.turns if version.number == job.argument else None


def bring(me, agent, name):
    """`memory import`, and each other command that makes an agent. Idempotent by the content's name."""
    job = Job(name, "import")
    base = yield from look(me, agent)
    while name not in base.seen and not base.turns:
        with suppress(Lost):
            yield "put", agent, base.then(me, "import", (name,), job)
        base = yield from look(me, agent)


def expire(me, agent):
    """`--agent-ttl`, by the bucket's clock. If the agent is used meanwhile, the number is taken."""
    base = yield from look(me, agent)
    now, listed = yield "list", agent
    if base.turns and now - listed.get(base.number, now) >= TTL:
        yield "put", agent, base.then(me, "expired", (), Job(f"expired {base.id}", "expired"))


def prune(me, agent):
    """The content below a forget goes at once, names after the grace; by the bucket's clock."""
    base = yield from look(me, agent)
    now, listed = yield "list", agent
    for number in sorted(listed):
        if number < base.floor:
            yield "empty", agent, number
        followed = any(above > number and made <= now - GRACE for above, made in listed.items())
        if followed and number < max(listed) - KEEP:
            yield "remove", agent, number
