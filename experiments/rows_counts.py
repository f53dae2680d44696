"""What the passes of a batch do, counted: passes, tokens fed and attended to, bytes copied. For EXP-011; no times.

The counts depend on the sequences and their order, not on the machine. Padding is what they exceed the sequences' own
tokens by.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from common import Json


@dataclass
class Counts:
    """The counts of one run. Implements `rows_bench.Watch`.

    Attributes:
        fed: tokens in prefill passes, padding included.
        attended: keys that the sequences of all decode passes attend to, padding included.
        copied_bytes: keys and values that are written again when a sequence joins, another leaves, or arrays grow. The
            caches of ended sequences are not among them: nobody saves them here.
    """

    prefill_passes: int = 0
    decode_passes: int = 0
    fed: int = 0
    attended: int = 0
    copied_bytes: int = 0
    _is_prefill = False

    def as_json(self) -> Json:
        return asdict(self)

    def model(self, model: Any) -> Any:
        return _CountedModel(model, self)

    def sampler(self) -> Any:
        """mlx-lm's own."""
        return None

    def note_pass(self, inputs: Any, cache: Any) -> None:
        """Count a pass whose keys and values are in the caches now."""
        if self._is_prefill:
            self.prefill_passes += 1
            self.fed += int(inputs.size)
        else:
            self.decode_passes += 1
            self.attended += _keys_of_all_rows(len(inputs), cache[0])

    @contextmanager
    def during(self, network: Any) -> Iterator[None]:
        """Count what runs inside the block."""
        from mlx_lm.generate import PromptProcessingBatch
        from mlx_lm.models.cache import BatchKVCache

        from stoker_worker.engine.rows.groups import RowGroup
        from stoker_worker.engine.rows.rows_generator import PrefillRows

        def of_batch(cache: Any) -> list[Any]:
            return [cache.keys, cache.values]

        def of_group(group: Any) -> list[Any]:
            return [*group._keys, *group._values]

        def joining(group: Any, rows: Sequence[Any], *_: Any) -> int:
            return sum(int(caches[0].offset) for caches in rows)

        def moving(group: Any, index: int) -> int:
            return 0 if index == len(group) - 1 else int(group.lengths[-1])

        merge = BatchKVCache.merge
        with ExitStack() as stack:

            def put(owner: Any, name: str, call: Any) -> None:
                stack.enter_context(patch.object(owner, name, call))

            for owner, name in ((PromptProcessingBatch, "prompt"), (PrefillRows, "next")):
                put(owner, name, self._prefilling(getattr(owner, name)))
            for name in ("extend", "filter", "finalize", "update_and_fetch"):
                put(BatchKVCache, name, self._renewing(getattr(BatchKVCache, name), of_batch))
            put(BatchKVCache, "merge", lambda caches: self._counted(merge(caches), of_batch))
            for name in ("_rebuild", "_grow"):
                put(RowGroup, name, self._renewing(getattr(RowGroup, name), of_group))
            for name, n_tokens in (("add", joining), ("remove", moving)):
                put(RowGroup, name, self._writing(getattr(RowGroup, name), n_tokens, of_group))
            yield

    def _prefilling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self._is_prefill = True
            try:
                return call(*args)
            finally:
                self._is_prefill = False

        return called

    def _renewing(self, call: Callable[..., Any], arrays: Callable[[Any], list[Any]]) -> Callable[..., Any]:
        """`call`, with the bytes of the arrays that it puts in the place of others."""

        def called(owner: Any, *args: Any) -> Any:
            before = arrays(owner)
            out = call(owner, *args)
            pairs = zip(before, arrays(owner), strict=True)
            self.copied_bytes += sum(new.nbytes for old, new in pairs if old is not None and new is not old)
            return out

        return called

    def _writing(
        self, call: Callable[..., Any], n_tokens: Callable[..., int], arrays: Callable[[Any], list[Any]]
    ) -> Callable[..., Any]:
        """`call`, with the bytes of the tokens that it writes into arrays that stay."""

        def called(owner: Any, *args: Any) -> Any:
            n = n_tokens(owner, *args)
            self.copied_bytes += n * sum(x.nbytes // (x.shape[0] * x.shape[2]) for x in arrays(owner))
            return call(owner, *args)

        return called

    def _counted(self, made: Any, arrays: Callable[[Any], list[Any]]) -> Any:
        self.copied_bytes += sum(array.nbytes for array in arrays(made) if array is not None)
        return made


class _CountedModel:
    def __init__(self, model: Any, counts: Counts) -> None:
        self._model = model
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: Any, cache: Any) -> Any:
        logits = self._model(inputs, cache=cache)
        self._counts.note_pass(inputs, cache)
        return logits


def _keys_of_all_rows(n_rows: int, cache: Any) -> int:
    from stoker_worker.engine.rows.attention import StepCache

    if isinstance(cache, StepCache):
        return sum(len(group) * max(group.lengths) for group in cache._step.groups)
    return n_rows * int(cache._idx)
