"""The reason why an architecture does not run in rows, in a few words for `docs/models.md`.

A fault of mlx-lm has a line in `docs/upstream.md`. The survey measures which modes are
wrong; we found the causes by reading mlx-lm. `make zoo` fails if an architecture that does not run in rows is missing
here, and if another one is listed.
"""

from typing import Final, NamedTuple

from tests.zoo.architectures import architecture_of


class Cause(NamedTuple):
    """
    Attributes:
        upstream: mlx-lm is at fault.
    """

    text: str
    upstream: bool = False

    def __str__(self) -> str:
        return f"[{self.text}](upstream.md#mlx-lm)" if self.upstream else self.text


_PADDING: Final = Cause(
    "no full attention; recurrent layers take padding on the right for text",
    upstream=True,
)
_DYNAMIC: Final = Cause("dynamic RoPE takes one offset for all sequences", upstream=True)
_KIND: Final = Cause("mlx-lm has no batch form of its cache", upstream=True)
_OWN: Final = "attention is the model's own code"
_INDEX: Final = Cause("the index of sparse attention reads all keys itself")

CAUSES: Final[dict[str, Cause]] = {
    "afm7": Cause("layers that reuse K/V count positions from the padding", upstream=True),
    "deepseek_v32": _INDEX,
    "deepseek_v41": _KIND,
    "gemma2": Cause(
        f"{_OWN}, and in a batch the mask of a sequence is applied to a head",
        upstream=True,
    ),
    "glm_moe_dsa": _INDEX,
    "gpt_bigcode": Cause("positions are taken from one offset for all sequences", upstream=True),
    "internlm2+dynamic-rope": _DYNAMIC,
    "internlm3+dynamic-rope": _DYNAMIC,
    "llama+dynamic-rope": _DYNAMIC,
    "llama4": _KIND,
    "longcat_flash_ngram": Cause("the last token ids are kept in a dtype that is not stored"),
    "mamba": _PADDING,
    "mamba2": Cause("no full attention"),
    "minimax_m3_vl": Cause("sparse blocks are counted from the padding", upstream=True),
    "phi3small": Cause("attention depends on how the prompt is cut", upstream=True),
    "plamo": Cause("it repeats the keys of all rows itself"),
    "plamo2": Cause("it calls MLX's attention itself"),
    "plamo3": Cause("attention depends on how the prompt is cut", upstream=True),
    "recurrent_gemma": _PADDING,
    "rwkv7": _PADDING,
}


def cause_of(name: str) -> Cause | None:
    """The cause for this config, or for its architecture."""
    return CAUSES.get(name) or CAUSES.get(architecture_of(name))
