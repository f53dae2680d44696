"""The file that leads the commands of one user to that user's embedded server: ``~/.stoker/redis.url``, mode 0600.

Line 1 is the URL with its password, line 2 the lock file that the server process holds as long as it lives. So a server
that is gone is told from one that lives without asking a port that another program may have by now. Any thread.
"""

import fcntl
from pathlib import Path
from typing import Final

from stoker_shared.durable_file import replace_file

DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379"
SHOWN: Final = "~/.stoker/redis.url"
"""The file, as people read it."""


def publish(url: str, lock: Path) -> None:
    """Lead this user's commands to this server; an earlier one is forgotten. Raises `OSError`."""
    file = Path(SHOWN).expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(file, f"{url}\n{lock}\n".encode())


def default_redis_url() -> str:
    """The server where none is named: this user's embedded one if it lives, else `DEFAULT_REDIS_URL`."""
    try:
        url, lock, *_ = Path(SHOWN).expanduser().read_text(encoding="utf-8").splitlines()
        return url if _is_held(Path(lock)) else DEFAULT_REDIS_URL
    except (OSError, ValueError, RuntimeError):  # no such file, another content, no home folder
        return DEFAULT_REDIS_URL


def _is_held(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
