"""Lines of the rule, each broken once: a seed of a history that shows the harm, the line, what is there instead."""

# ruff: noqa: E501

MUTATIONS = {
    "no look after the put": (
        7,
        "base, looked = (yield from look(me, job.chain, new if created else None)), True",
        "base, looked = new if created else (yield from look(me, job.chain)), True",
    ),
    "an unknown put counts as made": (
        4,
        "            created = False\n        base",
        "            created = True\n        base",
    ),
    "an unknown put ends the job": (
        2,
        "            created = False\n        base",
        '            return (yield from ask("end", me.life, job.id, job.execution, "failed", 0))\n        base',
    ),
    "exists with my own delivery is mine": (
        6,
        "        base, looked = (yield from look(me, job.chain, new if created else None)), True",
        """        there = None if created else (yield "get", job.chain, new.number)
        if there and there.by[0] == job.id:
            return (yield from ask("end", me.life, job.id, job.execution, "finished", new.number))
        base, looked = (yield from look(me, job.chain, new if created else None)), True""",
    ),
    "own object removed when another is above": (
        740,
        "        base, looked = (yield from look(me, job.chain, new if created else None)), True",
        """        base, looked = (yield from look(me, job.chain, new if created else None)), True
        if created and base.number > new.number:
            yield "remove", job.chain, new.number""",
    ),
    "exists is not followed upwards": (18, "while me.lags and newest", "while False and newest"),
    "absence proves that it is the newest": (
        0,
        'newest = known if known.number >= max(listed, default=0) else (yield "get", agent, max(listed))',
        'newest = known if known.number else NOTHING if not listed else (yield "get", agent, max(listed))',
    ),
    "the copy is written before the put": (
        0,
        "        try:\n            created = yield",
        "        me.local[job.chain] = new\n        try:\n            created = yield",
    ),
    "a delivery that is known runs again": (
        5,
        'if outcome == "finished" or place == job.place:',
        "if base.by[:1] == (job.id,):\n            outcome = outcome",
    ),
    "a forget forgets the deliveries": (
        4,
        "number, seen = self.number + 1, {**self.seen, job.id",
        'number, seen = self.number + 1, {**(self.seen if kind != "forget" else {}), job.id',
    ),
    "a rollback forgets the deliveries": (
        88,
        "number, seen = self.number + 1, {**self.seen, job.id",
        'number, seen = self.number + 1, {**(self.seen if kind != "rollback" else {}), job.id',
    ),
    "append puts its old answer at the next number": (
        7,
        "turns = None if failure else (yield from turns_after(me, job, base))",
        'turns = locals().get("turns") or (None if failure else (yield from turns_after(me, job, base)))',
    ),
    "no ownership before the put": (
        31,
        '        yield from ask("sending", me.life, job.id, job.execution, new.number)\n',
        "",
    ),
    "the end is not fenced": (
        12,
        "job = self._own(life, job_id, execution)\n        self._end(job, status)",
        "job = self.jobs.get(job_id) or self._own(life, job_id, execution)\n        self._end(job, status)",
    ),
    "cancel is true after the put": (36, 'not in ("queued", "started") or job.sent:', 'not in ("queued", "started"):'),
    "a failed job leaves its number open": (
        6,
        "elif job.sent <= base.number:",
        "elif True:",
    ),
    "closing ends other enqueueings too": (
        6,
        'if outcome == "finished" or place == job.place:',
        "if outcome:",
    ),
    "who has not looked refuses": (30, "elif failure is None and not looked:", "elif False:"),
    "a read trusts the hint": (
        173,
        "base = (yield from look(me, job.agent)) if job.agent is not None else NOTHING",
        """base = me.local.get(job.agent, NOTHING)
    if job.agent is not None and job.last != (me.life, base.number):
        base = yield from look(me, job.agent)""",
    ),
    "reads do not keep writes away": (
        0,
        "        elif job.agent is not None:\n            self.reading[job.agent] = self.reading.get(job.agent, 0) + 1\n",
        """        elif job.agent is not None:
            self.reading["", job.agent] = self.reading.get(job.agent, 0) + 1
            self.reading.setdefault(job.agent, 0)
""",
    ),
    "nothing is held": (0, "taken = set(self.held)", "taken = set()"),
    "the line of an agent has no order": (
        3,
        "            if job.agent is not None:\n                taken.add(job.agent)\n",
        "",
    ),
    "given back to the end of the queue": (7, "self.queue.insert(0, job.id)", "self.queue.append(job.id)"),
    "held by the dead": (
        0,
        "                job.losses += 1\n                self._give_back(job)\n",
        '                job.losses += 1\n                job.status = "queued"\n                self.queue.insert(0, job.id)\n',
    ),
    "the dead keep their jobs": (0, "            elif not self._lives(job.member):\n", "            elif False:\n"),
    "a claim whose reply was lost is forgotten": (
        449,
        "if job.member == life and job.execution not in known:",
        "if False:",
    ),
    "the living are taken for dead": (0, "elif not self._lives(job.member):", "elif job.member != life:"),
    "patience counts from the enqueueing": (
        0,
        "if me.now - me.passed.setdefault(job_id, me.now) >= PATIENCE:",
        "if me.now - me.passed.setdefault(job_id, 0) >= PATIENCE:",
    ),
    "no patience": (0, "if home == me.life or home not in ready:", "if True:"),
    "patience with the dead": (0, "if home == me.life or home not in ready:", "if home in (None, me.life):"),
    "a member that is not ready counts as ready": (
        28,
        "ready = [one for one, lease in self.leases.items() if lease.ready and self._lives(one)]",
        "ready = [one for one, lease in self.leases.items() if self._lives(one)]",
    ),
    "jobs are claimed while the bucket is away": (10, "        if me.away:\n            continue\n", ""),
    "jobs without an agent wait for the bucket": (
        20,
        "        if agent is None:\n            return job_id\n        if me.away:\n            continue\n",
        "        if me.away:\n            continue\n        if agent is None:\n            return job_id\n",
    ),
    "a job fails because the bucket is away": (
        10,
        'yield from ask("give_back", me.life, job.id, job.execution)\n    except Deposed',
        'yield from ask("end", me.life, job.id, job.execution, "failed", 0)\n    except Deposed',
    ),
    "a stop waits for the bucket": (
        20,
        "            created = False\n        base",
        "            created = False\n            me.away = False\n            while True:\n                try:\n                    yield 'list', ''\n                    break\n                except Lost:\n                    pass\n        base",
    ),
    "names go without grace": (476, "made <= now - GRACE", "made <= now"),
    "forget removes names at once": (
        199,
        '            yield "empty", agent, number\n',
        '            yield "remove", agent, number\n',
    ),
    "the newest is pruned if it is a forget": (
        1,
        "    for number in sorted(listed):\n",
        '    if base.kind == "forget":\n        yield "remove", agent, base.number\n    for number in sorted(listed):\n',
    ),
    "numbers begin again after a forget": (
        1,
        "number, seen = self.number + 1,",
        'number, seen = 1 if self.kind == "forget" else self.number + 1,',
    ),
    "a forget is a removal": (
        1,
        '    if job.kind == "forget":\n        return ()\n',
        '    if job.kind == "forget":\n        for number in range(1, base.number + 1):\n            yield "remove", job.agent, number\n        return ()\n',
    ),
    "rollback by number alone": (
        260,
        "if below is None or below.id != version.parent:",
        "if below is None:",
    ),
    "rollback behind a forget": (3, "max(job.argument, base.floor)", "job.argument"),
    "a fork begins at 1": (
        22,
        "number, seen = self.number + 1,",
        'number, seen = 1 if kind == "fork" else self.number + 1,',
    ),
    "a fork overwrites": (
        8,
        "return None if base.turns or not source.turns else",
        "return None if not source.turns else",
    ),
    "an import overwrites": (0, "while name not in base.seen and not base.turns:", "while name not in base.seen:"),
    "an import that was made is made again": (
        4,
        "while name not in base.seen and not base.turns:",
        "while not base.turns:",
    ),
    "agent-ttl removes": (
        0,
        '        yield "put", agent, base.then(me, "expired", (), Job(f"expired {base.id}", "expired"))',
        "        for number in sorted(listed):\n            yield 'remove', agent, number",
    ),
    "agent-ttl trusts the copy": (
        5,
        '    base = yield from look(me, agent)\n    now, listed = yield "list", agent\n    if base.turns and now - listed.get(base.number, now) >= TTL:',
        '    base = me.local.get(agent, NOTHING)\n    now, listed = yield "list", agent\n    if base.turns and now - listed.get(base.number, now) >= TTL:',
    ),
    "agent-ttl counts nothing": (28, "now - listed.get(base.number, now) >= TTL", "True"),
    "what a forget leaves is kept": (0, "        if number < base.floor:\n", "        if False:\n"),
    "a job may take any number of members along": (
        31,
        'failure, answered = "failed" if job.losses >= LOSSES else None, False',
        "failure, answered = None, False",
    ),
    "the copy of a member that slept is trusted": (
        393,
        "looked = job.last != (me.life, base.number)",
        "looked = not base.number",
    ),
}

SCENES = {"names go without grace": "listed", "forget removes names at once": "listed"}
"""What is rare in histories of all kinds: those of the seed have scenes of this kind only."""
