"""The doctor's checks of the machine, and that no check crashes the command."""

import pytest

from stoker_worker.doctor import device, system
from stoker_worker.doctor.check import Check, Status


def test_a_check_that_raises_is_a_failure_of_one_line() -> None:
    def look() -> None:
        raise RuntimeError("two\nlines")

    found = Check("it", look).made()  # type: ignore[arg-type]
    assert (found.status, found.line) == (Status.FAIL, "RuntimeError: two lines")
    assert found.advice


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (" sleep                1", Status.WARN),
        (" sleep                10 (sleep prevented by caffeinate)", Status.OK),
        (" sleep                0", Status.OK),
    ],
)
def test_a_mac_that_will_sleep_is_noticed(line: str, status: Status) -> None:
    pmset = (
        f"System-wide power settings:\nCurrently in use:\n standby              1\n{line}\n displaysleep         5\n"
    )
    assert system.sleep_in(pmset).status == status


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_PACKAGES", ("rq", "no-such-package-of-stoker"))
    found = system.packages()
    assert found.status == Status.FAIL
    assert found.line == "not installed: no-such-package-of-stoker"
    assert list(found.figures["versions"]) == ["rq"]


@pytest.mark.mlx
def test_a_macs_memory_for_models_is_that_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played: there is no Metal here. The names are those that mlx-lm reads there."""
    import mlx.core as mx

    info = {"device_name": "Apple M2", "memory_size": 24 * 2**30, "max_recommended_working_set_size": 16 * 2**30}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(device, "is_metal", lambda: True)
    monkeypatch.setattr(device, "_wired_limit_mb", lambda: 20000)
    assert device.device().line == "Metal: Apple M2"
    assert device.wired_memory().line == "16.0 of 24.0 GB for the GPU (set to 20000 MB)"
    assert device.memory_for_models() == 16 * 2**30
