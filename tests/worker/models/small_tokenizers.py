"""Tokenizers with a few tokens, in the two ways in which models write bytes, behind what guides need of a wrapper."""

from types import SimpleNamespace

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"


class Plain:
    """The part of a `transformers` tokenizer that guides use."""

    def __init__(self, backend):
        self.backend_tokenizer = backend

    def encode(self, text, add_special_tokens):
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids):
        return self.backend_tokenizer.decode(ids, skip_special_tokens=False)

    def __len__(self):
        return self.backend_tokenizer.get_vocab_size()


def byte_level():
    """GPT-2's way, with the first tokens of its trie, and longer ones that cross the borders of JSON."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [('"', ":"), ("{", '"'), ("Ġ", '"'), ('"', ","), ("t", "r"), ("tr", "u"), ("tru", "e"), ("1", "2")]
    words = [*letters, *(first + second for first, second in merges)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend)


def byte_fallback():
    """SentencePiece's way: a space is a letter of its own, and what has no token is written in bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'{}[]":,0123456789abcdetrufalsn', '▁"', '":']
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", '"'), ('"', ":")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrapped(backend)


def _wrapped(backend):
    backend.add_special_tokens([AddedToken(END, special=True), AddedToken("<pad>", special=True)])
    backend.add_tokens([AddedToken(text) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>", "null")])
    tokenizer = Plain(backend)
    return SimpleNamespace(_tokenizer=tokenizer, eos_token_ids={backend.token_to_id(END)})
