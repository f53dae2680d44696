"""GGUF import: the imported model computes the same as the original, or is refused by name. Tiny models made here, and
the real SmolLM2."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.models.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    metadata,
    permuted,
    random_weights,
    tokenizer_metadata,
    write_gguf,
)

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.models import gguf
from stoker_worker.models.gguf import import_gguf, make_tokenizer

HALF = random_weights(tied=True)[0]["token_embd.weight"].astype(np.float16)


def logits(folder: Path) -> Any:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return np.array(model(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])))


def reference_logits(weights: dict[str, Any], *, tied: bool) -> Any:
    """Those of mlx-lm's own model with these weights; its config is spelled out, not the importer's."""
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    args = ModelArgs.from_dict(
        {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "intermediate_size": INTER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-6,
            "vocab_size": VOCAB,
            "rope_theta": 5000.0,
            "rope_traditional": False,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 512,
        }
    )
    model = Model(args)
    model.load_weights([(name, mx.array(array)) for name, array in weights.items()])
    return np.array(model(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])))


def packed(kind: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bytes]:
    n_bytes = {"Q4_0": 18, "Q8_0": 34}[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (shape[0] * shape[1] // 32, n_bytes), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    return kind, shape, blocks.tobytes()


@pytest.mark.mlx
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_with_permuted_queries_and_keys_gives_the_unpermuted_models_logits(tmp_path: Path, tied: bool) -> None:
    ours, theirs = random_weights(tied=tied)
    for layer in range(LAYERS):
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            ours[f"blk.{layer}.{part}.weight"] = permuted(ours[f"blk.{layer}.{part}.weight"], heads)
    import_gguf(write_gguf(tmp_path / "tiny.gguf", metadata(), ours), tmp_path / "tiny")
    np.testing.assert_allclose(logits(tmp_path / "tiny"), reference_logits(theirs, tied=tied), atol=1e-4)


@pytest.mark.mlx
def test_packed_layers_keep_their_bits_and_everything_else_becomes_half_precision(tmp_path: Path) -> None:
    ours, _ = random_weights(tied=True)
    for name, array in list(ours.items()):
        if name.startswith("blk") and array.ndim == 2:
            ours[name] = packed("Q4_0", array.shape)
    ours["token_embd.weight"] = packed("Q8_0", (VOCAB, HIDDEN))
    import_gguf(write_gguf(tmp_path / "tiny.gguf", metadata("Q4_0"), ours), tmp_path / "tiny")

    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    embedding = {"group_size": 32, "bits": 8}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": embedding}
    assert config["_name_or_path"] == "Tiny"
    assert logits(tmp_path / "tiny").dtype == np.float16


@pytest.mark.model
def test_imported_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    import mlx.core as mx
    from mlx_lm import generate, load
    from mlx_lm.utils import dequantize_model

    model, tokenizer = load(str(smollm2))
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert generate(model, tokenizer, ids, max_tokens=16) == "The capital of France is Paris."


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("tensors", "extra", "message"),
    [
        ({}, {"general__architecture": "gemma3"}, "architecture 'gemma3'"),
        ({}, {"kind": "Q4_K"}, "this type"),
        ({}, {"kind": "Q4_0"}, "is not Q4_0"),
        ({}, {"tokenizer__ggml__pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({}, {"tokenizer__ggml__model": "llama"}, "tokenizer 'llama'"),
        ({}, {"tokenizer__ggml__add_bos_token": True}, "begin or end"),
        ({}, {"tokenizer__ggml__merges": ["a"]}, "contradict"),
        ({}, {"llama__rope__scaling__type": "yarn"}, "scaled rotary"),
        ({}, {"llama__rope__dimension_count": 8}, "part of each head"),
        ({"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}, {}, "scaled rotary"),
        ({"blk.0.attn_q.bias": np.ones(HIDDEN, np.float32)}, {}, "attn_q.bias"),
        ({"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}, {}, "attn_q_norm"),
        ({"output_norm.weight": np.full(HIDDEN, 1e6, np.float32), "token_embd.weight": HALF}, {}, "float16"),
    ],
)
def test_a_file_that_cannot_be_imported_exactly_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, tensors: dict[str, Any], extra: dict[str, Any], message: str
) -> None:
    ours, _ = random_weights(tied=True)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(**extra), ours | tensors)

    with pytest.raises(ModelNotLoadable, match=message) as refused:
        import_gguf(file, tmp_path / "tiny")

    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.mlx
def test_a_file_that_is_missing_of_another_format_or_ends_early_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable, match="No such file"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "tiny")
    ours, _ = random_weights(tied=True)
    whole = write_gguf(tmp_path / "whole.gguf", metadata(), ours).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 10, 40, 500, 3000, len(whole) // 2, len(whole) - 64):
        cut.write_bytes(whole[:length] or b"hello world")
        with pytest.raises(ModelNotLoadable, match=r"cut\.gguf"):
            import_gguf(cut, tmp_path / "tiny")


@pytest.mark.mlx
def test_a_folder_in_use_is_not_touched_and_an_empty_one_is_filled(tmp_path: Path) -> None:
    ours, _ = random_weights(tied=True)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(), ours)
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    import_gguf(file, folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    with pytest.raises(ModelNotLoadable, match="not empty"):
        import_gguf(file, folder)

    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert sorted(before) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.mlx
def test_a_failure_while_writing_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = random_weights(tied=True)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(), ours)

    def disk_full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_write_json", disk_full)
    with pytest.raises(ModelNotLoadable, match="No space left"):
        import_gguf(file, tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_numbers_are_split_as_by_the_models_own_tokenizer() -> None:
    # Merges across each boundary that a pre-tokenizer can draw: only the pre-tokenizer keeps the pieces apart.
    keys = tokenizer_metadata(merges=["1 2", "12 3", "123 4", "a 1"])
    assert make_tokenizer(keys).encode("a1234").tokens == ["a", "1", "2", "3", "4"]


def test_control_tokens_are_found_in_text_and_user_defined_ones_are_not_special() -> None:
    keys = tokenizer_metadata(control=["<|end|>", "<tool>"])
    keys["tokenizer.ggml.token_type"][-1] = 4
    built = make_tokenizer(keys)
    assert built.encode("a<|end|><tool>").tokens == ["a", "<|end|>", "<tool>"]
    assert {token.content: token.special for token in built.get_added_tokens_decoder().values()} == {
        "<|end|>": True,
        "<tool>": False,
    }


@pytest.mark.parametrize("missing", ["tokens", "token_type", "merges"])
def test_a_file_without_a_part_of_its_tokenizer_is_refused_by_its_name(missing: str) -> None:
    keys = tokenizer_metadata()
    del keys[f"tokenizer.ggml.{missing}"]
    with pytest.raises(ModelNotLoadable, match=missing):
        make_tokenizer(keys)
