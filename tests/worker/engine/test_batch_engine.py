"""The engine on the real model: its greedy output equals the model's own, whatever else is in the batch."""

from typing import Any

import pytest
from tests.worker.engine.reading import read_along

pytestmark = pytest.mark.model

PROMPTS = (
    "The quick brown fox jumps over the lazy",
    "The capital of France is",
    "Machine learning is",
    "def fibonacci(n):",
    "Once upon a time, in a village between two rivers, there lived an old clockmaker who",
    "1, 1, 2, 3, 5, 8,",
)


@pytest.fixture(scope="module")
def loaded(real_model):
    return real_model.loaded


@pytest.fixture(scope="module")
def alone(real_model):
    return real_model.alone


@pytest.fixture(scope="module")
def work(real_model):
    return real_model.work


def drain(engine):
    done = {}
    while engine.in_flight:
        done |= {completion.uid: completion for completion in engine.step()}
    return done


@pytest.mark.fast_blas
def test_a_batch_of_unequal_sequences_gives_each_the_answer_it_gets_alone(make_engine, work, loaded, alone):
    engine = make_engine(max_batch=4)
    works = [work(prompt, max_tokens=4 + 2 * n) for n, prompt in enumerate(PROMPTS)]
    uids = [engine.submit(w) for w in works]
    done = drain(engine)
    for uid, w in zip(uids, works, strict=True):
        assert list(done[uid].generated_ids) == alone(w.prompt_ids, w.request.max_tokens)
        assert done[uid].text == loaded.tokenizer.decode(done[uid].generated_ids)


def test_a_sequence_continued_from_a_saved_cache_answers_as_uncached(make_engine, work, loaded, alone):
    engine, length = make_engine(), 257
    text = " ".join(f"word{n} and" for n in range(length))
    ids = tuple(loaded.tokenizer.encode(text, special_start=True))[: length - 4]
    first = drain_one(engine, work(ids, max_tokens=4))
    assert first.cache.n_tokens == length
    longer = (*ids, *first.generated_ids, *loaded.tokenizer.encode(" So then", special_start=False))
    second = drain_one(engine, work(longer, prefix=first.cache, max_tokens=8))
    assert list(second.generated_ids) == alone(longer, 8)
    assert second.cache.n_tokens == len(longer) + len(second.generated_ids)


def drain_one(engine, one):
    uid = engine.submit(one)
    return drain(engine)[uid]


@pytest.mark.fast_blas
def test_rows_with_features_of_sampling_change_no_row_beside_them(make_engine, work, loaded, alone):
    stop = loaded.tokenizer.encode(" the", special_start=False)[-1]
    features: tuple[dict[str, Any], ...] = (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5, "temperature": 0.9, "seed": 3},
        {"logit_bias": {stop: -100.0}},
        {"min_tokens": 16},
        {"stop_token_ids": [stop], "ignore_eos": True},
    )
    changed = [work(PROMPTS[n], **fields) for n, fields in enumerate(features)]
    plain = [work(prompt) for prompt in PROMPTS[:3]]
    engine = make_engine()
    uids = [engine.submit(one) for pair in zip(changed, plain, strict=False) for one in pair]
    uids += [engine.submit(one) for one in changed[3:]]
    done = [drained[uid].generated_ids for drained in [drain(engine)] for uid in uids]
    assert [list(ids) for ids in done[1:6:2]] == [alone(one.prompt_ids, 16) for one in plain]
    assert done[0:5:2] + done[6:] == [drain_one(make_engine(), one).generated_ids for one in changed]
    assert stop not in done[4]
    assert len(done[6]) == 16


@pytest.mark.fast_blas
def test_the_texts_of_all_sequences_can_be_read_as_they_grow(make_engine, work):
    works = [work(prompt, max_tokens=12) for prompt in PROMPTS[:3]]
    engine = make_engine()
    uids = [engine.submit(one) for one in works]
    plain = drain(engine)
    stop = plain[uids[1]].text[9:14]
    works[1] = work(PROMPTS[1], max_tokens=12, stop=[stop])
    works.append(
        work(
            "Repeat: \U0001f469\u200d\U0001f4bb \u4e2d\u6587 \U0001f469\u200d\U0001f4bb \u4e2d\u6587",
            max_tokens=12,
        )
    )
    done, read, _ = read_along(make_engine(), works)
    for n, uid in enumerate(uids):
        assert done[n].text == plain[uid].text.partition(stop if n == 1 else "\0")[0]
        assert len({text for text in read[n] if text}) > (1 if n == 1 else 6)
        assert stop not in max(read[1])
    assert not any(text.endswith("\ufffd") for text in read[-1])


@pytest.mark.fast_blas
def test_sampling_follows_the_models_distribution(make_engine, work):
    """Temperature near zero is greedy; a top_k of one is greedy at any temperature."""
    engine = make_engine()
    greedy, cold, narrow, wide = (
        engine.submit(work(PROMPTS[1], max_tokens=6, **fields))
        for fields in (
            {},
            {"temperature": 0.001},
            {"temperature": 5.0, "top_k": 1},
            {"temperature": 5.0, "top_k": 10_000_000, "seed": 1},
        )
    )
    said = {uid: completion.generated_ids for uid, completion in drain(engine).items()}
    assert said[greedy] == said[cold] == said[narrow] != said[wide]
