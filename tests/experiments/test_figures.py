"""The figures of a machine: parts that fail or take too long cost only themselves, and the pages have the figures."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from tests.experiments.experiments_process import EXPERIMENTS
from tests.worker.test_service import Managed, managed  # noqa: F401

from stoker_worker.cli.main import main

ROOT = EXPERIMENTS.parent


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import figures  # type: ignore[import-not-found]

    return figures


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import figures_page  # type: ignore[import-not-found]

    return figures_page


PLAYED = """
import os, time
def fine(bench, folder):
    yield {"what": "first", "ratio": {"median": 2.0, "min": 1.5, "max": 3.0, "n": 3, "samples": [2.0, 1.5, 3.0]}}
def raises(bench, folder):
    yield {"what": "before the error", "equal": False}
    raise RuntimeError("no such kernel")
def aborts(bench, folder):
    os.abort()
def slow(bench, folder):
    try:
        time.sleep(600)
        yield {}
    finally:
        open(f"{os.path.dirname(__file__)}/closed", "w").close()
"""


def figures_of(kit: ModuleType, parts: list[str], out: Path, minutes: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The results of a run of played parts, the text of its page, and whether all is well."""
    (out / "played.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", str(out))
    played = tuple(kit.Part(name, f"a part that is {name}", "played", name, loads_model=False) for name in parts)
    monkeypatch.setattr(kit, "PARTS", played)
    page, is_well = kit.run(out / "run", kit.Options(minutes, "owner/model", None))
    return json.loads(page.with_suffix(".json").read_text()), page.read_text(), is_well


@pytest.mark.mlx
def test_a_part_that_raises_or_dies_is_named_and_the_others_go_on(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, page, is_well = figures_of(kit, ["raises", "aborts", "fine"], tmp_path, 30, monkeypatch)
    raised, aborted, fine = content["parts"]
    assert [part["status"] for part in content["parts"]] == ["failed", "failed", "done"]
    assert not is_well
    assert (raised["error"], raised["rows"][0]["what"]) == ("RuntimeError: no such kernel", "before the error")
    assert "ended with -6" in aborted["error"]
    assert fine["rows"][0]["ratio"]["samples"] == [2.0, 1.5, 3.0]
    assert set(content["source"]) == {"commit", "dirty"}
    assert content["machine"]["device"]
    assert "no such kernel" in page
    assert "| fine | first | 2 (1.5 to 3) | 3 |" in page
    assert "0 of 1 comparisons are exact. Not exact: before the error." in page


@pytest.mark.mlx
def test_the_clock_ends_a_part_and_what_did_not_run_is_named(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "SURE_S", 0.0)
    monkeypatch.setattr(kit, "LEAST_S", 3.5)  # half of the clock is less
    content, page, is_well = figures_of(kit, ["slow", "fine"], tmp_path, 0.11, monkeypatch)
    assert [part["status"] for part in content["parts"]] == ["stopped", "not run"]
    assert is_well
    assert "a part that is fine | not run" in page
    assert (tmp_path / "closed").exists(), "a part that is ended closes what it opened"


@pytest.mark.parametrize("managed", ["Darwin"], indirect=True)
def test_launchd_loads_the_unit_and_nothing_of_it_stays(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Played: there is no launchd here."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from machine_checks import launchd  # type: ignore[import-not-found]

    assert launchd(managed.home)["equal"]
    assert [call.split()[0] for call in managed.calls()] == ["enable", "bootstrap", "bootout"]
    assert not list(managed.home.rglob("*.plist"))


def test_every_part_has_its_function(kit: ModuleType) -> None:
    texts = {part: (EXPERIMENTS / f"{part.module}.py").read_text() for part in kit.PARTS}
    assert not [part.name for part, text in texts.items() if f"\ndef {part.function}(" not in text]
    assert {part.name for part in kit.Options(1, "m", None).parts()}.isdisjoint({"wired", "sleep"})


# --- the pages ---


def test_the_committed_pages_have_the_committed_figures(pages: ModuleType) -> None:
    written = dict(pages.written(ROOT, pages.all_figures(), EXPERIMENTS / "results"))
    assert not [path for path, text in written.items() if path.read_text() != text]
    workers = json.loads((EXPERIMENTS / "results" / "exp_025_results.json").read_text())
    least = min(one["speed"]["median"] for one in workers["jobs"])
    assert f"at least {least} times the jobs of one\n" in (ROOT / "README.md").read_text()


def made_up(**facts: Any) -> dict[str, Any]:
    spread = {"median": 1.23, "min": 1.2, "max": 1.3, "n": 5, "samples": [1.23, 1.2, 1.3, 1.25, 1.21]}
    row = {"what": "engine / bare", "ratio": spread, "first": spread, "second": spread, "unit": "tokens/s",
           "equal": True, "headline": "full batch"}  # fmt: skip
    machine = {"device": "Apple M9", "cpu": "Apple M9", "cores": 10, "ram_gb": 64, "os": "macOS 27.0 arm64",
               "model": "Some-Model", "dtype": "auto", "cache_dtype": "bfloat16", "cache_bytes_per_token": 9,
               "load_average_at_start": 0.1, **facts}  # fmt: skip
    part = {"name": "010", "title": "throughput", "status": "done", "error": "", "s": 9, "rows": [row]}
    return {"date": "2027-01-02", "quick": True, "stoker": "1", "options": {"note": ""}, "machine": machine,
            "thermal": {"before": ["nominal"], "after": []}, "wall_s": 9, "parts": [part]}  # fmt: skip


def test_the_readme_shows_the_newest_mac_that_is_no_virtual_machine(pages: ModuleType) -> None:
    results = EXPERIMENTS / "results"
    linux, virtual, mac = made_up(os="Linux"), made_up(virtual=True), made_up()
    assert "two Linux CPU cores" in pages.measured({"a": linux, "b": virtual}, results)
    shown = pages.measured({"a": linux, "b": virtual, "2027-01-02-m9": mac}, results)
    assert shown.startswith("Some-Model in auto on Apple M9, 64 GB (2027-01-02, [all figures](docs/figures/2027-01")
    assert "tokens per second of a full batch" in shown
    assert "1.23 (1.2 to 1.3), exact: yes" in shown
    assert "[Apple M9, 10 cores, 64 GB, virtual](b.md) | macOS 27.0 arm64 | Some-Model, auto | 1.23 (1.2 to 1.3)" in (
        pages.machines({"b": virtual})
    )
    assert "This is a virtual machine" in pages.page(virtual)
    assert "do not trust" in pages.page(made_up(load_average_at_start=11.0))
    assert "do not trust" not in pages.page(mac)
    assert pages.name_of(mac) == "2027-01-02-apple-m9-some-model"


@pytest.mark.parametrize("part", ["wired", "no such part"])
def test_a_part_that_only_its_own_option_names_is_refused_as_another(tmp_path: Path, part: str) -> None:
    found = CliRunner().invoke(main, ["figures", "--only", part, "--out", str(tmp_path)])
    assert (found.exit_code, "no such part" in found.output) == (2, True)
