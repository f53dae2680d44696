"""The token ids that end a sequence, and those that a request may name. Pure; engine thread."""

from dataclasses import dataclass
from typing import Self

from stoker_shared.errors import InvalidRequest
from stoker_shared.request import GenerationRequest


@dataclass(frozen=True)
class EndIds:
    """
    Attributes:
        eos: the model's end-of-sequence tokens, unless they are ignored. One that ends a sequence belongs to its
            transcript, because a chat template writes it too.
        stop: the request's own. One that ends a sequence does not belong to its transcript, as a stop string does not:
            so the transcript's tokens are those of the text.
    """

    eos: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()

    @classmethod
    def of(cls, request: GenerationRequest, eos_ids: frozenset[int]) -> Self:
        eos = frozenset() if request.ignore_eos else eos_ids
        return cls(eos, frozenset(request.stop_token_ids) - eos)

    @property
    def all(self) -> frozenset[int]:
        return self.eos | self.stop


def check_token_ids(request: GenerationRequest, vocabulary: int) -> None:
    """
    Args:
        vocabulary: how many token ids the model has logits for.

    Raises:
        InvalidRequest: the request names a token id that the model does not have.
    """
    named = {"stop_token_ids": request.stop_token_ids, "logit_bias": [int(key) for key in request.logit_bias or ()]}
    for field, token_ids in named.items():
        if (largest := max(token_ids, default=0)) >= vocabulary:
            raise InvalidRequest(f"{field}: there is no token {largest}; this model's ids are 0 to {vocabulary - 1}")


def names_token_ids(request: GenerationRequest) -> bool:
    """Whether `check_token_ids` has anything to check."""
    return bool(request.stop_token_ids or request.logit_bias)
