"""`stoker-worker` with a thread that notes the process's figures once a second. Experiments only.

``python experiments/watched_worker.py SAMPLES run --model ...``: a line of JSON in SAMPLES for each second: Unix time,
the process's CPU seconds, resident bytes, bytes in use on the C heap (glibc; ``null`` elsewhere), open descriptors and
threads; and MLX's bytes: active, kept for reuse, and the most that were active since the line before. These are 0 as
long as nothing has imported MLX.
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stoker_worker.cli.main import main


def watch(samples: Path) -> None:
    with samples.open("a", buffering=1) as out:
        while True:
            sample = {
                "at": time.time(), "cpu": time.process_time(), "rss": resident_bytes(),
                "heap": heap_bytes(), "fds": len(os.listdir("/dev/fd")), "threads": n_threads(),
                **mlx_bytes(sys.modules.get("mlx.core")),
            }  # fmt: skip
            out.write(json.dumps(sample) + "\n")
            time.sleep(1.0)


def mlx_bytes(mx: Any) -> dict[str, int]:
    if not hasattr(mx, "reset_peak_memory"):  # not imported, or not wholly
        return {"active": 0, "kept": 0, "peak": 0}
    found = {"active": mx.get_active_memory(), "kept": mx.get_cache_memory(), "peak": mx.get_peak_memory()}
    mx.reset_peak_memory()
    return found


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    seen = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    return 1024 * int(seen.stdout)


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def heap_bytes() -> int | None:
    """What `malloc` has given out; what it keeps of freed memory is resident too."""
    return None if _mallinfo2 is None else int(_mallinfo2().uordblks)


def n_threads() -> int:
    """Those of libraries included, where the system tells; else Python's own."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


if __name__ == "__main__":
    threading.Thread(target=watch, args=(Path(sys.argv.pop(1)),), daemon=True).start()
    main(prog_name="stoker-worker")
