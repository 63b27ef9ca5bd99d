"""Scripts of producers, which may call but not load them: who loads them, when, and what a producer sees meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from perdure import App, Context, Producer, Settings, Unavailable
from perdure.queues import Gateway, Namespace, Refused, list_queues
from perdure.queues.transport.gateway import GatewayTimings
from perdure.queues.transport.scripts import queue_scripts

from tests.conftest import ON_SERVERS
from tests.support.acl import create_user
from tests.support.command_line import call
from tests.support.servers import find_program
from tests.support.servers.nodes import Node, free_ports
from tests.support.workers import bounded, running_worker, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=ON_SERVERS)
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    program = find_program(request.param)
    assert program is not None
    (port,) = free_ports(1)
    node = Node(program, port, ["--port", str(port), "--bind", "127.0.0.1", "--save", ""], {})
    try:
        node.start()
        yield node
    finally:
        node.stop()


@pytest.fixture
def users(node: Node, namespace_name: str) -> dict[str, Settings]:
    """Settings by role, on a server that has no script."""
    for role in ("producer", "worker", "operator"):
        create_user(node, role, namespace_name)
    node.command("SCRIPT", "FLUSH")
    node.command("CONFIG", "RESETSTAT")
    place = f"127.0.0.1:{node.port}/0"
    return {
        role: Settings(redis_url=f"redis://{role}:of-{role}@{place}", namespace=namespace_name, lease=1.0)
        for role in ("producer", "worker", "operator")
    }


def producer_of(settings: Settings) -> Producer:
    return Producer(settings.redis_url, namespace=settings.namespace)


def app_of(settings: Settings) -> App:
    app = App("loads", settings=settings)

    @app.task
    async def echo(ctx: Context, text: str) -> str:
        return text

    return app


async def missing(node: Node) -> int:
    """Return how many scripts of this version the server does not have."""
    scripts = queue_scripts()
    found: list[int] = await asyncio.to_thread(node.command, "SCRIPT", "EXISTS", *(script.sha for script in scripts))
    return len(scripts) - sum(found)


async def test_a_producer_waits_until_an_operator_has_loaded_the_scripts(
    users: dict[str, Settings], node: Node
) -> None:
    async with producer_of(users["producer"]) as producer, producer_of(users["operator"]) as operator:
        waiting = asyncio.create_task(producer.enqueue("echo", {"text": "a"}, queue="loads"))

        async def is_refused() -> bool:
            return "cmdstat_evalsha" in node.info("commandstats")

        await wait_until(is_refused, "the producer's call was answered with NOSCRIPT")
        assert not waiting.done()
        assert await operator.gateway.load_scripts() > 0
        assert await operator.gateway.load_scripts() == 0
        assert (await bounded(waiting)).id
    assert await missing(node) == 0


async def test_a_producer_says_who_must_load_the_scripts(
    users: dict[str, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gateway, "timings", GatewayTimings(scripts=0.1))
    async with producer_of(users["producer"]) as producer:
        producer.gateway.patience = 0.1
        with pytest.raises(Unavailable, match=r"no worker or operator has loaded .*prepare"):
            await producer.enqueue("echo", {"text": "a"}, queue="loads")


async def test_a_running_worker_loads_scripts_that_the_server_has_lost(users: dict[str, Settings], node: Node) -> None:
    async with app_of(users["producer"]) as app, running_worker(app_of(users["worker"])):
        assert await missing(node) == 0
        assert await bounded((await app.tasks["echo"].enqueue("a")).result()) == "a"
        await asyncio.to_thread(node.command, "SCRIPT", "FLUSH")
        assert await bounded((await app.tasks["echo"].enqueue("b")).result()) == "b"
        assert await missing(node) == 0


async def test_an_operator_that_misses_a_script_loads_all(users: dict[str, Settings], node: Node) -> None:
    async with producer_of(users["operator"]) as operator:
        await operator.enqueue("echo", {"text": "a"}, queue="loads")
    assert await missing(node) == 0
    assert "cmdstat_eval" not in node.info("commandstats"), "no process sends the source of a script with a call"


async def test_a_command_prepares_a_server_for_producers(
    users: dict[str, Settings], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", users["operator"].redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", users["operator"].namespace)
    prepared = await asyncio.to_thread(call, "server", "prepare", "loads", "--json")
    assert (prepared.json["scripts"] > 0, prepared.json["queues"]) == (True, ["loads"])
    assert (await asyncio.to_thread(call, "server", "prepare", "--json")).json["scripts"] == 0
    assert (await asyncio.to_thread(call, "server", "prepare", "a:b")).code == 2
    node.command("ACL", "LOG", "RESET")
    async with producer_of(users["producer"]) as producer:
        handle = await producer.enqueue("echo", {"text": "a"}, queue="loads")
        found = await producer.find(handle.id)
        assert found is not None
    assert node.command("ACL", "LOG") == []


async def test_a_worker_registers_the_queue_of_a_producer(
    users: dict[str, Settings],
    node: Node,
    namespace: Namespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = logging.getLogger("perdure.queues.junk")  # whatever a worker of another test has set above it
    monkeypatch.setattr(source, "handlers", [caplog.handler])
    monkeypatch.setattr(source, "propagate", False)
    version = node.info("server")["redis_version"]
    if version.startswith("6."):
        pytest.skip("Redis 6.2 has no rights to read keys only: the producer registers its queue")
    async with producer_of(users["operator"]) as operator:
        await operator.gateway.load_scripts()
        with caplog.at_level(logging.WARNING, source.name):
            async with app_of(users["producer"]) as app:
                handle = await app.tasks["echo"].enqueue("a")
                assert await list_queues(operator.gateway, namespace) == []
                assert f"perdure server prepare {app.name}" in caplog.text
                async with running_worker(app_of(users["worker"])):
                    assert await bounded(handle.result()) == "a"
        assert [queue.queue for queue in await list_queues(operator.gateway, namespace)] == ["loads"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("HKEYS", "STEPS"), r"HKEYS on \{NS:\*\}:steps:\*; roles with the rights: viewer, worker, operator"),
        (("HSET", "QUEUES", "x", 1), r"HSET on \{NS\}:queues; roles with the rights: worker, operator"),
        (("XREADGROUP", "GROUP", "g", "c", "STREAMS", "READY", ">"), "XREADGROUP.*; roles with the rights: worker"),
        (("CONFIG", "GET", "*"), "CONFIG GET; no role has the rights"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
async def test_the_error_of_a_missing_right_names_command_keys_and_roles(
    users: dict[str, Settings], node: Node, namespace: Namespace, command: tuple[str | int, ...], said: str
) -> None:
    if node.info("server")["redis_version"].startswith("6.") and "QUEUES" in command:
        pytest.skip("Redis 6.2 has no rights to read keys only")
    partition = namespace.partition("loads")
    keys = {"STEPS": partition.steps("x"), "QUEUES": namespace.queues, "READY": partition.ready}
    words = [keys.get(word, word) if isinstance(word, str) else word for word in command]
    async with producer_of(users["producer"]) as producer:
        with pytest.raises(Refused, match=said.replace("NS", namespace.name) + ".*page on security"):
            await producer.gateway.command(*words)
        with pytest.raises(Refused, match="roles with the rights: worker, operator"):
            await producer.gateway.load_scripts()
