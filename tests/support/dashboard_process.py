"""`stoker dashboard` as its operator starts it, and a headless Chromium that reads its pages."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.wait import wait_for

STOKER = [sys.executable, "-c", "from stoker.cli import main; main()"]


@contextmanager
def running_dashboard(redis_url: str, log: Path, *arguments: str) -> Iterator[str]:
    """Yields the dashboard's address, without a slash at the end."""
    command = [*STOKER, "--redis", redis_url, "dashboard", "--port", "0", *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        found = wait_for(lambda: re.search(r"http://\S+(?=/\n)", log.read_text()) or process.poll() is not None)
        assert isinstance(found, re.Match), log.read_text()
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        returncode = process.wait(20)
    assert returncode == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        self._command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        self._command += [f"--user-data-dir={profile}", "--window-size=1200,1000", "--virtual-time-budget=6000"]

    def text(self, url: str) -> str:
        """The text of the page after its scripts have run, without tags and templates."""
        page = re.sub(r"(?s)<script.*?</script>", "", self.dom(url))
        return " ".join(re.sub(r"(?s)<[^>]*>", " ", page).split())

    def dom(self, url: str) -> str:
        done = subprocess.run(
            [*self._command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium to read the dashboard with")
    return Browser(program, tmp_path / "chromium")


def require_dashboard() -> None:
    try:
        import rq_dashboard  # noqa: F401
    except ModuleNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(f"{error}: pip install 'stoker[dashboard]'")
        pytest.skip("no rq-dashboard: pip install 'stoker[dashboard]'")
