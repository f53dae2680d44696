"""The line of rates: once a minute, and only when there was work."""

import logging

from tests.worker.events.test_job_log import RESULT

from stoker_worker.metrics.counting import Metrics
from stoker_worker.metrics.looking import Looking
from stoker_worker.metrics.rates_line import RatesLine


def test_a_minute_with_work_is_one_line_and_one_without_is_none(caplog):
    caplog.set_level(logging.INFO)
    now, metrics = [0.0], Metrics()
    rates = RatesLine(metrics, Looking(), clock=lambda: now[0])

    def minute() -> list[str]:
        caplog.clear()
        for _ in range(4):
            now[0] += 15
            rates.look()
        return list(caplog.messages)

    assert minute() == []
    for _ in range(60):
        metrics.answered(RESULT)
    metrics.failed(ValueError())
    assert minute() == [
        "rates tokens_per_s=0.0 prompt_tokens_per_s=23.0 cached_share=0.3 finished=60 failed=1 in_flight=0"
    ]
    assert minute() == []
