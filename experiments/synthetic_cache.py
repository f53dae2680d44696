"""Turns that are saved without a model: an agent with a cache of random numbers in the product's own store, and the way
back from there. Experiments only.

A cache layout takes the model's place: the contents of a cache make no difference to the time that it takes.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import note

from stoker_worker.memory.blocks import empty_layers, empty_states
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import (
    AgentVersion,
    Array,
    Delivery,
    LayerKV,
    LayerState,
    LoadedModel,
    SequenceCache,
    Snapshot,
    Transcript,
    Turn,
)
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec


def smollm2_layers(n_layers: int) -> ModelCacheSpec:
    """So many layers in the head shape of SmolLM2-135M."""
    return ModelCacheSpec((LayerSpec(LayerKind.FULL, 3, 64, 64),) * n_layers, "float32")


def model_of(spec: ModelCacheSpec) -> LoadedModel:
    """As in a worker, prefixes are restored into the engine's own memory."""
    from stoker_worker.engine.transfer import MlxRoom

    fingerprint = hashlib.sha256(spec.describe().encode()).hexdigest()
    tokenizer: Any = None
    return LoadedModel("synthetic", fingerprint, "tok", 1 << 20, spec, tokenizer, room_type=MlxRoom)


def random_tokens(n_tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(1).integers(2, 40_000, n_tokens).tolist())


def turn_after(base: AgentVersion, model: LoadedModel, ids: Sequence[int], cache: SequenceCache | None) -> Turn:
    """The agent's next turn, whose transcript is `ids`."""
    transcript = Transcript(tuple(ids), model.tokenizer_fingerprint, None, "synthetic", "length")
    delivery = Delivery(f"job {base.agent_id} {base.number}", "0")
    return Turn(base, delivery, transcript, model, None, cache, {"version": base.number + 1})


def save_turn(
    store: AgentCacheStore, model: LoadedModel, agent_id: str, ids: Sequence[int], cache: SequenceCache | None
) -> AgentVersion:
    """Save the agent's next turn; returns the version that it made."""
    store.save(turn_after(store.open_agent(agent_id), model, ids, cache))
    return store.open_agent(agent_id)


@dataclass
class Contents:
    """The whole cache of some tokens.

    Attributes:
        memory: holds all of it: `layers` and `states` are views.
    """

    memory: Array
    layers: tuple[LayerKV, ...]
    states: tuple[LayerState, ...]

    @classmethod
    def random(cls, spec: ModelCacheSpec, n_tokens: int) -> "Contents":
        layers, states = empty_layers(spec, n_tokens), empty_states(spec, n_tokens)
        arrays = [*chain.from_iterable(layers), *chain.from_iterable(states)]
        memory = np.empty(sum(array.nbytes for array in arrays), np.uint8)
        np.random.default_rng(1).random(out=memory.view(np.float32), dtype=np.float32)
        views = _views(memory, arrays)
        in_pairs = tuple((next(views), next(views)) for _ in layers)
        return cls(memory, in_pairs, tuple(tuple(next(views) for _ in state) for state in states))


def _views(memory: Array, like: Sequence[Array]) -> Iterator[Array]:
    at = 0
    for array in like:
        yield memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        at += array.nbytes


@dataclass
class SavedAgent:
    """
    Attributes:
        network: in the model's place; it only makes empty caches.
        ids: the tokens whose cache was saved.
    """

    network: Any
    store: AgentCacheStore
    model: LoadedModel
    agent: AgentVersion
    ids: tuple[int, ...]
    contents: Contents

    @classmethod
    def save(cls, store: AgentCacheStore, spec: ModelCacheSpec, n_tokens: int) -> "SavedAgent":
        """An agent with random contents."""
        model, ids, contents = model_of(spec), random_tokens(n_tokens), Contents.random(spec, n_tokens)
        snapshots = (Snapshot(n_tokens, contents.states),) if contents.states else ()
        agent = save_turn(store, model, "agent", ids, SequenceCache(n_tokens, contents.layers, snapshots))
        return cls(SimpleNamespace(make_cache=partial(_empty_caches, spec)), store, model, agent, ids, contents)

    def restore(self, n_tokens: int) -> SequenceCache:
        """The first `n_tokens` tokens from the store, verified. The prompt has one more, left to feed."""
        prompt = (*self.ids[:n_tokens], 1)
        restored = self.store.restore(prompt, agent=self.agent, model=self.model, salt=None)
        if restored.prefix is None or restored.prefix.n_tokens != n_tokens or restored.miss_reason is not None:
            raise RuntimeError(f"not restored whole: {restored.miss_reason}")
        return restored.prefix

    def caches(self, prefix: SequenceCache) -> list[Any]:
        """The engine's part: the caches that a sequence goes on in, evaluated."""
        import mlx.core as mx

        from stoker_worker.engine.transfer import prefix_to_caches

        made = prefix_to_caches(self.network, prefix, self.model.spec)
        mx.eval([(cache.keys, cache.values) for cache in made])
        return made

    def restored(self, n_tokens: int) -> list[Any]:
        """Both of them: the caches that a sequence goes on in after the first `n_tokens` tokens."""
        return self.caches(self.restore(n_tokens))

    def is_whole(self, caches: Sequence[Any], n_tokens: int) -> bool:
        """Whether every byte of the first `n_tokens` tokens is the saved one."""
        layers, states = iter(self.contents.layers), iter(self.contents.states)
        saved = [next(layers if x.kind == LayerKind.FULL else states) for x in self.model.spec.layers]
        got = [(as_numpy(cache.keys)[0], as_numpy(cache.values)[0]) for cache in caches]
        return same(got, saved, n_tokens)


@contextmanager
def saved_agent(folder: Path, spec: ModelCacheSpec, n_tokens: int) -> Iterator[SavedAgent]:
    """An agent in a store of its own, which is removed in the end, from the page cache too."""
    note(f"saving {n_tokens} tokens of {len(spec.layers)} layers")
    with closing(AgentCacheStore(folder)) as store:
        yield SavedAgent.save(store, spec, n_tokens)
    shutil.rmtree(folder)


def _empty_caches(spec: ModelCacheSpec) -> list[Any]:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    return [RotatingKVCache(x.window_tokens) if x.kind == LayerKind.WINDOW else KVCache() for x in spec.layers]


def as_numpy(array: Any) -> Array:
    import mlx.core as mx

    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def same(got: Sequence[Sequence[Array]], wanted: Sequence[Sequence[Array]], n_tokens: int) -> bool:
    """Whether the first `n_tokens` tokens of two caches are equal."""
    return all(
        np.array_equal(left[:, :n_tokens], right[:, :n_tokens])
        for pairs in zip(got, wanted, strict=True)
        for left, right in zip(*pairs, strict=True)
    )
