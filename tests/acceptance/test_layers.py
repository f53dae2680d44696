"""Cache layouts that the first documents name, and MLA, which came later. Tiny and random.

Each model has a turn, the store is opened anew, and the next turn goes on from what was stored.
"""

import random

import pytest
from tests.worker.engine.layouts import Layout, random_ids
from tests.worker.engine.test_layout_memory import Conversation
from tests.zoo.architectures import make_model

from stoker_worker.ports.cache_spec import LayerKind
from stoker_worker.ports.model import Batching

pytestmark = [pytest.mark.mlx, pytest.mark.slow]


def check_a_turn_goes_on_from_the_store(layout, folder):
    conversation, rng = Conversation(layout, folder), random.Random(1)
    ids = tuple(random_ids(rng, 600))
    for n_stored, source in ((0, "none"), (612, "disk")):
        assert conversation.turn(ids, 12) == (n_stored, None)
        assert conversation.source == source
        answer = conversation.said[-1][len(ids) :]
        assert len(set(answer)) > 3, "an answer that depends on nothing shows nothing"
        ids = (*ids, *answer, *random_ids(rng, 40))


def test_mock_moe_alternating_layers(tmp_path):
    """Sprint 2 plan, carried over from sprint 1: alternating layer types; the cache spec has the pattern."""
    dense_and_sparse = Layout("qwen3_moe").spec
    assert [layer.kind for layer in dense_and_sparse.layers] == 4 * [LayerKind.FULL]  # experts have no cache
    layout = Layout("gpt_oss", eos=False)
    kinds = [(layer.kind, layer.window_tokens) for layer in layout.spec.layers]
    assert kinds == 2 * [(LayerKind.WINDOW, 64), (LayerKind.FULL, 0)]
    assert layout.spec.bytes_per_token == 2 * 2 * (16 + 16) * 4  # of the two full layers only
    check_a_turn_goes_on_from_the_store(layout, tmp_path)


def test_mla_layers_are_stored(tmp_path):
    """No document asks for it: with MLA, a layer keeps a latent vector and a rotary part in place of K and V."""
    layout = Layout("deepseek_v3", eos=False, model=make_model("deepseek_v3"))
    assert {(layer.kind, layer.n_kv_heads, layer.key_dim, layer.value_dim) for layer in layout.spec.layers} == {
        (LayerKind.FULL, 1, 16, 8)
    }
    assert layout.batching == Batching.ROWS
    check_a_turn_goes_on_from_the_store(layout, tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_of_qwen2_0_5b_takes_12_kb(dtype):
    """KV-cache testing results: 0.11 MB for 9 tokens of Qwen2-0.5B, which is 12 KB for each."""
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    spec = Layout("qwen2", dtype=dtype, num_hidden_layers=24, hidden_size=896, **heads).spec
    assert spec.bytes_per_token == 12 * 1024
    assert round(9 * spec.bytes_per_token / 1e6, 2) == 0.11
