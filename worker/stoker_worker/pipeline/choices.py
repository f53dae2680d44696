"""The sequences of one job: as many as it wants choices, all over one prompt. Engine thread, no MLX.

Owns which of them have ended, and how. The job ends with its last sequence, or with the first that fails.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from stoker_worker.pipeline.job import Job, Outcome, cut_short, outcome_of
from stoker_worker.ports import (
    CompletedGeneration,
    GenerationEnginePort,
    GenerationWork,
    SequenceProgress,
    Stage,
    TextSoFar,
)

_FURTHEST_FIRST: Final[tuple[Stage, ...]] = ("decode", "prefill", "waiting")


def works_of(job: Job) -> Iterable[GenerationWork]:
    """The job's sequences, the first choice first.

    Only the first one restores memory and saves blocks. The others take the prompt's cache over from it in the batch,
    also if the job shares with no other job.
    """
    request, ids = job.request, job.prompt.ids
    if request.n == 1:
        yield GenerationWork(request, ids, job.restored.prefix, job.save_from, job.shares, job.guide)
        return
    shares = job.shares or ("job", str(job.claimed.claim_number))
    for number in range(request.n):
        # So that choice i is the answer of a job of its own with this seed.
        seed = None if request.seed is None else request.seed + number
        if number == 0:
            own = request.model_copy(update={"seed": seed})
            yield GenerationWork(own, ids, job.restored.prefix, job.save_from, shares, job.guide)
        else:  # the prompt is scored once
            own = request.model_copy(update={"seed": seed, "prompt_logprobs": None, "prompt_logprobs_start": 0})
            guide = job.guide.fork() if job.guide else None
            yield GenerationWork(own, ids, None, None, shares, guide)


class Choices:
    """A job in the engine."""

    def __init__(self, job: Job, uids: Iterable[int]) -> None:
        """
        Args:
            uids: of its sequences, the first choice first.
        """
        self.job = job
        self._uids = tuple(uids)
        self._ended: dict[int, CompletedGeneration] = {}

    @property
    def in_engine(self) -> list[int]:
        """Uids of the sequences that have not ended."""
        return [uid for uid in self._uids if uid not in self._ended]

    def end(self, completion: CompletedGeneration) -> bool:
        """Note the end of a sequence; ``True`` if the job ends with it."""
        self._ended[completion.uid] = completion
        return completion.outcome != "finished" or len(self._ended) == len(self._uids)

    def outcome(self) -> Outcome:
        """How the job ends, once no sequence of it is in the engine. The job gets its further choices."""
        completions = [self._ended[uid] for uid in self._uids if uid in self._ended]
        self.job.further_choices = tuple(completions[1:])
        failed = next((one for one in completions if one.outcome == "failed"), None)
        if failed is not None:
            return outcome_of(self.job, failed)
        if len(completions) < len(self._uids) or any(one.outcome == "cancelled" for one in completions):
            return cut_short(self.job, completions[0] if completions else None)
        return outcome_of(self.job, completions[0])

    def text_so_far(self, engine: GenerationEnginePort) -> TextSoFar:
        """The first choice's, as `GenerationEnginePort.text`."""
        first = self._uids[0]
        text = self._ended[first].text if first in self._ended else engine.text(first)
        return TextSoFar(text, self.job.prompt.markers)

    def progress(self, of_sequences: Mapping[int, SequenceProgress]) -> SequenceProgress:
        """Of all choices together: the furthest stage, and the sums."""
        running = [of_sequences[uid] for uid in self.in_engine if uid in of_sequences]
        stages = {one.stage for one in running}
        return SequenceProgress(
            next((stage for stage in _FURTHEST_FIRST if stage in stages), "waiting"),
            sum(one.tokens for one in running) + sum(len(one.generated_ids) for one in self._ended.values()),
            sum(one.tokens_per_s for one in running),
        )
