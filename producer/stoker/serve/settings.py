"""What one `stoker serve` was told to do. Plain data."""

from dataclasses import dataclass, field
from pathlib import Path

from stoker.openai.fields import BodyOptions
from stoker.serve.tokens import Tokens
from stoker_shared.wire import DEFAULT_QUEUE, MAX_REQUEST_BYTES


@dataclass(frozen=True)
class ServeSettings:
    """
    Attributes:
        queue, batch_queue: RQ queues of calls, and of the lines of batches.
        body_options: which models a body may name.
        tokens: who may call; ``None`` for everybody who reaches the port.
        batch_store: folder of files and batches; ``None`` to serve neither.
        max_body_bytes, max_file_bytes: largest request body, and largest upload.
        max_waiting: most calls in flight per token.
        timeout_s: how long a call may take, in seconds.
        queue_without_worker: accept calls while no worker is alive, instead of refusing them.
        worker_wait_s: how long a call waits for a worker to appear before it is refused.
    """

    queue: str = DEFAULT_QUEUE
    batch_queue: str = DEFAULT_QUEUE
    body_options: BodyOptions = field(default_factory=BodyOptions)
    tokens: Tokens | None = None
    batch_store: Path | None = None
    max_body_bytes: int = MAX_REQUEST_BYTES
    max_file_bytes: int = 512 * 2**20
    max_waiting: int = 1000
    timeout_s: int = 600
    queue_without_worker: bool = False
    worker_wait_s: float = 3.0
