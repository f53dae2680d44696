"""From submitted work to a sequence: its restored caches, how its tokens are drawn, what ends it and what scores it.
Engine thread.

Owns the check of the token ids that a request names.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from stoker_worker.engine.cache_transfer import prefix_to_caches
from stoker_worker.engine.end_ids import EndIds, check_token_ids, names_token_ids
from stoker_worker.engine.prompt_scores import PromptScorer
from stoker_worker.engine.sampling import SequenceSampling
from stoker_worker.engine.sequence import Sequence
from stoker_worker.engine.stop_scanner import StopScanner
from stoker_worker.ports import GenerationWork, LoadedModel, TokenizerPort


class SequenceMaker:
    def __init__(self, model: Any, loaded: LoadedModel, tokenizer: TokenizerPort) -> None:
        self._model = model
        self._loaded = loaded
        self._tokenizer = tokenizer

    def make(self, uid: int, work: GenerationWork) -> Sequence:
        """
        Raises:
            InvalidRequest: the request names a token id that the model does not have.
            ValueError: the restored prefix is not one of this model, or its memory is still in use.
        """
        request, prefix = work.request, work.prefix
        if names_token_ids(request):
            check_token_ids(request, self._vocabulary)
        work = replace(work, prefix=None, save_from=work.save_from if self._loaded.has_memory else None)
        stops = StopScanner(self._tokenizer, request.stop, min_tokens=request.min_tokens) if request.stop else None
        end_ids = EndIds.of(request, self._tokenizer.eos_ids)
        sampling = SequenceSampling(request, n_prompt=len(work.prompt_ids), end_ids=end_ids.all)
        scorer = PromptScorer.of(work, self._tokenizer)
        sequence = Sequence(uid, work, sampling, stops, end_ids, scorer=scorer)
        if prefix is not None:
            sequence.take_prefix(prefix, prefix_to_caches(self._model, prefix, self._loaded.spec))
        return sequence

    @cached_property
    def _vocabulary(self) -> int:
        """Token ids that the model has logits for. Nothing is computed: only the shape is read."""
        return int(self._model(mx.array([[0]])).shape[-1])
