"""The errors that a failed job has, or that cross from one package into another, as one tree under `StokerError`.

An error of one package alone (`BatchGone`, `CallbacksNotLoadable`, `BatchHeld`) is defined there, as a `StokerError`.
"""

from typing import Any


class StokerError(Exception):
    """Base of everything below."""

    retryable: bool = False
    """True if the same call or job may well succeed later, because the cause lies outside it and passes."""


class RequestError(StokerError, ValueError):
    """The job can never succeed as it is; it is failed at once and never retried."""


class InvalidRequest(RequestError):
    """A field is missing, unknown, of the wrong type or out of range; the message names it."""


class RequestVersionTooNew(RequestError):
    """The request's `v` is newer than this side's; the message has both."""


class RequestTooLarge(RequestError):
    """The request is larger than `MAX_REQUEST_BYTES`, or than the model's context could ever hold."""


class ContextLimitExceeded(RequestError):
    """prompt + max_tokens exceeds the model's context. With `fit_max_tokens`, the prompt leaves no room for an answer
    in the context, or in the worker's KV memory. The message has the numbers."""


class BlockPoolTooSmall(RequestError):
    """prompt + max_tokens needs more KV memory than the worker has in all; the message has the numbers."""


class ModelMismatch(RequestError):
    """The job names another model than the one this worker has loaded."""


class TemplateError(RequestError):
    """The model has no chat template, or its template refused these messages."""


class GuideRefused(RequestError):
    """A grammar or schema is wrong, not supported, or too large; the message has the reason."""


class DuplicateJob(RequestError):
    """The id a producer chose names a job with another request, or in another queue; nothing was enqueued."""


class TranscriptMismatch(RequestError):
    """`append` gave a prompt to an agent whose transcript is made of messages, or the other way round."""


class PayloadRefused(RequestError):
    """Not a JSON job of stoker's: a pickle, another function, or one with webhooks, callbacks,
    repeats or a rate limit."""


class AgentMemoryError(StokerError):
    """A problem of an agent's memory."""


class AgentTranscriptUnreadable(AgentMemoryError):
    """`append` cannot be sure of the conversation to continue. `usable`: the `AgentVersion` that `full` may use."""

    def __init__(self, message: str, *, usable: Any = None) -> None:
        super().__init__(message)
        self.usable = usable


class SharedStoreAway(AgentMemoryError):
    """The shared store does not answer, so it is not known how an agent goes on. No job fails for it: it waits."""

    retryable = True


class VersionTaken(AgentMemoryError):
    """Another worker has made the agent's next version meanwhile. No job fails for it: it runs again from that one."""

    retryable = True


class AgentVersionNotSaved(AgentMemoryError):
    """A turn or a change could not be written to disk and did not happen; a forgotten agent may have files left."""

    retryable = True  # a full disk


class AgentVersionConflict(AgentMemoryError):
    """The agent is not at the version that the job expects or continues: another job changed it."""


class AgentNotFound(AgentMemoryError):
    """There is no such agent, or it has no such version; no new agent was made instead."""


class AgentExists(AgentMemoryError):
    """There already is an agent with the new agent's id."""


class AgentBusy(AgentMemoryError):
    """Another process is working on the agent, a worker or a command of the shell. Nothing was changed."""

    retryable = True


class StoreUnusable(AgentMemoryError):
    """The store folder cannot be used; the message has the reason (rights, another process, unknown format)."""


class EngineError(StokerError):
    """A problem of the model or the engine."""


class ModelNotLoadable(EngineError):
    """The model cannot be loaded or served; the message has the reason."""


class GenerationTimedOut(EngineError):
    """The job's own timeout passed; the text so far is in `job.meta["partial"]`. A retry needs a longer timeout."""


class WorkerLostTooOften(EngineError):
    """Too many workers were lost while they ran this job alone; it is not tried again."""


class EngineFailed(EngineError):
    """The engine broke while this job was in it."""

    retryable = True  # other jobs may have needed the memory


class QueueError(StokerError):
    """A problem between this process and Redis."""


class RedisUnavailable(QueueError):
    """No server answers at the URL, or it refused this client. The message never holds the password."""

    retryable = True


class QueueHeld(QueueError):
    """Another live worker has this one's name on its queues; the message names its host and pid."""

    retryable = True


class OwnershipLost(QueueError):
    """The execution is no longer this worker's: the job was recovered by another worker, canceled or deleted."""


class JobLost(OwnershipLost):
    """Redis has lost data, and with it the execution: no process has it."""


class JobError(StokerError):
    """The end of a job as its producer sees it."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(job_id, message)
        self.job_id, self.message = job_id, message

    def __str__(self) -> str:
        return f"job {self.job_id}: {self.message}"


class JobFailed(JobError):
    """The worker failed the job.

    Attributes:
        reason: the worker's line, ``ErrorName: message``; `kind`: that name, ``Other`` if it is none of this module's.
        retryable: `retryable` of the error's class: whether the request may well succeed when it is submitted again.
        partial_text: the text that a job generated before it timed out, else ``None``.
    """

    def __init__(self, job_id: str, reason: str, partial_text: str | None = None) -> None:
        super().__init__(job_id, f"failed: {reason}")
        self.args = (job_id, reason, partial_text)  # a pickle is made from these
        self.reason, self.partial_text = reason, partial_text
        error = class_named(reason.partition(":")[0])
        self.kind, self.retryable = (error.__name__, error.retryable) if error else ("Other", False)


class JobCanceled(JobError):
    """The job was canceled, or stopped by RQ's command."""


class JobNotFound(JobError):
    """No job of this id: it never existed, was deleted, or its result has expired."""

    def __init__(self, job_id: str, message: str = "not found (it never existed, was deleted, or has expired)") -> None:
        super().__init__(job_id, message)


class ResultTimeout(JobError, TimeoutError):
    """The job has not ended within `timeout_s`; it continues, and can be waited for again."""

    retryable = True


class WrongWorker(StokerError):
    """A stock RQ worker tried to run a job of stoker's; only `stoker-worker` can."""


def class_named(name: str) -> type[StokerError] | None:
    """The class of this name in this module, if there is one."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, StokerError) else None
