"""Rebuilds a GGUF file's tokenizer with the `tokenizers` library. Reads no file. Any thread, no MLX.

A GGUF file holds a tokenizer's tokens and merges, but only the *name* of its pre-tokenizer. A wrong pre-tokenizer still
encodes every text, but not as in the model's training, so a name is either built exactly or refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable

CONTROL: Final = 3
"""Token type: comes from the template, never from a text."""
USER_DEFINED: Final = 4
"""Token type: matched in a text before any merge."""

_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3_SPLIT: Final = _WORDS + r"\p{N}{1,3}" + _REST
QWEN_2_SPLIT: Final = _WORDS + r"\p{N}" + _REST
PRE_TOKENIZERS: Final = ("gpt-2", "llama-bpe", "qwen2", "smollm")
"""The values of ``tokenizer.ggml.pre`` that are built."""

_SPECIAL_ROLES: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


@dataclass(frozen=True)
class GgufTokenizer:
    """
    Attributes:
        metadata: every ``tokenizer.*`` key of the file, as plain Python values.
    """

    metadata: Mapping[str, Any]

    @property
    def pre(self) -> str:
        """The pre-tokenizer's name.

        Raises:
            ModelNotLoadable: the pre-tokenizer, or this kind of tokenizer, is not supported.
        """
        model = self._get("model")
        if model != "gpt2":
            raise ModelNotLoadable(f"GGUF tokenizer {model!r} is not supported: only byte-level BPE ('gpt2') is")
        pre = self._get("pre")
        if pre not in PRE_TOKENIZERS:
            raise ModelNotLoadable(
                f"GGUF pre-tokenizer {pre!r} is not supported, only {', '.join(PRE_TOKENIZERS)} are: use the model "
                "in MLX or Hugging Face format"
            )
        return str(pre)

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end a turn: end of sequence, and end of turn where the two differ."""
        ids = (self._get(f"{role}_token_id") for role in ("eos", "eot"))
        return sorted({int(token_id) for token_id in ids if token_id is not None})

    @property
    def bos_id(self) -> int | None:
        """The token at the start of a text, if the model has one."""
        token_id = self._get("bos_token_id")
        return None if token_id is None else int(token_id)

    def build(self) -> Any:
        """The `tokenizers.Tokenizer`.

        Raises:
            ModelNotLoadable: tokens or merges are missing or contradict each other; or as for `pre`.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models

        pre = self.pre
        tokens: Sequence[str] = self._required("tokens")
        types: Sequence[int] = self._required("token_type")
        vocab = {token: index for index, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ")) for merge in self._required("merges")]
        if len(vocab) != len(tokens) or len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
            raise ModelNotLoadable("the GGUF file's tokens, token types and merges contradict each other")
        if self._get("add_eos_token"):
            raise ModelNotLoadable("GGUF tokenizers that end every text with a token are not supported")
        # Llama 3's own tokenizer keeps a word that is a token whole, even where no merges lead to it.
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        tokenizer.decoder = decoders.ByteLevel()
        _set_pre_tokenizer(tokenizer, pre)
        for kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL
            found = [token for token, token_type in zip(tokens, types, strict=True) if token_type == kind]
            added = [AddedToken(token, special=special, normalized=False) for token in found]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        self._set_start(tokenizer, tokens, pre)
        return tokenizer

    def config(self) -> dict[str, Any]:
        """The content of ``tokenizer_config.json``, chat template included."""
        tokens = self._required("tokens")
        names = {}
        for role, name in _SPECIAL_ROLES.items():
            token_id = self._get(f"{role}_token_id")
            if token_id is not None:
                names[name] = tokens[token_id]
        template = self.metadata.get("tokenizer.chat_template")
        return {
            # Not the class of one model: such classes ignore the pre-tokenizer in tokenizer.json and build their own.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **names,
            **({"chat_template": template} if template else {}),
        }

    def _set_start(self, tokenizer: Any, tokens: Sequence[str], pre: str) -> None:
        """Put BOS before every text where the model wants it; llama.cpp assumes so for Llama 3."""
        from tokenizers import processors

        add_bos = self._get("add_bos_token")
        if (pre == "llama-bpe" if add_bos is None else add_bos) and self.bos_id is not None:
            bos = tokens[self.bos_id]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, self.bos_id)]
            )

    def _get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def _required(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise ModelNotLoadable(f"the GGUF file has no tokenizer.ggml.{key}")
        return value


def _set_pre_tokenizer(tokenizer: Any, pre: str) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    match pre:
        case "gpt-2":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        case _:
            pattern = QWEN_2_SPLIT if pre == "qwen2" else LLAMA_3_SPLIT
            split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
            if pre == "qwen2":
                tokenizer.normalizer = normalizers.NFC()
