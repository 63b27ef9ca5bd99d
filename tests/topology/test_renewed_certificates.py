"""Certificates that are renewed in their files while workers and producers are connected."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from perdure import App, Context, Settings
from perdure.queues import Address
from perdure.queues.transport.address import Node
from perdure.queues.transport.clients import async_client, pipelined_connection
from perdure.queues.transport.tls import TlsConnection

from tests.support.servers.certificates import Authority
from tests.support.workers import bounded, running_worker

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl"),
]


class TlsFront:
    """A TLS server before a server on a unix socket, which requires a certificate of its clients."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self, certificate: tuple[Path, Path], clients: Path) -> None:
        """Accept clients with a certificate of an authority; close all connections of before."""
        await self.stop()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=clients)
        context.load_cert_chain(*certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._socket)
        ends = {writer, up_writer}
        self._open |= ends
        try:
            ways = [pass_on(reader, up_writer), pass_on(up_reader, writer)]
            await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass


@pytest.fixture
async def front(redis_url: str) -> AsyncIterator[TlsFront]:
    front = TlsFront(redis_url.removeprefix("unix://"))
    yield front
    await front.stop()


@contextmanager
def authorities(folder: Path) -> Iterator[tuple[Authority, Authority]]:
    for name in ("old", "new"):
        (folder / name).mkdir()
    yield Authority.found(folder / "old"), Authority.found(folder / "new")


# A synchronous connection that the peer resets before its handshake is left to the garbage collector by the ssl module.
@pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("renewed", ["the client's certificate", "the server's authority"])
async def test_a_renewed_certificate_is_read_from_its_file(
    front: TlsFront, settings: Settings, tmp_path: Path, renewed: str
) -> None:
    with authorities(tmp_path) as (old, new):
        served = old.sign("server")
        certificate, key, trusted = (tmp_path / name for name in ("client.crt", "client.key", "ca.crt"))

        def install(authority: Authority) -> None:
            for source, target in zip(authority.sign("client"), (certificate, key), strict=True):
                shutil.copy(source, target)

        install(old)
        shutil.copy(old.certificate, trusted)
        await front.start(served, old.certificate)
        query = f"ssl_ca_certs={trusted}&ssl_certfile={certificate}&ssl_keyfile={key}"
        url = f"rediss://127.0.0.1:{front.port}/0?{query}"
        async with App("renewed", settings=settings.model_copy(update={"redis_url": url})) as app:
            runs: list[str] = []
            started, finish = asyncio.Event(), asyncio.Event()

            @app.task
            async def job(ctx: Context) -> str:
                runs.append(ctx.task_id)
                started.set()
                await finish.wait()
                return await ctx.step("record", lambda: "recorded")

            async with running_worker(app) as worker:
                handle = await job.enqueue()
                await bounded(started.wait())
                if renewed == "the client's certificate":
                    install(new)
                    await front.start(served, new.certificate)
                else:
                    trusted.write_bytes(old.certificate.read_bytes() + new.certificate.read_bytes())
                    await front.start(new.sign("server"), old.certificate)
                finish.set()
                assert await bounded(handle.result()) == "recorded"
                assert await bounded((await job.enqueue()).result()) == "recorded"
                assert worker.health().live
            assert len(runs) == 2


QUERY = "ssl_ca_certs=/ca.pem"


@pytest.mark.parametrize(
    ("url", "node"),
    [
        (f"rediss://host?{QUERY}", None),
        (f"rediss+cluster://host?{QUERY}", Node("host", 7000)),
        (f"rediss+sentinel://host/jobs?{QUERY}", None),
    ],
)
def test_each_topology_reads_the_files_at_each_connect(url: str, node: Node | None) -> None:
    address = Address.parse(url, data_dir=Path)
    blocking = async_client(address, None, node=node).connection_pool.make_connection()
    for connection in (pipelined_connection(address, None, node), blocking):
        assert isinstance(connection, TlsConnection)
        assert connection.ca_certs == "/ca.pem"
