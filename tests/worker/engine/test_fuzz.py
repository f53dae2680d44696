"""Random agents, turns, batches and pools: every sequence that ends has the answer it gets alone and uncached.

`make fuzz` runs many more rounds.
"""

import os
import random
from dataclasses import replace

import pytest
from tests.worker.engine.layouts import EOS, Layout, cache_bytes, prefix_of, random_ids, work
from tests.worker.engine.tiny_models import CONFIGS, WIDE_HEADS

from stoker_worker.ports.model import Batching

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "2"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
SEQUENCES_IN_A_ROUND = 6
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 130, 254, 255, 256, 257, 300, 511, 513)
LONGEST = 800
BEGINNINGS = (300, 450)

DAILY = (("llama", None), ("llama", 8), ("gemma3_text", None), ("qwen3_next", None), ("mamba2", None))
"""Each way of keeping a cache; `test_layout_memory` has all layouts each day."""
LAYOUTS = [*((name, None) for name in CONFIGS), *((name, 8) for name in WIDE_HEADS)]


class Agent:
    """An agent's tokens so far, and the cache its next turn may continue from."""

    def __init__(self, beginning):
        self.beginning = beginning
        self.ids = ()
        self.cache = None

    def next_work(self, rng):
        """The next turn: cold, or from a place in the last one, sometimes with other tokens than before."""
        max_tokens = rng.choice((1, 2, 5, 12, 30))
        lengths = [n for n in LENGTHS if len(self.ids) + n + max_tokens <= LONGEST]
        if self.cache is None or not lengths:
            return work((*self.beginning, *random_ids(rng, rng.choice(LENGTHS))), max_tokens)
        new = random_ids(rng, rng.choice(lengths))
        places = [snapshot.n_tokens for snapshot in self.cache.snapshots]
        if not places:
            places = [self.cache.n_tokens, self.cache.n_tokens - 1, rng.randint(1, self.cache.n_tokens)]
        place = rng.choice([place for place in places if place > 0] or [None])
        if place is None or rng.random() < 0.15:
            return work((*self.ids, *new), max_tokens)  # uncached, though a cache exists
        kept = self.ids[:place] if rng.random() < 0.3 else self.ids  # a fork from the middle, or the next turn
        return work((*kept, *new), max_tokens, prefix_of(self.cache, place))


@pytest.mark.parametrize(
    ("name", "kv_bits"),
    [pytest.param(*one, marks=() if one in DAILY else pytest.mark.scheduled) for one in LAYOUTS],
)
def test_any_history_of_any_layout_is_answered_as_if_each_sequence_were_alone(name, kv_bits):
    rng = random.Random(f"{name} {SEED}")
    layout = Layout(name, kv_bits=kv_bits)
    common = random_ids(rng, max(BEGINNINGS))  # several agents' prompts begin with so many of these
    agents = [Agent(common[: rng.choice((0, *BEGINNINGS))]) for _ in range(8)]
    compared = restored = cancelled = preempt = shared = 0
    for number in range(ROUNDS):
        taken = rng.sample(agents, SEQUENCES_IN_A_ROUND)
        works = [replace(agent.next_work(rng), shares=("fuzz",)) for agent in taken]
        longest = max(len(one.prompt_ids) + one.request.max_tokens for one in works)
        prefill_tokens = rng.choice((16, 64, 100))
        room = {"max_batch": rng.randint(1, 5)}
        if rng.random() < 0.6:  # a pool for a few sequences, so that some wait and some are preempted
            whole = layout.kv_cost(prefill_tokens).sequence_blocks(longest)
            room = {"max_batch": 5, "blocks": whole + rng.randint(0, 4)}
        engine = layout.engine(prefill_tokens=prefill_tokens, draft_ngram=number % 2 == 1, **room)
        uids = [engine.submit(one) for one in works]
        victims = {rng.choice(uids): rng.randint(1, 12) for _ in range(rng.randint(0, 2))}
        done, steps = {}, 0
        while engine.in_flight:
            done |= {completion.uid: completion for completion in engine.step()}
            steps += 1
            shared += any(sequence.prefix is not None for sequence in engine._scheduler)
            assert cache_bytes(engine) <= engine._pool.used * engine._kv_cost.block_bytes
            if rng.random() < 0.1 and (in_batch := list(engine._scheduler.in_batch())):
                done |= {completion.uid: completion for completion in engine._preempt(rng.choice(in_batch))}
                preempt += 1
            for uid in [uid for uid, at in victims.items() if at == steps and uid not in done]:
                done[uid] = engine.cancel(uid)
        assert engine._pool.used == 0
        engine.close()
        for agent, one, uid in zip(taken, works, uids, strict=True):
            completion = done[uid]
            if completion.outcome == "cancelled":
                cancelled += 1
                continue
            said = list(completion.generated_ids)
            assert said == layout.alone(one.prompt_ids, one.request.max_tokens)
            assert completion.ended_by == ("eos" if said[-1] == EOS else "length")
            compared += 1
            restored += one.prefix is not None
            agent.ids, agent.cache = (*one.prompt_ids, *said), completion.cache
    print(
        f"{name} {kv_bits}: {compared} sequences equal, {restored} restored, {preempt} preempted, "
        f"{cancelled} cancelled, a prefix shared in {shared} steps"
    )
    assert compared >= 4 * ROUNDS  # the others were cancelled
    assert restored
    assert preempt
    assert bool(shared) == (layout.batching == Batching.ROWS and layout.spec.has_only_full_layers)
