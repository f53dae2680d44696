"""The cost of tokens, from steps of known costs."""

import pytest

from stoker_worker.metrics.costs import Costs


def test_costs_are_found_again_from_the_steps():
    costs = Costs()
    assert (costs.prompt_token_s(), costs.token_s()) == (None, None)
    for _ in range(50):  # a prompt of 100 tokens at 1 ms, beside four rows at 5 ms; then nine steps of these
        costs.stepped(0.120, 4, has_prefill=True)
        costs.prefilled(100)
        for _ in range(9):
            costs.stepped(0.020, 4, has_prefill=False)
    assert costs.token_s() == pytest.approx(0.005)
    assert costs.prompt_token_s() == pytest.approx(0.001)


def test_costs_follow_a_change():
    costs = Costs()
    for token_s in (0.01, 0.5):
        for _ in range(3000):
            costs.stepped(token_s, 1, has_prefill=False)
    assert (costs.token_s() or 0.0) > 0.3
