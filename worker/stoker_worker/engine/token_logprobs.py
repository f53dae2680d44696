"""Log-probabilities of a token in OpenAI's chat form. Owns no state; engine thread."""

from typing import Any

import mlx.core as mx
import numpy as np

from stoker_shared.result import TokenLogprob, TopLogprob
from stoker_worker.ports import TextCodec


def token_logprob(token_id: int, logprobs: mx.array, *, n_top: int, codec: TextCodec) -> TokenLogprob:
    """What the model thought of a token it said, and of the `n_top` likeliest in its place.

    Args:
        logprobs: (vocabulary,), evaluated, normalised; after a repetition penalty, before temperature and filters.
    """
    values = np.asarray(logprobs.astype(mx.float32))
    likeliest = np.argsort(-values, kind="stable")[:n_top].tolist() if n_top else []
    return TokenLogprob(
        **_about(token_id, codec),
        logprob=float(values[token_id]),
        top_logprobs=[TopLogprob(**_about(top, codec), logprob=float(values[top])) for top in likeliest],
    )


def _about(token_id: int, codec: TextCodec) -> dict[str, Any]:
    # A token may be a part of a character: then its text has a replacement character and its bytes are not known.
    text = codec.decode([token_id])
    return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode())}
