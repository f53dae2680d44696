"""Tokenizers rebuilt from GGUF: each pre-tokenizer splits as its model's own; the real SmolLM2's against known ids."""

from pathlib import Path

import pytest
from tests.worker.models.gguf.gguf_writer import tokenizer_metadata

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.models.gguf.tokenizer import GgufTokenizer

# Merges across every boundary that a pre-tokenizer can draw: only the pre-tokenizer keeps the pieces apart.
GREEDY = ["1 2", "12 3", "123 4", "Ċ Ċ", "Ċ Ġ", "a 1", "x )", "Ġ a", "' s"]


def pieces(pre: str, text: str, **extra: object) -> list[str]:
    built = GgufTokenizer({**tokenizer_metadata(pre=pre, merges=GREEDY), **extra}).build()
    return list(built.encode(text).tokens)


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["<|end|>", "123", "4"]),  # and BOS first, unless the file disables it
        ("gpt-2", ["1234"]),
    ],
)
def test_numbers_are_split_as_by_the_models_own_tokenizer(pre: str, digits: list[str]) -> None:
    assert pieces(pre, "1234") == digits


def test_llama_3_texts_begin_with_bos_unless_the_file_disables_it() -> None:
    assert pieces("llama-bpe", "a", **{"tokenizer.ggml.add_bos_token": False}) == ["a"]
    assert pieces("gpt-2", "a", **{"tokenizer.ggml.add_bos_token": True}) == ["<|end|>", "a"]


def test_a_llama_3_word_that_is_a_token_stays_whole() -> None:
    # "ab" is a token, but no merge makes it.
    keys = tokenizer_metadata(pre="llama-bpe", control=["<|end|>", "ab"])
    keys["tokenizer.ggml.token_type"][-1] = 1
    keys["tokenizer.ggml.add_bos_token"] = False
    assert GgufTokenizer(keys).build().encode("ab").tokens == ["ab"]
    assert GgufTokenizer({**keys, "tokenizer.ggml.pre": "gpt-2"}).build().encode("ab").tokens == ["a", "b"]


def test_qwen2_splits_and_normalizes_as_transformers_own_qwen2_tokenizer() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    from stoker_worker.models.gguf.tokenizer import QWEN_2_SPLIT

    assert QWEN_2_SPLIT == PRETOKENIZE_REGEX
    built = GgufTokenizer(tokenizer_metadata(pre="qwen2")).build()
    assert built.normalizer.normalize_str("e\u0301") == "é"


def test_control_tokens_are_found_in_text_and_user_defined_ones_are_not_special() -> None:
    keys = tokenizer_metadata(pre="gpt-2", control=["<|end|>", "<tool>"])
    keys["tokenizer.ggml.token_type"][-1] = 4
    built = GgufTokenizer(keys).build()
    assert built.encode("a<|end|><tool>").tokens == ["a", "<|end|>", "<tool>"]
    assert {token.content: token.special for token in built.get_added_tokens_decoder().values()} == {
        "<|end|>": True,
        "<tool>": False,
    }


@pytest.mark.parametrize("missing", ["tokens", "token_type", "merges"])
def test_a_file_without_a_part_of_its_tokenizer_is_refused_by_its_name(missing: str) -> None:
    keys = tokenizer_metadata(pre="gpt-2")
    del keys[f"tokenizer.ggml.{missing}"]
    with pytest.raises(ModelNotLoadable, match=missing):
        GgufTokenizer(keys).build()


@pytest.mark.model
def test_smollm2_encodes_its_default_system_message_to_the_published_ids(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
    )
    assert tokenizer.encode(text).ids == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182),
        *(2, 198, 1, 4093, 198),
    ]
