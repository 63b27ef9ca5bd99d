"""Managed servers: TLS with certificates on both sides, users with few rights, databases."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from perdure import Producer, Settings, Unavailable
from perdure.queues import Refused

from tests.support.acl import documented_rights
from tests.support.full_scenario import live
from tests.support.servers import SYSTEM, find_program
from tests.support.servers.certificates import Authority
from tests.support.servers.nodes import Node, free_ports

pytestmark = pytest.mark.integration

PASSWORD = "p/ss#w?rd"
QUOTED = "p%2Fss%23w%3Frd"


@dataclass
class Managed:
    """A server with TLS and client certificates, and an ACL user with the documented rights only."""

    node: Node
    authority: Authority
    query: str

    def url(self, *, user: str = f"worker:{QUOTED}@", database: int = 0) -> str:
        return f"rediss://{user}localhost:{self.node.port}/{database}?{self.query}"


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    program = find_program(SYSTEM)
    if program is None or shutil.which("openssl") is None:
        pytest.skip("the bundled Valkey is built without TLS, and there is no system one (or no openssl)")
    authority = Authority.found(tmp_path_factory.mktemp("managed"))
    query = authority.query()
    (port,) = free_ports(1)
    files = dict(part.split("=") for part in query.split("&"))
    node = Node(
        program,
        port,
        ["--tls-port", str(port), "--bind", "127.0.0.1", "--save", "", *authority.server_options()],
        {"ssl": True, **files},
    )
    try:
        node.start()
        yield Managed(node, authority, query)
    finally:
        node.stop()


@pytest.fixture
def worker_user(managed: Managed, namespace_name: str) -> Iterator[None]:
    """Return the settings of the user `worker`, limited to this test's namespace."""
    rights = documented_rights(namespace_name)
    managed.node.command("ACL", "SETUSER", "worker", "reset", "on", f">{PASSWORD}", *rights)
    managed.node.command("ACL", "LOG", "RESET")
    yield
    managed.node.command("ACL", "DELUSER", "worker")


def refused(node: Node) -> list[Any]:
    """Return the refusals in the server's ACL log."""
    entries = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in node.command("ACL", "LOG")]
    return [(entry[b"reason"], entry[b"context"], entry[b"object"]) for entry in entries]


@pytest.mark.usefixtures("worker_user")
async def test_the_documented_user_has_sufficient_rights(managed: Managed, namespace_name: str) -> None:
    await live(Settings(redis_url=managed.url(), namespace=namespace_name, lease=1.0))
    assert refused(managed.node) == []


@pytest.mark.usefixtures("worker_user")
async def test_the_user_of_a_namespace_reaches_no_other(managed: Managed) -> None:
    async with Producer(managed.url(), namespace="another") as producer:
        with pytest.raises(Refused, match=r"(?i)permission"):
            await producer.enqueue("task", queue="default")


@pytest.mark.usefixtures("worker_user")
async def test_a_wrong_password_is_reported_and_not_shown(managed: Managed) -> None:
    with pytest.raises(Refused, match="credentials") as caught:
        await Producer(managed.url(user="worker:wrong-one@")).__aenter__()
    assert "wrong-one" not in str(caught.value)


async def test_a_client_without_a_certificate_is_refused(managed: Managed) -> None:
    producer = Producer(f"rediss://localhost:{managed.node.port}/0?ssl_ca_certs={managed.authority.certificate}")
    producer.gateway.patience = 0.0
    with pytest.raises(Unavailable, match="cannot reach Redis"):  # the server closes the connection without a reason
        await producer.__aenter__()


async def test_databases_do_not_see_each_other(managed: Managed, namespace_name: str) -> None:
    async with (
        Producer(managed.url(user="", database=3), namespace=namespace_name) as third,
        Producer(managed.url(user="", database=0), namespace=namespace_name) as first,
    ):
        handle = await third.enqueue("task", queue="default")
        assert await first.find(handle.id) is None
        assert await third.find(handle.id) is not None
        assert await handle.cancel() == "cancelled"
