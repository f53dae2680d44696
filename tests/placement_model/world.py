"""Around the rule: processes that crash and sleep, a Redis and a bucket that misbehave, a clock, and a history of them.

A history is a list of actions, each a name and up to four numbers, so that any part of a history is one too.
"""

import random
from dataclasses import replace

from tests.placement_model.invariants import Invariants

LAG = 5
AGENTS = ("ann", "bob")
KINDS = ("append", "append", "append", "full", "read", "forget", "rollback", "fork", "plain")
BUCKET = ("list", "get", "put", "remove", "empty")
MOMENTS = ("put", "put", "put", "compute", "sending", "end", "list", "get", "claim", "give_back", "remove")
FAULTS = ("lost", "unheard", "late", "twice", "failed")  # not done; done; later; again later; by the engine


class Bucket:
    """Put-if-absent, with puts that arrive late or twice, and listings that lag."""

    def __init__(self, world):
        self.world, self.objects, self.removed, self.late, self.down = world, {a: {} for a in AGENTS}, [], [], False

    def put(self, agent, version):
        if version.number in self.objects[agent]:
            return False
        self.world.invariants.created(agent, version)
        self.objects[agent][version.number] = [version, self.world.now, self.world.now]
        return True

    def made_at(self, agent, number):
        return self.objects[agent][number][1]

    def get(self, agent, number):
        return self.objects[agent].get(number, [None])[0]

    def list(self, agent):
        """When each name was made. Each may be missing for a while, and stay for a while after it was removed."""
        now = self.world.now
        seen = {n: made for a, n, made, removed in self.removed if a == agent and removed > now - self.lag()}
        seen |= {n: made for n, (_, made, named) in self.objects.get(agent, {}).items() if named <= now - self.lag()}
        self.world.count(
            "a listing lacks the newest", agent and max(seen, default=0) < max(self.objects[agent], default=0)
        )
        return now, seen

    def lag(self):
        return self.world.random.randint(0, LAG) if self.world.lags else 0

    def remove(self, agent, number):
        if number in self.objects[agent]:
            _, made, _ = self.objects[agent].pop(number)
            self.removed.append((agent, number, made, self.world.now))
            self.world.invariants.removed(agent, number)

    def empty(self, agent, number):
        """Overwrites, if it is there. The object is newer then, its name is not."""
        if number in self.objects[agent]:
            entry = self.objects[agent][number]
            entry[0], entry[1] = replace(entry[0], kind="emptied", turns=(), seen={}), self.world.now
            self.world.invariants.removed(agent, number)

    def arrive(self, which):
        if self.late:
            agent, version = self.late.pop(which % len(self.late))
            below = version.number < self.world.invariants.newest(agent).number
            if self.put(agent, version):
                self.world.count("a late put takes a number below the newest", below)


class Process:
    """A member's process: its threads are generators that have yielded an operation. `local` is its disk."""

    def __init__(self, world):
        self.world, self.local, self.member, self.asleep = world, {}, None, False
        self.threads, self.slow = [], []
        self.begin()

    def begin(self):
        self.world.lives += 1
        self.member = self.world.rule.Member(f"m{self.world.lives}", self.local, self.world.lags)
        self.start(self.world.rule.fetch(self.member), self.member)

    def start(self, generator, member):
        self.advance([generator, None, member, 0], generator.__next__)

    @property
    def stopping(self):
        return self.member is not None and self.member.stopping

    def stop(self):
        if self.member:
            self.member.stopping = True

    def crash(self):
        self.threads, self.slow, self.member = [], [], None

    def lose_disk(self):
        self.local.clear()

    def wake(self):
        self.asleep = False
        self.threads, self.slow = self.threads + self.slow, []

    def background(self, action, *args):
        if self.member:
            self.start(getattr(self.world.rule, action)(self.member, *args), self.member)

    def step(self, which, fault=None):
        thread = self.threads.pop(which % len(self.threads))
        generator, operation, member, since = thread
        if self.world.now - since >= self.world.rule.GRACE:
            self.world.count(f"more than the grace passes before {operation[0]}", True)
        member.now = self.world.now
        try:
            reply = self.world.carry_out(operation, fault, member)
        except (self.world.rule.Lost, self.world.rule.Deposed) as error:
            raised = error
            self.advance(thread, lambda: generator.throw(raised))
        else:
            self.advance(thread, lambda: generator.send(reply))

    def at(self, wanted):
        """The threads that wait for this operation."""
        return [at for at, thread in enumerate(self.threads) if thread[1][0] == wanted]

    def is_fetcher(self, at):
        return self.threads[at][0].__name__ == "fetch"

    def stop_thread(self, at, after):
        thread = self.threads[at]
        if after:
            self.step(at)
        if thread in self.threads:
            self.threads.remove(thread)
            self.slow.append(thread)

    def advance(self, thread, resume):
        generator, _, member, _ = thread
        is_fetcher = generator.__name__ == "fetch"
        jobs = set(member.jobs)
        try:
            thread[1], thread[3] = resume(), self.world.now
            self.threads.append(thread)
        except StopIteration:
            if is_fetcher:  # it has left
                self.crash()
        except (self.world.rule.Lost, self.world.rule.Deposed):  # a command's; it is given again
            pass
        if is_fetcher:
            for key in [one for one in member.jobs if one not in jobs]:
                self.start(self.world.rule.run(member, member.jobs[key]), member)


