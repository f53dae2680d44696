"""The engine thread: loads the model, and runs it. Touches no Redis, and after the load no disk.

Owns which job each sequence belongs to. A job with several choices has several sequences over one prompt; it ends with
the last of them, or with the first that fails. MLX arrays belong to the thread that computes them, so the model is
loaded here, and only evaluated arrays leave the thread. The loader and the read-ahead make arrays for the caches that
they read.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final

from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.job import Failed, GivenBack, Job, Outcome, cut_short, outcome_of
from stoker_worker.ports import (
    NOT_COUNTED,
    CompletedGeneration,
    GenerationEnginePort,
    GenerationWork,
    KVMemory,
    LoadedModel,
    MetricsPort,
    ModelProviderPort,
    SequenceProgress,
    Stage,
    TextSoFar,
)

_FURTHEST_FIRST: Final[tuple[Stage, ...]] = ("decode", "prefill", "waiting")


def works_of(job: Job) -> Iterable[GenerationWork]:
    """The job's sequences, the first choice first. Only that one restores memory and saves blocks; the others take the
    prompt's cache from it in the batch, even if the job shares nothing with other jobs."""
    request, ids, places = job.request, job.prompt.ids, job.restored.checkpoints_at
    if request.n == 1:
        yield GenerationWork(request, ids, job.restored.prefix, job.is_saved, job.shares, job.guide, places)
        return
    shares = job.shares or ("job", str(job.claimed.claim_number))
    for number in range(request.n):
        # So choice i equals the answer of a job of its own with this seed.
        seed = None if request.seed is None else request.seed + number
        if number == 0:
            own = request.model_copy(update={"seed": seed})
            yield GenerationWork(own, ids, job.restored.prefix, job.is_saved, shares, job.guide, places)
        else:  # the prompt is scored once
            own = request.model_copy(update={"seed": seed, "prompt_logprobs": None, "prompt_logprobs_start": 0})
            guide = job.guide.fork() if job.guide else None
            yield GenerationWork(own, ids, None, False, shares, guide)


class Choices:
    """A job in the engine."""

    def __init__(self, job: Job, uids: Iterable[int]) -> None:
        """`uids`: of its sequences, the first choice first."""
        self.job = job
        self._uids = tuple(uids)
        self._ended: dict[int, CompletedGeneration] = {}

    @property
    def in_engine(self) -> list[int]:
        """Uids of the sequences that have not ended."""
        return [uid for uid in self._uids if uid not in self._ended]

    def end(self, completion: CompletedGeneration) -> bool:
        """Note the end of a sequence; ``True`` if it ends the job."""
        self._ended[completion.uid] = completion
        return completion.outcome != "finished" or len(self._ended) == len(self._uids)

    def outcome(self) -> Outcome:
        """How the job ends, once no sequence of it is in the engine. Sets the job's `further_choices`."""
        completions = [self._ended[uid] for uid in self._uids if uid in self._ended]
        self.job.further_choices = tuple(completions[1:])
        failed = next((one for one in completions if one.outcome == "failed"), None)
        if failed is not None:
            return outcome_of(self.job, failed)
        if len(completions) < len(self._uids) or any(one.outcome == "cancelled" for one in completions):
            return cut_short(self.job, completions[0] if completions else None)
        return outcome_of(self.job, completions[0])

    def text_so_far(self, engine: GenerationEnginePort) -> TextSoFar:
        """The first choice's text, as from `GenerationEnginePort.text`."""
        first = self._uids[0]
        text = self._ended[first].text if first in self._ended else engine.text(first)
        return TextSoFar(text, self.job.prompt.markers)

    def progress(self, of_sequences: Mapping[int, SequenceProgress]) -> SequenceProgress:
        """The progress of all choices together: the furthest stage, and the sums."""
        running = [of_sequences[uid] for uid in self.in_engine if uid in of_sequences]
        stages = {one.stage for one in running}
        return SequenceProgress(
            next((stage for stage in _FURTHEST_FIRST if stage in stages), "waiting"),
            sum(one.tokens for one in running) + sum(len(one.generated_ids) for one in self._ended.values()),
            sum(one.tokens_per_s for one in running),
        )


log = logging.getLogger(__name__)

_GATHER_S: Final = 0.5
"""How long a loaded job waits for jobs that the loader is still working on. To join together is cheaper: a join may
copy the arrays that it shares, those of a row group, or of the whole batch where mlx-lm batches."""


