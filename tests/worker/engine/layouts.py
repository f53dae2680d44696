"""Tiny models, each with an engine and the reference: the base of every exactness test of the engine."""

from dataclasses import replace
from itertools import count
from typing import Any

from tests.worker.engine.tiny_models import WIDE_HEADS, make_model
from tests.zoo.configs import VOCABULARY

from stoker_shared import build_request
from stoker_worker.ports import GenerationWork, LoadedModel
from stoker_worker.ports.model import Batching, ServingMode

EOS = VOCABULARY - 1


class Numbers:
    """A tokenizer that decodes a token to its number."""

    def __init__(self, eos_ids=frozenset({EOS})):
        self.eos_ids = eos_ids

    def fork(self):
        return self

    def encode(self, text, *, special_start):
        return [(37 * i + ord(letter)) % (VOCABULARY - 1) for i, letter in enumerate(text)]

    def decode(self, token_ids):
        return "".join(f"<{token_id}>" for token_id in token_ids)


class Layout:
    """One tiny model with engines over it and its own answers as the reference.

    Args:
        kv_bits: 8: full attention keeps 8 bits; the heads are wide enough for that.
        model: another one than that of the family `name`.
    """

    def __init__(self, name, *, eos=True, dtype="float32", kv_bits=None, model=None, **changes):
        import mlx.core as mx

        from stoker_worker.engine.rows.rows_generator import why_not_in_rows
        from stoker_worker.models.cache_probe import can_be_batched, read_cache_spec
        from stoker_worker.models.quantised_cache import quantise_caches

        changes = {**WIDE_HEADS[name], **changes} if kv_bits else changes
        self.model = make_model(name, **changes) if model is None else model
        self.model.set_dtype(getattr(mx, dtype))
        self.spec = self.plain_spec = read_cache_spec(self.model)
        self.in_8_bits = kv_bits == 8
        if self.in_8_bits:
            quantise_caches(self.model, self.spec)
            self.spec = read_cache_spec(self.model)
        tokenizer: Any = Numbers() if eos else Numbers(frozenset({10**9}))
        self.batching = Batching.BATCHED if can_be_batched(self.model) else Batching.ONE_AT_A_TIME
        if why_not_in_rows(self.model, self.spec) is None:
            self.batching = Batching.ROWS
        self.loaded = LoadedModel(name, "f", "t", 8192, self.spec, tokenizer)

    def engine(self, *, max_batch=4, prefill_tokens=64, blocks=1000, batching=None, draft_ngram=False):
        from stoker_worker.engine.batch_engine import assemble

        max_bytes = blocks * self.kv_cost(prefill_tokens).block_bytes
        return assemble(
            self.model,
            replace(self.loaded, mode=ServingMode(batching or self.batching)),
            max_bytes=max_bytes,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            max_step_s=10.0,
            draft_ngram=draft_ngram,
        )

    def kv_cost(self, prefill_tokens=64):
        from stoker_worker.engine.kv_memory import KVCost

        return KVCost(self.spec, prefill_tokens, in_rows=self.batching == Batching.ROWS)

    def alone(self, ids, max_tokens):
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        said, caches = [], self._caches_of_mlx_lm(make_prompt_cache(self.model))
        for token, _ in generate_step(mx.array(list(ids)), self.model, max_tokens=max_tokens, prompt_cache=caches):
            said.append(token)
            if token in self.loaded.tokenizer.eos_ids:
                break
        return said

    def _caches_of_mlx_lm(self, caches):
        """`caches` without stoker's own; except where mlx-lm's quantised attention refuses the model (sinks)."""
        from mlx_lm.models.cache import CacheList, QuantizedKVCache

        from stoker_worker.models.quantised_cache import QuantisedCache
        from stoker_worker.ports.cache_spec import group_size

        made = []
        for cache in caches:
            if type(cache) is CacheList:
                made.append(CacheList(*self._caches_of_mlx_lm(cache.caches)))
            elif type(cache) is QuantisedCache and self.loaded.name != "gpt_oss":
                made.append(QuantizedKVCache(group_size(self.plain_spec.full_layers[0].key_dim), 8))
            else:
                made.append(cache)
        return made


def work(ids, max_tokens, prefix=None, is_saved=True, **fields):
    request = build_request({"agent_id": "a", "prompt": "x", "max_tokens": max_tokens, **fields})
    return GenerationWork(request, tuple(ids), prefix, is_saved)


def changed(one, **fields):
    """The same work with other fields of its request."""
    return replace(one, request=one.request.model_copy(update=fields))


def run(engine, works, after_step=lambda: None):
    """The ends of `works`, in their order."""
    return finish(engine, [engine.submit(one) for one in works], after_step)


def finish(engine, uids, after_step=lambda: None):
    """The ends of sequences that were submitted. `after_step` may return the ends of some that it takes out."""
    done = {}
    while engine.in_flight:
        done |= {end.uid: end for end in (*engine.step(), *(after_step() or ()))}
    engine.close()
    return [done[uid] for uid in uids]


def breaks_at(real, *places):
    """`real`, except that these of its calls raise, as where there is no memory."""
    calls = count(1)

    def call(*args):
        if next(calls) in places:
            raise RuntimeError("[malloc] unable to allocate")
        return real(*args)

    return call


def assert_right(layout, works, done):
    """Each has the answer that mlx-lm gives it alone."""
    for one, end in zip(works, done, strict=True):
        assert list(end.generated_ids) == layout.alone(one.prompt_ids, one.request.max_tokens)


def random_ids(rng, n):
    return [rng.randrange(VOCABULARY - 1) for _ in range(n)]


def prefix_of(cache, n_tokens):
    """The prefix that a store would restore from a saved cache."""
    cut = cache.up_to(n_tokens)
    return replace(cut, layers=tuple((keys.copy(), values.copy()) for keys, values in cut.layers))


def cache_bytes(engine: Any) -> int:
    """Bytes that the caches of an engine's sequences take."""
    generator = engine._generator
    if hasattr(generator, "nbytes"):  # in rows
        return int(generator.nbytes)
    if hasattr(generator, "_caches"):  # one sequence at a time
        return sum(int(cache.nbytes) for cache in generator._caches)
    return int(generator._generator.prompt_cache_nbytes)
