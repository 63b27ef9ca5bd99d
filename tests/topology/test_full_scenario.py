"""The full scenario on each kind of deployment: a cluster, sentinels, a cluster with TLS and passwords."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from perdure import Producer, Settings, Unavailable
from perdure.queues import Refused

from tests.conftest import default_kind
from tests.support.acl import documented_rights
from tests.support.full_scenario import live
from tests.support.servers import SYSTEM, find_program
from tests.support.servers.certificates import Authority
from tests.support.servers.clusters import Cluster, private_cluster
from tests.support.servers.sentinels import Sentinels, private_sentinels

pytestmark = [pytest.mark.cluster, pytest.mark.integration]

PASSWORD = "of-the-nodes"


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    program = find_program(default_kind())
    if program is None:
        pytest.skip(f"no {default_kind()} server here")
    with private_sentinels(program) as sentinels:
        yield sentinels


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    return Authority.found(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def guarded(authority: Authority) -> Iterator[Cluster]:
    """A cluster whose nodes require TLS, client certificates and passwords."""
    program = find_program(SYSTEM)
    if program is None:
        pytest.skip("the bundled Valkey is built without TLS, and there is no system one")
    files = dict(part.split("=") for part in authority.query().split("&"))
    with private_cluster(
        program,
        options=("--requirepass", PASSWORD, "--masterauth", PASSWORD),
        tls=authority.server_options(),
        client_options={"ssl": True, "password": PASSWORD, **files},
    ) as cluster:
        yield cluster


async def test_a_cluster(shared_cluster: Cluster, namespace_name: str) -> None:
    await live(Settings(redis_url=shared_cluster.url(), namespace=namespace_name, lease=1.0))


async def test_sentinels(sentinels: Sentinels, namespace_name: str) -> None:
    await live(Settings(redis_url=sentinels.url(), namespace=namespace_name, lease=1.0))


async def test_databases_behind_sentinels_do_not_see_each_other(sentinels: Sentinels, namespace_name: str) -> None:
    async with (
        Producer(f"{sentinels.url()}/3", namespace=namespace_name) as third,
        Producer(sentinels.url(), namespace=namespace_name) as first,
    ):
        handle = await third.enqueue("task", queue="default")
        assert await first.find(handle.id) is None
        assert await third.find(handle.id) is not None
        assert await handle.cancel() == "cancelled"


async def test_a_cluster_with_certificates_passwords_and_few_rights(
    guarded: Cluster, authority: Authority, namespace_name: str
) -> None:
    for node in guarded.nodes:
        rights = [*documented_rights(namespace_name), "+cluster|slots", "+asking"]
        node.command("ACL", "SETUSER", "worker", "reset", "on", ">of-the-worker", *rights)
    url = guarded.url(credentials="worker:of-the-worker@", query=f"?{authority.query()}", secure=True)
    await live(Settings(redis_url=url, namespace=namespace_name, lease=1.0))
    assert [entry for node in guarded.nodes for entry in node.command("ACL", "LOG")] == []


async def test_a_guarded_cluster_refuses_missing_credentials(guarded: Cluster, authority: Authority) -> None:
    with pytest.raises(Refused, match="credentials"):
        await Producer(guarded.url(query=f"?{authority.query()}", secure=True)).__aenter__()
    without_certificate = Producer(
        guarded.url(credentials=f":{PASSWORD}@", query=f"?ssl_ca_certs={authority.certificate}", secure=True)
    )
    without_certificate.gateway.patience = 0.0
    with pytest.raises(Unavailable, match="cannot reach"):
        await without_certificate.__aenter__()
