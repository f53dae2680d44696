"""The rules of docs/lifecycle.md after a chaos run: for the jobs as Redis has them, and for the transcripts."""

import json
import zlib
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from redis import Redis
from tests.chaos.hooks import generations
from tests.chaos.oracle import Oracle
from tests.chaos.plan import QUEUES, PlannedJob
from tests.chaos.storm import Storm
from tests.chaos.traffic import ENDED, Delivery, Traffic
from tests.support.answers import without_total
from tests.support.store_reader import Kept, StoreReader

from stoker_shared.request import request_digest
from stoker_worker.memory.transcripts import delivery_key
from stoker_worker.ports import Delivery as PortDelivery
from stoker_worker.queue.registration import EXECUTION_TTL_S

REGISTRIES = ("wip", "finished", "failed", "canceled", "scheduled", "deferred", "ready")
SUCCESSFUL = b"1"
_KEY = "rq:job:"


@dataclass
class Found:
    """A job id as found after the run; `state` is ``None`` where its hash is gone.

    Attributes:
        current: the delivery that the hash belongs to; of several sends, the last to arrive.
        superseded: the deliveries that had the id before.
        places: every list and registry with the id, once for each occurrence.
        entries: the result stream, oldest first.
    """

    job_id: str
    current: Delivery
    superseded: list[Delivery]
    state: str | None
    places: list[str]
    entries: list[dict[bytes, bytes]]
    reason: str

    @property
    def plan(self) -> PlannedJob:
        return self.current.job

    @property
    def came_once(self) -> bool:
        """Whether only its first sender has sent it."""
        return not (self.superseded or self.plan.again)

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(b64decode(entry[b"return_value"])) for entry in self.entries if entry[b"type"] == SUCCESSFUL]

    def results_of(self, plan: PlannedJob) -> list[dict[str, Any]]:
        return [result for result in self.results if result["metadata"]["job"] == plan.name]

    @property
    def result(self) -> dict[str, Any]:
        """The newest result."""
        assert self.entries[-1][b"type"] == SUCCESSFUL, self
        return self.results[-1]


@dataclass(frozen=True)
class Record:
    """A job's hash: its state, its creation time, and the name in its request."""

    state: str
    created_at: str
    name: str


def find_jobs(connection: Redis, sent: Sequence[Delivery]) -> list[Found]:
    """Every id that arrived. A delivery in doubt arrived completely or not at all."""
    records, places = _records(connection), places_of_all(connection)
    by_id: dict[str, list[Delivery]] = {}
    for delivery in sent:
        by_id.setdefault(delivery.job_id, []).append(delivery)
    found = [_find(connection, job_id, of, records.get(job_id), places) for job_id, of in by_id.items()]
    return [job for job in found if job.state is not None or job.current.is_acknowledged]


def _find(
    connection: Redis, job_id: str, sent: list[Delivery], record: Record | None, places: dict[str, list[str]]
) -> Found:
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.xrange(f"rq:results:{job_id}")
        [stream] = pipeline.execute()
    entries = [entry for _, entry in stream]
    failures = [entry[b"exc_string"] for entry in entries if b"exc_string" in entry]
    reason = zlib.decompress(b64decode(failures[-1])).decode() if failures else ""
    current = next((delivery for delivery in reversed(sent) if record and _is_of(delivery, record)), sent[-1])
    before = sent[: next(at for at, delivery in enumerate(sent) if delivery is current)]
    return Found(job_id, current, before, record.state if record else None, places.get(job_id, []), entries, reason)


def _is_of(delivery: Delivery, record: Record) -> bool:
    return delivery.job.name == record.name and delivery.created_at in {None, record.created_at}


def _records(connection: Redis) -> dict[str, Record]:
    keys = list(connection.scan_iter(match=f"{_KEY}*", count=1000))
    with connection.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hmget(key, "status", "created_at", "data")
        replies = pipeline.execute(raise_on_error=False)
    return {
        key.decode().removeprefix(_KEY): Record(status.decode(), created_at.decode(), _name_in(data))
        for key, reply in zip(keys, replies, strict=True)
        if not isinstance(reply, Exception)  # the sets of dependents and dependencies
        for status, created_at, data in [reply]
    }


def _name_in(data: bytes) -> str:
    name: str = json.loads(zlib.decompress(data))[3]["request"]["metadata"]["job"]
    return name


