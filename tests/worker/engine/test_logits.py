"""Bias, penalties and ends that a request sets: each changes its own row as the reference says, and no other row."""

import random

import mlx.core as mx
import numpy as np
import pytest
from tests.worker.engine.layouts import EOS, Layout, Numbers, changed, random_ids, run, work
from tests.worker.engine.test_drafts import repeating
from tests.zoo.configs import VOCABULARY

from stoker_shared import build_request
from stoker_worker.engine.sampling import make_processors, token_logprob
from stoker_worker.ports.model import Batching

pytestmark = pytest.mark.mlx

PROMPT = [5, 6, 6, 7]
EVERY_FEATURE = (
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.7},
    {"presence_penalty": -1.5, "frequency_penalty": -0.5},
    {"logit_bias": {3: 100, 40: -100, "4": 7.5}},
    {"min_tokens": 35},
    {"frequency_penalty": 2.0, "repetition_penalty": 1.3, "logit_bias": {9: 5.0}, "min_tokens": 12},
    {},
)


def processed(logits, answer, *, end_ids=frozenset(), **fields):
    request = build_request({"prompt": "x", **fields})
    tokens = mx.array([*PROMPT, *answer], mx.int32)
    for processor in make_processors(request, len(PROMPT), end_ids):
        logits = processor(tokens, logits)
    return np.asarray(logits.astype(mx.float32))[0]


def expected(logits, answer, fields, *, prompt=PROMPT, end_ids=()):
    """What vLLM and OpenAI document, in NumPy; the repetition penalty is mlx-lm's."""
    changed = np.array(logits, np.float64)
    for token_id, bias in fields.get("logit_bias", {}).items():
        changed[int(token_id)] += bias
    if "repetition_penalty" in fields:
        seen = list(set([*prompt, *answer][-20:]))
        by = fields["repetition_penalty"]
        changed[seen] = np.where(changed[seen] < 0, changed[seen] * by, changed[seen] / by)
    counts = np.bincount(np.array(answer, int), minlength=len(changed))
    changed -= fields.get("presence_penalty", 0) * (counts > 0) + fields.get("frequency_penalty", 0) * counts
    if len(answer) < fields.get("min_tokens", 0):
        changed[list(end_ids)] = -np.inf
    return changed


@pytest.fixture(scope="module")
def logits():
    mx.random.seed(1)
    return mx.random.normal((1, 50)) * 4


@pytest.mark.parametrize("fields", EVERY_FEATURE[:5])
@pytest.mark.parametrize("answer", [[], [8], [6, 8, 8, 8, 49, 0, 6]])
def test_a_penalty_counts_the_answer_and_not_the_prompt(logits, fields, answer):
    found = processed(logits, answer, **fields)
    np.testing.assert_allclose(found, expected(np.asarray(logits)[0], answer, fields), atol=1e-5)


def test_a_penalty_of_many_repeats_is_not_rounded_on_the_way_in_16_bits():
    found = processed(mx.zeros((1, 50), mx.bfloat16), [8] * 300, frequency_penalty=0.001)
    assert found[8] == pytest.approx(-0.3, rel=0.01)


def test_an_end_has_no_chance_before_min_tokens_and_an_unknown_end_is_no_fault(logits):
    found = processed(logits, [1, 2], end_ids=frozenset({4, 9, 10**9}), min_tokens=3, logit_bias={4: 100})
    assert np.exp(found - found.max())[[4, 9]].tolist() == [0, 0]
    after = processed(logits, [1, 2, 3], end_ids=frozenset({4, 9, 10**9}), min_tokens=3)
    assert after.tolist() == np.asarray(logits)[0].tolist()


