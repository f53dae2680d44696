"""A store's worker has the same name each time; two stores never have the same one."""

import pytest

from stoker_worker.memory.locks import NAME_FILE, store_name


def test_a_store_keeps_its_name(tmp_path, monkeypatch):
    name = store_name(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert store_name(tmp_path) == name
    (tmp_path / "other").mkdir()
    assert store_name(tmp_path / "other").startswith("another-")


def test_the_hosts_name_becomes_one_that_redis_keys_can_hold(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "größe mac:1." + "x" * 99)
    assert store_name(tmp_path).startswith("gr--e-mac-1.xxx")
    assert len(store_name(tmp_path)) <= 64


@pytest.mark.parametrize("content", [b"", b"a:b\n", b"\xff\xfe", b"x" * 65])
def test_a_damaged_name_is_replaced_and_told_of(tmp_path, content, caplog):
    (tmp_path / NAME_FILE).write_bytes(content)
    name = store_name(tmp_path)
    assert "is damaged" in caplog.text
    assert store_name(tmp_path) == name
    assert (tmp_path / NAME_FILE).read_text() == f"{name}\n"
