"""Fixtures: servers, a namespace per test, and a check that no test leaves a key without expiry."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import hypothesis
import pytest
import redis.asyncio
import redis.utils
from perdure import App
from perdure.queues import Address, Gateway, Namespace, Partition, Producer
from perdure.queues.delivery.checkpoint import Entry, Kind
from perdure.queues.transport.pipelining import ClientAdapter, Command, PipelinedConnection
from perdure.queues.transport.scripts import loaded_scripts
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from perdure.worker.log import logger
from perdure.worker.settings import Settings
from perdure.worker.testing.timed_server import TimedServer

from tests.support.key_leaks import check_for_leaks
from tests.support.servers import BUNDLED, SYSTEM, RedisServer, find_program
from tests.support.servers.clusters import Cluster, private_cluster
from tests.support.servers.postgres import PostgresServer, find_postgres

DEFAULT_KIND = os.environ.get("PERDURE_TEST_SERVER", BUNDLED)
SERVERS = [
    kind
    for kind in ([DEFAULT_KIND] if "PERDURE_TEST_SERVER" in os.environ else [BUNDLED, SYSTEM])
    if find_program(kind)
]
ON_SERVERS = [pytest.param(kind, marks=(pytest.mark.integration, pytest.mark.conformance)) for kind in SERVERS]
"""Parameters of the tests that run on every kind of server."""
CLUSTER = "cluster"
logger.enable("perdure")  # the library is quiet otherwise
redis.utils.get_lib_version = functools.cache(
    redis.utils.get_lib_version
)  # each connection reads the package's metadata
BACKENDS = ["fake", *ON_SERVERS, pytest.param(CLUSTER, marks=pytest.mark.cluster)]


def pytest_report_header() -> str:
    """Report the servers of the run; a kind that is not installed is not a parameter, so no test is skipped for it."""
    return f"redis servers: {', '.join(SERVERS) or 'none'}; integration tests on {default_kind()}"


def default_kind() -> str:
    """Return the kind of server for integration tests: bundled (Valkey), or the one in PERDURE_TEST_SERVER.

    If the variable is set, conformance tests run on that kind only, else on the bundled and the system server.
    """
    return DEFAULT_KIND


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis fail no test for its time: the machine may be loaded."""
    hypothesis.settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None]:
    """Let the garbage collector pass over what lives until the end: thousands of tests, and all modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files first that start processes: they take longest, and the last file decides how long the run takes."""
    slow = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in slow)


DATA_FOLDERS = itertools.count()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Remove the developer's PERDURE_* settings, and name a data directory for the test, which is made if it is used.

    `tmp_path` would make a folder and a link for each of thousands of tests.
    """
    for name in list(os.environ):
        if name.startswith("PERDURE_") and name != "PERDURE_TEST_SERVER":
            monkeypatch.delenv(name)
    folder = tmp_path_factory.getbasetemp() / f"data-{next(DATA_FOLDERS)}"
    monkeypatch.setenv("PERDURE_DATA_DIR", str(folder))


@pytest.fixture(autouse=True)
def one_slot_per_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that all keys of each script call are in one hash slot, as a cluster requires."""
    astray: list[str] = []
    for wire in (PipelinedConnection, ClientAdapter):
        monkeypatch.setattr(wire, "submit", watched(wire.submit, astray))
    yield
    assert not astray, f"scripts across slots: {astray}"


