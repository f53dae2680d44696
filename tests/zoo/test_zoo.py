"""The proof at load takes the widest mode in which every history is right, no wider and no narrower.

`make all` runs a few, with every mode and every kind of layer; `make zoo` runs all architectures.
"""

import os

import pytest
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.models_page import PAGE, WIDEST, cause_of, line, page
from tests.zoo.survey import survey_all

from stoker_worker.ports.model import WIDEST_FIRST

pytestmark = [pytest.mark.mlx, pytest.mark.scheduled]

ALL = os.environ.get("ZOO") == "all"
SHORT = (
    *("afm7", "deepseek_v3", "gemma2", "gemma3n", "gpt_bigcode", "kimi_linear", "llama", "llama4", "mamba", "plamo2"),
    *("plamo3", "qwen3_next", "recurrent_gemma"),
)
NAMES = tuple(ARCHITECTURES) if ALL else SHORT
ROUNDS_INSIDE = ("deepseek_v41",)
"""To few bits: the proof takes that for a fault in float32."""


@pytest.fixture(scope="module")
def surveyed():
    return survey_all(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_proof_takes_the_widest_mode_that_is_right_and_the_page_has_it(surveyed, name):
    found = surveyed[name]
    assert not found.died
    taken = str(WIDEST_FIRST[-1]) if name in ROUNDS_INSIDE else found.mode
    assert found.proved in {found.mode, taken}, f"the survey: {found.wrong}; the proof: {found.why}"
    assert found.sees_padding, "sequences that see padding are not noticed"
    assert (cause_of(name) is not None) == (found.mode != WIDEST)
    assert line(found) in PAGE.read_text(), "make models"


def test_an_architecture_that_kills_its_process_is_one_line_of_the_survey():
    found = survey_all(["no such architecture", "llama"], processes=1)
    assert found["no such architecture"].died.startswith("exit status 1: ModuleNotFoundError")
    assert found["llama"].mode == WIDEST


@pytest.mark.skipif(not ALL, reason="the page is about all architectures: make zoo")
def test_the_page_of_models_matches_the_survey(surveyed):
    assert PAGE.read_text() == page(surveyed), "make models"
