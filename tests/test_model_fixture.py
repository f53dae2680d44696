"""The SmolLM2 fixture itself."""

import os
import shutil
from pathlib import Path

import pytest
from tests import model_fixture

from stoker_shared.errors import ModelNotLoadable


def test_a_missing_wheel_skips_on_a_laptop_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fixture.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        model_fixture.smollm2_gguf()
    monkeypatch.setitem(os.environ, "CI", "true")
    with pytest.raises(pytest.fail.Exception):
        model_fixture.smollm2_gguf()


@pytest.mark.model
def test_a_process_that_converts_too_late_uses_the_first_ones_folder(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_one_wins(source: Path, folder: Path) -> None:
        shutil.copytree(smollm2, folder)
        raise ModelNotLoadable("folder exists and is not empty")

    monkeypatch.setattr(model_fixture, "CHECKOUT", tmp_path)
    monkeypatch.setattr(model_fixture.importer, "import_gguf", first_one_wins)
    assert (model_fixture.smollm2_folder() / "config.json").is_file()
