"""Names in the Redis of other people: a change of one of them changes the wire format."""

from stoker_shared import wire


def test_the_names_on_the_wire_are_stable():
    assert wire.DEFAULT_QUEUE == "generate"
    assert wire.TASK_PATH == "stoker_shared.task.generate"
    assert wire.REQUEST_KWARG == "request"
    assert wire.META_PARTIAL == "partial"
    assert wire.META_PROGRESS == "progress"
    assert wire.FIELD_STREAM == "stoker_stream"
    assert wire.STREAM_KEY == "stoker:stream:{job_id}"
    assert wire.WORKER_KEY == "stoker:worker:{name}"
    assert wire.FIELD_ATTEMPTS == "stoker_attempts"
    assert wire.FIELD_LOST_ALONE == "stoker_lost_alone"
    assert wire.FIELD_AGENT == "stoker_agent"
    assert wire.LEASE_KEY == "stoker:holder:{member}"
    assert wire.FENCE_KEY == "stoker:fence:{member}"
    assert wire.MEMBERS_KEY == "stoker:members"
    assert wire.SERVED_KEY == "stoker:lease:{queue}"
    assert wire.STORE_KEY == "stoker:store:{queue}"
    assert wire.HELD_KEY == "stoker:held:{queue}"
    assert wire.LAST_KEY == "stoker:last:{queue}"
    assert wire.TAKEN_KEY == "stoker:taken:{queue}"
    assert wire.COUNTS_KEY == "stoker:counts:{queue}"
