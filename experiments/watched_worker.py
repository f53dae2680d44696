"""`stoker-worker` with a thread that notes the process's memory once a second. Experiments only.

``python experiments/watched_worker.py SAMPLES run --model ...``: a line of JSON in SAMPLES for each second: Unix time,
the process's CPU seconds, resident bytes, and MLX's bytes: active, kept for reuse, and the most that were active since
the line before.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from stoker_worker.cli.main import main


def watch(samples: Path) -> None:
    import mlx.core as mx

    with samples.open("a", buffering=1) as out:
        while True:
            sample = {
                "at": time.time(), "cpu": time.process_time(), "rss": resident_bytes(),
                "active": mx.get_active_memory(), "kept": mx.get_cache_memory(),
                "peak": mx.get_peak_memory(),
            }  # fmt: skip
            mx.reset_peak_memory()
            out.write(json.dumps(sample) + "\n")
            time.sleep(1.0)


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import subprocess

    seen = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    return 1024 * int(seen.stdout)


if __name__ == "__main__":
    from stoker_worker.models.blas import preload_blas

    preload_blas()  # before MLX, as the worker does
    threading.Thread(target=watch, args=(Path(sys.argv.pop(1)),), daemon=True).start()
    main(prog_name="stoker-worker")
