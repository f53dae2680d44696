"""Tests statements of the seed documents about mlx-lm 0.30.4 with the installed mlx-lm. The last part of EXP-004."""

import tempfile
import time
from pathlib import Path
from typing import Any

from bench import Bench
from common import Json, spread


def check(bench: Bench) -> Json:
    """Each statement of the seed documents that a few lines can test, and the finding."""
    from mlx_lm.generate import BatchGenerator

    ids = bench.encode("The capital of France is")
    wanted = bench.uncached(ids, 5)
    generator = BatchGenerator(bench.network, stop_tokens=[[i] for i in sorted(bench.model.tokenizer.eos_ids)])
    found: Json = {"insert_takes_one_max_tokens_for_all": True}
    try:
        generator.insert([list(ids)], max_tokens=5)
    except TypeError:
        found["insert_takes_one_max_tokens_for_all"] = False
    generator.insert([list(ids)], max_tokens=[5])
    accumulated: list[int] = []  # as in the seed's loop: from all responses but the last
    last: Any = None
    while last is None:
        for response in generator.next_generated():
            if response.finish_reason is None:
                accumulated.append(response.token)
            else:
                last = response
    found["tokens_asked_for"] = len(wanted)
    found["tokens_the_seeds_loop_collects"] = len(accumulated)
    found["last_response_carries_the_last_token"] = [*accumulated, last.token] == wanted
    found["prompt_cache_is"] = (
        "list attribute" if isinstance(last.prompt_cache, list) else type(last.prompt_cache).__name__
    )
    found["tokens_in_extracted_cache_beyond_the_prompt"] = last.prompt_cache[0].offset - len(ids)
    # `while responses := gen.next()` ends when next() is falsy. Here nothing is left to generate.
    found["next_of_an_exhausted_generator_is_falsy"] = not generator.next()
    found["next_generated_of_an_exhausted_generator_is_falsy"] = not generator.next_generated()
    generator.close()
    return found | _gemma_layers() | _lazy_loading(bench)


def _gemma_layers() -> Json:
    """The kinds of cache of a narrow Gemma 3 with 48 layers and random weights, and whether stoker serves it."""
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    from stoker_shared.errors import ModelNotLoadable
    from stoker_worker.models.cache_probe import read_cache_spec

    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_attention_heads": 2, "vocab_size": 64}
    network = Model(ModelArgs(model_type="gemma3_text", num_hidden_layers=48, **sizes))
    kinds = [type(cache).__name__ for cache in network.make_cache()]
    try:
        read_cache_spec(network)
        served = True
    except ModelNotLoadable:
        served = False
    return {"gemma_3_caches": {kind: kinds.count(kind) for kind in sorted(set(kinds))}, "gemma_3_is_served": served}


def _lazy_loading(bench: Bench, tokens: int = 512) -> Json:
    """How long mlx-lm's loader takes to return, which the seeds took for reloading, and to have the arrays."""
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

    caches = make_prompt_cache(bench.network)
    for cache, layer in zip(caches, bench.model.spec.layers, strict=True):
        cache.update_and_fetch(*(mx.ones((1, layer.n_kv_heads, tokens, n)) for n in (layer.key_dim, layer.value_dim)))
    returned, evaluated = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(file, caches)
        for _ in range(5):
            start = time.perf_counter()
            loaded = load_prompt_cache(file)
            returned.append(1000 * (time.perf_counter() - start))
            mx.eval([cache.state for cache in loaded])
            evaluated.append(1000 * (time.perf_counter() - start))
    return {"reload_tokens": tokens, "reload_returns_ms": spread(returned), "reload_evaluated_ms": spread(evaluated)}
