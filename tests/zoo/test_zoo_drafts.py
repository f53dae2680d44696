"""Every architecture that may get drafts answers as each sequence does alone, whatever is drafted.

`make test` runs a few, with every kind of attention; `make zoo` runs all architectures.
"""

import os
import random
from itertools import cycle

import pytest
from tests.worker.engine.layouts import run
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.specimen import Specimen, work

pytestmark = pytest.mark.mlx

SHORT = ("deepseek_v3", "gpt2", "llama4_text", "longcat_flash", "minicpm3", "qwen3_moe", "stablelm")
NAMES = tuple(ARCHITECTURES) if os.environ.get("ZOO") == "all" else SHORT

SAID = 12
MOST_APART = 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_right_and_wrong_drafts_leave_the_answers_of_each_sequence_alone(name, monkeypatch):
    from stoker_worker.engine.rows.row import NgramLookup
    from stoker_worker.engine.rows.rows_generator import why_not_in_rows
    from stoker_worker.ports.model import Batching, ServingMode

    specimen = Specimen(name)
    if not specimen.spec.has_only_full_layers or why_not_in_rows(specimen.model, specimen.spec) is not None:
        pytest.skip("gets no drafts")
    rng = random.Random(name)
    works = [work([rng.randrange(90) for _ in range(n)], SAID) for n in (9, 14, 23)]
    wrong = cycle((True, False))
    whole = [[*one.prompt_ids, *specimen.alone(one.prompt_ids, SAID).said] for one in works]

    def draft(lookup, most):
        """What follows in the row's answer, in every second draft with a wrong token in it."""
        tokens = lookup._tokens
        (row,) = [row for row in whole if row[: len(tokens)] == tokens]
        found = row[len(tokens) :][:most]
        if next(wrong):
            place = rng.randrange(len(found))
            found[place] = (found[place] + 1) % 90
        return found

    monkeypatch.setattr(NgramLookup, "is_repeating", True)
    monkeypatch.setattr(NgramLookup, "draft", draft)
    engine = specimen.engine(ServingMode(Batching.ROWS), max_batch=3, prefill_tokens=8, draft_ngram=True)
    drafts = engine._generator._decode.drafts
    done = run(engine, works)
    assert 0 < drafts.n_accepted < drafts.n_drafted
    assert max(map(specimen.apart, works, done)) < MOST_APART
