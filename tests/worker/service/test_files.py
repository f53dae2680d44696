"""The files of a service: a plist that launchd can read, a unit that systemd accepts, with the same content in both."""

import plistlib
import pwd
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stoker_worker.service.launchd import Launchd
from stoker_worker.service.systemd import Systemd
from stoker_worker.service.unit import ServiceUnit, worker_unit

ODD = "a \"b\" \\ $HOME %h\n'x' é"
URL_FILE = Path("/home/me/a b/night.redis-url")
DAEMON = pwd.getpwnam("daemon")
UNIT = ServiceUnit("night", (sys.executable, "run", ODD), Path("/tmp"), {"STOKER_X": ODD}, 90)


def test_the_unit_runs_these_options_with_the_variables_of_stoker_and_more_time_than_the_grace():
    environment = {"STOKER_GRACE_S": "5", "HF_HOME": "/models", "PATH": "/bin", "SSH_AUTH_SOCK": "x"}
    unit = worker_unit("night", ["--max-batch", "8"], URL_FILE, grace_s=4.5, environment=environment)
    assert unit.command == (sys.executable, "-P", "-m", "stoker_worker", "run", "--max-batch", "8")
    assert set(unit.environment) == {"STOKER_GRACE_S", "HF_HOME", "PATH"}
    assert unit.stop_timeout_s > 5
    assert unit.folder == Path.cwd()


def test_the_plist_restarts_after_a_crash_only_and_waits_for_the_grace():
    agent = plistlib.loads(Launchd(Path("/Users/x/Library"), 501, Path("/c")).text(UNIT).encode())
    assert agent["ProgramArguments"] == list(UNIT.command)
    assert agent["EnvironmentVariables"] == UNIT.environment
    assert agent["WorkingDirectory"] == "/tmp"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["RunAtLoad"] is True
    assert agent["ExitTimeOut"] == 90
    assert agent["ThrottleInterval"] >= 10
    assert agent["ProcessType"] == "Interactive"
    assert agent["StandardErrorPath"] == "/Users/x/Library/Logs/stoker/night.log"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "night.service"
    for unit, complaints in (
        (UNIT, False),
        (replace(UNIT, account=DAEMON), False),
        (replace(UNIT, command=("no-such-program",)), True),
    ):
        manager = "--system" if unit.account else "--user"
        file.write_text(Systemd(tmp_path, tmp_path, is_system=unit.account is not None).text(unit))
        done = subprocess.run(["systemd-analyze", "verify", manager, file], capture_output=True, text=True, check=False)
        assert bool(done.stderr or done.returncode) is complaints, done.stderr


def test_the_unit_restarts_after_a_crash_only_and_stops_the_worker_alone():
    lines = Systemd(Path("/units"), Path("/c")).text(UNIT).splitlines()
    assert {"Restart=on-failure", "TimeoutStopSec=90", "KillMode=process", "WorkingDirectory=/tmp"} <= set(lines)
    [command] = [line for line in lines if line.startswith("ExecStart=")]
    assert command.endswith('"run" "a \\"b\\" \\\\ $$HOME %%h\\n\'x\' é"')
    [variable] = [line for line in lines if line.startswith("Environment=")]
    assert variable == 'Environment="STOKER_X=a \\"b\\" \\\\ $HOME %%h\\n\'x\' é"'


SECRETS = [
    (["--redis", "redis://:sec@h"], {}, "redis://:sec@h"),
    (["--redis=redis://u:sec@h", "--max-batch", "2"], {}, "redis://u:sec@h"),
    (["--redis", "redis://:sec0@h", "--redis", "redis://h?password=sec1"], {}, "redis://h?password=sec1"),
    ([], {"STOKER_REDIS_URL": "rediss://u:sec@h/2"}, "rediss://u:sec@h/2"),
    (["--redis", "embedded"], {"STOKER_REDIS_URL": "redis://:sec@h"}, ""),
    (["--redis", "redis://:sec@h"], {"STOKER_REDIS_URL": "redis://:sec2@h"}, "redis://:sec@h"),
    (["--redis", "redis://user@h"], {}, ""),
    (["--redis", "file:///x/y"], {}, ""),
    ([], {"STOKER_REDIS_URL": "redis://h"}, ""),
]


@pytest.mark.parametrize(("options", "variables", "redis_url"), SECRETS)
def test_a_password_of_redis_is_neither_in_the_arguments_nor_in_the_variables(options, variables, redis_url):
    unit = worker_unit("night", options, URL_FILE, grace_s=1, environment=variables)
    assert unit.redis_url == redis_url
    assert "sec" not in repr([unit.command, unit.environment])
    assert ("file:///home/me/a%20b/night.redis-url" in unit.command) is bool(redis_url)
    if not redis_url:
        assert [*options] == [*unit.command[5:]]


def test_a_service_of_the_machine_runs_as_its_user_from_boot_on():
    variables = {"HF_TOKEN": "secret", "HF_HOME": "/models", "HOME": "/root"}
    unit = worker_unit("night", [], URL_FILE, grace_s=1, environment=variables, account=DAEMON)
    assert dict(unit.environment) == {"HF_HOME": "/models", "HOME": DAEMON.pw_dir}
    daemon = Launchd(Path("/Library"), None, Path("/etc/stoker"))
    assert daemon.path("night") == Path("/Library/LaunchDaemons/night.plist")
    plist = plistlib.loads(daemon.text(unit).encode())
    assert (plist["UserName"], plist["EnvironmentVariables"]["HOME"]) == ("daemon", DAEMON.pw_dir)
    lines = Systemd(Path("/etc/systemd/system"), Path("/etc/stoker"), is_system=True).text(unit).splitlines()
    assert {"User=daemon", "WantedBy=multi-user.target", "After=network-online.target"} <= set(lines)
