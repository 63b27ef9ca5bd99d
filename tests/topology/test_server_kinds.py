"""Addresses that lead to another kind of server: the error names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure.queues import Address, Gateway, Refused, Unavailable
from perdure.queues.transport.server_check import check_kind

from tests.support.servers.clusters import Cluster
from tests.support.servers.nodes import Node, free_ports
from tests.support.servers.sentinels import SERVICE, Sentinels, private_sentinels

pytestmark = pytest.mark.integration


async def reach(url: str) -> None:
    gateway = Gateway(Address(url), patience=0.0)
    try:
        await gateway.open()
    finally:
        await gateway.close()


@pytest.fixture(scope="module")
def server(server_program: Path) -> Iterator[int]:
    """The port of a standalone server."""
    (port,) = free_ports(1)
    node = Node(server_program, port, ["--bind", "127.0.0.1", "--port", str(port), "--save", ""], {})
    node.start()
    yield port
    node.stop()


@pytest.fixture(scope="module")
def lone_node(server_program: Path) -> Iterator[int]:
    """The port of a cluster node without other nodes and slots."""
    (port,) = free_ports(1, bus=True)
    node = Node(server_program, port, ["--bind", "127.0.0.1", "--port", str(port), "--cluster-enabled", "yes"], {})
    node.start()
    yield port
    node.stop()


async def test_a_standalone_server_is_not_a_cluster(server: int) -> None:
    with pytest.raises(Refused, match=r"one server and not a Redis Cluster: write redis://"):
        await reach(f"redis+cluster://127.0.0.1:{server}")


async def test_a_cluster_node_is_not_a_standalone_server(lone_node: int) -> None:
    with pytest.raises(Refused, match=r"a node of a Redis Cluster: write redis\+cluster://"):
        await reach(f"redis://127.0.0.1:{lone_node}")


async def test_a_standalone_server_is_not_a_sentinel(server: int) -> None:
    with pytest.raises(Refused, match=rf"127\.0\.0\.1:{server} is not a sentinel .*: write redis://"):
        await reach(f"redis+sentinel://127.0.0.1:{server}/{SERVICE}")


async def test_unreachable_nodes_are_reported_as_unavailable() -> None:
    with pytest.raises(Unavailable, match="cannot reach any node of"):
        await reach("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(Unavailable, match=r"no sentinel knows the primary of 'jobs'; 127\.0\.0\.1:1: .*127\.0\.0\.1:2"):
        await reach("redis+sentinel://127.0.0.1:1,127.0.0.1:2/jobs")


async def test_a_missing_certificate_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "authority.pem"
    for scheme, rest in (("rediss", ""), ("rediss+cluster", ""), ("rediss+sentinel", "/jobs")):
        with pytest.raises(ValueError, match=r"the file of ssl_ca_certs does not exist: .*authority\.pem"):
            await reach(f"{scheme}://127.0.0.1:1{rest}?ssl_ca_certs={missing}")


@pytest.fixture(scope="module")
def sentinels(server_program: Path) -> Iterator[Sentinels]:
    with private_sentinels(server_program, replicas=0, sentinels=1) as sentinels:
        yield sentinels


async def test_a_sentinel_is_not_a_server(sentinels: Sentinels) -> None:
    port = sentinels.watchers[0].port
    with pytest.raises(Refused, match=r"is a sentinel: write redis\+sentinel://host:port/service"):
        await reach(f"redis://127.0.0.1:{port}")
    with pytest.raises(Refused, match=r"is a sentinel: write redis\+sentinel://host:port/service"):
        await reach(f"redis+cluster://127.0.0.1:{port}")


async def test_an_unmonitored_service_is_named(sentinels: Sentinels) -> None:
    with pytest.raises(Refused, match="the sentinels do not monitor 'another'"):
        await reach(f"redis+sentinel://127.0.0.1:{sentinels.watchers[0].port}/another")


async def test_one_sentinel_that_answers_is_enough(sentinels: Sentinels) -> None:
    await reach(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinels.watchers[0].port}/{SERVICE}")


@pytest.mark.cluster
async def test_any_node_of_a_cluster_is_sufficient(shared_cluster: Cluster) -> None:
    for node in shared_cluster.nodes:
        await reach(f"redis+cluster://127.0.0.1:1,127.0.0.1:{node.port}")
    with pytest.raises(Refused, match=r"write redis\+cluster://"):
        await reach(f"redis://127.0.0.1:{shared_cluster.nodes[0].port}")


@pytest.mark.parametrize(
    ("url", "info", "why"),
    [
        ("redis://h", "redis_version:6.0.9\r\nredis_mode:standalone", "is Redis 6.0.9: Perdure needs 6.2 or newer"),
        ("redis+cluster://h", "redis_version:5.0.0\r\nredis_mode:cluster", "Redis 5.0.0"),
        ("redis://h", "nothing:known", r"is Redis \?"),
        ("rediss://h", "redis_version:7.2.4\r\nserver_mode:cluster", r"write rediss\+cluster://host:port"),
    ],
)
def test_the_mode_and_version_of_the_server_are_checked(url: str, info: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        check_kind(Address(url), info.encode())


@pytest.mark.parametrize(("url", "mode"), [("redis://h", "standalone"), ("redis+cluster://h", "cluster")])
def test_a_server_of_the_right_kind_is_accepted(url: str, mode: str) -> None:
    check_kind(Address(url), f"redis_version:6.2.0\r\nredis_mode:{mode}\r\n".encode())
