"""The text of jobs as it is generated: a Redis stream for each job whose text is read along.

Owns these streams; costs nothing for all other jobs. A stream is a convenience: readers take the answer itself from the
job's result, so nothing here is tried again. Fetcher thread; finisher threads write the end.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from stoker_shared.wire import STREAM_KEY
from stoker_worker.ports import TextSoFar
from stoker_worker.queue.json_job import JobRun
from stoker_worker.queue.transient_errors import may_pass

log = logging.getLogger(__name__)

TTL_S: Final = 3600
"""How long a stream outlives its last entry, if its worker dies."""

ENDED_TTL_S: Final = 60
MAX_TEXT_BYTES: Final = 2**20
"""A longer text is not streamed to its end: the rest comes with the result. The stream takes twice that at most."""

MAX_ENTRIES: Final = 256
_LEAST_WHOLE_BYTES: Final = 4096

# The execution is gone once the job has ended or was taken away: such a run writes nothing any more. An entry of kind
# `more` continues earlier entries, and is of no use without them.
_TELL: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if ARGV[3] == 'whole' then
  redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'run', ARGV[2], 'kind', ARGV[3], 'text', ARGV[4],
    'markers', ARGV[5])
else
  if redis.call('EXISTS', KEYS[2]) == 0 then return -1 end
  redis.call('XADD', KEYS[2], '*', 'run', ARGV[2], 'kind', ARGV[3], 'text', ARGV[4])
end
redis.call('EXPIRE', KEYS[2], ARGV[1])
return 1
"""


@dataclass
class _Stream:
    """The contents of one stream.

    Attributes:
        told: characters that it holds; -1 while it is not begun, or its contents are in doubt.
        whole_bytes: size of its first entry, the only one with all text up to there.
        is_refused: the server takes nothing for this key, which may hold something else.
    """

    run: JobRun
    told: int = -1
    whole_bytes: int = 0
    more_bytes: int = 0
    entries: int = 0
    is_refused: bool = False

    def next_entry(self, text: str) -> tuple[str, str] | None:
        """Kind and text; ``None`` when there is nothing new.

        The whole text is written again only after as much was added to it, or after very many entries.
        """
        if self.told < 0:
            return "whole", text
        if len(text) <= self.told:
            return None
        if self.more_bytes > max(_LEAST_WHOLE_BYTES, self.whole_bytes) or self.entries >= MAX_ENTRIES:
            return "whole", text
        return "more", text[self.told :]

    def has(self, kind: str, text: str, told: int) -> None:
        size = len(text.encode())
        if kind == "whole":
            self.whole_bytes, self.more_bytes, self.entries = size, 0, 1
        else:
            self.more_bytes += size
            self.entries += 1
        self.told = told


class JobStreams:
    """The streams of the jobs in flight."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._tell = connection.register_script(_TELL)
        self._open: dict[int, _Stream] = {}

    @property
    def claim_numbers(self) -> frozenset[int]:
        return frozenset(self._open) if self._open else frozenset()

    def open(self, claim_number: int, run: JobRun) -> None:
        """Stream this run's text from now on; may be called again."""
        self._open.setdefault(claim_number, _Stream(run))

    def tell(self, claim_number: int, so_far: TextSoFar) -> None:
        """
        Raises:
            redis.exceptions.RedisError: Redis is away; whether it was written is unknown.
        """
        stream, text = self._open.get(claim_number), so_far.text
        if stream is None or stream.is_refused or len(text.encode()) > MAX_TEXT_BYTES:
            return
        if (entry := stream.next_entry(text)) is None:
            return
        told, stream.told = stream.told, -1  # in doubt until the reply has come
        job, execution = stream.run.job, stream.run.execution
        keys = [execution.key, STREAM_KEY.format(job_id=job.id)]
        try:
            written = self._tell(keys=keys, args=[TTL_S, execution.id, *entry, so_far.markers.model_dump_json()])
        except ResponseError as error:
            if may_pass(error):
                raise
            stream.is_refused = True
            log.warning("job %s cannot be read along: %s", job.id, error)
            return
        if written == 1:
            stream.has(*entry, len(text))
        elif written == 0:  # the job has ended or was taken away
            stream.told = told

    def close(self, claim_number: int, *, ended: bool) -> None:
        """Write nothing more of this run.

        Args:
            ended: the job has ended, and its hash tells how; else it waits to run again, or another worker has it.
        """
        stream = self._open.pop(claim_number, None)
        if stream is None or stream.is_refused or not ended:
            return
        key = STREAM_KEY.format(job_id=stream.run.job.id)
        # Not tried again if it is lost: readers look at the job's hash now and then.
        with suppress(RedisError), self._connection.pipeline(transaction=True) as pipeline:
            pipeline.xadd(key, {"run": stream.run.execution.id, "kind": "end", "text": ""})
            pipeline.expire(key, ENDED_TTL_S)
            pipeline.execute()
