"""Workers in processes of their own from the start, with hooks in them: MLX does not live through a fork.

``python -m tests.chaos.fresh_worker HOOKS run …`` is such a process; HOOKS is JSON.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.forked_worker import environment
from tests.worker_process import WorkerProcess


def start_fresh(
    arguments: Sequence[str], log: Path, *, env: Mapping[str, str], hooks: Mapping[str, Any]
) -> WorkerProcess:
    """`stoker-worker run` with these arguments."""
    return WorkerProcess(arguments, log, environment() | env, program=("tests.chaos.fresh_worker", json.dumps(hooks)))


def main() -> None:
    from stoker_worker.engine.blas import preload_openblas

    preload_openblas()  # the hooks import MLX
    from tests.chaos.hooks import install

    from stoker_worker.cli import main as worker_main

    install(json.loads(sys.argv[1]))
    worker_main(sys.argv[2:], prog_name="stoker-worker")


if __name__ == "__main__":
    main()
