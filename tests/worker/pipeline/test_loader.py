"""The loader: where its jobs go next, and its calls of agent memory."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.in_memory.queue import InMemoryQueue
from tests.worker.memory.agents import sequence_cache
from tests.worker.pipeline.stages import (
    MODEL,
    TIMEOUT_S,
    NotedEngine,
    NotedFinisher,
    PlayedStore,
    claimed,
    error_in,
    loaded_model,
)

from stoker_shared.errors import (
    AgentNotFound,
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    EngineFailed,
    InvalidRequest,
    ModelMismatch,
    WorkerLostTooOften,
)
from stoker_worker.pipeline.job import Cancelled, Finished, GivenBack, Job, Replayed, RunsAgain
from stoker_worker.pipeline.loader import Loader
from stoker_worker.ports import LastVersion, Transcript, Turn
from stoker_worker.ports.memory import common_length
from stoker_worker.ports.model import RequestDefaults


class Scene:
    def __init__(self, **options: Any) -> None:
        self.queue, self.store, self.finisher = InMemoryQueue(), PlayedStore(), NotedFinisher()
        self.engine = NotedEngine(self.finisher)
        self.loader = Loader(self.store, loaded_model(), self.engine, self.finisher, **options)

    def put(self, agent_id: str | None, **fields: Any) -> Job:
        job = Job(claimed(self.queue, agent_id, **fields))
        self.loader.put(job)
        return job


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    if not scene.loader.is_alive():
        scene.loader.start()
    scene.loader.finish()
    scene.loader.join(TIMEOUT_S)


def test_a_job_records_whether_another_follows_and_the_store_learns_whether_sequences_run(scene: Scene) -> None:
    scene.engine.busy = iter([False, True])
    scene.put("a")
    scene.put("b")
    scene.loader.start()
    assert [scene.engine.next().has_next for _ in range(2)] == [True, False]
    assert [asked["beside_others"] for asked in scene.store.restores] == [False, True]
    assert scene.finisher.ended.empty()


def test_a_job_generates_with_the_workers_defaults_and_one_that_they_contradict_fails_alone() -> None:
    scene = Scene(defaults=RequestDefaults({"max_tokens": 7, "temperature": 0.5}))
    scene.put("own", max_tokens=9, temperature=0.0)
    scene.put("neither")
    scene.put("wrong", min_tokens=8)
    scene.loader.start()
    requests = [scene.engine.next().request for _ in range(2)]
    assert [(request.max_tokens, request.temperature) for request in requests] == [(9, 0.0), (7, 0.5)]
    job, outcome = scene.finisher.next()
    assert job.job_id == "job-wrong"
    assert isinstance(error_in(outcome), InvalidRequest)
    scene.loader.finish()
    scene.loader.join(TIMEOUT_S)


def test_a_job_is_failed_only_for_worker_losses_while_it_ran_alone(scene: Scene) -> None:
    for agent_id, alone in (("innocent", 2), ("poison", 3)):
        scene.put(agent_id, entry={"lost": 3, "losses_alone": alone}).claimed.release()
    scene.loader.start()
    assert scene.engine.next().job_id == "job-innocent"
    job, outcome = scene.finisher.next()
    assert (job.job_id, type(error_in(outcome))) == ("job-poison", WorkerLostTooOften)


def save(scene: Scene, job: Job, text: str) -> None:
    transcript = Transcript((1, 2), MODEL.tokenizer_fingerprint, None, text, "eos")
    delivery = job.claimed.delivery
    scene.store.save(Turn(scene.store.open_agent("a"), delivery, transcript, MODEL, None, None, {"text": text}))


def test_the_expected_version_is_checked_only_for_a_delivery_without_an_answer(scene: Scene) -> None:
    saved = scene.put("a", context="append", expect_version=0, job_id="saved")
    save(scene, saved, "done")
    scene.put("a", context="append", expect_version=0, job_id="late")
    scene.put("nobody", context="append", must_exist=True, job_id="none")
    scene.put("a", context="append", expect_version=1, must_exist=True, job_id="fine")
    scene.loader.start()
    assert scene.engine.next().job_id == "fine"
    (job, answered), (_, late), (_, none) = (scene.finisher.next() for _ in range(3))
    assert (job.job_id, answered) == ("saved", Replayed({"text": "done"}))
    assert isinstance(error_in(late), AgentVersionConflict)
    assert isinstance(error_in(none), AgentNotFound)


def test_a_saved_turn_is_the_answer_also_after_the_jobs_timeout_and_at_a_worker_with_another_model(
    scene: Scene,
) -> None:
    """A failed job would not show that its turn is in the transcript."""
    late, elsewhere = scene.put("a", job_id="late"), scene.put("a", job_id="elsewhere", model="another")
    save(scene, late, "one")
    save(scene, elsewhere, "two")
    late.cancel.set("timed out")
    scene.put("a", job_id="refused", model="another")
    scene.loader.start()
    first, second, refused = (scene.finisher.next()[1] for _ in range(3))
    assert (first, second) == (Replayed({"text": "one"}), Replayed({"text": "two"}))
    assert isinstance(error_in(refused), ModelMismatch)


def unreadable(*args: Any) -> Any:
    raise AgentTranscriptUnreadable("the answers of agent 'a': damaged")


def outcomes(scene: Scene) -> dict[str, Any]:
    """Of the jobs put before, and of two more, `append` and `full`: the error of one that failed, its outcome if it
    ended in another way, else the job."""
    scene.put("a", context="append", job_id="append")
    scene.put("a", context="full", job_id="full")
    scene.put("b", job_id="last").cancel.set("withdrawn")
    scene.loader.start()
    found: dict[str, Any] = {}
    while "last" not in found:
        job, outcome = scene.finisher.next()
        found[job.job_id] = error_in(outcome) or outcome
    while not scene.engine.jobs.empty():
        job = scene.engine.next()
        found[job.job_id] = job
    return found


def test_a_turn_that_may_have_been_made_is_not_made_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a job that carries the whole conversation goes on when the answers cannot be read."""
    monkeypatch.setattr(scene.store, "answer", unreadable)
    found = outcomes(scene)
    assert isinstance(found["append"], AgentTranscriptUnreadable)
    assert isinstance(found["full"], Job)


