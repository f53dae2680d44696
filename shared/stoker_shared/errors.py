"""Every error stoker raises or writes into a failed job, as one tree.

::

    StokerError
    ├── RequestError                    the job can never succeed as it is: failed at once, never retried
    │   ├── InvalidRequest              a field is missing, unknown, of the wrong type or out of range
    │   ├── RequestVersionTooNew        written by a newer producer than this worker
    │   ├── RequestTooLarge             over MAX_REQUEST_BYTES, or longer than the context could ever hold
    │   ├── RequestNotServed            a valid field that this worker does not serve
    │   ├── ContextLimitExceeded        prompt + max_tokens over the model's context
    │   ├── BlockPoolTooSmall           prompt + max_tokens over the worker's whole KV memory
    │   ├── ModelMismatch               the job names another model than the loaded one
    │   ├── TemplateError               the model has no chat template, or it refused the messages
    │   ├── DuplicateJob                the id a producer chose names a job with another request already
    │   ├── TranscriptMismatch          `append` of a prompt to messages, or the other way round
    │   └── PayloadRefused              a pickle, an unknown function, callbacks: not a generation job of ours
    ├── AgentMemoryError
    │   ├── AgentTranscriptUnreadable   `append` cannot be sure of the conversation it continues
    │   ├── AgentVersionNotSaved        an `append` turn, or a change of an agent, could not be made durable
    │   ├── AgentVersionConflict        the agent is not at the version that the job counts on
    │   ├── AgentNotFound               there is no such agent, or it has no such version
    │   ├── AgentExists                 an agent that was to be made is there already
    │   └── StoreUnusable               the store folder is missing rights, locked or of an unknown format
    ├── EngineError
    │   ├── ModelNotLoadable            no such folder, unknown architecture, unsupported cache layout
    │   ├── GenerationTimedOut          the job's own timeout passed while it ran
    │   ├── WorkerLostTooOften          the job was in flight when its worker died, too many times
    │   └── EngineFailed                the engine broke while the job was in it
    ├── QueueError
    │   ├── RedisUnavailable            no server at the URL, or it refused us
    │   ├── QueueHeld                   another live worker holds this queue
    │   ├── CallbacksNotLoadable        a module of `--allow-callbacks` cannot be imported
    │   └── OwnershipLost               the execution is no longer ours: the result is dropped
    ├── JobError                        what a waiting producer gets
    │   ├── JobFailed                   the worker failed it; `.reason` is the worker's one line
    │   ├── JobCanceled                 canceled before it ran, or stopped while it ran
    │   ├── JobNotFound                 no such id, or its result has expired
    │   └── ResultTimeout               not finished within `timeout_s`; the job goes on
    └── WrongWorker                     a stock RQ worker tried to run a job of ours
"""

from typing import Any


class StokerError(Exception):
    """Base of everything below.

    Attributes:
        retryable: whether the very same call or job may well succeed later: the cause lies outside it, and passes.
    """

    retryable: bool = False


class RequestError(StokerError, ValueError):
    """The job can never succeed as it is; it is failed at once and never retried."""


class InvalidRequest(RequestError):
    """A field is missing, unknown, of the wrong type or out of range; the message names it."""


class RequestVersionTooNew(RequestError):
    """The request's `v` is newer than this side's; the message says both."""


class RequestTooLarge(RequestError):
    """The request is larger than `MAX_REQUEST_BYTES`, or than the model's context could ever hold."""


class RequestNotServed(RequestError):
    """The request is valid, but this worker does not serve the field the message names."""


class ContextLimitExceeded(RequestError):
    """prompt + max_tokens exceeds the model's context; the message says the numbers."""


class BlockPoolTooSmall(RequestError):
    """prompt + max_tokens needs more KV memory than the worker has in all; the message says the numbers."""


class ModelMismatch(RequestError):
    """The job names another model than the one this worker has loaded."""


class TemplateError(RequestError):
    """The model has no chat template, or its template refused these messages."""


class DuplicateJob(RequestError):
    """The id a producer chose names a job with another request, or in another queue; nothing was enqueued."""


class TranscriptMismatch(RequestError):
    """`append` gave a prompt to an agent whose transcript is made of messages, or the other way round."""


