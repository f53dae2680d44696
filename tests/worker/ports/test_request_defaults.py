"""The worker's own sampling defaults: what they fill in, and what is refused at start."""

import pytest

from stoker_shared.errors import InvalidRequest
from stoker_shared.request import build_request
from stoker_worker.ports.model import RequestDefaults
from stoker_worker.settings import read_settings

DEFAULTS = RequestDefaults.parsed("temperature=0.7, max_tokens=40,top_k=5")


def test_only_what_the_request_does_not_set_is_filled_in():
    sent = build_request({"prompt": "x", "temperature": 0.0, "top_k": None, "top_p": 0.5}).as_payload()
    filled = DEFAULTS.filled_in(build_request(sent))
    assert (filled.temperature, filled.max_tokens, filled.top_k, filled.top_p) == (0.0, 40, 5, 0.5)


def test_a_default_that_cuts_off_before_min_tokens_fails_the_job_by_name():
    with pytest.raises(InvalidRequest, match=r"'min_tokens' is above .* 40"):
        DEFAULTS.filled_in(build_request({"prompt": "x", "min_tokens": 41}))
    assert DEFAULTS.filled_in(build_request({"prompt": "x", "min_tokens": 41, "max_tokens": 50})).max_tokens == 50


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature=1", "'temprature' has no default here, only frequency_penalty, max_tokens"),
        ("seed=1", "'seed' has no default"),
        ("top_k", "KEY=VALUE"),
        ("top_k=1,top_k=2", "each key once"),
        ("top_k=many", "top_k needs a number"),
        ("top_k=true", "top_k needs a number"),
        ("top_k=1.5", "top_k"),
        ("temperature=11", "temperature"),
        ("temperature=NaN", "temperature"),
        ("max_tokens=0", "max_tokens"),
    ],
)
def test_a_default_that_no_request_could_have_is_refused_at_start(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        read_settings({"defaults": text})
