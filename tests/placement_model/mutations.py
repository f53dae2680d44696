"""Lines of the rule, each broken once: the line, what is there instead; and seeds of histories that show the harm."""

# ruff: noqa: E501

MUTATIONS = {
    "no look after the put": (
        "base, looked = (yield from look(me, job.chain, new if created else None)), True",
        "base, looked = new if created else (yield from look(me, job.chain)), True",
    ),
    "an unknown put counts as made": (
        "            created = False\n        base",
        "            created = True\n        base",
    ),
    "an unknown put ends the job": (
        "            created = False\n        base",
        '            return (yield from ask("end", me.life, job.id, job.execution, "failed", 0))\n        base',
    ),
    "exists with my own delivery is mine": (
        "        base, looked = (yield from look(me, job.chain, new if created else None)), True",
        """        there = None if created else (yield "get", job.chain, new.number)
        if there and there.by[0] == job.id:
            return (yield from ask("end", me.life, job.id, job.execution, "finished", new.number))
        base, looked = (yield from look(me, job.chain, new if created else None)), True""",
    ),
    "own object removed when another is above": (
        "        base, looked = (yield from look(me, job.chain, new if created else None)), True",
        """        base, looked = (yield from look(me, job.chain, new if created else None)), True
        if created and base.number > new.number:
            yield "remove", job.chain, new.number""",
    ),
    "exists is not followed upwards": ("while me.lags and newest", "while False and newest"),
    "absence proves that it is the newest": (
        'newest = known if known.number >= max(listed, default=0) else (yield "get", agent, max(listed))',
        'newest = known if known.number else NOTHING if not listed else (yield "get", agent, max(listed))',
    ),
    "the copy is written before the put": (
        "        try:\n            created = yield",
        "        me.local[job.chain] = new\n        try:\n            created = yield",
    ),
    "a delivery that is known runs again": (
        'if outcome == "finished" or place == job.place:',
        "if base.by[:1] == (job.id,):\n            outcome = outcome",
    ),
    "a forget forgets the deliveries": (
        "number, seen = self.number + 1, {**self.seen, job.id",
        'number, seen = self.number + 1, {**(self.seen if kind != "forget" else {}), job.id',
    ),
    "a rollback forgets the deliveries": (
        "number, seen = self.number + 1, {**self.seen, job.id",
        'number, seen = self.number + 1, {**(self.seen if kind != "rollback" else {}), job.id',
    ),
    "append puts its old answer at the next number": (
        "turns = None if failure else (yield from turns_after(me, job, base))",
        'turns = locals().get("turns") or (None if failure else (yield from turns_after(me, job, base)))',
    ),
    "no ownership before the put": (
        '        yield from ask("sending", me.life, job.id, job.execution, new.number)\n',
        "",
    ),
    "the end is not fenced": (
        "job = self._own(life, job_id, execution)\n        self._end(job, status)",
        "job = self.jobs.get(job_id) or self._own(life, job_id, execution)\n        self._end(job, status)",
    ),
    "cancel is true after the put": ('not in ("queued", "started") or job.sent:', 'not in ("queued", "started"):'),
    "a failed job leaves its number open": (
        "elif job.sent <= base.number:",
        "elif True:",
    ),
    "closing ends other enqueueings too": (
        'if outcome == "finished" or place == job.place:',
        "if outcome:",
    ),
    "who has not looked refuses": ("elif failure is None and not looked:", "elif False:"),
    "a read trusts the hint": (
        "base = (yield from look(me, job.agent)) if job.agent is not None else NOTHING",
        """base = me.local.get(job.agent, NOTHING)
    if job.agent is not None and job.last != (me.life, base.number):
        base = yield from look(me, job.agent)""",
    ),
    "reads do not keep writes away": (
        "        elif job.agent is not None:\n            self.reading[job.agent] = self.reading.get(job.agent, 0) + 1\n",
        """        elif job.agent is not None:
            self.reading["", job.agent] = self.reading.get(job.agent, 0) + 1
            self.reading.setdefault(job.agent, 0)
""",
    ),
    "nothing is held": ("taken = set(self.held)", "taken = set()"),
    "the line of an agent has no order": (
        "            if job.agent is not None:\n                taken.add(job.agent)\n",
        "",
    ),
    "given back to the end of the queue": ("self.queue.insert(0, job.id)", "self.queue.append(job.id)"),
    "held by the dead": (
        "                job.losses += 1\n                self._give_back(job)\n",
        '                job.losses += 1\n                job.status = "queued"\n                self.queue.insert(0, job.id)\n',
    ),
    "the dead keep their jobs": ("            elif not self._lives(job.member):\n", "            elif False:\n"),
    "a claim whose reply was lost is forgotten": (
        "if job.member == life and job.execution not in known:",
        "if False:",
    ),
    "the living are taken for dead": ("elif not self._lives(job.member):", "elif job.member != life:"),
    "an old life goes on": (
        "    def _alive(self, life):\n        if not self._lives(life):\n",
        "    def _alive(self, life):\n        if life not in self.leases:\n",
    ),
    "patience counts from the enqueueing": (
        "if me.now - me.passed.setdefault(job_id, me.now) >= PATIENCE:",
        "if me.now - me.passed.setdefault(job_id, 0) >= PATIENCE:",
    ),
    "no patience": ("if home == me.life or home not in ready:", "if True:"),
    "patience with the dead": ("if home == me.life or home not in ready:", "if home in (None, me.life):"),
    "a member that is not ready counts as ready": (
        "ready = [one for one, lease in self.leases.items() if lease.ready and self._lives(one)]",
        "ready = [one for one, lease in self.leases.items() if self._lives(one)]",
    ),
    "jobs are claimed while the bucket is away": ("        if me.away:\n            continue\n", ""),
    "jobs without an agent wait for the bucket": (
        "        if agent is None:\n            return job_id\n        if me.away:\n            continue\n",
        "        if me.away:\n            continue\n        if agent is None:\n            return job_id\n",
    ),
    "a job fails because the bucket is away": (
        'yield from ask("give_back", me.life, job.id, job.execution)\n    except Deposed',
        'yield from ask("end", me.life, job.id, job.execution, "failed", 0)\n    except Deposed',
    ),
    "a stop waits for the bucket": (
        "            created = False\n        base",
        "            created = False\n            me.away = False\n            while True:\n                try:\n                    yield 'list', ''\n                    break\n                except Lost:\n                    pass\n        base",
    ),
    "names go without grace": ("made <= now - GRACE", "made <= now"),
    "forget removes names at once": (
        '            yield "empty", agent, number\n',
        '            yield "remove", agent, number\n',
    ),
    "the newest is pruned if it is a forget": (
        "    for number in sorted(listed):\n",
        '    if base.kind == "forget":\n        yield "remove", agent, base.number\n    for number in sorted(listed):\n',
    ),
    "numbers begin again after a forget": (
        "number, seen = self.number + 1,",
        'number, seen = 1 if self.kind == "forget" else self.number + 1,',
    ),
    "a forget is a removal": (
        '    if job.kind == "forget":\n        return ()\n',
        '    if job.kind == "forget":\n        for number in range(1, base.number + 1):\n            yield "remove", job.agent, number\n        return ()\n',
    ),
    "rollback by number alone": (
        "if below is None or below.id != version.parent:",
        "if below is None:",
    ),
    "rollback behind a forget": ("max(job.argument, base.floor)", "job.argument"),
    "a fork begins at 1": (
        "number, seen = self.number + 1,",
        'number, seen = 1 if kind == "fork" else self.number + 1,',
    ),
    "a fork overwrites": ("return None if base.turns or not source.turns else", "return None if not source.turns else"),
    "an import overwrites": ("while name not in base.seen and not base.turns:", "while name not in base.seen:"),
    "an import that was made is made again": (
        "while name not in base.seen and not base.turns:",
        "while not base.turns:",
    ),
    "agent-ttl removes": (
        '        yield "put", agent, base.then(me, "expired", (), Job(f"expired {base.id}", "expired"))',
        "        for number in sorted(listed):\n            yield 'remove', agent, number",
    ),
    "agent-ttl trusts the copy": (
        '    base = yield from look(me, agent)\n    now, listed = yield "list", agent\n    if base.turns and now - listed.get(base.number, now) >= TTL:',
        '    base = me.local.get(agent, NOTHING)\n    now, listed = yield "list", agent\n    if base.turns and now - listed.get(base.number, now) >= TTL:',
    ),
    "agent-ttl counts nothing": ("now - listed.get(base.number, now) >= TTL", "True"),
    "what a forget leaves is kept": ("        if number < base.floor:\n", "        if False:\n"),
    "a job may take any number of members along": (
        'failure, answered = "failed" if job.losses >= LOSSES else None, False',
        "failure, answered = None, False",
    ),
    "the copy of a member that slept is trusted": (
        "looked = job.last != (me.life, base.number)",
        "looked = not base.number",
    ),
}

