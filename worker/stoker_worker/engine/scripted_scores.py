"""The scores of a prompt in the engine without a model: every token is as likely as any other. Pure; engine thread."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from stoker_shared.result import PromptLogprobs, TokenLogprob, TopLogprob
from stoker_worker.ports import GenerationWork

VOCABULARY: Final = 258
"""Token ids of the scripted tokenizer: bytes, the end, and the mark of a role."""

_LOGPROB: Final = -math.log(VOCABULARY)
_FIRST_TOP: Final = ord("!")


def even_scores(work: GenerationWork, decode: Callable[[Sequence[int]], str]) -> PromptLogprobs | None:
    """``None`` if the work's prompt is not to be scored."""
    n_top, start = work.request.prompt_logprobs, work.request.prompt_logprobs_start
    if n_top is None:
        return None
    top = [TopLogprob(token=decode([_FIRST_TOP + n]), logprob=_LOGPROB) for n in range(n_top)]
    scored = [
        TokenLogprob(token=decode([token]), logprob=_LOGPROB, top_logprobs=top)
        for token in work.prompt_ids[max(1, start) :]
    ]
    return PromptLogprobs(start=start, content=scored if start else [None, *scored])
