"""Why an architecture is not batched: where `docs/upstream.md` tells of it, and in a few words for `docs/models.md`.

What is wrong is measured by the survey; the causes were found by reading mlx-lm. An architecture that is not batched
and is missing here fails `make zoo`, as does one that is here and is batched.
"""

from typing import Final, NamedTuple

from tests.zoo.architectures import architecture_of


class Cause(NamedTuple):
    """
    Attributes:
        anchor: of the heading in `docs/upstream.md`.
    """

    text: str
    anchor: str


_PADDING: Final = Cause(
    "recurrent layers take padding on the right for text", "recurrent-layers-take-right-padding-for-text"
)
_DYNAMIC: Final = Cause("dynamic RoPE takes one offset for all rows", "dynamic-rope-raises-in-a-batch")
_KIND: Final = Cause("mlx-lm has no batch form of its cache", "caches-without-a-batch-form")

CAUSES: Final[dict[str, Cause]] = {
    "afm7": Cause("layers that reuse K/V count positions from the padding", "afm-7-counts-positions-from-the-padding"),
    "baichuan_m1": _PADDING,
    "bailing_moe_linear": _PADDING,
    "deepseek_v41": _KIND,
    "gemma2": Cause("the mask of a row lands on a head", "gemma-2-and-phi-3-small-broadcast-the-mask-over-heads"),
    "gpt_bigcode": Cause("positions are taken from one offset for all rows", "gpt_bigcode-raises-in-a-batch"),
    "internlm2+dynamic-rope": _DYNAMIC,
    "internlm3+dynamic-rope": _DYNAMIC,
    "jamba": _PADDING,
    "llama+dynamic-rope": _DYNAMIC,
    "llama4": _KIND,
    "longcat_flash_ngram": _PADDING,
    "mamba": _PADDING,
    "minimax_m3_vl": Cause(
        "sparse blocks are counted from the padding", "minimax-m3-counts-sparse-blocks-from-the-padding"
    ),
    "nemotron_h": _PADDING,
    "olmo_hybrid": _PADDING,
    "phi3small": Cause(
        "what a token attends to depends on how the prompt is cut", "phi-3-small-depends-on-how-the-prompt-is-cut"
    ),
    "plamo3": Cause(
        "what a token attends to depends on how the prompt is cut", "plamo-3-depends-on-how-the-prompt-is-cut"
    ),
    "recurrent_gemma": _PADDING,
    "rwkv7": _PADDING,
}


def cause_of(name: str) -> Cause | None:
    """That of this very config, or of its architecture."""
    return CAUSES.get(name) or CAUSES.get(architecture_of(name))
