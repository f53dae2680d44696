"""The actions of a history, and its end. `world.py` has the processes, the Redis and the bucket that they act on.

A history is a list of actions, each a name and up to four numbers, so that any part of a history is one too.
"""

import random

from tests.several_workers.invariants import Invariants, Job

LAG = 5
AGENTS = ("ann", "bob")
KINDS = ("append", "append", "append", "full", "read", "forget", "rollback", "fork", "plain")
MOMENTS = ("put", "put", "put", "compute", "sending", "end", "list", "get", "claim", "give_back", "remove")
FAULTS = ("lost", "unheard", "late", "twice", "failed")  # not done; done; later; again later; by the engine
PATIENCE = 300  # steps until something comes
MOST_WAITS = 6  # seconds, while nobody can take a step


class Actions:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lags = self.random.random() < 0.6
        self.now, self.lives, self.places, self.epoch = 0, 0, 0, 0
        self.snapshots, self.invariants = [], Invariants(self)

    def play(self, history):
        """Raises `Broken` where an invariant does not hold."""
        for name, *numbers in history:
            getattr(self, name)(*numbers, *(0, 0, 0, 99)[len(numbers) :])
        self.heal()

    # Actions.

    def submit(self, kind, agent, argument, _):
        self.places += 1
        kind, agent = KINDS[kind % len(KINDS)], AGENTS[agent % 2]
        job = Job(f"j{self.places}", kind, None if kind == "plain" else agent, place=self.places)
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
        wanted, waits = MOMENTS[operation % len(MOMENTS)], MOST_WAITS
        for one in self.processes[process % 3 :] + self.processes[: process % 3]:
            for _ in range(0 if one.asleep else PATIENCE):
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

    def idle(self, rounds, *_):
        """Time passes, and those that are awake keep their leases."""
        for _round in range(rounds % 14):
            self.time(2)
            self.everybody()

    def time(self, by, *_):
        self.passes(1 + by % 4)

    def long_time(self, by, *_):
        self.passes(5 + by % 30)

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

    def arrive(self, which, *_):
        self.bucket.arrive(which)

    def flush(self, *_):
        self.goes_on_from(None)

    def replicate(self, *_):
        self.snapshots.append(self.redis.copy())

    def go_back(self, which, *_):
        if self.snapshots:
            self.goes_on_from(self.snapshots[which % len(self.snapshots)])

    def prune(self, process, agent, *_):
        self.processes[process % len(self.processes)].background("prune", AGENTS[agent % 2])

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
