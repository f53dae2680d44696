"""The reports have one form, and agree with the results beside them; so does their index."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.experiments.experiments_process import EXPERIMENTS, ExperimentsProcess

pytestmark = pytest.mark.scheduled

REPORTS = sorted(EXPERIMENTS.glob("EXP-*.md"))
RUN = [report for report in REPORTS if (EXPERIMENTS / "results" / f"exp_{report.name[4:7]}_results.json").exists()]
by_name = pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)
each_that_was_run = pytest.mark.parametrize("report", RUN, ids=lambda report: report.stem)


def script_of(report: Path) -> Path:
    (script,) = EXPERIMENTS.glob(f"exp_{number(report)}_*.py")
    return script


def number(report: Path) -> str:
    return report.name[4:7]


@by_name
def test_every_report_has_the_same_sections_in_the_same_order(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = report.read_text()
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from report import SECTIONS  # type: ignore[import-not-found]

    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == SECTIONS
    title, _, summary = text.split("\n")[:3]
    assert re.match(
        rf"# EXP-{number(report)}, .*: (not run yet$|.+ \(\d+ of \d+ targets met; (on|without) .*\)$)", title
    )
    assert summary == "<!-- from results: summary -->"
    *_, last = text.strip().split("\n\n")
    assert last.startswith("To repeat: ")
    assert f"python experiments/{script_of(report).name}" in last


def test_a_report_is_older_if_the_code_that_it_measures_has_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from source import BUT, MEASURED, code, is_of_another_script, is_older  # type: ignore[import-not-found]

    assert set(MEASURED) == {number(report) for report in REPORTS}
    assert all((EXPERIMENTS.parent / path.removeprefix(BUT)).exists() for paths in MEASURED.values() for path in paths)
    log = ["git", "log", "--format=%H", "--", *MEASURED["002"]]
    done = subprocess.run(log, cwd=EXPERIMENTS.parent, capture_output=True, text=True, check=True)
    newest, *_, first = done.stdout.split()
    assert (is_older("002", first), is_older("002", newest)) == (True, False)
    assert is_of_another_script("002", first)
    assert not is_of_another_script("002", "HEAD")
    assert code('"""Words."""\n\nx = 1\n') == code("x = 1  # others\n") != code("x = 2\n")


@each_that_was_run
def test_the_figures_and_the_index_match_the_results(
    experiments: ExperimentsProcess, report: Path, tmp_path: Path
) -> None:
    results = Path("results") / f"exp_{number(report)}_results.json"
    (tmp_path / "results").mkdir()
    shutil.copy(EXPERIMENTS / results, tmp_path / results)
    experiments.run(script_of(report).name, "--render", "--out", str(tmp_path))
    for name in (report.name, "README.md"):
        assert (tmp_path / name).read_text() == (EXPERIMENTS / name).read_text()


@each_that_was_run
def test_the_results_come_from_a_full_run_and_the_verdict_from_its_criteria(report: Path) -> None:
    content = json.loads((EXPERIMENTS / "results" / f"exp_{number(report)}_results.json").read_text())
    assert content["quick"] is False
    passed = content["verdict"].pop("passed")
    assert passed == all(content["verdict"].values())
