"""The server fixture itself."""

import pytest
from tests.server_fixture import require_server_program

from stoker_worker.embedded_redis import server_files as server_program


def test_a_missing_server_skips_on_a_laptop_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_program, "_programs", lambda: iter(()))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        require_server_program()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception):
        require_server_program()
