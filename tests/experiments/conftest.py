"""One process for all experiments of a run: MLX is imported and the model loaded once."""

from collections.abc import Iterator

import pytest
from tests.experiments.experiments_process import ExperimentsProcess


@pytest.fixture(scope="package")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExperimentsProcess]:
    process = ExperimentsProcess(tmp_path_factory.mktemp("experiments") / "log")
    yield process
    process.close()
