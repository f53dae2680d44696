"""Keeps RQ and rq-dashboard from loading pickles. Owns the serializers of this process."""

import rq.serializers
from rq.serializers import JSONSerializer
from rq_dashboard import web


def never_unpickle() -> None:
    """Make JSON the serializer wherever RQ would choose pickle; anybody who can write to Redis could run code here.

    Since 0.3.5, rq-dashboard lists workers with RQ's default serializer. Its option ``--json``, there since 0.6.7.2,
    does not reach that page, nor those that show, delete and requeue a job.
    """
    rq.serializers.PickleSerializer = JSONSerializer  # type: ignore[assignment]
    rq.serializers.SERIALIZER_ALIASES["pickle"] = JSONSerializer
    web.config.serializer = JSONSerializer
