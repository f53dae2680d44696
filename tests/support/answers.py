"""Compares answers."""

from collections.abc import Mapping
from typing import Any

from stoker_shared.result import GenerationResult


def without_total(result: GenerationResult | Mapping[str, Any]) -> dict[str, Any]:
    """All fields but `timing.total_s`: in an answer from the agent's history it ends before the save."""
    fields = result.model_dump() if isinstance(result, GenerationResult) else result
    timing = {name: seconds for name, seconds in fields["timing"].items() if name != "total_s"}
    return {**fields, "timing": timing}