SEEDS = {
    "an unknown put counts as made": 62,
    "an unknown put ends the job": 0,
    "exists is not followed upwards": 14,
    "absence proves that it is the newest": 23,
    "the copy is written before the put": 0,
    "a forget forgets the deliveries": 231,
    "a rollback forgets the deliveries": 192,
    "no ownership before the put": 39,
    "the end is not fenced": 30,
    "cancel is true after the put": 40,
    "who has not looked refuses": 91,
    "reads do not keep writes away": 1,
    "given back to the end of the queue": 7,
    "held by the dead": 7,
    "the dead keep their jobs": 7,
    "a claim whose reply was lost is forgotten": 60,
    "the living are taken for dead": 0,
    "patience counts from the enqueueing": 4,
    "no patience": 4,
    "patience with the dead": 0,
    "jobs are claimed while the bucket is away": 0,
    "jobs without an agent wait for the bucket": 20,
    "a job fails because the bucket is away": 0,
    "the newest is pruned if it is a forget": 1,
    "numbers begin again after a forget": 11,
    "a forget is a removal": 1,
    "rollback behind a forget": 11,
    "a fork overwrites": 10,
    "an import overwrites": 7,
    "what a forget leaves is kept": 1,
    "append puts its old answer at the next number": 14,
    "nothing is held": 7,
    "a delivery that is known runs again": 163,
    "a fork begins at 1": 350,
    "agent-ttl removes": 59,
    "a failed job leaves its number open": 4689,
}

NOT_SEEN = sorted(MUTATIONS.keys() - SEEDS.keys())
"""Either another line covers it, or the search does not reach it: the model has not decided which."""
