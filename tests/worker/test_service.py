"""`stoker-worker service` on both systems: its files, the manager's calls, what is left behind and what is refused."""

import os
import plistlib
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stoker_worker.cli.main import main
from stoker_worker.service import Launchd, ServiceUnit, Systemd, worker_unit

LAUNCHCTL = """
case "$1 $2" in
    enable*) rm -f disabled ;;
    bootstrap*)
        [ ! -e disabled ] || exit 5
        [ ! -e broken ] || { printf 'it is broken\\nTry it as root.\\n' >&2; exit 5; }
        touch loaded ;;
    "print gui/"*/*|"print system/"*)
        [ -e loaded ] && printf '\\tstate = running\\n\\tpid = 7\\n\\t\\tstate = inner\\n' ;;
    "print "*) [ ! -e no-session ] ;;
    bootout*) [ -e stuck ] || touch leaving ;;
    kickstart*) [ ! -e loaded ] || exit 37 ;;
esac
result=$?
if [ -e leaving ] && [ "$1" = print ]; then rm -f leaving loaded; fi
exit $result
"""
"""After `bootout`, an agent is gone at the second look only. `kickstart` fails, without a word, for one that runs."""

SYSTEMCTL = """
case "$*" in
    *enable*) [ ! -e broken ] || { echo "it is broken" >&2; exit 5; } ;;
    *" show "*) [ ! -e no-session ] || { echo "Failed to connect to bus" >&2; exit 1; } ;;
    *is-active*) [ -e loaded ] || exit 3 ;;
    *restart*|*" start "*) touch loaded ;;
    *" stop "*) rm -f loaded ;;
    *disable*) rm -f loaded ;;
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
    return on


ODD = "a \"b\" \\ $HOME %h\n'x' é"
UNIT = ServiceUnit("night", (sys.executable, "run", ODD), Path("/tmp"), {"STOKER_X": ODD}, 90)


def test_the_unit_runs_these_options_with_the_variables_of_stoker_and_more_time_than_the_grace():
    kept = {
        "STOKER_GRACE_S": "5",
        "HF_HOME": "/models",
        "PATH": "/bin",
        "AWS_REGION": "r",
        "https_proxy": "http://p",
        "SSL_CERT_FILE": "/ca",
    }
    environment = {**kept, "SSH_AUTH_SOCK": "x"}
    unit = worker_unit("night", ["--max-batch", "8"], grace_s=4.5, environment=environment)
    assert unit.command == (sys.executable, "-P", "-m", "stoker_worker", "run", "--max-batch", "8")
    assert unit.environment == kept
    assert unit.stop_timeout_s > 5
    assert unit.folder == Path.cwd()


def test_the_plist_restarts_after_a_crash_only_and_waits_for_the_grace():
    agent = plistlib.loads(Launchd(Path("/Users/x/Library"), 501).text(UNIT).encode())
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
    for unit, complaints in (UNIT, False), (replace(UNIT, command=("no-such-program",)), True):
        file.write_text(Systemd(tmp_path).text(unit))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--user", file], capture_output=True, text=True, check=False
        )
        assert bool(done.stderr or done.returncode) is complaints, done.stderr


def test_the_unit_restarts_after_a_crash_only_and_stops_the_worker_alone():
    lines = Systemd(Path("/units")).text(UNIT).splitlines()
    assert {"Restart=on-failure", "TimeoutStopSec=90", "KillMode=process", "WorkingDirectory=/tmp"} <= set(lines)
    [command] = [line for line in lines if line.startswith("ExecStart=")]
    assert command.endswith('"run" "a \\"b\\" \\\\ $$HOME %%h\\n\'x\' é"')
    [variable] = [line for line in lines if line.startswith("Environment=")]
    assert variable == 'Environment="STOKER_X=a \\"b\\" \\\\ $HOME %%h\\n\'x\' é"'


def test_a_dollar_in_the_path_of_the_program_is_one_for_systemd_too():
    text = Systemd(Path("/units")).text(replace(UNIT, command=("/opt/a$b/python", "a$b")))
    assert 'ExecStart="/opt/a$b/python" "a$$b"\n' in text


@pytest.mark.parametrize(
    ("options", "variables", "url"),
    [
        (["--redis", "redis://:sec0@h", "--max-batch", "2", "--redis=redis://:sec@h"], {}, "redis://:sec@h"),
        (["--max-batch", "2"], {"STOKER_REDIS_URL": "rediss://u:sec@h/2"}, "rediss://u:sec@h/2"),
        (["--redis", "embedded", "--max-batch", "2"], {"STOKER_REDIS_URL": "redis://:sec@h"}, "embedded"),
    ],
)
def test_a_password_of_redis_is_not_in_the_arguments_that_everybody_sees(options, variables, url):
    unit = worker_unit("night", options, grace_s=1, environment=variables)
    assert unit.command[5:] == ("--max-batch", "2")
    assert dict(unit.environment) == {"STOKER_REDIS_URL": url}


BOTH = pytest.mark.parametrize("managed", ["Darwin", "Linux"], indirect=True)
MAC = pytest.mark.parametrize("managed", ["Darwin"], indirect=True)
LINUX = pytest.mark.parametrize("managed", ["Linux"], indirect=True)


def files(managed):
    return [path for path in managed.home.rglob("*") if path.is_file()]


@BOTH
def test_print_shows_the_file_that_only_its_user_can_read_and_changes_nothing(managed):
    printed = managed.service("install", "--print", "--", "--engine", "scripted", "--grace-s", "100").output
    assert "130" in printed
    assert not files(managed)
    assert not managed.calls()
    assert managed.install("--grace-s", "100").exit_code == 0
    [file] = files(managed)
    assert file.read_text() == printed
    assert "/models" in printed
    assert "NOT_OURS" not in printed
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@BOTH
def test_another_redis_url_starts_the_service_anew_and_no_password_is_printed(managed):
    out = managed.install("--redis", "redis://:pw-first@10.0.0.1").output
    managed.calls()
    out += managed.install("--redis", "redis://:pw-second@10.0.0.1").output
    [file] = files(managed)
    assert managed.calls()[-1].split()[0 if file.suffix == ".plist" else 1] in ("bootstrap", "restart")
    assert "pw-second" in file.read_text()
    assert "pw-" not in out


VERBS = {
    ".plist": [["enable", "bootstrap"], ["enable", "kickstart"], ["bootout", "enable", "bootstrap"]],
    ".service": [["enable", "restart"], ["enable", "start"], ["enable", "restart"]],
}


@BOTH
def test_install_may_be_repeated_and_changes_options(managed):
    made = []
    for options in ((), (), ("--max-batch", "3")):
        installed = managed.install(*options)
        assert installed.exit_code == 0
        calls = " ".join(managed.calls()).split()
        made.append(
            [verb for verb in calls if verb in ("bootstrap", "bootout", "kickstart", "enable", "start", "restart")]
        )
    assert "running jobs" in installed.output
    [file] = files(managed)
    assert made == VERBS[file.suffix]
    assert "--max-batch" in file.read_text()
    assert managed.is_loaded()


@BOTH
def test_uninstall_leaves_nothing_and_may_be_repeated(managed):
    managed.install()
    assert managed.service("uninstall").exit_code == 0
    assert not managed.is_loaded()
    assert not files(managed)
    repeated = managed.service("uninstall")
    assert (repeated.exit_code, repeated.output) == (0, "stoker-worker is not installed\n")


@BOTH
def test_a_second_worker_has_a_name_of_its_own(managed):
    managed.install()
    assert managed.service("install", "--name", "night", "--", "--engine", "scripted").exit_code == 0
    assert {file.stem for file in files(managed)} == {"stoker-worker", "night"}
    assert managed.service("install", "--name", "../x", "--", "--engine", "scripted").exit_code == 2


@BOTH
@pytest.mark.parametrize(
    "options", [["--no-such-option"], ["--grace-s", "-1"], ["--max-batch", "no"], []], ids=" ".join
)
def test_options_that_run_would_refuse_are_refused_before_anything_is_done(managed, options):
    refused = managed.service("install", "--", *options)
    assert refused.exit_code == 2
    assert "Traceback" not in refused.output
    assert not files(managed)
    assert not managed.calls()


@BOTH
@pytest.mark.parametrize(
    ("trouble", "named"),
    [("no-session", "ServiceRefused"), ("missing", "ctl is missing"), ("broken", ": it is broken")],
)
def test_a_manager_that_is_missing_or_refuses_is_quoted(managed, monkeypatch, trouble, named):
    if trouble == "missing":
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        (managed.state / trouble).touch()
    refused = managed.install()
    assert refused.exit_code == 1
    assert named in refused.output.splitlines()[-1]
    if trouble != "broken":
        assert not files(managed)
        assert len(refused.output.splitlines()) == 1


@BOTH
def test_install_warns_of_a_key_that_expires(managed, monkeypatch):
    assert "AWS" not in managed.install().output
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    assert "AWS_SESSION_TOKEN will expire" in managed.install().output


@BOTH
def test_a_folder_that_cannot_be_written_is_named(managed):
    for name in ("Library", ".config"):
        (managed.home / name).write_text("a file")
    refused = managed.install()
    assert refused.exit_code == 1
    assert "ServiceRefused: " in refused.output.splitlines()[-1]
    assert str(managed.home) in refused.output


def stuck(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a service that launchd does not end; returns its file."""
    monkeypatch.setattr("stoker_worker.service._MARGIN_S", 0.3)
    managed.install()
    [file] = files(managed)
    file.write_bytes(plistlib.dumps(plistlib.loads(file.read_bytes()) | {"ExitTimeOut": 0}))
    (managed.state / "stuck").touch()
    return file


