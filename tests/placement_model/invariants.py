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
- An agent leaves a member that is ready only after another one has passed it for as long as the patience.
- While the bucket is away, jobs without an agent end, and stops too. While nothing fails, every job ends.
- In the end, nothing but the newest numbers is left, and no content from before a forget.
"""

from collections import defaultdict

ENDED = ("finished", "failed", "canceled")
CLAIMS_IN_AN_OUTAGE = 4


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
        self.seen_waiting = {}  # by life and job: since when
        self.due = {}  # by life: jobs of nobody who is ready, which it must not leave
        self.outage_claims = defaultdict(int)

    def newest(self, agent):
        return self.chains[agent][-1] if self.chains[agent] else self.world.rule.NOTHING

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
            require(made <= self.world.now - self.world.rule.TTL, "an agent that is used expires")
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
        elif version.kind == "import":
            require(not newest.turns, "an import replaces an agent")
            expected = [(job_id,)]
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
        require(job.losses < self.world.rule.LOSSES, "a job takes one member after the other along")
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

    def script(self, name, args):
        redis = self.world.redis
        if name == "end":
            was = redis.jobs[args[1]].status if args[1] in redis.jobs else None
            reply = redis.end(*args)
            _, job_id, execution, status, number = args
            self.ended(was, job_id, execution, status, [number])
            return reply
        reply = getattr(redis, name)(*args)
        if name == "claim" and reply is not None:
            self.claimed(args[0], reply)
        return reply

    def viewed(self, member, waiting, _):
        life, leases = member.life, self.world.redis.leases.items()
        ready = [one for one, lease in leases if lease.ready and lease.until > self.world.now]
        needs_nobody = [one for one, agent, home in waiting if agent is not None and home not in ready]
        require(not self.due.pop(life, set()).intersection(needs_nobody), "a job waits for a member that is gone")
        self.due[life] = set() if member.away else set(needs_nobody)
        now = self.world.now
        for job_id, _, home in waiting:
            since, _ = self.seen_waiting.get((life, job_id), (now, None))
            self.seen_waiting[life, job_id] = (since, home in ready and home != life)

    def claimed(self, life, job):
        chain, source = len(self.chains[job.chain]), len(self.chains[job.agent])
        self.check_order(job)
        self.runs[job.execution] = job
        self.claims[job.execution] = (self.world.epoch, chain, source)
        since, is_others = self.seen_waiting[life, job.id]
        patience = self.world.rule.PATIENCE
        require(not is_others or self.world.now - since >= patience or job.agent is None, "an agent moved without need")
        if self.world.bucket.down and job.agent is not None:
            self.outage_claims[life] += 1
            require(self.outage_claims[life] < CLAIMS_IN_AN_OUTAGE, "jobs go round in an outage")
        elif not self.world.bucket.down:
            self.outage_claims.clear()
        if job.losses >= self.world.rule.LOSSES:
            self.reasons.add((job.id, job.place))

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
        now = self.chains[job.chain][number - 1] if number else self.world.rule.NOTHING
        if job.kind == "append":
            require(len(now.turns) >= self.world.rule.LIMIT, "a job failed without a reason")
        elif job.kind == "fork":
            sources = self.chains[job.agent][max(0, source - 1) :]
            require(now.turns or not source or not all(one.turns for one in sources), "a job failed without a reason")
        else:
            first_kept = max(1, now.floor, number - self.world.rule.KEEP)
            kept = job.kind == "rollback" and first_kept <= job.argument <= number
            require(job.kind == "rollback" and not kept, "a job failed without a reason")

    # The end.

    def outage_was_survived(self):
        waiting = [job.id for job in self.world.redis.jobs.values() if job.kind == "plain" and job.status not in ENDED]
        require(not waiting, "a job without an agent waits for the bucket")
        require(not any(one.stopping for one in self.world.processes), "a stop takes for ever")

    def everything_ended(self):
        redis = self.world.redis
        require(all(job.status in ENDED for job in redis.jobs.values()), "a job never ends")
        require(not redis.held and not redis.reading, "an agent is held for ever")

    def nothing_is_left(self):
        for agent, objects in self.world.bucket.objects.items():
            newest = self.newest(agent)
            require(all(n >= newest.number - self.world.rule.KEEP for n in objects), "old numbers are never pruned")
            old = [one for one, _, _ in objects.values() if one.number < newest.floor and one.turns]
            require(not old, "forgotten content is left")

    def all_expired(self):
        require(not any(self.newest(agent).turns for agent in self.chains), "an agent that nobody uses does not expire")
