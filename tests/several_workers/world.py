"""Histories of the real worker: `Worker` with its threads, `RqQueue`, `AgentCacheStore`, a Redis server, and a bucket
or a folder.

Each process of a worker is a set of played threads, which stop at each request to Redis or to the bucket. What happened
is read from what Redis and the bucket hold, and told to the invariants.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from socket import SHUT_WR
from tempfile import TemporaryDirectory
from time import perf_counter

import obstore
import obstore.exceptions
import pytest
from obstore.store import LocalStore, MemoryStore
from redis import Redis
from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue
from rq.job import Job as RqJob
from rq.registry import CanceledJobRegistry, FailedJobRegistry
from rq.serializers import JSONSerializer
from tests.several_workers.actions import AGENTS, LAG, Actions
from tests.several_workers.histories import history_of
from tests.several_workers.invariants import ENDED, TTL, Broken, Version, require
from tests.several_workers.played_threads import PlayedThread, Stage
from tests.worker.memory.agents import FastDisk, problems_of

from stoker import Producer
from stoker_shared.errors import EngineFailed, QueueHeld, RedisUnavailable, StoreUnusable
from stoker_shared.wire import AGENT_TASK_PATH
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.memory import turn_saver
from stoker_worker.memory.database import connect
from stoker_worker.memory.locks import _LockedFile, store_name
from stoker_worker.memory.replica import versions
from stoker_worker.memory.replica.bucket import Bucket, BucketAway
from stoker_worker.memory.replica.versions import SharedVersion, Versions, number_in, version_name, versions_folder
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.pipeline.worker import Worker
from stoker_worker.process_identity import ProcessIdentity
from stoker_worker.queue.end import RqClaimedJob
from stoker_worker.queue.lease import OwnStore
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.rq_queue import RqQueue, open_queue
from stoker_worker.settings import read_settings

SETTINGS = {"lease_ttl_s": 10, "heartbeat_s": 2, "poll_s": 1, "recover_s": 3, "patience_s": 4}
PLACES = 2  # jobs that a worker runs at once
GRACE = 20.0  # how long a name stays after the next one was put: longer than a lease, and than a listing lags
PROCESSES = 3
TURN = re.compile(r"\[(j\d+)\]")
SWEEPS = 40  # how often each thread goes on in a round
LABELLED = {
    "begin_save": "sending",
    "finish": "end",
    "fail": "end",
    "stop": "end",
    "give_back": "give_back",
}

_PASS = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local ttl = redis.call('PTTL', key)
  if ttl >= 0 then redis.call('PEXPIRE', key, math.max(0, ttl - ARGV[1])) end
end
"""


class RealRedis:
    """The server, as its administrator and producers see it. Its time is that of the stage: what is to expire is
    shifted.

    Attributes:
        jobs: those that it knows, with the states of the last `look`.
    """

    def __init__(self, world, url):
        self.world, self.url = world, url
        self.server, self.producer = Redis.from_url(url), Producer(url)
        self.server.flushall()
        self.server.script_flush()
        self.jobs, self._began = {}, perf_counter()
        self._pass = self.server.register_script(_PASS)

    def passes(self, seconds=0):
        now = perf_counter()
        self._pass(args=[int(1000 * (seconds - (now - self._began)))])
        self._began = now

    def close(self):
        self.producer.close()
        self.server.close()

    def submit(self, job):
        text = f"[{job.id}]\nsay ok"
        fields = {"job_id": job.id, "agent_id": job.agent, "max_tokens": 1, "prompt": text}
        queue = Queue("generate", connection=self.server, serializer=JSONSerializer)
        if job.kind in ("append", "full", "plain"):
            self.producer.submit(**fields, context="append" if job.kind == "append" else "full")
        elif job.kind == "read":
            self.producer.submit(**fields, context="append", cache="read")
        else:
            request = {"action": job.kind, "agent_id": job.agent}
            request |= {"rollback": {"version": job.argument}, "fork": {"target": job.argument}}.get(job.kind, {})
            queue.enqueue_call(AGENT_TASK_PATH, kwargs={"request": request}, job_id=job.id)
        self.jobs[job.id] = job

    def cancel(self, job_id):
        done = self.producer.ticket(job_id).cancel()
        self.jobs[job_id].status = "canceled" if done else self.jobs[job_id].status
        return done

    def retry(self, job_id, place):
        job = self.jobs[job_id]
        registry = {"failed": FailedJobRegistry, "canceled": CanceledJobRegistry}.get(job.status)
        if registry is not None:
            with suppress(Exception):  # it has run out
                registry("generate", connection=self.server, serializer=JSONSerializer).requeue(job_id)
                job.place, job.status = place, "queued"

    def look(self):
        """The states as they are; yields jobs that have ended since, with their state before."""
        with self.server.pipeline(transaction=False) as pipeline:
            for job_id in self.jobs:
                pipeline.hget(f"rq:job:{job_id}", "status")
            found = pipeline.execute()
        for job, status in zip(list(self.jobs.values()), found, strict=True):
            was, job.status = job.status, (status or b"finished").decode().replace("stopped", "canceled")
            if job.status in ENDED and was != job.status:
                yield job, was

    def failure_of(self, job):
        result = RqJob.fetch(job.id, self.server, JSONSerializer).latest_result()
        return (result.exc_string or "") if result else ""

    def copy(self):
        keys = self.server.keys("*")
        found = [(key, self.server.pttl(key), self.server.dump(key)) for key in keys]
        return self.world.now, found, {job.id: replace(job) for job in self.jobs.values()}

    def restart(self, dumped=None):
        """Empty, or as it was."""
        self.server.flushall()
        self.server.script_flush()
        then, keys, jobs = dumped or (0, [], {})
        for key, ttl, content in keys:
            left = ttl - 1000 * (self.world.now - then) if ttl >= 0 else 0
            if left >= 0:
                self.server.restore(key, int(left), content)
        self.jobs = {job_id: replace(job) for job_id, job in jobs.items()}
        list(self.look())


