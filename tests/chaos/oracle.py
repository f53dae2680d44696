"""What the answer to a prompt has to be, said a second time: not with the code of the worker's engine."""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tests.chaos.plan import PlannedJob

END = 256  # the scripted engine's end-of-sequence token


class Oracle(Protocol):
    def encode(self, prompt: str) -> Sequence[int]:
        """The tokens by which a job's own prompt continues a conversation, or begins one."""

    def answer(self, prompt_ids: Sequence[int], plan: PlannedJob) -> tuple[Sequence[int], str]:
        """The tokens and the text that follow `prompt_ids`, all of the conversation."""


class ScriptedOracle:
    """From the scripted engine's description."""

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
    """mlx-lm itself: one sequence, no cache, the weights in float32 as the worker has them on a CPU."""

    def __init__(self, folder: Path) -> None:
        import mlx.core as mx
        from mlx_lm import load
        from mlx_lm.utils import dequantize_model

        self._network, self._tokenizer = load(str(folder))[:2]
        self._network.set_dtype(mx.float32)
        self._network = dequantize_model(self._network)
        mx.eval(self._network.parameters())

    def encode(self, prompt: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False)
        return ids

    def answer(self, prompt_ids: Sequence[int], plan: PlannedJob) -> tuple[Sequence[int], str]:
        from mlx_lm import stream_generate

        steps = stream_generate(self._network, self._tokenizer, list(prompt_ids), plan.max_tokens)
        ids = [step.token for step in steps]
        return ids, self._tokenizer.decode([token for token in ids if token not in self._tokenizer.eos_token_ids])
