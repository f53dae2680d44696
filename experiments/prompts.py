"""The prompts of EXP-003 and EXP-004: the seed documents' own and twelve others. Owns texts and their lengths; no MLX.

After their first sentences, texts continue with their own words in a shuffled order (seeded): a model continues
repeated text by copying, and two wrong caches would then agree by chance.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

SEED_PROMPTS: Final = (
    "The quick brown fox jumps over the lazy",
    "The quick brown fox",
    "The capital of France is",
    "Machine learning is",
    "Python programming language",
    "Hello world",
    "Once upon a time",
)
"""As the seed documents give them: EXP-003's report and plan first, then EXP-004's."""

_TEXTS: Final[dict[str, str]] = json.loads(Path(__file__).with_name("prompt_texts.json").read_text(encoding="utf-8"))

_OTHERS: Final = (
    *(("emoji", 7), ("Japanese", 32), ("Chinese", 48), ("Arabic", 64), ("Python", 243), ("English", 244)),
    *(("German", 245), ("French", 255), ("Russian", 256), ("Spanish", 257), ("JSON", 258), ("Hindi", 500)),
)
"""Twelve generated tokens take 243, 244, 245 and 500 to 255, 256, 257 and 512."""

DELTAS: Final = (
    " And then",
    "\n\nLet us look at it from the other side: what would have happened if nobody had come at all?",
    "。",
    " 1",
    "\n    return None\n\n\ndef test_",
    " Aber warum?",
)
"""What the next turn adds, one after the other; from one token to a sentence."""


SIX_KINDS: Final = ("English", "German", "French", "Spanish", "Python", "Portuguese")
"""Texts of which every experiment with many sequences takes some."""


def seed_prompts() -> dict[str, str]:
    """By name."""
    return {f"seed {n}": text for n, text in enumerate(SEED_PROMPTS, start=1)}


def other_prompts(encode: Callable[[str], list[int]]) -> dict[str, str]:
    """Twelve prompts of 7 to 500 tokens, as `encode` counts them, by name."""
    return {f"{kind} {n}": text_of(encode, kind, n) for kind, n in _OTHERS}


def text_of(encode: Callable[[str], list[int]], kind: str, n_tokens: int, *, seed: int | None = None) -> str:
    """The longest beginning of a text with at most `n_tokens` tokens; exact where no character is two tokens.

    Each length is a text of its own; with the `seed` of a shorter text, it is that text's continuation.
    """
    base = _TEXTS[kind]
    text, shuffled = base, random.Random(n_tokens if seed is None else seed)
    pieces = base.split(" ") if " " in base else list(base)
    while len(encode(text)) <= n_tokens:
        shuffled.shuffle(pieces)
        text += (" " if " " in base else "").join(pieces)
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(text[:middle])) <= n_tokens else (low, middle - 1)
    return text[:low]
