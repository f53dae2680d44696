"""What must hold, checked by one who sees everything. Raises `Broken`.

The chain of an agent is the list of its versions as they became the newest. A turn is finished when Redis was told so.

- The chain is a line: each version has the next number and was made from the one before. The newest is never removed.
- A version's conversation follows from the one before, by the kind of its job.
- A finished turn is in the chain; no job is there twice.
- Turns of one agent are in the order in which their jobs were enqueued for the last time, if Redis lost no data between
  the claims of the two.
- A job that was canceled or failed has no turn, if Redis lost no data between its claim, that end and its put. None
  fails without a reason. No end changes.
- A read, a fork and a refusal come from a version that was the newest at some moment since the claim, and without turns
  of jobs that were enqueued behind.
- While the bucket is away, jobs without an agent end, and stops too. While nothing fails, every job ends.
"""

from collections import defaultdict
from dataclasses import dataclass

ENDED = ("finished", "failed", "canceled")
LOSSES = 3  # workers that a job may take along
TTL = 30  # how long an agent is kept that nobody uses


@dataclass(frozen=True)
class Version:
    """One object of the bucket."""

    number: int = 0
    id: str = ""
    parent: str = ""  # the id of the version that it was made from
    kind: str = "nothing"  # of the job that made it; or "closed", "expired"
    by: tuple = ()  # the job, its enqueueing and its execution
    turns: tuple = ()
    floor: int = 0  # the number of the last forget: nothing below comes back


NOTHING = Version()


@dataclass
class Job:
    id: str
    kind: str  # append, full, rollback, forget, fork; read; plain (without an agent)
    agent: str | None = None
    argument: object = None  # rollback: the number; fork: the new agent
    place: int = 0  # which enqueueing it is; never used twice, also after Redis has lost data
    status: str = "queued"
    execution: str | None = None  # a run of it: each claim begins another one
    losses: int = 0

    @property
    def writes(self):  # its own agent
        return self.kind in ("append", "full", "rollback", "forget")

    @property
    def chain(self):
        return self.argument if self.kind == "fork" else self.agent


class Broken(Exception):
    """An invariant does not hold."""


def require(holds, otherwise):
    if not holds:
        raise Broken(otherwise)


