"""What the first documents ask of the engine, on SmolLM2-135M-Instruct in float32 where time permits.

docs/first-documents.md has the documents, and everything else that they ask for.
"""

import gc
import random

import pytest
from tests.support.real_model import behind_the_likeliest
from tests.worker.engine.layouts import Layout, cache_bytes, random_ids, run, work

from stoker_shared.errors import BlockPoolTooSmall
from stoker_worker.ports.model import Batching

GROWING = ("llama", "gemma3_text", "qwen3_next", "mamba2")
"""Full attention, with windows, with recurrent layers, and with nothing else."""

AGENTS = {"Hello world": 500, "The quick brown fox": 4000, "Once upon a time": 1200}
"""The prompts of the plan's second integration test, and the most tokens that each may generate."""


@pytest.mark.model
@pytest.mark.fast_blas
@pytest.mark.scheduled
def test_single_agent_output_matches_reference(real_model):
    """Sprint 2 plan: integration test 1, and the exit criterion that text matches the reference (greedy)."""
    ids = real_model.encode("The quick brown fox")
    (done,) = run(real_model.engine(blocks=100), [real_model.work(ids, max_tokens=50)])
    reference = real_model.alone(ids, 50)
    assert list(done.generated_ids) == reference
    assert len(reference) == 50
    assert done.text == real_model.tokenizer.decode(reference)


@pytest.mark.model
@pytest.mark.fast_blas
@pytest.mark.scheduled
@pytest.mark.timeout(0)
def test_three_agents_variable_length_as_chat(real_model):
    """Sprint 2 plan: integration test 2, with all of its tokens, each a message of a chat."""
    chats = [
        tuple(real_model.tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True))
        for p in AGENTS
    ]
    works = [real_model.work(chat, max_tokens=n) for chat, n in zip(chats, AGENTS.values(), strict=True)]
    for completion, one in zip(run(real_model.engine(max_batch=3), works), works, strict=True):
        assert (completion.outcome, completion.ended_by) in {("finished", "eos"), ("finished", "length")}
        assert completion.ended_by == "eos" or len(completion.generated_ids) == one.request.max_tokens
        assert behind_the_likeliest(real_model.network, one.prompt_ids, completion.generated_ids) < 1e-3


