"""A shared store for tests, a folder or a bucket of an S3 server of our own, and machines that share it."""

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from tests.support.private_server import free_port
from tests.worker.memory.agents import AgentOf, FastDisk

from stoker_shared.agents import AgentResult, build_agent_request
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.replica.shared_replica import SharedReplica
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import AgentVersion, Delivery


class SharedAgent(AgentOf[AgentCacheStore]):
    """Looks before it continues, as the pipeline does."""

    def open(self) -> AgentVersion:
        self.store.look(self.name)
        return super().open()


BOTH = pytest.mark.parametrize("share", ["folder", "bucket"], indirect=True)
_TIMEOUT_S = 30.0
_machines = count(1)  # no two of them run one job
_places = count(1)


class SharedFolder:
    """A folder that every machine mounts.

    Attributes:
        objects: where the objects are, as plain files.
    """

    def __init__(self, folder: Path) -> None:
        self.objects = folder / "mounted"
        self.objects.mkdir()
        self.url = f"file://{self.objects}"

    def go_away(self) -> None:
        self.objects.rename(self.objects.with_name("unmounted"))

    def come_back(self) -> None:
        unmounted = self.objects.with_name("unmounted")
        if self.objects.exists():  # by a write that was under way when it went
            shutil.copytree(self.objects, unmounted, dirs_exist_ok=True)
            shutil.rmtree(self.objects)
        unmounted.rename(self.objects)

    def close(self) -> None:
        pass


class _S3Server:
    """Keeps each object as a plain file. One for all tests of a process: a start takes a third of a second."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "agents").mkdir()
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def start(self) -> None:
        """Unless it runs."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "localbucket", str(self.folder), "--port", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/agents?list-type=2"):
                return
            time.sleep(0.02)
        raise TimeoutError("the S3 server does not answer")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _end(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


_server = functools.cache(_S3Server)


class SharedBucket:
    """A place of its own in a bucket."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._server = _server()
        place = f"of/{next(_places)}"
        self.objects = self._server.folder / "agents" / place
        self.url = f"s3://agents/{place}"
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "eu-central-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self._server.port}")
        self.come_back()

    def go_away(self) -> None:
        self._server.stop()

    def come_back(self) -> None:
        self._server.start()

    def close(self) -> None:
        shutil.rmtree(self.objects, ignore_errors=True)


Share = SharedFolder | SharedBucket


class Machine:
    """A worker's store with a shared one. Its threads do not run: tests say when it writes its caches."""

    def __init__(self, folder: Path, share: Share, *, memory_max_bytes: int = 0, max_bps: int | None = None) -> None:
        self.folder = folder
        self._jobs = count(1000 * next(_machines))
        self.bucket = Bucket(share.url)
        self.store = AgentCacheStore(
            folder, files=FastDisk(), memory_max_bytes=memory_max_bytes, shared=self.bucket, shared_max_bps=max_bps
        )
        assert isinstance(self.store.parts.replica, SharedReplica)
        self.versions = self.store.parts.replica.versions

    def agent(self, name: str = "agent", **fields: object) -> SharedAgent:
        return SharedAgent(self.store, name, jobs=self._jobs, **fields)  # type: ignore[arg-type]

    def run(self, action: str, agent_id: str = "agent", **fields: object) -> AgentResult:
        """A job about an agent's memory; each action comes once for an agent."""
        request = build_agent_request({"action": action, "agent_id": agent_id, **fields})
        delivery = Delivery(f"{action}-{agent_id}", "now")
        assert self.store.agent_jobs.answer(request, delivery) is None
        return self.store.agent_jobs.run(request, delivery)

    def write_behind(self) -> None:
        """As the thread does, until nothing is left."""
        assert self.store._behind is not None
        while self.store._behind.write_next():
            pass

    def notice_return(self) -> None:
        """The shared store answers again; the end of an outage is not believed at once."""
        until = time.monotonic() + _TIMEOUT_S
        while self.bucket.outage.seconds and time.monotonic() < until:
            with suppress(OSError):
                self.bucket.get("stoker.json")
            time.sleep(0.02)
