"""The faults of mlx-lm in `docs/upstream.md` exist: each reproduction does what the page shows (`make zoo`)."""

import os
import re
import subprocess
import sys

import pytest
from tests.zoo.causes import CAUSES
from tests.zoo.survey import ROOT

pytestmark = pytest.mark.mlx

PAGE = (ROOT / "docs" / "upstream.md").read_text()
MLX_LM = PAGE[PAGE.index("\n## mlx-lm\n") : PAGE.index("\n## MLX\n")]
FAULTS = re.findall(r"\n### (.*?)\n.*?```python\n(.*?)```\n\n```text\n(.*?)```", MLX_LM, re.DOTALL)
ROUNDING = 1e-4


def shape_of(text):
    """The text with each number replaced by whether it is rounding."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: "0" if float(number[0]) < ROUNDING else "n", text.strip())


def test_causes_point_to_headings():
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"\n### (.*)", PAGE)}
    assert {cause.anchor for cause in CAUSES.values() if cause.anchor} <= headings


@pytest.mark.skipif(os.environ.get("ZOO") != "all", reason="a process for each fault: make zoo")
@pytest.mark.parametrize(("title", "program", "shown"), FAULTS, ids=[title for title, _, _ in FAULTS])
def test_the_reproduction_does_what_the_page_shows(title, program, shown):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()
    if done.returncode and "Traceback" in done.stderr:
        said.append(done.stderr.strip().splitlines()[-1])
    assert shape_of("\n".join(said)) == shape_of(shown)
