"""The name of a store's worker, which stays when the worker is started again: its jobs in flight are known by it. Main
thread.

Owns ``STORE/worker-name``. The host's name is part of it, as it was when the store was made: hosts change their names,
and two stores of one host have different ones.
"""

import logging
import re
import secrets
import socket
from pathlib import Path
from typing import Final

from stoker_shared.durable_file import replace_file

_log = logging.getLogger(__name__)

FILE: Final = "worker-name"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def store_name(folder: Path) -> str:
    """The name, made with the first call. If it cannot be kept, it is only this process's, with a warning."""
    path = folder / FILE
    try:
        kept = path.read_text().strip()
        if _NAME.fullmatch(kept):
            return kept
        _log.warning("%s is damaged; this store's worker gets a new name", path)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("cannot read %s: %s", path, error)
    name = f"{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())[:50]}-{secrets.token_hex(3)}"
    try:
        replace_file(path, f"{name}\n".encode())
    except OSError as error:
        _log.warning("cannot write %s, so this worker has another name next time: %s", path, error)
    return name