def places_of_all(connection: Redis) -> dict[str, list[str]]:
    """Every list and registry that has an id, once for each occurrence."""
    found: dict[str, list[str]] = {}
    for place, entries in _places(connection):
        for entry in entries:
            found.setdefault(entry.decode().split(":")[0], []).append(place)
    return found


def _places(connection: Redis) -> Iterable[tuple[str, list[Any]]]:
    for key in (f"rq:queue:{queue}" for queue in QUEUES):
        yield f"list:{key}", connection.lrange(key, 0, -1)
    for queue in QUEUES:
        for kind in REGISTRIES:
            yield f"{kind}:{queue}", connection.zrange(f"rq:{kind}:{queue}", 0, -1)


class Histories:
    """The store after the run."""

    def __init__(self, store: StoreReader, jobs: Sequence[Found], oracle: Oracle) -> None:
        self._store, self._jobs, self._oracle = store, jobs, oracle
        self._by_id = {job.job_id: job for job in jobs}
        named = {sent.job.agent for job in jobs for sent in (*job.superseded, job.current)}
        self._agents = {agent for agent in named if agent is not None}
        self._histories: dict[str, list[Kept]] = {}

    @property
    def checks(self) -> tuple[Callable[[], None], ...]:
        return (
            self.each_turn_is_in_its_agents_history_once,
            self.turns_of_an_agent_are_in_the_order_of_its_queues,
            self.every_answer_is_that_of_the_conversation_before_it,
            self.every_answer_outside_the_histories_is_right_too,
            self.the_store_is_whole,
        )

    def each_turn_is_in_its_agents_history_once(self) -> None:
        """A finished `readwrite` delivery's turn is there once. A failed delivery's turn is not. A withdrawn or
        superseded one's is there only if it was saved before the job's end, by this worker or by a lost one."""
        for agent in self._agents:
            history = self._history(agent)
            turns = [version.delivery for version in history]
            assert len(turns) == len(set(turns)), (agent, history)
            made = [self._made(agent, version) for version in history]
            for job in self._jobs:
                for delivery in self._finished(job):
                    is_of_agent = delivery.job.agent == agent and delivery.job.cache == "readwrite"
                    times = sum(turn is delivery for turn in made)
                    assert not is_of_agent or times == 1, (agent, job, times)
            for delivery, version in zip(made, history, strict=True):
                job = self._by_id[delivery.job_id]
                assert delivery.job.cache == "readwrite", job
                assert delivery.job.agent == agent, job
                if delivery is not job.current or job.state != "finished":
                    assert delivery.job.withdraw or delivery in job.superseded, job
                else:
                    report = job.result["cache"]
                    assert (report["agent_version"], report["saved"]) == (version.number, True), (job, version)

    def _finished(self, job: Found) -> list[Delivery]:
        """The deliveries of the job that certainly finished."""
        sent = [*job.superseded, job.current]
        before = [delivery for delivery, after in pairwise(sent) if after.met[0] == "finished"]
        return [*before, job.current] if job.state == "finished" else before

    def turns_of_an_agent_are_in_the_order_of_its_queues(self) -> None:
        for agent in self._agents:
            turns = [self._made(agent, version).job for version in self._history(agent)]
            for queue in QUEUES:
                line = [plan.index for plan in turns if plan.queue == queue and plan.keeps_order]
                assert all(before < after for before, after in pairwise(line)), (agent, queue, line)

    def every_answer_is_that_of_the_conversation_before_it(self) -> None:
        """Each version is the one before it, the job's prompt and the answer, token by token."""
        for agent in self._agents:
            ids: tuple[int, ...] = ()
            text = ""
            for version in self._history(agent):
                delivery = self._made(agent, version)
                job, plan = self._by_id[delivery.job_id], delivery.job
                if plan.context == "full":
                    ids, text = (), ""
                prompt_ids = (*ids, *self._oracle.encode(plan.prompt))
                answer, said = self._oracle.answer(prompt_ids, plan)
                ids, text = (*prompt_ids, *answer), text + plan.prompt + said
                assert version.transcript.token_ids == ids, (agent, version)
                assert version.transcript.text == text, (agent, version)
                assert version.result is not None
                assert version.result["text"] == said, (agent, version)
                if job.state == "finished" and delivery is job.current:
                    assert without_total(job.result) == without_total(version.result), job

    def every_answer_outside_the_histories_is_right_too(self) -> None:
        for job in self._jobs:
            if job.state == "finished" and (job.plan.cache != "readwrite" or job.plan.agent is None):
                version = job.result["cache"]["agent_version"] if job.plan.context == "append" else None
                assert (job.plan.agent is None or job.plan.cache == "off") <= (version is None), job
                ids = self._history(job.plan.agent or "")[version - 1].transcript.token_ids if version else ()
                _, said = self._oracle.answer((*ids, *self._oracle.encode(job.plan.prompt)), job.plan)
                assert job.result["text"] == said, job

    def the_store_is_whole(self) -> None:
        assert self._store.problems() == []

    # --- reading ---

    def _made(self, agent: str, version: Kept) -> Delivery:
        """The delivery that made the turn."""
        assert version.result is not None, (agent, version)
        job, name = self._by_id[version.job_id or ""], version.result["metadata"]["job"]
        for delivery in (*job.superseded, job.current):
            if delivery.job.name == name and _key_of(agent, delivery) in {None, version.delivery}:
                return delivery
        raise AssertionError(f"no delivery of {job} made this version of {agent}: {version}")

    def _history(self, agent: str) -> list[Kept]:
        if agent not in self._histories:
            history = self._histories[agent] = self._store.history(agent)
            assert [version.number for version in history] == list(range(1, len(history) + 1)), (agent, history)
        return self._histories[agent]


