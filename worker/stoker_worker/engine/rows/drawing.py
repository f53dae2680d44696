"""From the logits of a pass to the token after each of its inputs, drawn as that input's row draws. Engine thread."""

from collections.abc import Sequence

import mlx.core as mx

from stoker_worker.engine.rows.row import Row


def processed(of_inputs: Sequence[Row], inputs: mx.array, logits: mx.array, contexts: list[mx.array]) -> mx.array:
    """
    Args:
        of_inputs: the row of each input; a row's inputs follow each other.
        inputs: token ids, (inputs,).
        logits: (inputs, vocabulary).
        contexts: arrays to be computed with the result are added to it.
    """
    if not any(row.processors for row in of_inputs):
        return logits
    done = []
    for index, row in enumerate(of_inputs):
        row_logits = logits[index : index + 1]
        if row.processors:
            context = row.context.update_and_fetch(inputs[index : index + 1])
            contexts.append(context)
            for processor in row.processors:
                row_logits = processor(context, row_logits)
        done.append(row_logits)
    return mx.concatenate(done)


def drawn(of_inputs: Sequence[Row], logprobs: mx.array) -> mx.array:
    """
    Args:
        of_inputs: the row of each input, in the order in which its tokens are drawn.
        logprobs: (inputs, vocabulary), normalised.

    Returns:
        token ids, (inputs,).
    """
    likeliest = mx.argmax(logprobs, axis=-1)
    if all(row.sampler is None for row in of_inputs):
        return likeliest
    return mx.concatenate(
        [
            (row.sampler(logprobs[i : i + 1]) if row.sampler else likeliest[i : i + 1]).astype(mx.uint32)
            for i, row in enumerate(of_inputs)
        ]
    )
