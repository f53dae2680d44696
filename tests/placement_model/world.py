"""Around the rule: processes that crash and sleep, a Redis and a bucket that misbehave, a clock, and a history of them.

A history is a list of actions, each a name and four numbers, so that any part of a history is one too.
"""

import copy
import random
from dataclasses import replace

from tests.placement_model.invariants import Invariants

LAG = 5
AGENTS = ("ann", "bob")
KINDS = ("append", "append", "append", "full", "read", "forget", "rollback", "fork", "plain")
BUCKET = ("list", "get", "put", "remove", "empty")
MOMENTS = ("put", "put", "put", "compute", "sending", "end", "list", "get", "claim", "give_back", "remove")
FAULTS = (
    "lost",
    "unheard",
    "late",
    "twice",
    "failed",
)  # not done; done; later; again later; by the engine


class Bucket:
    """Put-if-absent, with puts that arrive late or twice, and listings that lag."""

    def __init__(self, world):
        self.world, self.objects, self.removed, self.late, self.down = world, {a: {} for a in AGENTS}, [], [], False

    def put(self, agent, version):
        if version.number in self.objects[agent]:
            return False
        world = self.world
        hidden = world.random.randint(0, LAG) if world.lags else 0
        self.objects[agent][version.number] = [version, world.now, world.now + hidden]
        world.invariants.created(agent, version)
        return True

    def get(self, agent, number):
        return self.objects[agent].get(number, [None])[0]

    def list(self, agent):
        now = self.world.now
        found = {n: made for n, (_, made, shown) in self.objects.get(agent, {}).items() if shown <= now}
        return now, {n: made for a, n, made, until in self.removed if a == agent and until > now} | found

    def remove(self, agent, number):
        if number in self.objects[agent]:
            _, made, _ = self.objects[agent].pop(number)
            self.removed.append((agent, number, made, self.world.now + (LAG if self.world.lags else 0)))
            self.world.invariants.removed(agent, number)

    def empty(self, agent, number):
        """Overwrites, if it is there."""
        if number in self.objects[agent]:
            entry = self.objects[agent][number]
            entry[0], entry[1] = replace(entry[0], kind="emptied", turns=(), seen={}), self.world.now
            self.world.invariants.removed(agent, number)

    def arrive(self, which):
        if self.late:
            agent, version = self.late.pop(which % len(self.late))
            self.put(agent, version)


class Process:
    """A member's process: its threads are generators that have yielded an operation. `local` is its disk."""

    def __init__(self, world):
        self.world, self.local, self.member, self.threads, self.asleep = world, {}, None, [], False
        self.begin()

    def begin(self):
        self.world.lives += 1
        self.member = self.world.rule.Member(f"m{self.world.lives}", self.local, self.world.lags)
        self.start(self.world.rule.fetch(self.member), self.member)

    def start(self, generator, member):
        self.advance([generator, None, member], generator.__next__)

    @property
    def stopping(self):
        return self.member is not None and self.member.stopping

    def crash(self):
        self.threads, self.member = [], None

    def background(self, action, *args):
        if self.member:
            self.start(action(self.member, *args), self.member)

    def step(self, which, fault=None):
        thread = self.threads.pop(which % len(self.threads))
        generator, operation, member = thread
        member.now = self.world.now
        try:
            reply = self.world.carry_out(operation, fault, member)
        except (self.world.rule.Lost, self.world.rule.Deposed) as error:
            raised = error
            self.advance(thread, lambda: generator.throw(raised))
        else:
            self.advance(thread, lambda: generator.send(reply))

    def advance(self, thread, resume):
        generator, _, member = thread
        is_fetcher = generator.__name__ == "fetch"
        jobs = set(member.jobs)
        try:
            thread[1] = resume()
            self.threads.append(thread)
        except StopIteration:
            if is_fetcher:  # it has left
                self.crash()
        except self.world.rule.Lost:
            pass
        except self.world.rule.Deposed:
            if is_fetcher and member is self.member and not member.stopping:
                self.begin()  # the threads of the life before go on until they find out
            elif is_fetcher:
                self.crash()
        if is_fetcher:
            for key in [one for one in member.jobs if one not in jobs]:
                self.start(self.world.rule.run(member, member.jobs[key]), member)


