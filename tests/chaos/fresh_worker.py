"""Workers with hooks, in new processes: MLX does not survive a fork.

``python -m tests.chaos.fresh_worker HOOKS run …`` is such a process; HOOKS is JSON.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked_worker import environment
from tests.support.worker_process import WorkerProcess


def start_fresh(
    arguments: Sequence[str], log: Path, *, env: Mapping[str, str], hooks: Mapping[str, Any]
) -> WorkerProcess:
    """Start `stoker-worker run` with these arguments."""
    program = ("tests.chaos.fresh_worker", json.dumps(hooks))
    return WorkerProcess(arguments, log, {**environment(), **env}, program=program)


def main() -> None:
    from stoker_worker.models.blas import preload_blas

    preload_blas()  # the hooks import MLX
    from tests.chaos.hooks import install

    from stoker_worker.cli.main import main as worker_main

    install(json.loads(sys.argv[1]))
    worker_main(sys.argv[2:], prog_name="stoker-worker")


if __name__ == "__main__":
    main()
