"""A primary that is replaced while it is alive: its connections are aborted after the sentinels' message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Settings, TaskHandle
from perdure.queues.transport.address import Node
from perdure.queues.transport.sentinel import FailoverListener

from tests.support.servers.nodes import Node as Server
from tests.support.servers.sentinels import Sentinels, private_sentinels
from tests.support.workers import bounded, running_worker, wait_until

FORMER, NEW = Node("10.0.0.1", 6379), Node("10.0.0.2", 6380)


@dataclass(eq=False)
class Connection:
    host: str
    port: int


class Silent(FailoverListener):
    """A listener whose messages come from the test."""

    def _listen(self) -> None:
        """Do nothing: there is no sentinel."""


@pytest.fixture
def replaced() -> FailoverListener:
    return Silent("jobs", [])


def said(service: str = "jobs", former: Node = FORMER, new: Node = NEW) -> str:
    return f"{service} {former.host} {former.port} {new.host} {new.port}"


def test_only_connections_to_the_former_primary_are_aborted(replaced: FailoverListener) -> None:
    cut: list[str] = []
    connections = [Connection(*FORMER), Connection(*NEW), Connection(*FORMER)]
    for number, connection in enumerate(connections):
        replaced.follow(connection, lambda number=number: cut.append(str(number)))  # type: ignore[misc]
    replaced._on_failover(said())
    assert cut == ["0", "2"]


def test_a_reconnected_connection_counts_for_its_new_server(replaced: FailoverListener) -> None:
    cut: list[str] = []
    connection = Connection(*FORMER)
    replaced.follow(connection, lambda: cut.append("first"))
    connection.host, connection.port = NEW
    replaced.follow(connection, lambda: cut.append("second"))
    replaced._on_failover(said())
    assert cut == []
    replaced._on_failover(said(former=NEW, new=FORMER))
    assert cut == ["second"]


def test_an_error_of_one_abort_does_not_prevent_the_others(replaced: FailoverListener) -> None:
    cut: list[str] = []
    connections = [Connection(*FORMER), Connection(*FORMER)]

    def closed() -> None:
        raise RuntimeError("the event loop is closed")

    replaced.follow(connections[0], closed)
    replaced.follow(connections[1], lambda: cut.append("second"))
    replaced._on_failover(said())
    assert cut == ["second"]


def test_the_former_primary_is_refused_as_the_primary(replaced: FailoverListener) -> None:
    replaced._on_failover(said())
    assert replaced.was_replaced(FORMER)
    assert not replaced.was_replaced(NEW)
    replaced._on_failover(said(former=NEW, new=FORMER))  # and back again
    assert replaced.was_replaced(NEW)
    assert not replaced.was_replaced(FORMER)


@pytest.mark.parametrize("text", [said("others"), "jobs 10.0.0.1", ""])
def test_messages_of_other_services_are_ignored(replaced: FailoverListener, text: str) -> None:
    cut: list[str] = []
    connection = Connection(*FORMER)
    replaced.follow(connection, lambda: cut.append("cut"))
    replaced._on_failover(text)
    assert cut == []
    assert not replaced.was_replaced(FORMER)


@pytest.fixture
def sentinels(server_program: Path) -> Iterator[Sentinels]:
    with private_sentinels(server_program) as sentinels:
        yield sentinels


@pytest.mark.cluster
@pytest.mark.integration
async def test_all_connections_leave_a_primary_that_was_not_demoted(sentinels: Sentinels, namespace_name: str) -> None:
    """The sentinels cannot demote it, so it stays a primary and accepts writes."""
    former = sentinels.primary
    former.command("ACL", "SETUSER", "default", "-replicaof", "-slaveof", "-config")
    async with App("leaving", settings=Settings(redis_url=sentinels.url(), namespace=namespace_name)) as app:
        started, proceed = asyncio.Event(), asyncio.Event()

        @app.task
        async def waits(ctx: Context) -> str:
            started.set()
            await proceed.wait()
            return "done"

        async with running_worker(app):
            running = await waits.enqueue()
            await bounded(started.wait())
            waiting = asyncio.create_task(running.result())
            await wait_until(lambda: _listens(former, running), "a waiter has subscribed")
            assert former.command("WAIT", 2, 20_000) == 2
            sentinels.replace_primary()
            heir = sentinels.failed_over(former)
            await wait_until(lambda: _left(former), "every connection has left the former primary")
            later = await waits.enqueue()
            proceed.set()
            assert await bounded(waiting) == await bounded(later.result()) == "done"
            for handle in (running, later):
                assert heir.command("HGET", handle.partition.record(handle.id), "state") == b"succeeded"
    assert former.info("replication")["role"] == "master"


async def _listens(node: Server, handle: TaskHandle[Any]) -> bool:
    found: list[int] = node.command("PUBSUB", "NUMSUB", handle.partition.record(handle.id))
    return found[1] > 0


async def _left(node: Server) -> bool:
    return not _clients(node)


def _clients(node: Server) -> list[dict[str, str]]:
    """Return the connections of Perdure, without those of sentinels, replicas and the test."""
    lines = node.command("CLIENT", "LIST").decode().splitlines()
    clients = [dict(part.partition("=")[::2] for part in line.split(" ")) for line in lines]
    return [
        client
        for client in clients
        if not client["name"].startswith("sentinel") and "S" not in client["flags"] and "client" not in client["cmd"]
    ]