class RealBucket:
    """Stands between `obstore` and whoever calls it."""

    def __init__(self, world, store, url):
        self.world, self.store, self.url, self.late, self.down = world, store, url, [], False
        self.made, self.removed = {}, []  # names and when; of those removed also the entry
        self.folders = {versions_folder(agent): agent for agent in AGENTS}
        self.real = {name: getattr(obstore, name) for name in ("put", "get", "head", "list", "delete")}

    def install(self, patch):
        for name in self.real:
            patch.setattr(obstore, name, self._gate(name))

    def _gate(self, name):
        def call(store, *args, **options):
            thread = self.world.stage.current()
            path = args[0] if args else options.pop("prefix")
            if thread is None:
                return getattr(self, name)(path, *args[1:], **options)
            is_version = path.startswith("agents/")
            label = {"put": "put", "head": "get", "delete": "remove"}.get(name, name)
            if name == "put" and options.get("mode") != "create":
                label = "empty"
            fault = thread.gate(label if is_version or name != "put" else "cache")
            carry_out = self._carried_out(name, thread, path, *args[1:], **options)
            if fault in ("late", "twice") and label == "put":
                self.late.append(carry_out)
            if (self.down and fault != "unheard") or fault == "lost" or (fault == "late" and label == "put"):
                raise OSError(f"played: {fault or 'away'}")
            reply = carry_out()
            if fault == "unheard":
                raise OSError("played: no reply")
            return reply

        return call

    def _carried_out(self, name, thread, path, *args, **options):
        """A put is sent by the job that its thread works on, whenever it arrives."""
        if name != "put" or options.get("mode") != "create" or not number_in(path):
            return lambda: getattr(self, name)(path, *args, **options)
        sent = self.world.sent(self.folders[path.rpartition("/")[0]], number_in(path), args[0], thread)

        def put():
            reply = self.put(path, *args, **options)
            self.world.created(sent)
            return reply

        return put

    def arrive(self, which):
        if self.late:
            with suppress(obstore.exceptions.BaseError, FileExistsError):
                self.late.pop(which % len(self.late))()

    def made_at(self, agent, number):
        return self.made[version_name(agent, number)]

    def put(self, path, content, **options):
        reply = self.real["put"](self.store, path, content, **options)
        self.made.setdefault(path, self.world.now)
        if options.get("mode") != "create":
            self.made[path] = self.world.now
        return reply

    def get(self, path):
        return self.real["get"](self.store, path)

    def head(self, path):
        return self._dated(self.real["head"](self.store, path))

    def list(self, prefix, offset=None):
        now, lag = self.world.now, self.world.lag if prefix.startswith("agents/") else lambda: 0
        found = {x["path"]: self._dated(x) for page in self.real["list"](self.store, prefix) for x in page}
        seen = {name: x for name, x in found.items() if self.made.get(name, 0) <= now - lag()}
        seen |= {name: x for name, x, at in self.removed if at > now - lag() and name.startswith(prefix)}
        return [[x for name, x in seen.items() if offset is None or name > offset]]

    def delete(self, path):
        entry = self.head(path)
        self.real["delete"](self.store, path)
        self.removed.append((path, entry, self.world.now))
        if number_in(path):
            self.world.invariants.removed(self.folders[path.rpartition("/")[0]], number_in(path))

    def _dated(self, entry):
        at = datetime.fromtimestamp(self.world.stage.epoch_s + self.made.get(entry["path"], 0), UTC)
        return {**entry, "last_modified": at}