class World:
    def __init__(self, rule, seed, processes=3):
        self.rule, self.random = rule, random.Random(seed)
        self.lags = self.random.random() < 0.6
        self.now, self.lives, self.places, self.epoch = 0, 0, 0, 0
        self.invariants = Invariants(self)
        self.redis, self.bucket, self.snapshots = rule.Redis(), Bucket(self), []
        self.processes = [Process(self) for _ in range(processes)]

    def carry_out(self, operation, fault, member):
        name, *args = operation
        if name == "compute":
            return self.invariants.computed(args[0], fault)
        if name == "claim":
            self.invariants.due.pop(member.life, None)  # it does not leave what is there
        if name == "put":
            self.invariants.sent(args[1])
            if fault in ("late", "twice"):
                self.bucket.late.append(args)
        is_away = name in BUCKET and self.bucket.down and fault != "unheard"
        if is_away or fault == "lost" or (fault == "late" and name == "put"):
            raise self.rule.Lost
        reply = getattr(self.bucket, name)(*args) if name in BUCKET else self.invariants.script(name, args)
        if fault == "unheard":
            raise self.rule.Lost
        if name == "view":
            self.invariants.viewed(member, *reply)
        return reply

    def play(self, history):
        """Raises `Broken` where an invariant does not hold."""
        for name, *numbers in history:
            getattr(self, name)(*numbers)
        self.heal()

    # Actions.

    def submit(self, kind, agent, argument, _):
        self.places += 1
        kind, agent = KINDS[kind % len(KINDS)], AGENTS[agent % 2]
        job = self.rule.Job(f"j{self.places}", kind, None if kind == "plain" else agent, place=self.places)
        if kind == "rollback":
            job.argument = max(1, len(self.invariants.chains[agent]) - argument % 4)
        if kind == "fork":
            job.argument = AGENTS[1 - AGENTS.index(agent)]
        self.invariants.submitted(job)
        self.redis.submit(job)

    def steps(self, process, thread, count, fault):
        """Some steps of one thread, and one with a fault."""
        one = self.processes[process % len(self.processes)]
        for left in range(count % 12, -1, -1):
            if one.asleep or not one.threads:
                return
            spin = thread if thread % 3 else self.random.randrange(99)
            one.step(spin, FAULTS[fault] if left == 0 and fault < len(FAULTS) else None)

    def until(self, process, operation, then, fault):
        """Steps to the moment before an operation. It fails, or the process sleeps or crashes there, or goes on."""
        one, wanted = self.processes[process % len(self.processes)], MOMENTS[operation % len(MOMENTS)]
        for _ in range(40):
            if one.asleep or not one.threads:
                return
            found = [at for at, thread in enumerate(one.threads) if thread[1][0] == wanted]
            if found:
                one.asleep = then % 4 == 0
                if then % 4 == 1:
                    one.crash()
                if then % 4 == 2 and fault < len(FAULTS):
                    one.step(found[0], FAULTS[fault])
                return
            one.step(0)

    def work(self, rounds, *_):
        """All that are awake, without faults."""
        for _round in range(rounds % 30):
            for one in self.processes:
                for _thread in range(0 if one.asleep else len(one.threads)):
                    if one.threads:
                        one.step(0)

    def time(self, by, *_):
        self.now += 1 + by % 4
        self.redis.now = self.now

    def long_time(self, by, *_):
        self.now += 5 + by % 30
        self.redis.now = self.now

    def sleep(self, process, *_):
        self.processes[process % len(self.processes)].asleep = True

    def wake(self, process, *_):
        self.processes[process % len(self.processes)].asleep = False

    def crash(self, process, lose_disk, *_):
        one = self.processes[process % len(self.processes)]
        one.crash()
        if lose_disk % 4 == 0:
            one.local.clear()

    def restart(self, process, *_):
        one = self.processes[process % len(self.processes)]
        if one.member is None:
            one.begin()

    def stop(self, process, *_):
        if member := self.processes[process % len(self.processes)].member:
            member.stopping = True

    def cancel(self, job, *_):
        if self.redis.jobs:
            self.invariants.cancel(list(self.redis.jobs)[-1 - job % len(self.redis.jobs)])

    def retry(self, job, *_):
        if self.redis.jobs:
            self.places += 1
            self.redis.retry(list(self.redis.jobs)[-1 - job % len(self.redis.jobs)], self.places)

    def outage(self, *_):
        self.bucket.down = not self.bucket.down
        self.invariants.outage_claims.clear()

    def arrive(self, which, *_):
        self.bucket.arrive(which)

    def flush(self, *_):
        self.redis, self.epoch = self.rule.Redis(), self.epoch + 1
        self.redis.now = self.now

    def replicate(self, *_):
        self.snapshots.append(copy.deepcopy(self.redis))

    def go_back(self, which, *_):
        if self.snapshots:
            self.redis, self.epoch = copy.deepcopy(self.snapshots[which % len(self.snapshots)]), self.epoch + 1
            self.redis.now = self.now

    def prune(self, process, agent, *_):
        self.processes[process % len(self.processes)].background(self.rule.prune, AGENTS[agent % 2])

    def expire(self, process, agent, *_):
        self.processes[process % len(self.processes)].background(self.rule.expire, AGENTS[agent % 2])

    def bring(self, process, agent, name, _):
        self.processes[process % len(self.processes)].background(self.rule.bring, AGENTS[agent % 2], f"i{name % 3}")

    # The end of a history: nothing fails any more.

    def heal(self):
        for one in self.processes:
            one.asleep = False
        if all(one.member is None or one.stopping for one in self.processes):
            self.processes[0].crash()
            self.processes[0].begin()
        if self.bucket.down:
            self.go_on(60)
            self.invariants.outage_was_survived()
            self.bucket.down = False
        while self.bucket.late[::2]:
            self.bucket.arrive(0)
        self.go_on(100 + 30 * len(self.redis.jobs))
        self.invariants.everything_ended()
        while self.bucket.late:
            self.bucket.arrive(0)
        self.long_time(29)
        self.long_time(29)
        for agent in AGENTS:
            for one in self.processes:
                one.background(self.rule.prune, agent)
        self.go_on(60)
        self.invariants.nothing_is_left()

    def go_on(self, rounds):
        for _ in range(rounds):
            self.time(0)
            for one in self.processes:
                for _ in range(len(one.threads)):
                    if one.threads:
                        one.step(0)
            is_quiet = not any(len(one.threads) > 1 or one.stopping for one in self.processes)
            if is_quiet and all(job.status not in ("queued", "started") for job in self.redis.jobs.values()):
                return