@pytest.mark.mlx
@pytest.mark.slow
def test_three_agents_variable_length_in_full():
    """Sprint 2 plan: integration test 2, with all of its tokens, on a tiny model."""
    layout = Layout("llama", eos=False, num_hidden_layers=1)
    works = [work(layout.loaded.tokenizer.encode(prompt, special_start=True), n) for prompt, n in AGENTS.items()]
    engine = layout.engine(max_batch=3)
    uids = [engine.submit(one) for one in works]
    ended = []
    while engine.in_flight:
        ended += engine.step()
    engine.close()
    assert [completion.uid for completion in ended] == [uids[0], uids[2], uids[1]]  # the shortest first
    for completion in ended:
        one = works[uids.index(completion.uid)]
        assert len(completion.generated_ids) == one.request.max_tokens
        assert behind_the_likeliest(layout.model, one.prompt_ids, completion.generated_ids) < 1e-3


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.parametrize("batching", [Batching.ROWS, Batching.BATCHED])
def test_block_extension_at_256_512_and_768_tokens(batching):
    """Sprint 2 plan: a sequence gets blocks while it decodes, and they are free when it has ended.

    The plan takes a block when the last one is full. In mlx-lm's batch it is so, but for the token that is fed next; in
    rows the pool counts the room for tokens to come, too, so it takes some blocks earlier.
    """
    layout = Layout("llama", eos=False)
    layout.batching = batching
    engine = layout.engine()
    one = work(random_ids(random.Random(1), 10), 800)
    engine.submit(one)
    held, done = {}, []
    while engine.in_flight:
        done += engine.step()
        assert cache_bytes(engine) <= engine.kv.used * engine._kv_cost.block_bytes
        for progress in engine.progress().values():
            held[len(one.prompt_ids) + progress.tokens] = engine.kv.used
    grown = {now for (before, blocks), now in zip(held.items(), list(held)[1:], strict=False) if blocks < held[now]}
    assert all(grown & set(range(border - 253, border + 3)) for border in (256, 512, 768)), grown
    assert batching == Batching.ROWS or grown == {258, 514, 770}
    assert list(held.values()) == sorted(held.values())
    assert list(done[0].generated_ids) == layout.alone(one.prompt_ids, 800)
    assert done[0].cache.n_tokens == 810
    assert engine.kv.used == 0
    engine.close()


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_pool_exhaustion_mid_decode(name):
    """Sprint 2 plan: the pool is exhausted while sequences decode. The youngest gives its blocks back and goes on
    later: no answer changes, and none fails."""
    layout, rng = Layout(name, eos=False), random.Random(1)
    works = [work(random_ids(rng, n), m) for n, m in ((240, 70), (230, 60), (30, 90), (250, 40))]
    plenty = run(layout.engine(), works)
    kv_cost = layout.kv_cost()
    engine = layout.engine(blocks=kv_cost.sequence_blocks(250) + kv_cost.sequence_blocks(320))
    most, preempt = 0, 0
    uids = [engine.submit(one) for one in works]
    done = {}
    while engine.in_flight:
        before = {sequence.uid for sequence in engine._scheduler.in_batch()}
        done |= {completion.uid: completion for completion in engine.step()}
        now = {sequence.uid for sequence in engine._scheduler.in_batch()}
        preempt += len(before - now - set(done))
        most = max(most, len(now))
        assert cache_bytes(engine) <= engine._pool.used * engine._kv_cost.block_bytes
        assert engine._pool.used <= engine._pool.total
    assert [done[uid].generated_ids for uid in uids] == [one.generated_ids for one in plenty]
    assert most > 1
    assert preempt or name == "mamba2"  # its sequences never grow
    assert engine.kv is not None
    assert (engine.kv.used, engine.kv.preemptions) == (0, preempt)


@pytest.mark.mlx
@pytest.mark.slow
def test_pool_exhaustion_refuses_what_can_never_fit():
    """Sprint 2 plan: the error of its failure-mode test, for a job that is larger than the whole pool."""
    engine = Layout("llama").engine(blocks=4)
    fits = engine._kv_cost.longest_sequence(4)
    message = rf"^Cannot allocate 5 blocks: .* is {fits + 1} tokens.* holds {fits} \(--kv-max-bytes\)$"
    with pytest.raises(BlockPoolTooSmall, match=message) as refused:
        engine.submit(work([1] * (fits - 9), 10))
    assert isinstance(refused.value, ValueError)
    assert engine.in_flight == 0
    engine.submit(work([1] * (fits - 10), 10))
    engine.close()


@pytest.mark.mlx
@pytest.mark.slow
def test_no_memory_leaks_over_ten_generations():
    """Sprint 2 plan: the exit criterion of a stable pool over 10 generations and more, with a profile of memory."""
    import mlx.core as mx

    gc.collect()  # what earlier tests left
    layout, profile = Layout("llama", eos=False), []
    engine = layout.engine(blocks=64)
    for number, n_tokens in zip(range(12), (5, 60, 130, 12) * 3, strict=True):
        engine.submit(work(random_ids(random.Random(number), n_tokens), 4))
        mx.reset_peak_memory()
        while engine.in_flight:
            engine.step()
        sample = (engine.kv.total, engine.kv.used, cache_bytes(engine), mx.get_active_memory(), mx.get_peak_memory())
        print(f"generation {number}: {n_tokens} tokens; blocks, used, cache bytes, active, peak: {sample}")
        profile.append(sample)
    assert {sample[:3] for sample in profile} == {(64, 0, 0)}
    assert len({active for *_, active, _ in profile[1:]}) == 1
    for (*_, before), (*_, after) in zip(profile[4:8], profile[8:], strict=True):
        assert after < 2 * before  # of so small a model, it depends on when each thread frees its arrays
    engine.close()