def test_an_agent_that_cannot_be_read_is_only_replaced(scene: Scene) -> None:
    save(scene, scene.put("a", job_id="first"), "done")
    save(scene, Job(claimed(scene.queue, "b", job_id="second")), "more")
    scene.store.mark_unsaved("a")
    found = outcomes(scene)
    assert isinstance(found["append"], AgentTranscriptUnreadable)
    assert found["full"].agent.number == 2
    assert found["first"] == Replayed({"text": "done"})  # its turn is saved, whatever happened since


def test_a_job_that_uses_no_memory_asks_for_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*args: Any) -> None:
        raise EngineFailed("asked")

    monkeypatch.setattr(scene.store, "answer", ask)
    monkeypatch.setattr(scene.store, "open_agent", ask)
    scene.put("a", cache="off", job_id="off")
    scene.put(None, job_id="none")
    scene.loader.start()
    assert [scene.engine.next().agent for _ in range(2)] == [None, None]


def test_a_job_cancelled_before_it_is_loaded_never_reaches_the_engine(scene: Scene) -> None:
    for reason in ("withdrawn", "stopping", "timed out"):
        scene.put(reason).cancel.set(reason)
    scene.loader.start()
    withdrawn, stopping, late = (scene.finisher.next()[1] for _ in range(3))
    assert (withdrawn, stopping) == (Cancelled(), GivenBack(counts_as_attempt=False))
    assert str(error_in(late)) == "the job's timeout passed after 0 generated tokens"
    assert scene.engine.jobs.empty()


class PanicException(BaseException):
    """As of a library in Rust, as tokenizers are. It is no `Exception`."""


@pytest.mark.parametrize(
    ("raised", "reason"),
    [(ZeroDivisionError("whatever it is"), "whatever it is"), (PanicException("at 7"), "PanicException: at 7")],
    ids=["error", "panic"],
)
def test_a_damaged_store_or_a_panic_costs_one_job(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, raised: BaseException, reason: str
) -> None:
    real = scene.store.open_agent

    def open_agent(agent_id: str) -> object:
        if agent_id == "damaged":
            raise raised
        return real(agent_id)

    monkeypatch.setattr(scene.store, "open_agent", open_agent)
    scene.put("damaged")
    scene.put("sound")
    scene.loader.start()
    assert scene.engine.next().job_id == "job-sound"
    assert str(error_in(scene.finisher.next()[1])) == reason


def test_a_sequence_shares_its_beginning_only_with_those_that_share_its_blocks(scene: Scene) -> None:
    scene.put("a", prompt="x")
    scene.put("b", prompt="x", cache_salt="salt")
    scene.put("c", prompt="x", cache="off")
    scene.loader.start()
    assert [scene.engine.next().shares for _ in range(3)] == [(None,), ("salt",), None]


def test_without_shared_prefixes_a_job_without_an_agent_shares_its_beginning_with_no_other(scene: Scene) -> None:
    scene.loader = Loader(scene.store, loaded_model(), scene.engine, scene.finisher, share_prefixes=False)
    scene.put("a", prompt="x")
    scene.put("b", prompt="x")
    scene.put(None, prompt="x")
    scene.loader.start()
    *own, without_agent = [scene.engine.next().shares for _ in range(3)]
    assert None not in own
    assert own[0] != own[1]
    assert without_agent is None


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_call_of_a_session_restores_and_is_saved_as_a_whole(scene: Scene, share_prefixes: bool) -> None:
    scene.loader = Loader(scene.store, loaded_model(), scene.engine, scene.finisher, share_prefixes=share_prefixes)
    scene.put(None, prompt="x", session="s", cache_salt="salt")
    scene.put(None, prompt="x", session="s", cache="read", cache_salt="salt")
    scene.put(None, prompt="x", session="s", cache="off")
    scene.loader.start()
    jobs = [scene.engine.next() for _ in range(3)]
    assert [(job.is_saved, job.agent) for job in jobs] == [(True, None), (False, None), (False, None)]
    salt = "salt" if share_prefixes else "\ns\nsalt"
    assert [(asked["session"], asked["salt"]) for asked in scene.store.restores] == [("s", salt)] * 2