def _key_of(agent: str, delivery: Delivery) -> bytes | None:
    """Its key in the store; ``None`` where the producer chose the time."""
    if delivery.created_at is None:
        return None
    request = request_digest(delivery.job.request)
    return delivery_key(agent, PortDelivery(delivery.job_id, delivery.created_at, request))


IS_REGISTERED = {"finished": "finished", "failed": "failed", "stopped": "failed", "canceled": "canceled"}


class FollowUp:
    """Redis and the store after the run."""

    def __init__(self, connection: Redis, traffic: Traffic, storm: Storm, oracle: Oracle) -> None:
        self._connection, self._storm = connection, storm
        self.jobs = find_jobs(connection, traffic.deliveries)
        self.by_id = {job.job_id: job for job in self.jobs}
        self._histories = Histories(StoreReader(storm.crew.store), self.jobs, oracle)
        self._log = storm.crew.log_of_all()

    def broken(self) -> list[str]:
        """The broken rules, with a line or two for each."""
        broken = [*self._storm.crew.problems]
        for check in (
            self.every_job_has_ended_in_exactly_one_state,
            self.each_ended_as_its_kind_does,
            self.only_poison_is_lost_too_often,
            self.dependents_wait_only_for_what_did_not_finish,
            self.no_id_stands_in_two_places,
            self.nothing_is_left_of_any_worker,
            self.every_delivery_has_one_result_and_retries_are_counted,
            self.attempts_are_counted,
            *self._histories.checks,
        ):
            try:
                check()
            except Exception as error:  # also a value that cannot be read at all
                broken.append(f"{check.__name__}: {type(error).__name__}: {error}")
        return broken

    def ends(self) -> dict[str | None, int]:
        return dict(Counter(job.state for job in self.jobs))

    # --- the rules ---

    def every_job_has_ended_in_exactly_one_state(self) -> None:
        for job in self.jobs:
            if job.state is None:  # its ttl expired in the queue, or it was deleted
                assert job.plan.short_lived or job.plan.withdraw == "delete", job
                assert job.places == [], job
            elif job.state == "deferred":
                assert job.places == [f"deferred:{job.plan.queue}"], job
            else:
                assert job.state in ENDED, job
                assert job.places == [f"{IS_REGISTERED[job.state]}:{job.plan.queue}"], job

    def each_ended_as_its_kind_does(self) -> None:
        for job in self.jobs:
            withdrawn = {"canceled", "stopped", None} if job.plan.withdraw else set()
            expired = {None} if job.plan.short_lived else set()
            deferred = {"deferred"} if job.plan.parents else set()
            assert job.state in job.plan.ends | withdrawn | expired | deferred, job
            assert "restored cache" not in job.reason, job  # the scripted engine checks every restored token
            if job.state == "failed" and not job.plan.is_poison:
                late = job.plan.options["job_timeout"] == 1
                why = "GenerationTimedOut: " if late else f"EngineFailed: number {job.plan.index}"
                assert job.reason.startswith(why), job

    def only_poison_is_lost_too_often(self) -> None:
        for job in self.jobs:
            if job.state == "failed":
                assert ("WorkerLostTooOften" in job.reason) == job.plan.is_poison, job

    def dependents_wait_only_for_what_did_not_finish(self) -> None:
        """As with RQ's own worker: a failed parent counts if that is allowed, a canceled or stopped one never does."""
        for job in self.jobs:
            met = {"finished", "failed"} if job.plan.allow_failure else {"finished"}
            parents = [parent for name in job.plan.parents if (parent := self.by_id.get(name))]
            unmet = [parent for parent in parents if parent.state not in met]
            if job.state == "deferred":
                assert unmet, (job, parents)
            else:  # a parent whose id was used again may have finished before
                assert all(not parent.came_once for parent in unmet), (job, parents)

    def no_id_stands_in_two_places(self) -> None:
        twice = {job_id: places for job_id, places in places_of_all(self._connection).items() if len(places) > 1}
        assert twice == {}

    def nothing_is_left_of_any_worker(self) -> None:
        for pattern in (
            "rq:wip:*",
            "rq:execution*",
            "rq:queue:*",
            "rq:workers*",
            "stoker:holder:*",
            "stoker:lease:*",
            "rq:scheduler-lock*",
        ):
            left = [key for key in self._connection.keys(pattern) if not self._is_left_by_rq(key.decode())]
            assert left == [], [(key, self._connection.ttl(key)) for key in left]

    def _is_left_by_rq(self, key: str) -> bool:
        """An execution that is in no registry and expires by itself, or the scheduler's lock of a worker that was lost
        a moment ago.

        RQ's own cancel or delete of a running job leaves an execution behind, and a worker that is lost then cannot
        remove it.
        """
        kind, job_id = [*key.split(":"), ""][1:3]
        if kind == "scheduler-lock":
            return self._connection.ttl(key) in range(6)  # it lasts five seconds
        if kind not in {"execution", "executions"} or not 0 < self._connection.ttl(key) <= EXECUTION_TTL_S + 60:
            return False
        return job_id in self.by_id and self.by_id[job_id].plan.withdraw is not None

    def every_delivery_has_one_result_and_retries_are_counted(self) -> None:
        for job in self.jobs:
            assert (job.state == "finished") <= (job.entries != [] and job.entries[-1][b"type"] == SUCCESSFUL), job
            sent = [*job.superseded, job.current]
            assert len(job.entries) <= sum(delivery.most_ends for delivery in sent), (job, sent)
            for plan in {delivery.job.name: delivery.job for delivery in sent}.values():
                same = [delivery for delivery in sent if delivery.job.name == plan.name]
                assert len(job.results_of(plan)) <= sum(delivery.most_ends for delivery in same), (job, same)
            for before, after in zip(job.superseded, sent[1:], strict=True):
                if after.met[0] == "finished":
                    assert job.results_of(before.job), (job, before)
            if job.state == "finished":
                assert job.result["metadata"]["job"] == job.plan.name, job
            self._retries_are_counted(job)

    def _retries_are_counted(self, job: Found) -> None:
        runs = generations(self._storm.seen, job.plan.request["metadata"])
        retry = job.plan.options.get("retry")
        if job.state == "failed" and retry:
            assert runs >= 1 + retry.max, (job, runs)
        if job.state == "finished":
            assert runs >= 1 + job.plan.flaky, (job, runs)

    def attempts_are_counted(self) -> None:
        """Exactly, except for jobs in an engine that broke and answers from the history."""
        # From the log: a worker may be killed on its way out, after it gave its jobs back.
        uncounted = self._log.count(" the engine broke\n") + self._storm.uncounted_losses
        for job in self.jobs:
            if job.state == "finished":
                worker_losses, attempt = self._storm.crew.worker_losses[job.job_id], job.result["attempt"]
                assert attempt <= 1 + worker_losses + uncounted, (job, worker_losses)
                answered = f"replayed job={job.job_id} " in self._log
                begins_anew = job.plan.options.get("retry") is not None or not job.came_once or len(job.current.met) > 1
                assert attempt >= 1 + worker_losses or answered or begins_anew, (job, worker_losses)
