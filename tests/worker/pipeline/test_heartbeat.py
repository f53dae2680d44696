"""The heartbeat knows for how long Redis is away, and for how long it was, over all outages."""

from tests.support.in_memory.queue import InMemoryQueue
from tests.support.wait import wait_for

from stoker_worker.pipeline.heartbeat import Heartbeat


def test_outages_add_up_and_end():
    queue = InMemoryQueue()
    heartbeat = Heartbeat(queue, period_s=0.002)
    heartbeat.start()
    seen = 0.0
    for _ in range(2):
        queue.away = True
        wait_for(lambda: heartbeat.redis_away_s() > 0.02)
        assert heartbeat.redis_away_total_s() >= seen + 0.02
        queue.away = False
        wait_for(lambda: heartbeat.redis_away_s() == 0)
        seen = heartbeat.redis_away_total_s()
        assert seen == heartbeat.redis_away_total_s()
    assert seen > 0.04
    heartbeat.finish()
    heartbeat.join()
