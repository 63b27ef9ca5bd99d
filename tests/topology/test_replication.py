"""`durability="replicated"`: confirmed writes are on the replicas, and missing confirmations are reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync
from perdure import App, Context, NotReplicated, Producer, Settings, State, TaskHandle, Unavailable
from perdure.queues import Address, Namespace, set_partitions
from perdure.queues.transport.clients import is_read_only
from perdure.queues.transport.replication import Replication

from tests.support.command_line import call
from tests.support.lossy_proxy import LossyProxy
from tests.support.servers.nodes import Node, free_ports, wait_for
from tests.support.workers import bounded, history, recorded_steps, running_worker, wait_until

pytestmark = pytest.mark.integration

SHORT = Replication(1, 0.2)
"""Seconds that suffice for a healthy replica; a test that needs one waits longer if necessary."""
LONG = Replication(1, 60.0)


@pytest.fixture(scope="module")
def nodes(server_program: Path) -> Iterator[tuple[Node, Node]]:
    """A primary and its replica."""
    options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")
    ports = free_ports(2)
    primary = Node(server_program, ports[0], (*options, "--port", str(ports[0])), {})
    replica = Node(server_program, ports[1], (*options, "--port", str(ports[1])), {})
    try:
        for node in (primary, replica):
            node.start()
        replica.command("REPLICAOF", "127.0.0.1", primary.port)
        wait_for(lambda: replica.info("replication")["master_link_status"] == "up", "the replica")
        yield primary, replica
    finally:
        replica.stop()
        primary.stop()


@pytest.fixture
def primary(nodes: tuple[Node, Node]) -> Iterator[Node]:
    """The primary; after the test its replica runs again, and the data is deleted."""
    primary, replica = nodes
    yield primary
    replica.thaw()
    primary.command("FLUSHALL")
    assert primary.command("WAIT", 1, 60_000) == 1


@pytest.fixture
def replica(primary: Node, nodes: tuple[Node, Node]) -> Node:
    return nodes[1]


def url_of(node: Node) -> str:
    return f"redis://127.0.0.1:{node.port}"


def producer_on(node: Node, namespace: str, replication: Replication) -> Producer:
    return Producer(url_of(node), namespace=namespace, replication=replication)


@pytest.fixture
async def producer(primary: Node, namespace_name: str) -> AsyncIterator[Producer]:
    async with producer_on(primary, namespace_name, LONG) as producer:
        yield producer


@pytest.fixture
async def impatient(primary: Node, namespace_name: str) -> AsyncIterator[Producer]:
    async with producer_on(primary, namespace_name, SHORT) as producer:
        yield producer


def waits(node: Node) -> int:
    """Return how many WAIT commands the server has executed."""
    stats = node.info("commandstats").get("cmdstat_wait", "calls=0,")
    return int(stats.partition("calls=")[2].partition(",")[0])


async def held_up(node: Node) -> bool:
    """Whether a client is blocked in WAIT."""
    return node.info("clients")["blocked_clients"] == "1"


async def test_the_replica_has_the_task_when_enqueue_returns(replica: Node, producer: Producer) -> None:
    now = await producer.enqueue("t", durability="replicated", queue="default")
    later = await producer.enqueue("t", delay=60, durability="replicated", queue="default")
    many = await producer.enqueue_many("t", [{"n": 1}, {"n": 2}], durability="replicated", queue="default")
    streamed = [one async for one in producer.enqueue_stream("t", [{"n": 3}], durability="replicated", queue="default")]
    for handle in (now, later, *many, *streamed):
        assert replica.command("EXISTS", handle.partition.record(handle.id)) == 1


async def test_many_callers_share_one_wait(primary: Node, producer: Producer) -> None:
    await producer.enqueue("t", durability="replicated", queue="default")
    before = waits(primary)
    await asyncio.gather(*(producer.enqueue("t", durability="replicated", queue="default") for _ in range(64)))
    assert waits(primary) - before == 1


async def test_without_a_replica_the_task_is_stored_and_not_confirmed(
    replica: Node, impatient: Producer, producer: Producer
) -> None:
    await impatient.enqueue("t", durability="replicated", queue="default")
    replica.freeze()
    with pytest.raises(
        NotReplicated, match=r"task mine is stored on .*, but 0 of 1 replicas .*within 0\.2 s"
    ) as raised:
        await impatient.enqueue("t", task_id="mine", durability="replicated", queue="default")
    assert raised.value.task_ids == ("mine",)
    found = await impatient.find("mine")
    assert found is not None
    assert await found.status() is State.QUEUED
    replica.thaw()
    again = await producer.enqueue("t", task_id="mine", durability="replicated", queue="default")
    assert replica.command("EXISTS", again.partition.record("mine")) == 1
    assert await producer.gateway.command("XLEN", again.partition.ready) == 2


async def test_a_repeated_enqueue_that_writes_nothing_is_not_confirmed_by_that(
    primary: Node, replica: Node, namespace_name: str, impatient: Producer
) -> None:
    """The script finds the task and writes nothing; WAIT must still report on the task."""
    replica.freeze()
    for _ in range(2):
        async with producer_on(primary, namespace_name, SHORT) as another:
            with pytest.raises(NotReplicated):
                await another.enqueue("t", task_id="mine", durability="replicated", queue="default")
            with pytest.raises(NotReplicated):
                await another.enqueue("t", task_id="mine", durability="replicated", queue="default")
    found = await impatient.find("mine")
    assert found is not None
    assert await impatient.gateway.command("XLEN", found.partition.ready) == 1


async def test_unconfirmed_tasks_of_a_batch_are_named_by_id(
    replica: Node, impatient: Producer, producer: Producer, namespace_name: str
) -> None:
    """Also in a queue of several partitions, where a task without a key may be anywhere."""
    await set_partitions(producer.gateway, Namespace(namespace_name), "wide", 4)
    await producer.enqueue("t", queue="wide")
    replica.freeze()
    lost: set[str] = set()
    for _ in range(5):
        with pytest.raises(NotReplicated) as raised:
            await impatient.enqueue("t", queue="wide", durability="replicated")
        lost.update(raised.value.task_ids)
    with pytest.raises(NotReplicated) as raised:
        await impatient.enqueue_many("t", [{}, {}], queue="wide", durability="replicated")
    lost.update(raised.value.task_ids)
    replica.thaw()
    handles = [await producer.enqueue("t", task_id=one, queue="wide", durability="replicated") for one in sorted(lost)]
    stored = 0
    for index in range(4):
        ready = producer.namespace.partition("wide", index).ready
        stored += await producer.gateway.command("XLEN", ready)
    assert len(handles) in (6, 7)  # of the two that came together, the error tells of those in the first script
    assert stored == 8


async def test_a_known_task_in_a_closed_partition_is_confirmed(
    replica: Node, impatient: Producer, producer: Producer, namespace_name: str
) -> None:
    await producer.enqueue("t", task_id="mine", queue="default")
    await set_partitions(producer.gateway, Namespace(namespace_name), "default", 2)
    replica.freeze()
    with pytest.raises(NotReplicated):
        await _has_seen_new_route(impatient)
    replica.thaw()
    handle = await producer.enqueue("t", task_id="mine", durability="replicated", queue="default")
    assert handle.partition.index == 0
    assert replica.command("EXISTS", handle.partition.record("mine")) == 1


async def test_an_unconfirmed_task_is_stored_though_its_first_partition_was_closed(
    replica: Node, impatient: Producer, producer: Producer, namespace_name: str
) -> None:
    await impatient.enqueue("t", queue="default")
    await set_partitions(producer.gateway, Namespace(namespace_name), "default", 2)
    replica.freeze()
    with pytest.raises(NotReplicated, match="task mine is stored"):
        await impatient.enqueue("t", task_id="mine", durability="replicated", queue="default")
    assert await producer.find("mine") is not None


async def _has_seen_new_route(producer: Producer) -> None:
    await producer.enqueue("t", queue="default")
    await producer.enqueue("t", task_id="mine", durability="replicated", queue="default")


async def test_other_commands_are_not_delayed(
    primary: Node, replica: Node, namespace_name: str, producer: Producer
) -> None:
    replica.freeze()
    waiting = asyncio.create_task(producer.enqueue("t", durability="replicated", queue="default"))

    await wait_until(lambda: held_up(primary), "the enqueue waits for the replica")
    other = await bounded(producer.enqueue("t", queue="default"))
    assert await bounded(other.status()) is State.QUEUED
    assert not waiting.done()
    replica.thaw()
    assert await (await bounded(waiting)).status() is State.QUEUED


async def test_more_replicas_than_exist_are_not_confirmed(primary: Node, namespace_name: str) -> None:
    async with producer_on(primary, namespace_name, Replication(2, 0.2)) as producer:
        with pytest.raises(NotReplicated, match="1 of 2 replicas") as raised:
            await _confirmed_by_one(producer)
        assert (raised.value.found, raised.value.wanted) == (1, 2)


async def _confirmed_by_one(producer: Producer) -> None:
    """Enqueue until the one replica had enough time, so that only the second replica is missing."""
    while True:
        try:
            await producer.enqueue("t", task_id="mine", durability="replicated", queue="default")
        except NotReplicated as error:
            if error.found == 1:
                raise


@pytest.mark.parametrize("text", [b"EVALSHA", b"WAIT"])
async def test_a_lost_reply_is_repeated_and_enqueues_once(
    primary: Node, tmp_path: Path, namespace_name: str, producer: Producer, text: bytes
) -> None:
    await producer.gateway.load_scripts()
    async with LossyProxy(primary.server.socket, tmp_path / "line").open() as line:
        address = Address(f"unix://{line.path}")
        async with Producer(address=address, namespace=namespace_name, replication=LONG) as lossy:
            await lossy.enqueue("t", queue="other", durability="replicated")
            line.lose(text)
            handle = await bounded(lossy.enqueue("t", durability="replicated", queue="default"))
    assert line.lost == 1
    assert await producer.gateway.command("XLEN", handle.partition.ready) == 1


async def test_a_primary_that_is_demoted_meanwhile_confirms_nothing(
    nodes: tuple[Node, Node], primary: Node, replica: Node, namespace_name: str
) -> None:
    async with producer_on(primary, namespace_name, LONG) as producer:
        producer.gateway.patience = 0.0
        await producer.enqueue("t", durability="replicated", queue="default")
        replica.freeze()
        waiting = asyncio.create_task(producer.enqueue("t", durability="replicated", queue="default"))

        await wait_until(lambda: held_up(primary), "the enqueue waits for the replica")
        primary.command("REPLICAOF", "127.0.0.1", "1")
        try:
            with pytest.raises(Unavailable):
                await bounded(waiting)
            while True:  # the server closes the waiting connection, then it refuses writes
                with pytest.raises(Unavailable) as raised:
                    await bounded(producer.enqueue("t", durability="replicated", queue="default"))
                if is_read_only(raised.value.__cause__):
                    break
            await wait_until(lambda: _has_left(primary), "its connection has left the server that refuses writes")
        finally:
            primary.command("REPLICAOF", "NO", "ONE")
            replica.thaw()
            await run_sync(
                wait_for, lambda: replica.info("replication")["master_link_status"] == "up", "the replica to be back"
            )
        producer.gateway.patience = 30.0
        assert (
            await (await bounded(producer.enqueue("t", durability="replicated", queue="default"))).status()
            is State.QUEUED
        )


async def _has_left(node: Node) -> bool:
    """Whether no replication connection is open."""
    return b"cmd=wait" not in node.command("CLIENT", "LIST")


async def test_a_waiting_write_fails_when_the_producer_closes(
    primary: Node, replica: Node, namespace_name: str
) -> None:
    async with producer_on(primary, namespace_name, LONG) as producer:
        await producer.enqueue("t", durability="replicated", queue="default")
        replica.freeze()
        waiting = asyncio.create_task(producer.enqueue("t", durability="replicated", queue="default"))

        await wait_until(lambda: held_up(primary), "the enqueue waits for the replica")
    with pytest.raises(Unavailable):
        await bounded(waiting)


# steps


@pytest.fixture
async def app(primary: Node, namespace_name: str) -> AsyncIterator[App]:
    settings = Settings(
        redis_url=url_of(primary), namespace=namespace_name, lease=1.0, grace=5.0, replication_timeout=0.1
    )
    async with App("replicated", settings=settings) as app:
        yield app


async def test_a_step_waits_for_the_replica_and_costs_no_attempt(app: App, primary: Node, replica: Node) -> None:
    calls: list[str] = []
    first_done, go_on = asyncio.Event(), asyncio.Event()

    async def act(name: str) -> str:
        calls.append(name)
        return name

    @app.task
    async def job(ctx: Context) -> tuple[int, int]:
        await ctx.options(durability="replicated").step("first", act, "first")
        first_done.set()
        await go_on.wait()
        await ctx.options(durability="replicated").step("second", act, "second")
        calls.append("after")
        return ctx.attempt, ctx.crashes

    @app.task
    async def simple(ctx: Context) -> str:
        return await ctx.step("only", act, "simple")

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(first_done.wait())
        assert replica.command("HEXISTS", handle.partition.steps(handle.id), "d:first") == 1
        replica.freeze()
        go_on.set()
        await wait_until(lambda: _has_step(handle, primary, "d:second"), "the second step is recorded on the primary")
        other = await simple.enqueue()
        assert await bounded(other.result()) == "simple"
        assert "after" not in calls
        assert await handle.status() is State.RUNNING
        replica.thaw()
        assert await bounded(handle.result()) == (1, 0)
    assert calls == ["first", "second", "simple", "after"]
    completed = [event.step for event in await history(handle) if event.type == "step_completed"]
    assert completed == ["first", "second"]


async def _has_step(handle: TaskHandle[Any], node: Node, field: str) -> bool:
    return bool(node.command("HEXISTS", handle.partition.steps(handle.id), field))


async def test_a_risky_step_acts_when_its_intent_is_replicated(app: App, primary: Node, replica: Node) -> None:
    acted: list[str] = []

    async def pay() -> None:
        acted.append("paid")

    @app.task(durability="replicated")
    async def job(ctx: Context) -> None:
        await ctx.options(risky=True, verify=lambda: None).step("pay", pay)

    replica.freeze()
    async with running_worker(app):
        handle = await job.enqueue()
        await wait_until(lambda: _has_step(handle, primary, "i:pay"), "the intent is on the primary")
        assert acted == []
        replica.thaw()
        await bounded(handle.result())
    assert acted == ["paid"]
    assert set(await recorded_steps(app, handle)) == {"d:pay"}


# invalid values


def test_the_command_line_reports_unconfirmed_tasks(
    primary: Node, replica: Node, namespace_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_REPLICATION_TIMEOUT", "30")
    where = ("--redis-url", url_of(primary), "--namespace", namespace_name)
    assert call("enqueue", "t", "--queue", "default", *where, "--durability", "replicated").code == 0
    replica.freeze()
    monkeypatch.setenv("PERDURE_REPLICATION_TIMEOUT", "0.1")
    answer = call("enqueue", "t", "--queue", "default", "--id", "mine", *where, "--durability", "replicated")
    assert (answer.code, answer.out) == (1, "")
    assert "task mine is stored on" in answer.err
    assert "start the server" not in answer.err
    assert call("enqueue", "t", "--queue", "default", *where, "--durability", "quorum").code == 2


async def test_another_value_of_durability_is_refused(producer: Producer) -> None:
    with pytest.raises(ValueError, match="'replicated' or None"):
        await producer.enqueue("t", durability="sync", queue="default")  # type: ignore[arg-type]
