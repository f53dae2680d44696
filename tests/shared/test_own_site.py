"""Which requests to a server on loopback a page of another site may have caused."""

import pytest

from stoker_shared.own_site import host_name, is_own_site, is_private_name


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST:80", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:80", "::1"),
        ("::1", "::1"),
        ("[::1", ""),
        ("", ""),
        ("127.0.0.1,evil.example", "127.0.0.1,evil.example"),
        ("127.0.0.1@evil.example", "evil.example"),
    ],
)
def test_a_host_has_a_name(host, name):
    assert host_name(host) == name


@pytest.mark.parametrize(
    ("host", "origin", "is_own"),
    [
        ("127.0.0.1:8400", None, True),
        ("[::1]:8400", "http://[::1]:8400", True),
        ("localhost", "http://localhost", True),
        ("localhost", "https://evil.example", False),
        ("localhost", "null", False),
        ("localhost", "http://[", False),
        ("evil.example", None, False),
        (None, None, False),
    ],
)
def test_another_sites_page_shows_in_its_headers(host, origin, is_own):
    assert is_own_site(host, origin) is is_own


def test_names_that_no_site_can_have_are_private():
    names = ("127.0.0.1", "10.0.0.7", "::1", "localhost", "worker", "host.docker.internal")
    assert all(map(is_private_name, names))
    assert not any(map(is_private_name, ("evil.example", "127.0.0.1.evil.example", "127.1", "")))
