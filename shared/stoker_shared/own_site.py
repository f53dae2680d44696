"""Whether a request to a server on loopback was caused by a page of another site. Pure; for all three HTTP servers.

A page in a browser of this machine can send requests to loopback, and with a name of its own that it points at our
address also read the answers (DNS rebinding). Both show in the headers that browsers send.
"""

import ipaddress
from collections.abc import Container
from typing import Final
from urllib.parse import urlsplit

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header or an address to listen on, without port and brackets; empty if it is
    none."""
    if host.count(":") > 1 and not host.startswith("["):
        return host
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_own_site(host: str | None, origin: str | None, names: Container[str] = LOOPBACK_NAMES) -> bool:
    """
    Args:
        host, origin: the headers of the request.
        names: in lower case, IPv6 addresses without brackets.
    """
    return host_name(host or "") in names and (not origin or host_name(origin.partition("://")[2]) in names)


def is_private_name(name: str) -> bool:
    """Whether no site of the web can have this name: it is an address, has no dot, or ends in ``.internal``."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name.endswith(".internal"))
    return True