class PayloadRefused(RequestError):
    """Not a JSON generation job of ours: a pickle, another function, or it has webhooks or callbacks not allowed."""


class AgentMemoryError(StokerError):
    """Something about an agent's memory that a producer has to know."""


class AgentTranscriptUnreadable(AgentMemoryError):
    """`append` cannot be sure of the conversation it would continue, so it does not continue it.

    Attributes:
        usable: the version of the agent that ``context="full"`` may go on from (the worker's `AgentVersion`).
    """

    def __init__(self, message: str, *, usable: Any = None) -> None:
        super().__init__(message)
        self.usable = usable


class AgentVersionNotSaved(AgentMemoryError):
    """An `append` turn was generated, or a job was to change an agent, and the disk did not take it. A turn did not
    happen then; neither did a change, unless only what is left of a forgotten agent could not be removed."""

    retryable = True  # a full disk


class AgentVersionConflict(AgentMemoryError):
    """The agent is not at the version that the job expects or continues: somebody else went on."""


class AgentNotFound(AgentMemoryError):
    """There is no such agent, or it has no such version; nothing was started in its place."""


class AgentExists(AgentMemoryError):
    """There is an agent already where a new one was to be made."""


class StoreUnusable(AgentMemoryError):
    """The store folder cannot be used; the message says why (rights, another process, unknown format)."""


class EngineError(StokerError):
    """Something about the model or the engine."""


class ModelNotLoadable(EngineError):
    """The model cannot be loaded or served; the message says why."""


class GenerationTimedOut(EngineError):
    """The job's own timeout passed; the text so far is in `job.meta["partial"]`. Another try needs a longer one."""


class WorkerLostTooOften(EngineError):
    """The job was in flight each time a worker died, too many times to try it again."""


class EngineFailed(EngineError):
    """The engine broke while this job was in it."""

    retryable = True  # memory that others needed


class QueueError(StokerError):
    """Something between this process and Redis."""


class RedisUnavailable(QueueError):
    """No server answers at the URL, or it refused this client. The message never holds the password."""

    retryable = True


class QueueHeld(QueueError):
    """Another live worker holds this queue; the message names its host and pid."""

    retryable = True


class CallbacksNotLoadable(QueueError):
    """A module of `--allow-callbacks` cannot be imported; the message says which, and why."""


class OwnershipLost(QueueError):
    """The execution is no longer this worker's: somebody recovered, canceled or deleted the job."""


class JobError(StokerError):
    """The end of a job as its producer sees it."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(job_id, message)
        self.job_id = job_id
        self.message = message

    def __str__(self) -> str:
        return f"job {self.job_id}: {self.message}"


class JobFailed(JobError):
    """The worker failed the job.

    Attributes:
        reason: the worker's own line, ``ErrorName: message``.
        kind: the error's name, one of this module's classes; ``Other`` when the line begins with none.
        retryable: whether the same request may well succeed when it is submitted again: that of the error's class.
        partial_text: what a job that timed out had generated, else ``None``.
    """

    def __init__(self, job_id: str, reason: str, partial_text: str | None = None) -> None:
        super().__init__(job_id, f"failed: {reason}")
        self.args = (job_id, reason, partial_text)  # a pickle is made from these
        self.reason = reason
        error = _class_named(reason.partition(":")[0])
        self.kind = error.__name__ if error else "Other"
        self.retryable = error.retryable if error else False
        self.partial_text = partial_text


class JobCanceled(JobError):
    """The job was canceled while it waited, or stopped while it ran."""


class JobNotFound(JobError):
    """No job of this id: it never was, was deleted, or its result has expired."""

    def __init__(self, job_id: str, message: str = "not found (it never was, was deleted, or has expired)") -> None:
        super().__init__(job_id, message)


class ResultTimeout(JobError, TimeoutError):
    """The job has not ended within `timeout_s`; it goes on, and may be waited for again."""

    retryable = True


class WrongWorker(StokerError):
    """A stock RQ worker tried to run a job of ours: only `stoker-worker` can."""


def _class_named(name: str) -> type[StokerError] | None:
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, StokerError) else None