class World:
    def __init__(self, rule, seed, processes=3):
        self.rule, self.random = rule, random.Random(seed)
        self.lags = self.random.random() < 0.6
        self.now, self.lives, self.places, self.epoch = 0, 0, 0, 0
        self.events, self.snapshots = set(), []
        self.processes = self.make(processes)

    def make(self, processes):
        self.invariants, self.redis, self.bucket = Invariants(self), self.rule.Redis(), Bucket(self)
        return [Process(self) for _ in range(processes)]

    def count(self, event, happened):
        if happened:
            self.events.add(event)

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
        below = name == "put" and args[1].number < self.invariants.newest(args[0]).number
        reply = getattr(self.bucket, name)(*args) if name in BUCKET else self.invariants.script(name, args)
        self.count("a put takes a number below the newest", below and reply)
        if fault == "unheard":
            raise self.rule.Lost
        if name == "view":
            self.invariants.viewed(member, *reply)
        return reply

    patience = 20  # steps until something comes
    most_waits = 0  # seconds, while nobody can take a step

    def play(self, history):
        """Raises `Broken` where an invariant does not hold."""
        for name, *numbers in history:
            getattr(self, name)(*numbers, *(0, 0, 0, 99)[len(numbers) :])
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

    def slow(self, process, operation, after, _):
        """The thread that waits for this operation stops there, or after it, and the process goes on."""
        wanted = MOMENTS[operation % len(MOMENTS)]
        for _ in range(20):
            for one in self.processes[process % 3 :] + self.processes[: process % 3]:
                if not one.asleep and (found := [at for at in one.at(wanted) if not one.is_fetcher(at)]):
                    one.stop_thread(found[0], after % 2)
                    return
            self.everybody()

    def until(self, process, operation, then, fault):
        """Steps to the moment before an operation. It fails, or the process sleeps or crashes there, or goes on."""
        wanted, waits = MOMENTS[operation % len(MOMENTS)], self.most_waits
        for one in self.processes[process % 3 :] + self.processes[: process % 3]:
            for _ in range(0 if one.asleep else self.patience):
                if found := one.at(wanted):
                    one.asleep = then % 4 == 0
                    if then % 4 == 1:
                        one.crash()
                    if then % 4 == 2 and fault < len(FAULTS):
                        one.step(found[0], FAULTS[fault])
                    return
                if one.threads:
                    one.step(0)
                elif waits:
                    waits -= 1
                    self.one_second_beside(one)
                else:
                    break

    def work(self, rounds, *_):
        """All that are awake, without faults."""
        for _round in range(rounds % 30):
            self.everybody()
            if self.is_quiet():
                return

    def everybody(self):
        for one in self.processes:
            for _ in range(0 if one.asleep else len(one.threads)):
                if one.threads:
                    one.step(0)

    def idle(self, rounds, *_):
        """Time passes, and those that are awake keep their leases."""
        for _round in range(rounds % 14):
            self.time(2)
            self.everybody()

    def time(self, by, *_):
        self.passes(1 + by % 4)

    def long_time(self, by, *_):
        self.passes(5 + by % 30)

    def passes(self, seconds):
        self.now += seconds
        self.redis.now = self.now

    def sleep(self, process, *_):
        self.processes[process % len(self.processes)].asleep = True

    def wake(self, process, *_):
        self.processes[process % len(self.processes)].wake()

    def crash(self, process, lose_disk, *_):
        one = self.processes[process % len(self.processes)]
        one.crash()
        if lose_disk % 4 == 0:
            one.lose_disk()

    def restart(self, process, *_):
        one = self.processes[process % len(self.processes)]
        if one.member is None:
            one.begin()

    def stop(self, process, *_):
        self.processes[process % len(self.processes)].stop()

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
        self.goes_on_from(None)

    def replicate(self, *_):
        self.snapshots.append(self.redis.copy())

    def go_back(self, which, *_):
        if self.snapshots:
            self.goes_on_from(self.snapshots[which % len(self.snapshots)])

    def goes_on_from(self, snapshot):
        """Redis has lost data. `snapshot`: what it still has, if anything."""
        self.epoch += 1
        self.redis = snapshot.copy() if snapshot else self.rule.Redis()
        self.redis.now = self.now

    def prune(self, process, agent, *_):
        self.processes[process % len(self.processes)].background("prune", AGENTS[agent % 2])

    def expire(self, process, agent, *_):
        self.processes[process % len(self.processes)].background("expire", AGENTS[agent % 2])

    def bring(self, process, agent, name, _):
        self.processes[process % len(self.processes)].background("bring", AGENTS[agent % 2], f"i{name % 3}")

    # The end of a history: nothing fails any more.

    def heal(self):
        for process in range(len(self.processes)):
            self.wake(process)
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
        self.look_back()

    def look_back(self):
        self.long_time(29)
        self.long_time(29)
        for agent in AGENTS:
            self.background("expire", agent)
        self.go_on(60)
        self.invariants.all_expired()
        self.long_time(29)
        for agent in AGENTS:
            self.background("prune", agent)
        self.go_on(60)
        self.invariants.nothing_is_left()

    def background(self, action, agent):
        next(one for one in self.processes if one.member).background(action, agent)

    def go_on(self, rounds):
        for _ in range(rounds):
            self.time(0)
            self.everybody()
            if self.is_quiet():
                return

    def is_quiet(self):
        is_busy = any(one.stopping or len(one.threads) > 1 for one in self.processes if not one.asleep)
        return not is_busy and all(job.status not in ("queued", "started") for job in self.redis.jobs.values())
