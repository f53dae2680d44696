"""The STOKER_* variables: none is missing, and a misspelt name is refused with the nearest one."""

import pytest

from stoker_shared.environment import ENV_PREFIX, VARIABLES, require_known_variables
from stoker_worker.settings import WorkerSettings


def test_the_variables_are_the_fields_of_the_workers_settings():
    assert sorted(VARIABLES) == sorted(ENV_PREFIX + name.upper() for name in WorkerSettings.model_fields)


def test_a_misspelt_variable_is_refused_with_the_nearest_name():
    require_known_variables(dict.fromkeys([*VARIABLES, "PATH", "STOKERS"], "x"))
    with pytest.raises(ValueError, match=r"STOKER_REDIS_ULR \(did you mean STOKER_REDIS_URL\?\)") as refused:
        require_known_variables({"STOKER_REDIS_ULR": "redis://:hunter2@h", "STOKER_MAX_BATCH": "3"})
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ValueError, match=r"environment: STOKER_COLOUR$"):
        require_known_variables({"STOKER_COLOUR": "blue"})