class EngineThread(threading.Thread):
    """Steps the engine while anything is in it, and hands over each job in the step that ends it."""

    def __init__(
        self,
        provider: ModelProviderPort,
        loaded: Future[LoadedModel],
        finisher: Finisher,
        metrics: MetricsPort = NOT_COUNTED,
    ) -> None:
        """`loaded`: set to the model, or to the error of loading it. `error`: set when the engine broke, before its
        jobs are handed over. `kv`: the engine's, once the model is loaded."""
        super().__init__(name="engine", daemon=True)
        self._provider = provider
        self._loaded = loaded
        self._finisher = finisher
        self._metrics = metrics
        self._waiting: SimpleQueue[Job | None] = SimpleQueue()
        self._gathered: list[Job] = []
        self._gather_until = 0.0
        self._running: dict[int, Choices] = {}  # by uid of each sequence in the engine
        self._progress: dict[str, SequenceProgress] = {}
        self.kv: KVMemory | None = None
        self._turned_at = 0.0
        self._texts_lock = threading.Lock()
        self._texts_wanted: frozenset[int] = frozenset()
        self._texts: dict[int, TextSoFar] = {}
        self.error: BaseException | None = None

    def put(self, job: Job) -> None:
        self._waiting.put(job)

    def finish(self) -> None:
        """Let the thread end at its next look for jobs. The caller sees to it that none is left."""
        self._waiting.put(None)

    def is_busy(self) -> bool:
        """Any thread."""
        return bool(self._running)

    def step_age_s(self) -> float:
        """How long the step under way has taken; 0 while the engine is empty. Any thread."""
        return time.monotonic() - self._turned_at if self._running else 0.0

    def progress(self) -> dict[str, SequenceProgress]:
        """How far each job in the engine is, by job id: a snapshot for any thread."""
        return self._progress

    def texts(self, claim_numbers: frozenset[int]) -> dict[int, TextSoFar]:
        """Ask for the texts of some jobs, by `claim_number`, because an id may run again. Returns the texts that were
        asked for before, as they were after a step since. Fetcher thread."""
        with self._texts_lock:
            self._texts_wanted = claim_numbers
            return self._texts

    def run(self) -> None:
        try:
            engine, model = self._provider.load()
        except BaseException as error:  # the main thread raises it to the operator
            self._leave()
            self._loaded.set_exception(error)
            return
        self.kv = engine.kv
        self._loaded.set_result(model)
        try:
            self._serve(engine)
        except BaseException as error:
            log.exception("the engine broke")
            self.error = error  # nothing more is claimed from here on
            self._progress = {}
            self._finisher.abandon()
            for choices in self._jobs():
                self._finisher.put(choices.job, GivenBack(counts_as_attempt=True))
            self._running.clear()
        finally:
            try:
                engine.close()
            finally:
                self._leave()

    def hand_over_waiting(self) -> None:
        """After the engine broke: give back the jobs that the loader has still put. Main thread, when this thread has
        ended or is closing the engine."""
        while True:
            try:
                job = self._waiting.get_nowait()
            except Empty:
                break
            if job is not None:
                self._gathered.append(job)
        for job in self._gathered:
            job.cancel.set("stopping")
            self._finisher.put(job, cut_short(job))
        self._gathered.clear()

    def _serve(self, engine: GenerationEnginePort) -> None:
        while self._take_in(engine):
            self._turned_at = time.monotonic()
            self._cancel(engine)
            self._step(engine)

    def _step(self, engine: GenerationEnginePort) -> None:
        began = time.perf_counter()
        ended = engine.step()
        step_s = time.perf_counter() - began
        for completion in ended:
            choices = self._running.pop(completion.uid, None)
            if choices is not None and choices.end(completion):  # None: another choice has ended the job in this step
                self._end(engine, choices)
        progress = engine.progress()
        self._metrics.stepped(step_s, progress, ended)
        self._progress = {choices.job.job_id: choices.progress(progress) for choices in self._jobs()}
        self._put_texts_together(engine)

    def _take_in(self, engine: GenerationEnginePort) -> bool:
        """Submit the jobs that are loaded, and wait for one while the engine is empty; ``False`` to end the thread."""
        while True:
            try:
                job = self._waiting.get(timeout=self._patience_s(engine))
            except Empty:
                break
            if job is None:
                return False
            if not self._gathered:
                self._gather_until = time.monotonic() + _GATHER_S
            self._gathered.append(job)
        if not self._expects_more():
            while self._gathered:
                self._submit(engine, self._gathered.pop(0))
        return True

    def _patience_s(self, engine: GenerationEnginePort) -> float | None:
        """How long to wait for the next job; ``None``: until there is one."""
        if engine.in_flight:
            return 0.0
        if not self._gathered:
            return None
        return max(0.0, self._gather_until - time.monotonic()) if self._expects_more() else 0.0

    def _expects_more(self) -> bool:
        """True while the gathered jobs wait for the one that the loader has begun on."""
        return bool(self._gathered) and self._gathered[-1].has_next and time.monotonic() < self._gather_until

    def _submit(self, engine: GenerationEnginePort, job: Job) -> None:
        if job.cancel.reason is not None:
            self._finisher.put(job, cut_short(job))
            return
        job.submitted_at = time.time()
        self._turned_at = time.monotonic()
        uids: list[int] = []
        try:
            for work in works_of(job):
                uids.append(engine.submit(work))
        except BaseException as error:
            for uid in uids:
                engine.cancel(uid)
            self._finisher.put(job, Failed.by(error))
            return
        job.drop_arrays()
        choices = Choices(job, uids)
        self._running |= dict.fromkeys(uids, choices)

    def _cancel(self, engine: GenerationEnginePort) -> None:
        for choices in self._jobs():
            if choices.job.cancel.reason is not None:
                self._end(engine, choices)

    def _put_texts_together(self, engine: GenerationEnginePort) -> None:
        """Decode the texts that `texts` has asked for since the last time: text that nobody reads costs nothing."""
        with self._texts_lock:
            wanted, self._texts_wanted = self._texts_wanted, frozenset()
        if wanted:
            numbers = ((choices, choices.job.claimed.claim_number) for choices in self._jobs())
            self._texts = {number: choices.text_so_far(engine) for choices, number in numbers if number in wanted}

    def _jobs(self) -> list[Choices]:
        """The jobs in the engine, each once."""
        return list(dict.fromkeys(self._running.values()))

    def _end(self, engine: GenerationEnginePort, choices: Choices) -> None:
        """Take what is left of a job out of the engine, and hand the job to the finisher."""
        left = choices.in_engine
        for uid in left:
            if (completion := engine.cancel(uid)) is not None:
                choices.end(completion)
        for uid in left:  # only now: if the engine breaks above, the job is still known here
            self._running.pop(uid, None)
        self._finisher.put(choices.job, choices.outcome())

    def _leave(self) -> None:
        try:
            self._provider.leave_thread()
        except Exception:  # perhaps MLX itself could not be imported
            log.debug("the engine thread could not be tidied", exc_info=True)