class Life:
    """One life of a process.

    Attributes:
        executions: the latest of each job.
    """

    def __init__(self, process, name):
        self.process, self.life, self.threads, self.is_dead = process, name, [], False
        self.worker, self.executions, self.errors, self.stopping = None, {}, [], False

    def ended_with(self, error):
        self.errors.append(error)


class RealProcess:
    """A machine: `member` is the life of its worker, if there is one. Its folder outlives it."""

    def __init__(self, world, number):
        self.world, self.name, self.asleep, self.slow, self.member = world, f"m{number}", False, [], None
        self.folder = world.folder / self.name
        self.begin()

    @property
    def stopping(self):
        return self.member is not None and self.member.stopping

    @property
    def threads(self):
        """Those that can go on."""
        if self.member is None or self.asleep:
            return []
        return [thread for thread in self.member.threads if thread.may_go and thread not in self.slow]

    def begin(self):
        self.world.lives += 1
        self.member = Life(self, f"{self.name}.{self.world.lives}")
        PlayedThread(self.world.stage, self.member, self._main, "main")

    def step(self, which, fault=None):
        life, threads = self.member, self.threads
        if threads:
            threads[which % len(threads)].go(fault)
        if self.world.broken:
            raise self.world.broken
        if life is not None and life.errors and life is self.member:
            self._is_over(life)

    def at(self, wanted):
        return [at for at, thread in enumerate(self.threads) if thread.operation == wanted]

    def is_fetcher(self, at):
        return self.threads[at].name == "fetcher"

    def stop_thread(self, at, after):
        thread = self.threads[at]
        if after:
            self.step(at)
        self.slow.append(thread)

    def wake(self):
        self.asleep, self.slow = False, []

    def stop(self):
        if self.member is not None and self.member.worker is not None:
            self.member.stopping = True
            self.member.worker.request_stop()

    def lose_disk(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_over(self, life):
        known = (QueueHeld, StoreUnusable, RedisUnavailable, SystemExit)
        for error in life.errors:
            if not isinstance(error, known):
                raise error
        self.crash()

    def crash(self):
        life, self.member, self.slow = self.member, None, []
        if life is not None:
            life.is_dead = True
            while life.threads:
                life.threads[-1].go()
            _LockedFile._all.pop(os.path.realpath(self.folder / "in-flight"), None)  # as the kernel does

    def background(self, action, *args):
        if self.member:
            PlayedThread(self.world.stage, self.member, lambda: getattr(self, action)(*args), "command")

    def prune(self, agent):
        with suppress(BucketAway):
            Versions(Bucket(self.world.bucket.url)).prune(agent)

    def _main(self):
        world, life = self.world, self.member
        with ExitStack() as opened:
            store = AgentCacheStore(
                self.folder,
                files=FastDisk(),
                agent_ttl_s=world.agent_ttl_s,
                shared=Bucket(world.bucket.url),
                connector=world.connect,
            )
            opened.enter_context(closing(store))
            while not store.shared_id():
                with suppress(BucketAway):
                    store.meet()
                time.sleep(1)
            store.start_upkeep()
            own = OwnStore(store_name(self.folder), store.shared_id(), has_agents=True)
            settings = read_settings({**SETTINGS, "redis_url": world.redis.url, "name": self.name})
            queue = opened.enter_context(open_queue(settings, world.redis.url, store=own, model="scripted"))
            life.worker = Worker(settings, queue.rq_queue, store, PlayedProvider(world))
            life.worker.run()
        raise SystemExit


class PlayedProvider(ScriptedProvider):
    def __init__(self, world):
        super().__init__(max_batch=PLACES, steps_per_s=1.0)
        object.__setattr__(self, "world", world)

    def load(self):
        engine, model = super().load()
        submit = engine.submit

        def played(work):
            thread = self.world.stage.current()
            fault = thread.gate("compute")
            self.world.computed(thread.process, work, fault)
            if fault == "failed":
                raise EngineFailed("played")
            return submit(work)

        engine.submit = played
        return engine, model


def noted(method):
    """What does not hold is kept: the thread that it was found in is the product's, which goes on after any error."""

    @wraps(method)
    def call(world, *args):
        try:
            with world.stage.aside():
                return method(world, *args)
        except Broken as broken:
            world.broken = world.broken or broken
            raise

    return call


class World(Actions):
    broken = None

    def __init__(self, seed, folder, url, patch):
        super().__init__(seed)
        self.folder, self.stage = folder, Stage()
        self.has_folder, self.executions = seed % 2 == 1, {}
        self.agent_ttl_s = TTL if seed % 3 == 0 else None
        self.patch, self.full_every = patch, 1 + seed // 2 % 2
        self.tokens, self.seen, self.is_one_host = {agent: () for agent in AGENTS}, {}, seed % 4 < 2
        self.redis = RealRedis(self, url)
        store, shared = MemoryStore(), f"s3://bucket/{folder.name}"
        if self.has_folder:
            (folder / "shared").mkdir(parents=True)
            shared, store = f"file://{folder}/shared", LocalStore(folder / "shared")
        self.bucket = RealBucket(self, store, shared)
        self._install()
        self.processes = [RealProcess(self, number) for number in range(PROCESSES)]

    # What is played.

    def _install(self):
        patch = self.patch
        self.stage.open(patch)
        patch.setattr(os, "urandom", self.random.randbytes)
        self.bucket.install(patch)
        patch.setattr(RqRegistration, "subscribe", lambda registration: None)
        for name in ("flock", "lockf"):
            patch.setattr(fcntl, name, lambda *args: None)
        patch.setattr(versions, "_GRACE_S", GRACE)
        for module in (versions, turn_saver):
            patch.setattr(module, "FULL_EVERY", self.full_every)
        patch.setattr(Connection, "send_packed_command", self._sends(Connection.send_packed_command))
        patch.setattr(RqQueue, "claim", self._claims(RqQueue.claim))
        for name, label in LABELLED.items():
            patch.setattr(RqClaimedJob, name, self._labelled(label, getattr(RqClaimedJob, name)))
        patch.setattr(ProcessIdentity, "of_this_process", self._identity)
        patch.setattr(ProcessIdentity, "is_certainly_dead", self._dead_here())

    @staticmethod
    def connect(path):
        connection = connect(path)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    def lag(self):
        return self.random.randint(0, LAG) if self.has_folder and self.lags else 0

    def _identity(self):
        life = self.stage.current().process
        host = "one" if self.is_one_host else life.process.name
        return ProcessIdentity(host, "boot", 1, life.life)

    def _dead_here(self):
        def is_certainly_dead(identity):
            living = [one.member.life for one in self.processes if one.member]
            return identity.host == self._identity().host and identity.started not in living

        return is_certainly_dead

    def _sends(self, real):
        world = self

        @wraps(real)
        def send(connection, command, check_health=True):
            thread = world.stage.current()
            if thread is None or not connection._sock:
                return real(connection, command, check_health)
            fault = thread.gate(thread.label)
            if fault in ("lost", "unheard"):
                if fault == "unheard":
                    real(connection, command, check_health)
                    connection._sock.shutdown(SHUT_WR)
                    while connection._sock.recv(65536):
                        pass
                connection.disconnect()
                raise RedisConnectionError("played: " + fault)
            real(connection, command, check_health)

        return send

    def _labelled(self, label, real):
        @wraps(real)
        def call(claimed, *args, **options):
            thread = self.stage.current()
            before, thread.label = thread.label, label
            try:
                return real(claimed, *args, **options)
            finally:
                thread.label = before
                self.look()

        return call

    def _claims(self, real):
        @wraps(real)
        def claim(queue, *args):
            thread = self.stage.current()
            epoch, lengths = self.epoch, {agent: len(self.invariants.chains[agent]) for agent in (None, *AGENTS)}
            before, thread.label = thread.label, "claim"
            try:
                found = real(queue, *args)
            finally:
                thread.label = before
            for claimed in found:
                self.claimed(thread.process, claimed, epoch if epoch == self.epoch else -1, lengths)
            return found

        return claim

    # What happened.

    @noted
    def claimed(self, life, claimed, epoch, lengths):
        job = self.redis.jobs.get(claimed.job_id)
        if job is None:  # lost meanwhile
            return
        execution = f"{life.life}/{claimed.claim_number}"
        life.executions[job.id] = execution
        self.executions[job.id] = execution
        self.look()
        self.invariants.check_order(job)
        self.invariants.runs[execution] = replace(job, execution=execution, losses=0)
        self.invariants.claims[execution] = (epoch, lengths[job.chain], lengths[job.agent])

    @noted
    def computed(self, life, work, fault):
        *before, job_id = TURN.findall(bytes(x for x in work.prompt_ids if x < 256).decode())
        execution = life.executions.get(job_id)
        if execution is not None:
            self.seen[execution] = tuple(before)
            self.invariants.computed(execution, fault)

    @noted
    def sent(self, agent, number, content, thread):
        shared = SharedVersion.decode(agent, number, content)
        record, result = shared.record, json.loads(shared.result or "null") or {}
        job_id = record.about.job_id if record else result.get("job_id")
        made_by = record.about.made_by if record else "forget" if job_id else "expired"
        execution = thread.process.executions.get(job_id)
        run = self.invariants.runs.get(execution)
        kind = run.kind if made_by == "turn" else made_by
        by = (job_id, run.place, execution) if run else ("", 0, "")
        head = shared.head.hex() or f"{agent} {number} {execution}"
        version = Version(number, head, ((record and record.parent) or b"").hex(), kind, by)
        self.invariants.sent(version)
        return agent, version, record

    @noted
    def created(self, sent):
        agent, version, record = sent
        newest = self.invariants.newest(agent)
        tokens = (*self.tokens[agent][: record.keep_tokens], *record.new_tokens) if record else ()
        if record is None or not version.parent:
            floor = newest.floor if record else version.number
            version = replace(version, parent=newest.id, floor=floor)
        if version.kind == "expired" and not newest.turns:
            version = replace(version, kind="closed")
        turns = tuple(TURN.findall(bytes(x for x in tokens if x < 256).decode()))
        if version.number > newest.number:
            self.tokens[agent] = tokens
        self.invariants.created(agent, replace(version, turns=turns))

    @noted
    def look(self):
        """At jobs that have ended since."""
        for job, was in list(self.redis.look()):
            execution, status = self.executions.get(job.id), job.status
            if status == "failed" and "WorkerLostTooOften" in self.redis.failure_of(job):
                self.invariants.reasons.add((job.id, job.place))
            if execution is not None:
                self.invariants.ended(was, job.id, execution, status, self._numbers(job, execution))

    def _numbers(self, job, execution):
        """Of the versions that it may have ended with."""
        chain = self.invariants.chains[job.agent if job.kind == "read" else job.chain]
        found = range(len(chain), -1, -1)
        if job.kind != "read" or execution not in self.seen:
            return list(found)
        return [n for n in found if (chain[n - 1].turns if n else ()) == self.seen[execution]]

    # Actions.

    def passes(self, seconds):
        self.now += seconds
        self.stage.now = self.now
        self.redis.passes(seconds)

    def goes_on_from(self, snapshot):
        self.epoch += 1
        self.redis.restart(snapshot)

    def everybody(self):
        """Until all of them wait for the time, or for long enough."""
        for _ in range(SWEEPS):
            ready = [one for one in self.processes for _ in one.threads]
            self.random.shuffle(ready)
            for one in ready:
                one.step(self.random.randrange(99))
            if not ready:
                break
        self.redis.passes()
        self.look()
        if not any(one.threads for one in self.processes):
            self.time(0)

    def one_second_beside(self, process):
        self.passes(1)
        for one in self.processes:
            for _ in range(len(one.threads) if one is not process else 0):
                one.step(0)

    def go_on(self, rounds):
        for _ in range(rounds):
            if not any(one.member for one in self.processes):  # who cannot start ends, and is started again
                self.processes[0].begin()
            self.time(0)
            self.everybody()
            if self.is_quiet():
                return

    def is_quiet(self):
        is_over = all(job.status not in ("queued", "started") for job in self.redis.jobs.values())
        return is_over and not any(one.stopping for one in self.processes if not one.asleep)

    def look_back(self):
        """Each machine, and a new one, goes on from the newest versions, and its store is whole. Nothing is played."""
        for one in self.processes:
            one.crash()
        self.patch.undo()
        self.lags = False
        with pytest.MonkeyPatch.context() as patch:
            self.bucket.install(patch)
            for folder in [*(one.folder for one in self.processes), self.folder / "new"]:
                store = AgentCacheStore(folder, files=FastDisk(), shared=Bucket(self.bucket.url))
                store.meet()
                for agent in AGENTS:
                    store.look(agent)
                    found = store.open_agent(agent).transcript
                    is_newest = (found.token_ids if found else ()) == self.tokens[agent]
                    require(is_newest, "a machine goes on from something else")
                require(not problems_of(store), "a store is damaged")
                store.close()


def main(url, first, last):
    """Play the histories of these seeds, and print what broke."""
    logging.disable(logging.CRITICAL)
    for seed in range(first, last):
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            try:
                World(seed, Path(folder), url, patch).play(history_of(seed))
            except Exception as error:
                print(f"{seed}: {type(error).__name__}: {error}", flush=True)
    os._exit(0)  # threads of processes that still live wait for ever


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
