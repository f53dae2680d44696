"""The tree of errors under `StokerError`: those of failed jobs, and those that cross from one package into another.

Errors of one package alone (`BatchGone`, `BatchHeld`) are subclasses defined there.
"""

from typing import Any


class StokerError(Exception):
    """The base class of this tree of errors."""

    retryable: bool = False
    """True if the same call or job may succeed later, because the cause lies outside it and passes."""


class RequestError(StokerError, ValueError):
    """The job can never succeed as it is; it fails at once and is never retried."""


class InvalidRequest(RequestError):
    """A field is missing, unknown, of the wrong type or out of range; the message names it."""


class RequestVersionTooNew(RequestError):
    """The request's `v` is newer than this side reads; the message has both versions."""


class RequestTooLarge(RequestError):
    """The request is over `MAX_REQUEST_BYTES`, has too many values or levels, or is more than the model's context could
    ever hold."""


class ContextLimitExceeded(RequestError):
    """prompt + max_tokens exceeds the model's context. With `fit_max_tokens`: the prompt leaves no room for an answer
    in the context, or in the worker's KV memory. The message has the numbers."""


class BlockPoolTooSmall(RequestError):
    """prompt + max_tokens needs more KV memory than the worker has in all; the message has the numbers."""


class ModelMismatch(RequestError):
    """The job asks for another model than this worker has loaded."""


class TemplateError(RequestError):
    """The model has no chat template, or the template refused these messages."""


class GuideRefused(RequestError):
    """A grammar or schema is wrong, unsupported or too large; the message has the reason."""


class DuplicateJob(RequestError):
    """The job id chosen by a producer belongs to another request or to a job in another queue. Nothing was enqueued."""


class TranscriptMismatch(RequestError):
    """`append` gave a prompt to an agent whose transcript consists of messages, or messages to one made of prompts."""


class PayloadRefused(RequestError):
    """The job is not a JSON job of stoker's (a pickle, another function), or has webhooks, callbacks, repeats or a rate
    limit."""


class AgentMemoryError(StokerError):
    """A problem of an agent's memory."""


class AgentTranscriptUnreadable(AgentMemoryError):
    """The conversation that `append` would continue is uncertain. `usable`: the `AgentVersion` that `full` may use."""

    def __init__(self, message: str, *, usable: Any = None) -> None:
        super().__init__(message)
        self.usable = usable


class SharedStoreAway(AgentMemoryError):
    """The shared store does not answer, so the agent's newest version is unknown. The job does not fail; it waits."""

    retryable = True


class VersionTaken(AgentMemoryError):
    """Another worker has made the agent's next version. The job does not fail; it runs again from that version."""

    retryable = True


class AgentVersionNotSaved(AgentMemoryError):
    """A turn or a change could not be written to disk and has no effect; files of a forgotten agent may remain."""

    retryable = True  # a full disk


class AgentVersionConflict(AgentMemoryError):
    """The agent is not at the version that the job expects or continues, because another job changed it."""


class AgentNotFound(AgentMemoryError):
    """The agent, or the version of it, does not exist; no new agent was made instead."""


class AgentExists(AgentMemoryError):
    """An agent with the new agent's id exists already."""


class AgentBusy(AgentMemoryError):
    """Another process, a worker or a shell command, is working on the agent. Nothing was changed."""

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
    """Too many workers were lost while each ran only this job; it is not tried again."""


class EngineFailed(EngineError):
    """The engine broke while this job was in it."""

    retryable = True  # other jobs may have needed the memory


class QueueError(StokerError):
    """A problem between this process and Redis."""


class RedisUnavailable(QueueError):
    """No server answers at the URL, or it refused this client. The message never contains the password.

    `is_lost`: the connection was lost, so the server may have carried out the command.
    """

    retryable = True
    is_lost = False


class QueueHeld(QueueError):
    """Another worker has this one's name, or serves its queue with another store or model, or has taken the queue over.
    At start, the message names that worker's host and pid."""

    retryable = True


class OwnershipLost(QueueError):
    """The run no longer belongs to this worker: another worker recovered the job, or it was canceled or deleted."""


class JobLost(OwnershipLost):
    """Redis has lost data, and the job's run with it: no process has the job."""


class JobError(StokerError):
    """The end of a job, as its producer sees it."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(job_id, message)
        self.job_id, self.message = job_id, message

    def __str__(self) -> str:
        return f"job {self.job_id}: {self.message}"


class JobFailed(JobError):
    """The worker failed the job.

    Attributes:
        reason: the worker's line, ``ErrorName: message``.
        kind: that name, or ``Other`` if it is not an error of this module.
        retryable: whether the request may succeed when it is submitted again, by the error's class.
        partial_text: the text generated before the job timed out, else ``None``.
    """

    def __init__(self, job_id: str, reason: str, partial_text: str | None = None) -> None:
        super().__init__(job_id, f"failed: {reason}")
        self.args = (job_id, reason, partial_text)  # pickle rebuilds the error from these
        self.reason, self.partial_text = reason, partial_text
        error = class_named(reason.partition(":")[0])
        self.kind, self.retryable = (error.__name__, error.retryable) if error else ("Other", False)


class JobCanceled(JobError):
    """The job was canceled, or stopped by RQ's command."""


class JobNotFound(JobError):
    """No job has this id: it never existed, was deleted, or its result has expired."""

    def __init__(self, job_id: str, message: str = "not found (it never existed, was deleted, or has expired)") -> None:
        super().__init__(job_id, message)


class ResultTimeout(JobError, TimeoutError):
    """The job has not ended within `timeout_s`; it continues, and one can wait for it again."""

    retryable = True


class WrongWorker(StokerError):
    """A stock RQ worker tried to run a job of stoker's; only `stoker-worker` can."""


def class_named(name: str) -> type[StokerError] | None:
    """The class of this name in this module, if there is one."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, StokerError) else None
