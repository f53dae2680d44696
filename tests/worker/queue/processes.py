"""Processes of which Redis has something."""

import dataclasses
import subprocess
import sys

from stoker_worker.process_identity import ProcessIdentity, _start_token


def a_dead_process() -> ProcessIdentity:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    me = ProcessIdentity.of_this_process()
    identity = dataclasses.replace(me, pid=process.pid, started=_start_token(process.pid) or "")
    assert not identity.is_certainly_dead()
    process.kill()
    process.wait()
    return identity
