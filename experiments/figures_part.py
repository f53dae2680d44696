"""One part of the figures, in a process of its own: its rows go into a JSON file, which is whole after each of them.

Called by `figures.py` with what to run, as JSON, and the file. Its main thread owns MLX.
"""

import json
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from command import as_text
from common import Json, machine

from stoker_shared.durable_file import replace_file
from stoker_worker.models.blas import preload_blas

DEMO = "SmolLM2-135M-Instruct"


def main(asked: Json, file: Path) -> None:
    found: Json = {"rows": [], "error": ""}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and what is open is closed
    folder = Path(asked["folder"]) / "work"
    folder.mkdir()
    try:
        bench = _bench(asked)
        found["machine"] = machine(bench.facts) | {"dtype": bench.dtype}
        for row in getattr(import_module(asked["module"]), asked["function"])(bench, folder):
            found["rows"].append(row)
            replace_file(file, as_text(found).encode())
    except Exception:
        traceback.print_exc()
        found["error"] = traceback.format_exc(limit=-2).strip().splitlines()[-1]
    replace_file(file, as_text(found).encode())


def _bench(asked: Json) -> Any:
    """The loaded model, or only its name and dtype."""
    preload_blas()
    import mlx.core as mx

    dtype = asked["dtype"]
    if dtype is None:
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        dtype = "auto" if on_gpu and not asked["model"].endswith(DEMO) else "float32"
    if not asked["loads_model"]:
        return SimpleNamespace(source=asked["model"], dtype=dtype, facts={})
    from bench import Bench

    return Bench.load(asked["model"], dtype)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
