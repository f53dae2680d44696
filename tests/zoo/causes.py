"""The reason why an architecture does not run in rows, in a few words for `docs/models.md`.

Where it is a fault of mlx-lm, the reason points to a section of `docs/upstream.md`. The survey measures which modes are
wrong; we found the causes by reading mlx-lm. `make zoo` fails if an architecture that does not run in rows is missing
here, and if another one is listed.
"""

from typing import Final, NamedTuple

from tests.zoo.architectures import architecture_of


class Cause(NamedTuple):
    """
    Attributes:
        anchor: the anchor of a heading in `docs/upstream.md`; empty where mlx-lm is not at fault.
    """

    text: str
    anchor: str = ""

    def __str__(self) -> str:
        return f"[{self.text}](upstream.md#{self.anchor})" if self.anchor else self.text


_PADDING: Final = Cause(
    "no full attention; recurrent layers take padding on the right for text",
    "recurrent-layers-take-right-padding-for-text",
)
_DYNAMIC: Final = Cause("dynamic RoPE takes one offset for all sequences", "dynamic-rope-raises-in-a-batch")
_KIND: Final = Cause("mlx-lm has no batch form of its cache", "caches-without-a-batch-form")
_OWN: Final = "attention is the model's own code"
_INDEX: Final = Cause("the index of sparse attention reads all keys itself")

CAUSES: Final[dict[str, Cause]] = {
    "afm7": Cause("layers that reuse K/V count positions from the padding", "afm-7-counts-positions-from-the-padding"),
    "deepseek_v32": _INDEX,
    "deepseek_v41": _KIND,
    "gemma2": Cause(
        f"{_OWN}, and in a batch the mask of a sequence is applied to a head",
        "gemma-2-and-phi-3-small-broadcast-the-mask-over-heads",
    ),
    "glm_moe_dsa": _INDEX,
    "gpt_bigcode": Cause("positions are taken from one offset for all sequences", "gpt_bigcode-raises-in-a-batch"),
    "internlm2+dynamic-rope": _DYNAMIC,
    "internlm3+dynamic-rope": _DYNAMIC,
    "llama+dynamic-rope": _DYNAMIC,
    "llama4": _KIND,
    "longcat_flash_ngram": Cause("the last token ids are kept in a dtype that is not stored"),
    "mamba": _PADDING,
    "mamba2": Cause("no full attention"),
    "minimax_m3_vl": Cause(
        "sparse blocks are counted from the padding", "minimax-m3-counts-sparse-blocks-from-the-padding"
    ),
    "phi3small": Cause("attention depends on how the prompt is cut", "phi-3-small-depends-on-how-the-prompt-is-cut"),
    "plamo": Cause("it repeats the keys of all rows itself"),
    "plamo2": Cause("it calls MLX's attention itself"),
    "plamo3": Cause("attention depends on how the prompt is cut", "plamo-3-depends-on-how-the-prompt-is-cut"),
    "recurrent_gemma": _PADDING,
    "rwkv7": _PADDING,
}


def cause_of(name: str) -> Cause | None:
    """The cause for this config, or for its architecture."""
    return CAUSES.get(name) or CAUSES.get(architecture_of(name))