class Invariants:
    def __init__(self, world):
        self.world = world
        self.jobs = {}
        self.chains = defaultdict(list)
        self.claims = {}  # by execution: the epoch, and how long its chain and its source were
        self.runs = {}  # by execution: the job as it was claimed
        self.epochs = {}  # by version: when its put was sent
        self.ends = {}  # by job and place, without a turn: the epoch
        self.reasons = set()

    def newest(self, agent):
        return self.chains[agent][-1] if self.chains[agent] else NOTHING

    # The bucket.

    def sent(self, version):
        self.epochs.setdefault(version.id, self.world.epoch)

    def created(self, agent, version):
        newest, chain = self.newest(agent), self.chains[agent]
        if version.number <= newest.number:
            return  # it takes a number that was removed, and is in nobody's chain
        require((version.number, version.parent) == (newest.number + 1, newest.id), "the chain is torn")
        job_id, place, execution = version.by
        self.check_turns(agent, version, newest)
        if version.kind not in ("closed", "expired"):
            require(job_id not in [one.by[0] for one in chain if one.kind != "closed"], "a turn is there twice")
        if job_id in self.jobs and version.kind != "closed":
            epoch, put_epoch = self.claims[execution][0], self.epochs[version.id]
            ended = epoch == put_epoch == self.ends.get((job_id, place))
            require(not ended, "a job that ended without a turn has one")
            later = version.kind != "fork" and self.behind(chain, place, epoch, put_epoch)
            require(not later, "turns are out of order")
        if version.kind == "expired":
            made = self.world.bucket.made_at(agent, newest.number)
            require(made <= self.world.now - TTL, "an agent that is used expires")
        chain.append(version)

    def behind(self, chain, place, claimed, used):
        """The turns of jobs that were enqueued behind, unless Redis lost data between the claims and the use."""
        turns = [one for one in chain if one.by[0] in self.jobs and one.kind not in ("closed", "fork")]
        return [one for one in turns if one.by[1] > place and self.claims[one.by[2]][0] == claimed == used]

    def check_turns(self, agent, version, newest):
        job_id, place, execution = version.by
        job = self.jobs.get(job_id)
        if version.kind == "append":
            expected = [(*newest.turns, job_id)]
        elif version.kind == "full":
            expected = [(job_id,)]
        elif version.kind in ("forget", "expired"):
            expected = [()]
        elif version.kind == "rollback":
            require(job.argument >= newest.floor, "a rollback goes behind a forget")
            expected = [self.chains[agent][job.argument - 1].turns]
        elif version.kind == "fork":
            require(not newest.turns, "a fork replaces an agent")
            epoch, _, source = self.claims[execution]
            chain, used = self.chains[job.agent], self.epochs[version.id]
            expected = [
                one.turns
                for one in chain[max(0, source - 1) :]
                if not self.behind(chain[: one.number], place, epoch, used)
            ]
        else:
            expected = [newest.turns]
        require(version.turns in expected, "the conversation is not what was said")

    def removed(self, agent, number):
        require(number < self.newest(agent).number, "the newest version was removed")

    # Redis.

    def submitted(self, job):
        self.jobs[job.id] = job

    def computed(self, execution, fault):
        job = self.runs[execution]
        require(job.losses < LOSSES, "a job takes one member after the other along")
        if fault != "failed":
            return None
        self.reasons.add((job.id, job.place))
        return "failed"

    def cancel(self, job_id):
        job = self.world.redis.jobs[job_id]
        was = job.status
        if self.world.redis.cancel(job_id):
            self.reasons.add((job_id, job.place))
            self.ended_without(job, was)

    def ended_without(self, job, was):
        require(was not in ENDED, "an end changed")
        epoch = self.world.epoch
        for one in self.chains[job.chain]:
            if one.by[:2] == (job.id, job.place) and one.kind != "closed":
                require(self.claims[one.by[2]][0] != epoch, "a job that ended without a turn has one")
        self.ends[job.id, job.place] = epoch

    def check_order(self, job):
        ahead = [one for one in self.world.redis.jobs.values() if one.writes and one.status not in ENDED]
        passed = [one for one in ahead if one.agent == job.agent and one.place < job.place]
        require(not passed, "a job passes a write before it")

    def ended(self, was, job_id, execution, status, numbers):
        """`numbers`: one of them is of the version that it ended with."""
        require(was not in ENDED, "an end changed")
        job = self.world.redis.jobs[job_id]
        epoch, chain, source = self.claims[execution]
        writes = job.chain is not None and job.kind != "read"
        if status == "finished" and writes:
            turns = [one for one in self.chains[job.chain] if one.kind != "closed" and one.by[0] == job_id]
            require(turns, "a finished turn is not in the chain")
        elif status == "finished":
            newer = [number for number in numbers if number >= chain]
            require(newer, "a read is stale")
            seen = self.chains[job.agent][: newer[0]]
            later = self.behind(seen, job.place, epoch, self.world.epoch)
            require(not later, "a read knows what was said behind it")
        else:
            if (job_id, job.place) not in self.reasons:
                newer = [number for number in numbers if number >= chain]
                require(newer, "a refusal is stale")
                self.check_refusals(job, newer, source)
            self.ended_without(job, was)

    def check_refusals(self, job, numbers, source):
        """That what was refused had to be, by a version that was the newest since the claim."""
        for number in numbers:
            try:
                return self.check_refusal(job, number, source)
            except Broken:
                if number == numbers[-1]:
                    raise

    def check_refusal(self, job, number, source):
        """A machine may lack all versions of an agent but the newest."""
        now = self.chains[job.chain][number - 1] if number else NOTHING
        if job.kind == "fork":
            sources = self.chains[job.agent][max(0, source - 1) :]
            require(now.turns or not source or not all(one.turns for one in sources), "a job failed without a reason")
            return
        why = self.world.redis.failure_of(job)
        is_right = job.kind in ("rollback", "forget") and (not now.turns or number != job.argument)
        is_forgotten = "answer is not kept any more" in why and job.id in [one.by[0] for one in self.chains[job.chain]]
        require(is_right or is_forgotten, f"a job failed without a reason: {why}")

    # The end.

    def outage_was_survived(self):
        """A machine whose disk is new does not know the shared store, and waits for it before it takes any job."""
        if not any(one.member.worker for one in self.world.processes if one.member):
            return
        waiting = [job.id for job in self.world.redis.jobs.values() if job.kind == "plain" and job.status not in ENDED]
        require(not waiting, "a job without an agent waits for the bucket")
        require(not any(one.stopping for one in self.world.processes), "a stop takes for ever")

    def everything_ended(self):
        require(all(job.status in ENDED for job in self.world.redis.jobs.values()), "a job never ends")
