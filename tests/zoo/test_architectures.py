"""The list of architectures matches the installed mlx-lm, so that an upgrade of mlx-lm fails here."""

import pytest
from tests.zoo.architectures import ARCHITECTURES, NOT_BUILT, architecture_of, installed

pytestmark = pytest.mark.mlx


def test_every_architecture_of_mlx_lm_is_listed_or_excepted():
    built = {architecture_of(name) for name in ARCHITECTURES}
    assert not built & set(NOT_BUILT)
    assert built | set(NOT_BUILT) == installed()
