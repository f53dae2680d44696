"""Writes `docs/models.md` from a survey of all architectures: `python -m tests.zoo.models_page`.

Owns the reason why an architecture does not run in rows, in a few words. We found the causes by reading mlx-lm; a fault
of mlx-lm has a line in `docs/upstream.md`. `make zoo` fails if an architecture that does not run in rows is missing in
`CAUSES`, and if another one is listed.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Final, NamedTuple

from tests.zoo.architectures import ARCHITECTURES, NOT_BUILT, architecture_of
from tests.zoo.survey import ROOT, Surveyed, survey_all

from stoker_worker.ports.model import WIDEST as WIDEST_MODE


class Cause(NamedTuple):
    """
    Attributes:
        upstream: mlx-lm is at fault.
    """

    text: str
    upstream: bool = False

    def __str__(self) -> str:
        return f"[{self.text}](upstream.md#mlx-lm)" if self.upstream else self.text


_PADDING: Final = Cause("no full attention; recurrent layers take padding on the right for text", upstream=True)
_DYNAMIC: Final = Cause("dynamic RoPE takes one offset for all sequences", upstream=True)
_KIND: Final = Cause("mlx-lm has no batch form of its cache", upstream=True)
_OWN: Final = "attention is the model's own code"
_INDEX: Final = Cause("the index of sparse attention reads all keys itself")

CAUSES: Final[dict[str, Cause]] = {
    "afm7": Cause("layers that reuse K/V count positions from the padding", upstream=True),
    "deepseek_v32": _INDEX,
    "deepseek_v41": _KIND,
    "gemma2": Cause(f"{_OWN}, and in a batch the mask of a sequence is applied to a head", upstream=True),
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


WIDEST: Final = str(WIDEST_MODE)
PAGE: Final = ROOT / "docs" / "models.md"

_HEAD: Final = """\
# Models

This page lists how each architecture of mlx-lm {mlx_lm} (mlx {mlx}) is served. `make models` writes it from a survey:
a tiny model of every architecture, with random weights in float32, runs through the engine on a CPU in each mode, the
widest first, and is compared with `mlx_lm`'s own single, uncached runs. The sequences have unequal lengths, join
others, cross windows and sparse budgets, are prefilled in chunks of several sizes, and take a second turn on restored
caches. `make zoo` repeats the survey, and fails if the survey, this page and the worker's own proof at load disagree;
only for `deepseek_v41`, which rounds keys to few bits, may the proof choose a narrower mode.

The worker does not read this list. It [proves each model at load](adr/0041-a-model-is-batched.md), so it also serves
a model that is not listed, or that a new release of mlx-lm has mended or broken, in the mode that is right for it.

In rows, every sequence has a cache of its own for full attention. Batched means mlx-lm's own batch, which is padded to
one rectangle. `--kv-bits 8` needs a model that runs in rows ([running.md](running.md#memory-and-speed)).

{counts}
"""

_TABLE: Final = """
| architecture | layers | mode | reason |
|---|---|---|---|
"""

_NOT_BUILT: Final = """
## Not tried

| architecture | reason |
|---|---|
"""


def page(surveyed: Mapping[str, Surveyed]) -> str:
    in_rows = sorted(name for name, one in surveyed.items() if one.mode == WIDEST)
    narrower = sorted(set(surveyed) - set(in_rows))
    n_architectures = len({architecture_of(name) for name in surveyed})
    n_batched = sum(one.mode == "batched" for one in surveyed.values())
    counts = (
        f"{n_architectures} architectures in {len(surveyed)} forms: {len(in_rows)} run in rows, {n_batched} are "
        f"batched by mlx-lm, {len(narrower) - n_batched} are served in a narrower mode, and {len(NOT_BUILT)} more "
        "could not be tried."
    )
    text = _HEAD.format(mlx_lm=version("mlx-lm"), mlx=version("mlx"), counts=fill(counts, 120))
    text += "\n## Narrower than in rows\n" + _TABLE + "".join(_narrower(surveyed[name]) for name in narrower)
    text += "\n## In rows\n" + "\n| architecture | layers |\n|---|---|\n"
    text += "".join(_in_rows(surveyed[name]) for name in in_rows)
    return text + _NOT_BUILT + "".join(f"| {name} | {reason} |\n" for name, reason in sorted(NOT_BUILT.items()))


def line(one: Surveyed) -> str:
    """The line of the page about an architecture."""
    return _in_rows(one) if one.mode == WIDEST else _narrower(one)


def _in_rows(one: Surveyed) -> str:
    return f"| {_title(one.name)} | {', '.join(one.layers)} |\n"


def _narrower(one: Surveyed) -> str:
    cause = cause_of(one.name)
    return f"| {_title(one.name)} | {', '.join(one.layers)} | {one.mode} | {cause or 'not known'} |\n"


def _title(name: str) -> str:
    architecture, _, variant = name.partition("+")
    return f"{architecture}, {variant.replace('-', ' ')}" if variant else architecture


def main() -> None:
    Path(PAGE).write_text(page(survey_all(list(ARCHITECTURES))))


if __name__ == "__main__":
    main()
