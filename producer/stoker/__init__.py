"""The library with which services enqueue generation jobs and read their results. Light: no MLX, no NumPy."""

from stoker.cascade.routing import NobodyServes
from stoker.connection import WrongKeyType
from stoker.overview import Overview, QueueStatus
from stoker.presence import LiveWorker
from stoker.producer import AsyncProducer, Producer
from stoker.streaming import Restarted, StreamEvent, TextChunk
from stoker.tickets import AsyncTicket, Ticket, TicketStatus
from stoker_shared.agents import AgentForgotten, AgentForked, AgentInfo, AgentRolledBack
from stoker_shared.check import Check
from stoker_shared.errors import (
    DuplicateJob,
    InvalidRequest,
    JobCanceled,
    JobError,
    JobFailed,
    JobNotFound,
    RedisUnavailable,
    RequestError,
    RequestTooLarge,
    RequestVersionTooNew,
    ResultTimeout,
    StokerError,
)
from stoker_shared.message import Message
from stoker_shared.request import GenerationRequest
from stoker_shared.result import Attempt, Choice, GenerationResult, PromptLogprobs, ToolCall

__all__ = [
    "AgentForgotten",
    "AgentForked",
    "AgentInfo",
    "AgentRolledBack",
    "AsyncProducer",
    "AsyncTicket",
    "Attempt",
    "Check",
    "Choice",
    "DuplicateJob",
    "GenerationRequest",
    "GenerationResult",
    "InvalidRequest",
    "JobCanceled",
    "JobError",
    "JobFailed",
    "JobNotFound",
    "LiveWorker",
    "Message",
    "NobodyServes",
    "Overview",
    "Producer",
    "PromptLogprobs",
    "QueueStatus",
    "RedisUnavailable",
    "RequestError",
    "RequestTooLarge",
    "RequestVersionTooNew",
    "Restarted",
    "ResultTimeout",
    "StokerError",
    "StreamEvent",
    "TextChunk",
    "Ticket",
    "TicketStatus",
    "ToolCall",
    "WrongKeyType",
]
