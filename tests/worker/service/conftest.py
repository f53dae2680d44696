"""A home of its own, and service managers that are shell scripts: they note their calls and know what is loaded."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stoker_worker.cli.main import main

LAUNCHCTL = """
case "$1 $2" in
    bootstrap*) [ ! -e broken ] || { echo "it is broken" >&2; exit 5; }; touch loaded ;;
    "print gui/"*/*|"print system/"*)
        [ -e loaded ] && printf '\\tstate = running\\n\\tpid = 7\\n\\t\\tstate = inner\\n' ;;
    "print "*) [ ! -e no-session ] ;;
    bootout*) touch leaving ;;
esac
result=$?
if [ -e leaving ] && [ "$1" = print ]; then rm -f leaving loaded; fi
exit $result
"""
"""After `bootout`, an agent is gone at the second look only."""

SYSTEMCTL = """
case "$*" in
    *enable*) [ ! -e broken ] || { echo "it is broken" >&2; exit 5; } ;;
    *" show "*) [ ! -e no-session ] || { echo "Failed to connect to bus" >&2; exit 1; } ;;
    *is-active*) [ -e loaded ] || exit 3 ;;
    *restart*|*" start "*) touch loaded ;;
    *disable*) rm -f loaded ;;
    *status*) [ -e loaded ] && echo "Active: active (running)" || { echo "inactive"; exit 3; } ;;
esac
"""


class Managed:
    """The commands of `stoker-worker service`, on one system."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.state = folder / "state"

    def service(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["service", *arguments])

    def install(self, *options: str) -> Result:
        return self.service("install", "--", "--engine", "scripted", *options)

    def calls(self) -> list[str]:
        """Of the manager's program since the last look, those that only ask left out."""
        noted = self.state / "calls"
        lines = noted.read_text().splitlines() if noted.exists() else []
        noted.unlink(missing_ok=True)
        return [line for line in lines if not any(word in line.split() for word in ("print", "show", "is-active"))]

    def is_loaded(self) -> bool:
        return (self.state / "loaded").exists()


@pytest.fixture
def managed(request, tmp_path, monkeypatch) -> Managed:
    """For the parameter `Darwin` or `Linux`."""
    on = Managed(tmp_path)
    programs = tmp_path / "bin"
    for folder in (on.home, on.state, programs):
        folder.mkdir()
    name, script = {"Darwin": ("launchctl", LAUNCHCTL), "Linux": ("systemctl", SYSTEMCTL)}[request.param]
    program = programs / name
    program.write_text(f'#!/bin/sh\ncd "{on.state}"\necho "$@" >> calls\n{script}')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(on.home))
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("NOT_OURS", "1")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("platform.system", lambda: request.param)
    monkeypatch.setattr("stoker_worker.service.here.ROOT", on.home)
    return on
