"""The refusals of GGUF import; a refused import leaves nothing on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.models.gguf.gguf_writer import write_gguf
from tests.worker.models.gguf.tiny_gguf import HEAD_DIM, HIDDEN, VOCAB, metadata, random_weights

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.models.gguf import importer as gguf
from stoker_worker.models.gguf.header import read_tensor_types
from stoker_worker.models.gguf.importer import import_gguf


def q4_k(ours: dict[str, Any]) -> None:
    ours["token_embd.weight"] = ("Q4_K", (VOCAB, 256), bytes(VOCAB * 144))


def scaled_rope(ours: dict[str, Any]) -> None:
    ours["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, dtype=np.float32)


def attention_bias(ours: dict[str, Any]) -> None:
    ours["blk.0.attn_q.bias"] = np.ones(HIDDEN, dtype=np.float32)


def unknown_tensor(ours: dict[str, Any]) -> None:
    ours["blk.0.attn_q_norm.weight"] = np.ones(HEAD_DIM, dtype=np.float32)


def too_large(ours: dict[str, Any]) -> None:
    ours["output_norm.weight"] = np.full(HIDDEN, 1e6, dtype=np.float32)
    ours["token_embd.weight"] = ours["token_embd.weight"].astype(np.float16)


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("change", "extra", "said"),
    [
        (None, {"general__architecture": "gemma3"}, "architecture 'gemma3'"),
        (None, {"tokenizer__ggml__pre": "tekken"}, "pre-tokenizer 'tekken'"),
        (None, {"tokenizer__ggml__model": "llama"}, "tokenizer 'llama'"),
        (None, {"llama__rope__scaling__type": "yarn"}, "scaled rotary"),
        (None, {"llama__expert_count": 8}, "experts"),
        (None, {"llama__rope__dimension_count": 8}, "part of each head"),
        (None, {"tokenizer__ggml__merges": ["a"]}, "contradict"),
        (q4_k, {}, "Q4_K"),
        (scaled_rope, {}, "scaled rotary"),
        (attention_bias, {}, "attn_q.bias"),
        (unknown_tensor, {}, "attn_q_norm"),
        (too_large, {}, "float16"),
    ],
)
def test_a_file_that_cannot_be_imported_exactly_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, change: Any, extra: dict[str, Any], said: str
) -> None:
    ours, _ = random_weights(biases=False, tied=True)
    if change:
        change(ours)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("llama", pre="gpt-2", **extra), ours)

    with pytest.raises(ModelNotLoadable, match=said) as refused:
        import_gguf(file, tmp_path / "tiny")

    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.mlx
def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    ours, _ = random_weights(biases=False, tied=True)
    whole = write_gguf(tmp_path / "whole.gguf", metadata("llama", pre="gpt-2"), ours).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 10, 40, 500, 3000, len(whole) // 2, len(whole) - 64):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelNotLoadable, match=r"cut\.gguf"):
            import_gguf(cut, tmp_path / "tiny")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"hello world", "begin with GGUF"), (b"GGUF\x01" + bytes(19), "version 1")],
)
def test_a_file_of_another_format_is_refused_without_mlx(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "x.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelNotLoadable, match=said):
        read_tensor_types(file)


@pytest.mark.mlx
def test_a_folder_in_use_is_not_touched_and_an_empty_one_is_filled(tmp_path: Path) -> None:
    ours, _ = random_weights(biases=False, tied=True)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("llama", pre="gpt-2"), ours)
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
    ours, _ = random_weights(biases=False, tied=True)
    file = write_gguf(tmp_path / "tiny.gguf", metadata("llama", pre="gpt-2"), ours)

    def disk_full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_write_json", disk_full)
    with pytest.raises(ModelNotLoadable, match="No space left"):
        import_gguf(file, tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
