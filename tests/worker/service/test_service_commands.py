"""`stoker-worker service` on both systems: the manager's calls, what is left behind, what is refused."""

import plistlib
import pwd
import stat

import pytest

from stoker_worker.settings import read_settings

BOTH = pytest.mark.parametrize("managed", ["Darwin", "Linux"], indirect=True)
MAC = pytest.mark.parametrize("managed", ["Darwin"], indirect=True)
LINUX = pytest.mark.parametrize("managed", ["Linux"], indirect=True)


def files(managed):
    return [path for path in managed.home.rglob("*") if path.is_file()]


@BOTH
def test_print_shows_the_file_and_changes_nothing(managed):
    printed = managed.service("install", "--print", "--", "--engine", "scripted", "--grace-s", "100").output
    assert "130" in printed
    assert not files(managed)
    assert not managed.calls()
    assert managed.install("--grace-s", "100").exit_code == 0
    [file] = files(managed)
    assert file.read_text() == printed


@BOTH
def test_only_the_user_can_read_the_file_which_has_the_variables(managed):
    managed.install()
    [file] = files(managed)
    assert "/models" in file.read_text()
    assert "NOT_OURS" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@BOTH
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_redis_url_with_a_password_has_a_file_that_only_the_user_can_read(managed, monkeypatch, by_variable):
    def install(url):
        if by_variable:
            monkeypatch.setenv("STOKER_REDIS_URL", url)
        return managed.install(*([] if by_variable else ["--redis", url]))

    out = install("redis://:pw-first@10.0.0.1").output
    secret = managed.home / ".config/stoker/stoker-worker.redis-url"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    unit, [command] = next(file for file in files(managed) if file != secret), [secret.as_uri()]
    assert command in unit.read_text()
    assert read_settings({"redis_url": secret.as_uri()}).redis_url == "redis://:pw-first@10.0.0.1"
    out += managed.service("install", "--print", "--", "--engine", "scripted", "--redis", "redis://:pw-first@h").output
    managed.calls()
    out += install("redis://:pw-second@10.0.0.1").output
    assert managed.calls()[-1].split()[0 if unit.suffix == ".plist" else 1] in ("bootstrap", "restart")
    assert "pw-second" in secret.read_text()
    assert not [word for word in ("pw-first", "pw-second") if word in out + unit.read_text()]
    install("redis://10.0.0.1")
    assert files(managed) == [unit]
    install("redis://:pw-third@10.0.0.1")
    managed.service("uninstall")
    assert not files(managed)


@BOTH
def test_a_service_of_the_machine_needs_root_and_a_user(managed, monkeypatch):
    def install(*options, redis="redis://:secret@h"):
        return managed.service("install", "--system", *options, "--", "--engine", "scripted", "--redis", redis)

    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 501)
    chowned = []
    monkeypatch.setattr("os.chown", lambda path, uid, gid: chowned.append((path.name, uid, gid)))
    for refused, reason in (
        (install(), "--user NAME"),
        (install("--user", "no-such-user"), "no user no-such-user"),
        (install("--user", "root"), "no rights of root"),
        (install("--user", "nobody"), "by root only"),
        (managed.service("uninstall", "--system"), "by root only"),
        (managed.service("install", "--user", "nobody", "--", "--engine", "scripted"), "--system"),
    ):
        assert refused.exit_code
        assert reason in refused.output
    assert not files(managed)
    assert "nobody" in install("--user", "nobody", "--print").output
    assert not files(managed)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "nobody")
    done = install()
    assert done.exit_code == 0, done.output
    assert "at each boot" in done.output
    written = {str(file.relative_to(managed.home)): file for file in files(managed)}
    secret = written.pop("etc/stoker/stoker-worker.redis-url")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    nobody = pwd.getpwnam("nobody")
    assert (secret.name, nobody.pw_uid, nobody.pw_gid) in chowned
    assert written.keys() <= {
        "Library/LaunchDaemons/stoker-worker.plist",
        "Library/Logs/stoker/stoker-worker.log",
        "etc/systemd/system/stoker-worker.service",
    }
    assert not [file for file in written.values() if "secret" in file.read_text()]
    assert not [call for call in managed.calls() if "--user" in call or "gui" in call]
    assert managed.service("status", "--system").exit_code == 0
    assert managed.service("status").exit_code == 4
    assert managed.service("uninstall", "--system").exit_code == 0
    assert [file.suffix for file in files(managed)] in ([], [".log"])


@MAC
def test_on_a_mac_install_may_be_repeated_and_changes_options(managed):
    assert managed.install().exit_code == 0
    assert [call.split()[0] for call in managed.calls()] == ["bootstrap"]
    assert managed.install().exit_code == 0
    assert [call.split()[0] for call in managed.calls()] == ["kickstart"]
    again = managed.install("--max-batch", "3")
    assert again.exit_code == 0
    assert "running jobs" in again.output
    assert [call.split()[0] for call in managed.calls()] == ["bootout", "bootstrap"]
    [file] = files(managed)
    assert plistlib.loads(file.read_bytes())["ProgramArguments"][-2:] == ["--max-batch", "3"]
    assert managed.is_loaded()


@LINUX
def test_on_linux_install_may_be_repeated_and_changes_options(managed):
    assert managed.install().exit_code == 0
    assert [call.split()[-2] for call in managed.calls()] == ["--user", "enable", "restart"]
    assert managed.install().exit_code == 0
    assert [call.split()[-2] for call in managed.calls()] == ["--user", "enable", "start"]
    again = managed.install("--max-batch", "3")
    assert "running jobs" in again.output
    assert managed.calls()[-1] == "--user restart stoker-worker.service"
    [file] = files(managed)
    assert '"--max-batch" "3"' in file.read_text()


@BOTH
def test_status_and_uninstall(managed):
    assert managed.service("status").exit_code == 4
    managed.install()
    status = managed.service("status")
    assert status.exit_code == 0
    assert "running" in status.output
    assert "inner" not in status.output
    (managed.state / "loaded").unlink()
    assert managed.service("status").exit_code == 3
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
def test_without_a_session_of_the_user_nothing_is_written(managed):
    (managed.state / "no-session").touch()
    refused = managed.install()
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: ServiceRefused: ")
    assert len(refused.output.splitlines()) == 1
    assert not files(managed)


@BOTH
def test_a_missing_manager_is_named(managed, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    refused = managed.install()
    assert refused.exit_code == 1
    assert "ctl is missing" in refused.output
    assert not files(managed)


@BOTH
def test_a_manager_that_fails_is_quoted(managed):
    (managed.state / "broken").touch()
    refused = managed.install()
    assert refused.exit_code == 1
    assert refused.output.splitlines()[-1].endswith(": it is broken")


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