@pytest.fixture(autouse=True)
def events_in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that each run puts its events into the log in the order of their numbers."""
    latest = WeakKeyDictionary[CheckpointWriter, int]()
    astray: list[str] = []
    add = CheckpointWriter._add

    def checked(writer: CheckpointWriter, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if entry.kind in (Kind.EVENT, Kind.BASE):
                if int(entry.value) <= latest.get(writer, 0):
                    astray.append(f"{entry.step} {entry.value.decode()} after {latest[writer]}")
                latest[writer] = int(entry.value)
        add(writer, entries)

    monkeypatch.setattr(CheckpointWriter, "_add", checked)
    yield
    assert not astray, f"events out of order: {astray}"


def watched(submit: Callable[[Any, Command], Any], astray: list[str]) -> Callable[[Any, Command], Any]:
    def watching(wire: Any, command: Command) -> Any:
        if command[0] == "EVALSHA":
            keys = [str(key) for key in command[3 : 3 + int(command[2])]]
            tags = {re.sub(r"(?s).*?\{([^}]+)\}.*", r"\1", key) for key in keys}
            if len(tags) != 1:
                names = {script.sha: script.name for script in loaded_scripts()}
                astray.append(f"{names.get(str(command[1]))} touches {sorted(tags)}")
        return submit(wire, command)

    return watching


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[dict[str, RedisServer]]:
    """Servers by kind, started on first use, stopped at the end of the session."""
    servers: dict[str, RedisServer] = {}
    yield servers
    for server in servers.values():
        server.stop()


def shared_server(servers: dict[str, RedisServer], kind: str) -> RedisServer:
    if kind not in servers:
        program = find_program(kind)
        if program is None:
            pytest.skip(f"no {kind} redis-server here")
        servers[kind] = RedisServer(program).start()
    return servers[kind]


@pytest.fixture(scope="session")
def server_program() -> Path:
    """Program of the kind of server for integration tests."""
    program = find_program(default_kind())
    if program is None:
        pytest.skip(f"no {default_kind()} redis-server here")
    return program


@pytest.fixture(scope="session")
def shared_cluster(server_program: Path) -> Iterator[Cluster]:
    """Cluster that tests share and do not change, started on first use."""
    with private_cluster(server_program) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def timed_server() -> Iterator[TimedServer]:
    """Server of the clock of perdure.testing, which tests share, and do not set forward."""
    with TimedServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """PostgreSQL server, started on first use, stopped at the end of the session."""
    programs = find_postgres()
    if programs is None:
        pytest.skip("there is no PostgreSQL wheel for this host")
    server = PostgresServer(programs)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def namespace_name() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def redis_url(shared_servers: dict[str, RedisServer], namespace_name: str) -> Iterator[str]:
    """URL of a real server; afterwards the namespace of the test is checked for leaked keys and emptied."""
    url = shared_server(shared_servers, default_kind()).url
    yield url
    check_for_leaks(url, namespace_name)


@pytest.fixture
def settings(redis_url: str, namespace_name: str) -> Settings:
    """Settings on a real server, with a short lease."""
    return Settings(redis_url=redis_url, namespace=namespace_name, lease=1.0, grace=5.0)


@pytest.fixture
async def app(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[App]:
    """An open app. The mark `app(name, **changed)` names it, and changes its settings."""
    mark = request.node.get_closest_marker("app") or pytest.mark.app.mark
    async with App(*(mark.args or ("test",)), settings=settings.model_copy(update=mark.kwargs)) as app:
        yield app


@pytest.fixture(params=BACKENDS)
async def gateway(
    request: pytest.FixtureRequest, shared_servers: dict[str, RedisServer], namespace_name: str
) -> AsyncIterator[Gateway]:
    """A gateway for the conformance set: over fakeredis, as the clock of perdure.testing runs it, the bundled server, a
    system server where there is one, and a Redis Cluster.
    """
    client: redis.asyncio.Redis | None = None
    if request.param == "fake":
        urls = [request.getfixturevalue("timed_server").url]
        client = redis.asyncio.Redis.from_url(urls[0], protocol=2)
        gateway = Gateway.over(client)
    elif request.param == CLUSTER:
        cluster: Cluster = request.getfixturevalue("shared_cluster")
        gateway = Gateway(Address(cluster.url()))
        urls = [f"redis://127.0.0.1:{node.port}" for node in cluster.serving()]
    else:
        gateway = Gateway(Address(shared_server(shared_servers, request.param).url))
        urls = [gateway.address.url]
    if request.param != "fake":
        await gateway.open()
    yield gateway
    try:
        for url in urls:  # all keys of a task are on one node
            check_for_leaks(url, namespace_name)
    finally:
        await gateway.close()
        if client is not None:
            await client.aclose()


@pytest.fixture
def namespace(namespace_name: str) -> Namespace:
    return Namespace(namespace_name)


@pytest.fixture
def partition(namespace: Namespace) -> Partition:
    return namespace.partition("default")


@pytest.fixture
async def producer(gateway: Gateway, namespace_name: str) -> AsyncIterator[Producer]:
    """A producer on the conformance gateway."""
    async with Producer(namespace=namespace_name, gateway=gateway) as producer:
        yield producer
