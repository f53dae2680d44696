"""Tiny models with an engine and the reference beside it: what every exactness test of the engine starts from."""

from dataclasses import replace

from tests.worker.engine.tiny_models import VOCABULARY, make_model

from stoker_shared import build_request
from stoker_worker.cache_spec import ModelCacheSpec
from stoker_worker.ports import GenerationWork, LoadedModel, RestoredPrefix
from stoker_worker.serving_mode import Rows, ServingMode

EOS = VOCABULARY - 1


class Codec:
    """Stands for a tokenizer: a token's text is its number."""

    def __init__(self, eos_ids=frozenset({EOS})):
        self.eos_ids = eos_ids

    def fork(self):
        return self

    def encode(self, text, *, special_start):
        return [(37 * i + ord(letter)) % (VOCABULARY - 1) for i, letter in enumerate(text)]

    def decode(self, token_ids):
        return "".join(f"<{token_id}>" for token_id in token_ids)


class Layout:
    """One tiny model with an engine maker and the reference beside it."""

    def __init__(self, name, *, eos=True, **changes):
        from stoker_worker.engine.probe import can_be_batched

        self.model = make_model(name, **changes)
        self.spec = ModelCacheSpec.from_model(self.model)
        codec = Codec() if eos else Codec(frozenset({10**9}))
        self.rows = Rows.BATCHED if can_be_batched(self.model) else Rows.ALONE
        self.loaded = LoadedModel(name, "f", "t", 8192, self.spec, codec)

    def engine(self, *, max_batch=4, prefill_tokens=64, blocks=1000, rows=None):
        from stoker_worker.engine.build import assemble
        from stoker_worker.engine.pricing import BatchPricing

        max_bytes = blocks * BatchPricing(self.spec, prefill_tokens).block_bytes
        return assemble(
            self.model,
            replace(self.loaded, mode=ServingMode(rows or self.rows)),
            max_bytes=max_bytes,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            max_step_s=10.0,
        )

    def alone(self, ids, max_tokens):
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        said = []
        for token, _ in generate_step(mx.array(list(ids)), self.model, max_tokens=max_tokens):
            said.append(token)
            if token in self.loaded.codec.eos_ids:
                break
        return said


def work(ids, max_tokens, prefix=None, save_from=0, **fields):
    request = build_request({"agent_id": "a", "prompt": "x", "max_tokens": max_tokens, **fields})
    return GenerationWork(request, tuple(ids), prefix, save_from)


def run(engine, works):
    uids = [engine.submit(one) for one in works]
    done = {}
    while engine.in_flight:
        done |= {completion.uid: completion for completion in engine.step()}
    engine.close()
    return [done[uid] for uid in uids]


def random_ids(rng, n):
    return [rng.randrange(VOCABULARY - 1) for _ in range(n)]


def prefix_of(cache, n_tokens):
    """What a store would give back of a saved cache that began at token 0."""
    states = next((snapshot.states for snapshot in cache.snapshots if snapshot.n_tokens == n_tokens), ())
    layers = tuple((keys[:, :n_tokens].copy(), values[:, :n_tokens].copy()) for keys, values in cache.layers)
    return RestoredPrefix(n_tokens, layers, states)
