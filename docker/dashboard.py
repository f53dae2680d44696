"""rq-dashboard, told to read every job as JSON. Owns that one setting; all options are rq-dashboard's own.

Its ``--json`` reaches the job pages but not the workers page, which unpickles what running jobs hold and fails. With
RQ's default serializer replaced before anything reads it, no page ever unpickles, whatever stands in Redis.
"""

import rq.serializers
from rq.serializers import JSONSerializer

if __name__ == "__main__":
    rq.serializers.PickleSerializer = JSONSerializer  # type: ignore[misc, assignment]
    rq.serializers.DefaultSerializer = JSONSerializer  # type: ignore[misc, assignment]

    from rq_dashboard.cli import main

    main()
