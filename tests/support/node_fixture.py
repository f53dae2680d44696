"""A folder for Node with docs/examples/producer.mjs and ioredis in it; skips where they are not available."""

import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "producer.mjs"


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(EXAMPLE, folder)
    install = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), "ioredis@>=5.4 <7"]
    try:
        subprocess.run(install, check=True, capture_output=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"ioredis cannot be installed: {error}")
    return folder