def test_a_prompt_is_restored_only_up_to_the_first_token_that_is_scored(scene: Scene) -> None:
    text = "a prompt of 24 character"
    scene.put("plain", prompt=text, max_tokens=7)
    scene.put("all", prompt=text, max_tokens=0, prompt_logprobs=0, cache="read")
    scene.put("end", prompt=text, max_tokens=7, prompt_logprobs=3, prompt_logprobs_start=20)
    scene.put("last", prompt=text, max_tokens=7, prompt_logprobs=0, prompt_logprobs_start=23)
    scene.put("beyond", prompt=text, max_tokens=7, prompt_logprobs=0, prompt_logprobs_start=24)
    scene.loader.start()
    assert [scene.engine.next().prompt.text for _ in range(4)] == [text] * 4
    asked = [(len(one["prompt_ids"]), one["max_tokens"]) for one in scene.store.restores]
    assert asked == [(24, 7), (0, 24), (20, 11), (23, 8)]
    _, refused = scene.finisher.next()
    assert isinstance(error_in(refused), InvalidRequest)
    assert str(error_in(refused)) == "'prompt_logprobs_start' is 24; the prompt has 24 tokens"


def test_the_store_hears_where_the_system_prompt_ends_with_every_model(scene: Scene) -> None:
    def asked() -> list[int]:
        return [one["system_tokens"] for one in scene.store.restores]

    for text in ("one", "two"):
        messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": text}]
        scene.put(text, prompt=None, messages=messages)
    scene.loader.start()
    jobs = [scene.engine.next() for _ in range(2)]
    assert not MODEL.spec.snapshot_layers
    assert asked() == [common_length(*(job.prompt.ids for job in jobs))] * 2 != [0, 0]
    # Whoever goes on behind all that is cached of it is past its system prompt.
    job, prompt = jobs[1], jobs[1].prompt
    said = Transcript(prompt.ids, MODEL.tokenizer_fingerprint, prompt.messages, None, "eos")
    cache = sequence_cache(prompt.ids, [], [], MODEL)
    scene.store.save(Turn(scene.store.open_agent("two"), job.claimed.delivery, said, MODEL, None, cache, {}))
    answered = [*messages, {"role": "assistant", "content": "2"}, {"role": "user", "content": "three"}]
    for given in (answered, [{"role": "system", "content": "Sing."}, *messages[1:]]):
        scene.put("two", job_id=given[0]["content"], prompt=None, messages=given)
        scene.engine.next()
    assert [n > 0 for n in asked()[2:]] == [False, True]


def test_a_prompt_that_is_only_counted_goes_past_the_engine_and_the_agents_cache(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.store, "restore", None)
    text = "x" * (MODEL.context_tokens + 1)
    scene.put("a", prompt=text, max_tokens=0, cache="read", n=2, return_prompt=True)
    scene.loader.start()
    job, outcome = scene.finisher.next()
    assert isinstance(outcome, Finished)
    assert job.prompt.decoded == text
    answers = [outcome.completion, *job.further_choices]
    assert [(one.generated_ids, one.ended_by) for one in answers] == [((), "length")] * 2
    assert scene.engine.jobs.empty()


def test_a_job_that_may_have_missed_other_workers_turns_is_refused_only_after_a_look(scene: Scene) -> None:
    scene.store.is_certain = False
    seen = LastVersion(7, "this", is_here=True)
    scene.put("fine", context="append", entry={"last": seen})
    scene.put("refused", context="append", entry={"last": seen}, must_exist=True)
    scene.loader.start()
    assert scene.engine.next().job_id == "job-fine"
    _, outcome = scene.finisher.next()
    assert isinstance(error_in(outcome), AgentNotFound)
    assert scene.store.looks == [("fine", seen), ("refused", seen), ("refused", None)]


def test_a_job_whose_agent_is_in_a_shared_store_that_is_away_runs_again(scene: Scene) -> None:
    scene.store.away = True
    scene.put("a")
    scene.put("b", context="append")
    scene.put("c", cache="off")
    scene.loader.start()
    found = [scene.finisher.next() for _ in range(2)]
    assert [job.job_id for job, _ in found] == ["job-a", "job-b"]
    assert [type(outcome) for _, outcome in found] == [RunsAgain] * 2
    assert scene.engine.next().job_id == "job-c"
