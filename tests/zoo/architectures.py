"""Every architecture of the installed mlx-lm: a tiny config for each, or the reason why it has none.

Owns the list and the weights; `configs.py` has the configs. A name with a `+` is another config of the architecture
before it.
"""

import re
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.zoo.configs import COMMON, EXPERT, PLAIN, RECURRENT, WINDOWED, Config

ARCHITECTURES: Final[dict[str, Config]] = dict(sorted({**PLAIN, **EXPERT, **WINDOWED, **RECURRENT}.items()))

NOT_BUILT: Final[dict[str, str]] = {
    "bitnet": "its linear layers are Metal kernels",
    "muse_spark": "its attention is a Metal kernel",
    "olmo": "its module ends the process unless ai2-olmo is installed",
}


_MODEL: Final = re.compile(r"^class Model\(|^from .* import .*\bModel\b", re.MULTILINE)


_DECAYS: Final = ("A_log", "dt_bias", "recurrent_param", "w_lora.lora.2.bias")
"""Small weights make states that forget slowly, so that a wrong state is still wrong many tokens later."""


def architecture_of(name: str) -> str:
    return name.partition("+")[0]


def installed() -> set[str]:
    """The modules of mlx-lm that have a model, found by reading the files: importing one of them ends the process."""
    import mlx_lm.models

    sources = {path.stem: path.read_text() for path in Path(mlx_lm.models.__path__[0]).glob("*.py")}
    return {name for name, source in sources.items() if _MODEL.search(source) and "\nclass ModelArgs" in source}


def config_of(name: str) -> Config:
    return {**COMMON, "model_type": architecture_of(name), **ARCHITECTURES[name]}


def make_model(name: str, seed: int = 0) -> Any:
    """A float32 model with random weights, large enough that its answers depend on the whole prompt."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    module = import_module(f"mlx_lm.models.{architecture_of(name)}")
    mx.random.seed(seed + zlib.crc32(name.encode()))
    model = module.Model(module.ModelArgs.from_dict(config_of(name)))
    model.set_dtype(mx.float32)
    model.update(tree_map_with_path(_weight, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _weight(path: str, made: Any) -> Any:
    """A weight in place of mlx-lm's own: some of those are zeros, and most are too small to matter."""
    import mlx.core as mx

    if not mx.issubdtype(made.dtype, mx.floating):  # packed weights
        return mx.random.randint(0, 2**31 - 1, made.shape).astype(made.dtype)
    noise = mx.random.normal(made.shape)
    if path.endswith(_DECAYS):
        return 0.5 * noise - 3.0
    if made.ndim < 2:
        return made + 0.1 * noise
    if "embed" in path:
        return noise
    fan_in = made.shape[-1] if made.shape[-1] > 1 else made[0].size
    return noise * (1.5 / fan_in**0.5)
