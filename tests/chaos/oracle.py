"""The expected answer to a prompt, computed without the code of the worker's engine."""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tests.chaos.plan import PlannedJob

from stoker_worker.ports.memory import common_length

END = 256  # the scripted engine's end-of-sequence token


class Oracle(Protocol):
    def encode(self, prompt: str) -> Sequence[int]:
        """The tokens that a job's own prompt adds to a conversation, or begins one with."""

    def answer(self, prompt_ids: Sequence[int], plan: PlannedJob) -> tuple[Sequence[int], str]:
        """The tokens and the text that follow `prompt_ids`, the whole conversation."""


class ScriptedOracle:
    """Computes answers by the description of the scripted engine."""

    def encode(self, prompt: str) -> Sequence[int]:
        return prompt.encode()

    def answer(self, prompt_ids: Sequence[int], plan: PlannedJob) -> tuple[Sequence[int], str]:
        line = plan.prompt.rsplit("\n", 1)[-1]
        if line.startswith("say "):
            ids = [*line.removeprefix("say ").encode(), END][: plan.max_tokens]
        else:
            digest = hashlib.sha256(struct.pack(f"<{len(prompt_ids)}I", *prompt_ids)).hexdigest()
            words = "".join(f"{digest[at : at + 4]} " for at in range(0, len(digest), 4)).encode()
            ids = [words[n % len(words)] for n in range(plan.max_tokens)]
        return ids, bytes(token for token in ids if token != END).decode()


class ModelOracle:
    """mlx-lm itself: one sequence alone, with the weights in float32 as in a worker on a CPU.

    mlx-lm's own cache keeps a conversation for its next turn, which halves the time.
    """

    def __init__(self, folder: Path) -> None:
        import mlx.core as mx
        from mlx_lm import load
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import dequantize_model

        self._network, self._tokenizer = load(str(folder))[:2]
        self._network.set_dtype(mx.float32)
        self._network = dequantize_model(self._network)
        mx.eval(self._network.parameters())
        self._cache = make_prompt_cache(self._network)
        self._read: tuple[int, ...] = ()

    def encode(self, prompt: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False)
        return ids

    def answer(self, prompt_ids: Sequence[int], plan: PlannedJob) -> tuple[Sequence[int], str]:
        from mlx_lm import stream_generate
        from mlx_lm.models.cache import trim_prompt_cache

        in_cache = self._cache[0].offset
        same = common_length(self._read[:in_cache], tuple(prompt_ids[:-1]))
        trim_prompt_cache(self._cache, in_cache - same)
        rest = list(prompt_ids[same:])
        steps = stream_generate(self._network, self._tokenizer, rest, plan.max_tokens, prompt_cache=self._cache)
        ids = [step.token for step in steps]
        self._read = (*prompt_ids, *ids)
        return ids, self._tokenizer.decode([token for token in ids if token not in self._tokenizer.eos_token_ids])