def test_where_a_grammar_allows_only_the_end_the_end_is_drawn():
    only_the_end = mx.where(mx.arange(50)[None] == 4, 0.0, -mx.inf)
    assert processed(only_the_end, [], end_ids=frozenset({4}), min_tokens=3).argmax() == 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_reported_log_probabilities_are_as_exact_as_the_logits(dtype):
    """In 16 bits, logits of about 20 and so log-probabilities near zero are multiples of 1/64 or 1/8."""
    logits = mx.random.normal((1, 200), key=mx.random.key(4)) * 3
    logits[0, 7], logits[0, 9] = 20.3, 18.1
    logits = logits.astype(getattr(mx, dtype))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    found = token_logprob(9, logprobs[0], n_top=2, tokenizer=Numbers())  # type: ignore[arg-type]
    exact = np.asarray(logits[0].astype(mx.float32), np.float64)
    exact -= np.log(np.exp(exact).sum())
    assert [top.token for top in found.top_logprobs] == ["<7>", "<9>"]
    assert [top.logprob for top in found.top_logprobs] == pytest.approx(exact[[7, 9]], abs=1e-3)
    assert found.logprob == found.top_logprobs[1].logprob


# --- in a batch ---


def answer_of(layout, one):
    """The greedy answer by the reference, each token from a pass over all tokens before it."""
    fields = one.request.model_dump(exclude_defaults=True)
    answer = []
    while len(answer) < one.request.max_tokens and answer[-1:] != [EOS]:
        logits = np.asarray(layout.model(mx.array([[*one.prompt_ids, *answer]]))[0, -1])
        answer.append(int(expected(logits, answer, fields, prompt=one.prompt_ids, end_ids=[EOS]).argmax()))
    return tuple(answer)


def ending_layout():
    """One whose end-of-sequence token is likely."""
    layout = Layout("llama")
    head = layout.model.lm_head
    head.weight = mx.where(mx.arange(VOCABULARY)[:, None] == EOS, head.weight * 1.4, head.weight)
    return layout


@pytest.fixture(scope="module")
def crowd():
    """A layout, a row of each feature, and their answers."""
    layout, rng = ending_layout(), random.Random(11)
    works = [work(random_ids(rng, rng.randint(60, 90)), 40, **fields) for fields in EVERY_FEATURE]
    answers = [answer_of(layout, one) for one in works]
    assert len({one[-1] for one in answers} - {EOS}) > 1
    assert any(one[-1] == EOS for one in answers)
    return layout, works, answers


@pytest.mark.parametrize("batching", [Batching.ROWS, Batching.BATCHED, Batching.SINGLE_PREFILL, Batching.ONE_AT_A_TIME])
def test_a_row_of_each_feature_beside_plain_rows_is_as_the_reference_says(crowd, batching):
    layout, works, answers = crowd
    assert [end.generated_ids for end in run(layout.engine(max_batch=8, batching=batching), works)] == answers


@pytest.mark.parametrize("batching", [Batching.ROWS, Batching.BATCHED, Batching.ONE_AT_A_TIME])
def test_penalties_and_ends_are_right_after_preemptions(crowd, batching):
    layout, works, answers = crowd
    stop = answers[0][20]
    works = [*works, changed(works[0], stop_token_ids=(stop,))]
    answers = [*answers, answers[0][: answers[0].index(stop) + 1]]
    engine, rng, preempted = layout.engine(max_batch=9, batching=batching), random.Random(1), []

    def preempt():
        decoding = [*engine._scheduler.decoding.values()]
        if decoding and rng.random() < 0.3:
            preempted.append(rng.choice(decoding))
            return engine._preempt(preempted[-1])
        return ()

    assert [end.generated_ids for end in run(engine, works, preempt)] == answers
    assert len(preempted) > 10


def test_penalties_and_stop_tokens_are_right_with_drafts():
    layout, rng = repeating("llama", eos=False), random.Random(2)
    features = ({"frequency_penalty": 0.3}, {"presence_penalty": -1.5, "frequency_penalty": -0.2}, {})
    works = [work(random_ids(rng, 40), 120, **fields) for fields in features]
    stop = run(layout.engine(), works)[2].generated_ids[-1]
    works[2] = changed(works[2], min_tokens=30, stop_token_ids=(stop,))
    plain = run(layout.engine(), works)
    engine = layout.engine(draft_ngram=True)
    drafts = engine._generator._decode.drafts
    found = run(engine, works)
    assert [(end.generated_ids, end.ended_by) for end in found] == [(end.generated_ids, end.ended_by) for end in plain]
    assert plain[2].ended_by == "stop"
    assert drafts.n_accepted > 50
    assert drafts.n_drafted > drafts.n_accepted
