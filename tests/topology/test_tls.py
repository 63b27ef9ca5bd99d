"""`rediss://`: verification of the server's certificate by the system's authorities or one in the URL."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from perdure import Producer, Unavailable

from tests.support.servers import SYSTEM, RedisServer, find_program

pytestmark = pytest.mark.integration


@dataclass
class TlsServer:
    port: int
    authority: Path
    stranger: Path

    def url(self, authority: Path | None) -> str:
        trust = f"?ssl_ca_certs={authority}" if authority else ""
        return f"rediss://localhost:{self.port}/0{trust}"


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    program = find_program(SYSTEM)
    if program is None or shutil.which("openssl") is None:
        pytest.skip("the bundled Valkey is built without TLS, and there is no system one (or no openssl)")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "stranger"):
        make_certificate(folder, name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--save", "", "--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", "no")
    certificate = ("--tls-cert-file", str(folder / "server.crt"), "--tls-key-file", str(folder / "server.key"))
    trust = ("--tls-ca-cert-file", str(folder / "server.crt"))
    server = RedisServer(program, options=(*options, *certificate, *trust))
    try:
        try:
            server.start()
        except RuntimeError as error:
            pytest.skip(f"this redis-server is built without TLS: {error}")
        yield TlsServer(port, folder / "server.crt", folder / "stranger.crt")
    finally:
        server.stop()


def make_certificate(folder: Path, name: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
    subprocess.run([*command, *files], cwd=folder, check=True, capture_output=True)


async def test_a_server_with_the_named_authority_is_accepted(tls_server: TlsServer, namespace_name: str) -> None:
    async with Producer(tls_server.url(tls_server.authority), namespace=namespace_name) as producer:
        handle = await producer.enqueue("task", {"number": 1}, queue="default")
        assert await handle.status() == "queued"
        assert await handle.cancel() == "cancelled"


async def test_a_server_with_another_authority_is_refused(tls_server: TlsServer) -> None:
    producer = Producer(tls_server.url(tls_server.stranger))
    producer.gateway.patience = 0.0
    with pytest.raises(Unavailable, match=r"(?i)certificate verify failed"):
        await producer.__aenter__()


async def test_a_server_with_an_unknown_authority_is_refused(tls_server: TlsServer) -> None:
    producer = Producer(tls_server.url(None))
    producer.gateway.patience = 0.0
    with pytest.raises(Unavailable, match=r"(?i)certificate verify failed"):
        await producer.__aenter__()
