"""The models that a job may ask, one after the other, and when it asks the next. Pure; both sides use it."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from stoker_shared.result import Attempt

_Seconds = Annotated[float, Field(ge=0.0)]

ModelName = Annotated[str, Field(min_length=1, max_length=1000)]


class RouteStep(BaseModel):
    """One model of a job's route.

    Attributes:
        queue: the queue of the workers that serve the model.
        prompt_token_s, token_s: seconds that such a worker needs for a prompt token and for a generated one; ``None``
            if unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: ModelName
    queue: Annotated[str, Field(min_length=1, max_length=1000)]
    prompt_token_s: _Seconds | None = None
    token_s: _Seconds | None = None

    def cost_s(self, prompt_tokens: float, tokens: float) -> float:
        """Expected seconds of a worker for so many tokens; tokens of unknown cost count 0."""
        return prompt_tokens * (self.prompt_token_s or 0.0) + tokens * (self.token_s or 0.0)


def next_step(route: Sequence[RouteStep], attempts: Sequence[Attempt], max_cost_s: float | None) -> RouteStep | None:
    """The step after these attempts, all of them rejected; ``None`` if there is none, or it would cost too much.

    Args:
        max_cost_s: most seconds of all attempts together. The next one is expected to need as many tokens as the
            largest so far.
    """
    if len(attempts) >= len(route):
        return None
    step = route[len(attempts)]
    if max_cost_s is not None:
        expected_s = step.cost_s(
            max((attempt.prompt_tokens for attempt in attempts), default=0),
            max((attempt.completion_tokens for attempt in attempts), default=0),
        )
        if sum(attempt.seconds for attempt in attempts) + expected_s > max_cost_s:
            return None
    return step
