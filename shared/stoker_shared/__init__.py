"""The contract between producers and the worker: models, wire names and errors. Imports neither rq nor mlx."""

from stoker_shared.message import Message
from stoker_shared.request import GenerationRequest, build_request
from stoker_shared.result import CacheReport, GenerationResult, Logprobs, Timing, Usage

__all__ = [
    "CacheReport",
    "GenerationRequest",
    "GenerationResult",
    "Logprobs",
    "Message",
    "Timing",
    "Usage",
    "build_request",
]
