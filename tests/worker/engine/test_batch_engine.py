"""The engine on the real model: its greedy output equals the model's own, whatever else is in the batch."""

import pytest

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
