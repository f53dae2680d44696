"""The whole path on models with window and recurrent layers: tiny and random, with SmolLM2's tokenizer."""

import json
import shutil
from typing import Any

import pytest
from tests.support.store_reader import StoreReader
from tests.support.worker_process import burst
from tests.worker.engine.tiny_models import CONFIGS, make_model

pytestmark = [pytest.mark.model, pytest.mark.server]

MAX_TOKENS = 10
WORDS = "One two three four five six seven eight nine ten. " * 30


def model_folder(name, folder, tokenizer):
    """A model of family `name` in mlx-lm's format, and the model itself."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    model = make_model(name, vocab_size=vocabulary)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {"model_type": name, **CONFIGS[name], "vocab_size": vocabulary, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return model


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "mamba2"])
def test_turns_across_restarts_equal_mlx_lm_alone_and_start_from_the_last_snapshot(
    name, producer, redis_url, store, tmp_path, smollm2
):
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    model = model_folder(name, tmp_path / name, smollm2)
    agents = [(context, n) for context in ("append", "full") for n in range(3)]
    cached = dict.fromkeys(agents, 0)
    for turn in range(2):
        tickets = {}
        for context, n in agents:
            before, new = WORDS[: 900 + 150 * n], f" and more, {turn}" if turn else ""
            prompt = new if turn and context == "append" else before + new
            fields: dict[str, Any] = {"agent_id": f"{context} {n}", "context": context, "max_tokens": MAX_TOKENS}
            tickets[context, n] = producer.submit(prompt=prompt, **fields)
        burst(redis_url, store, "--model", str(tmp_path / name))
        for (context, n), ticket in tickets.items():
            result, version = ticket.result(timeout_s=1), StoreReader(store).newest(f"{context} {n}")
            assert version.transcript is not None
            ids, end = list(version.transcript.token_ids), result.usage.prompt_tokens
            alone = [token for token, _ in generate_step(mx.array(ids[:end]), model, max_tokens=len(ids) - end)]
            assert ids[end:] == alone
            assert len(alone) == result.usage.completion_tokens
            assert result.cache.miss_reason is None
            if turn:  # in the first turn, the agents begin alike, and may take over what another one prefills
                assert result.usage.cached_tokens == cached[context, n]
            assert result.cache.source in ("memory", "disk" if turn else "none")  # some were read ahead
            # An `append` also contains the agent's answer; a whole conversation brings other words.
            cached[context, n] = len(ids) if context == "append" else end - 1
    assert StoreReader(store).problems() == []
