"""The reason why an architecture is not batched: a section of `docs/upstream.md` and a few words for `docs/models.md`.

The survey measures which are wrong; we found the causes by reading mlx-lm. `make zoo` fails if an architecture that is
not batched is missing here, and if a batched one is listed.
"""

from typing import Final, NamedTuple

from tests.zoo.architectures import architecture_of


class Cause(NamedTuple):
    """
    Attributes:
        anchor: the anchor of a heading in `docs/upstream.md`.
    """

    text: str
    anchor: str


_PADDING: Final = Cause(
    "recurrent layers take padding on the right for text", "recurrent-layers-take-right-padding-for-text"
)
_DYNAMIC: Final = Cause("dynamic RoPE takes one offset for all sequences", "dynamic-rope-raises-in-a-batch")
_KIND: Final = Cause("mlx-lm has no batch form of its cache", "caches-without-a-batch-form")

CAUSES: Final[dict[str, Cause]] = {
    "afm7": Cause("layers that reuse K/V count positions from the padding", "afm-7-counts-positions-from-the-padding"),
    "baichuan_m1": _PADDING,
    "bailing_moe_linear": _PADDING,
    "deepseek_v41": _KIND,
    "gemma2": Cause(
        "the mask of a sequence is applied to a head", "gemma-2-and-phi-3-small-broadcast-the-mask-over-heads"
    ),
    "gpt_bigcode": Cause("positions are taken from one offset for all sequences", "gpt_bigcode-raises-in-a-batch"),
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
    "phi3small": Cause("attention depends on how the prompt is cut", "phi-3-small-depends-on-how-the-prompt-is-cut"),
    "plamo3": Cause("attention depends on how the prompt is cut", "plamo-3-depends-on-how-the-prompt-is-cut"),
    "recurrent_gemma": _PADDING,
    "rwkv7": _PADDING,
}


def cause_of(name: str) -> Cause | None:
    """The cause for this config, or for its architecture."""
    return CAUSES.get(name) or CAUSES.get(architecture_of(name))