@MAC
def test_a_service_that_launchd_does_not_end_is_named_and_stays_installed(managed, monkeypatch):
    file = stuck(managed, monkeypatch)
    refused = managed.service("uninstall")
    assert refused.exit_code == 1
    assert "launchd does not end stoker-worker: see launchctl print gui/" in refused.output
    assert files(managed) == [file]


@BOTH
def test_a_service_runs_on_if_its_new_file_cannot_be_written(managed, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    managed.install()
    managed.calls()
    monkeypatch.setattr("stoker_worker.service.write_new", full)
    refused = managed.install("--max-batch", "3")
    assert (refused.exit_code, "No space left" in refused.output) == (1, True)
    assert managed.is_loaded()
    assert not managed.calls()


@LINUX
def test_steps_that_nobody_reads_are_taken_all_the_same(managed):
    """As with `service install ... | head -1`."""
    managed.install()
    for words in (["install", "--", "--engine", "scripted", "--max-batch", "3"], ["uninstall"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "stoker_worker", "service", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")
        assert managed.is_loaded() is (words[0] == "install")
    assert not files(managed)


@MAC
@pytest.mark.parametrize(
    "text",
    [b'<?xml version="1.0"?><plist><dict>', plistlib.dumps([1]), plistlib.dumps({"ExitTimeOut": []})],
    ids=range(3),
)
def test_a_file_that_a_person_has_broken_is_replaced_and_removed(managed, text):
    managed.install()
    [file] = files(managed)
    for words in (["install", "--", "--engine", "scripted"], ["uninstall"]):
        file.write_bytes(text)
        assert managed.service(*words).exit_code == 0
    assert not files(managed)
    assert not managed.is_loaded()


@BOTH
def test_a_grace_without_an_end_is_a_year(managed):
    assert managed.install("--grace-s", "inf").exit_code == 0
    [file] = files(managed)
    assert str(366 * 86_400 + 30) in file.read_text()


@MAC
def test_an_install_that_ended_while_the_worker_stopped_can_be_repeated(managed, monkeypatch):
    """The worker must not go on with its old options."""
    file = stuck(managed, monkeypatch)
    assert managed.install("--max-batch", "3").exit_code == 1
    (managed.state / "stuck").unlink()
    managed.calls()
    assert managed.install("--max-batch", "3").exit_code == 0
    assert [call.split()[0] for call in managed.calls()] == ["bootout", "enable", "bootstrap"]
    assert "--max-batch" in file.read_text()


@LINUX
def test_on_linux_a_worker_stops_before_its_unit_changes(managed):
    """After the reload, systemd would kill it after the new unit's time, and its own grace may be longer."""
    managed.install()
    managed.calls()
    (managed.state / "broken").touch()
    assert managed.install("--grace-s", "1").exit_code == 1
    calls = [call.split()[1] for call in managed.calls()]
    assert calls.index("stop") < calls.index("daemon-reload")
    (managed.state / "broken").unlink()
    assert managed.install("--grace-s", "1").exit_code == 0
    assert managed.is_loaded()


@MAC
def test_a_service_that_was_disabled_is_installed_again(managed):
    (managed.state / "disabled").touch()
    assert managed.install().exit_code == 0
    assert managed.is_loaded()


@MAC
def test_on_a_mac_the_log_is_a_file(managed, monkeypatch):
    ran = []
    monkeypatch.setattr("os.execvp", lambda program, command: ran.append(command))
    assert "no log" in managed.service("logs").output
    managed.install()
    log = managed.home / "Library" / "Logs" / "stoker" / "stoker-worker.log"
    log.touch()
    managed.service("logs", "-n", "5", "--follow")
    assert ran == [["tail", "-n", "5", "-F", str(log)]]


@LINUX
def test_on_linux_the_log_is_in_the_journal(managed, monkeypatch):
    ran = []
    monkeypatch.setattr("os.execvp", lambda program, command: ran.append(command))
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert "not installed" in managed.service("logs").output
    managed.install()
    managed.service("logs", "-n", "5")
    assert ran == [["journalctl", "--no-pager", "--user-unit", "stoker-worker.service", "--lines", "5"]]
