"""`durability="replicated"`: what was said to be replicated is on the replicas, and what is not known to be says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync
from perdure import App, Context, NotReplicated, Producer, Settings, State, TaskHandle, Unavailable
from perdure.queues import Address, ConfigurationError, Namespace, Replication, set_partitions
from perdure.queues.transport.clients import is_read_only
from perdure.worker.settings import load_settings

from tests.conftest import default_kind
from tests.support.command_line import call
from tests.support.lossy_proxy import LossyLine
from tests.support.nodes import Node, free_ports, wait_for
from tests.support.servers import find_program
from tests.support.workers import history, recorded_steps, soon, until, working

pytestmark = pytest.mark.integration

SHORT = Replication(1, 0.2)
"""Long enough for a replica on this machine that is well; where a test needs it well, it waits as long as it must."""
LONG = Replication(1, 60.0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """A primary and its replica."""
    program = find_program(default_kind())
    if program is None:
        pytest.skip(f"no {default_kind()} server here")
    options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")
    ports = free_ports(2)
    primary = Node(program, ports[0], (*options, "--port", str(ports[0])), {})
    replica = Node(program, ports[1], (*options, "--port", str(ports[1])), {})
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
    """The primary; afterwards its replica is well again, and all is gone."""
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
    """How often the server was asked to WAIT."""
    told = node.info("commandstats").get("cmdstat_wait", "calls=0,")
    return int(told.partition("calls=")[2].partition(",")[0])


async def held_up(node: Node) -> bool:
    """Whether somebody is in a WAIT there."""
    return node.info("clients")["blocked_clients"] == "1"


async def test_once_it_returns_the_replica_has_the_task(replica: Node, producer: Producer) -> None:
    now = await producer.enqueue("t", durability="replicated")
    later = await producer.enqueue("t", delay=60, durability="replicated")
    many = await producer.enqueue_many("t", [{"n": 1}, {"n": 2}], durability="replicated")
    streamed = [one async for one in producer.enqueue_stream("t", [{"n": 3}], durability="replicated")]
    for handle in (now, later, *many, *streamed):
        assert replica.command("EXISTS", handle.partition.record(handle.id)) == 1


async def test_many_callers_share_one_wait(primary: Node, producer: Producer) -> None:
    await producer.enqueue("t", durability="replicated")
    before = waits(primary)
    await asyncio.gather(*(producer.enqueue("t", durability="replicated") for _ in range(64)))
    assert waits(primary) - before == 1


async def test_without_a_replica_that_answers_it_is_stored_and_said_not_to_be_confirmed(
    replica: Node, impatient: Producer, producer: Producer
) -> None:
    await impatient.enqueue("t", durability="replicated")
    replica.freeze()
    with pytest.raises(
        NotReplicated, match=r"task mine is stored on .*, but 0 of 1 replicas .*within 0\.2 s"
    ) as raised:
        await impatient.enqueue("t", task_id="mine", durability="replicated")
    assert raised.value.task_ids == ("mine",)
    found = await impatient.find("mine")
    assert found is not None
    assert await found.status() is State.QUEUED
    replica.thaw()
    again = await producer.enqueue("t", task_id="mine", durability="replicated")
    assert replica.command("EXISTS", again.partition.record("mine")) == 1
    assert await producer.gateway.command("XLEN", again.partition.ready) == 2


async def test_asked_again_on_another_connection_it_is_not_confirmed_by_having_nothing_to_write(
    primary: Node, replica: Node, namespace_name: str, impatient: Producer
) -> None:
    """The script finds the task and writes nothing; what WAIT tells must be about the task all the same."""
    replica.freeze()
    for _ in range(2):
        async with producer_on(primary, namespace_name, SHORT) as another:
            with pytest.raises(NotReplicated):
                await another.enqueue("t", task_id="mine", durability="replicated")
            with pytest.raises(NotReplicated):
                await another.enqueue("t", task_id="mine", durability="replicated")
    found = await impatient.find("mine")
    assert found is not None
    assert await impatient.gateway.command("XLEN", found.partition.ready) == 1


async def test_of_many_it_says_which_and_each_is_found_again_by_its_id(
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
        await impatient.enqueue_many("t", [{"n": 1}, {"n": 2}], queue="wide", durability="replicated")
    lost.update(raised.value.task_ids)
    replica.thaw()
    handles = [await producer.enqueue("t", task_id=one, queue="wide", durability="replicated") for one in sorted(lost)]
    stored = 0
    for index in range(4):
        ready = producer.namespace.partition("wide", index).ready
        stored += await producer.gateway.command("XLEN", ready)
    assert len(handles) in (6, 7)  # of the two that came together, the error tells of those in the first script
    assert stored == 8


async def test_a_task_that_is_known_in_a_partition_that_closed_is_asked_about_too(
    replica: Node, impatient: Producer, producer: Producer, namespace_name: str
) -> None:
    await producer.enqueue("t", task_id="mine")
    await set_partitions(producer.gateway, Namespace(namespace_name), "default", 2)
    replica.freeze()
    with pytest.raises(NotReplicated):
        await _heard_of(impatient)
    replica.thaw()
    handle = await producer.enqueue("t", task_id="mine", durability="replicated")
    assert handle.partition.index == 0
    assert replica.command("EXISTS", handle.partition.record("mine")) == 1


async def _heard_of(producer: Producer) -> None:
    await producer.enqueue("t")
    await producer.enqueue("t", task_id="mine", durability="replicated")


async def test_nobody_else_waits(primary: Node, replica: Node, namespace_name: str, producer: Producer) -> None:
    replica.freeze()
    waiting = asyncio.create_task(producer.enqueue("t", durability="replicated"))

    await until(lambda: held_up(primary), "the enqueue waits for the replica")
    other = await soon(producer.enqueue("t"))
    assert await soon(other.status()) is State.QUEUED
    assert not waiting.done()
    replica.thaw()
    assert await (await soon(waiting)).status() is State.QUEUED


async def test_more_replicas_than_there_are(primary: Node, namespace_name: str) -> None:
    async with producer_on(primary, namespace_name, Replication(2, 0.2)) as producer:
        with pytest.raises(NotReplicated, match="1 of 2 replicas") as raised:
            await _confirmed_by_one(producer)
        assert (raised.value.found, raised.value.wanted) == (1, 2)


async def _confirmed_by_one(producer: Producer) -> None:
    """Again until the one replica had time enough: only the number of replicas is to be missing."""
    while True:
        try:
            await producer.enqueue("t", task_id="mine", durability="replicated")
        except NotReplicated as error:
            if error.found == 1:
                raise


@pytest.mark.parametrize("text", [b"EVALSHA", b"WAIT"])
async def test_a_lost_reply_is_asked_for_again_and_enqueues_once(
    primary: Node, tmp_path: Path, namespace_name: str, producer: Producer, text: bytes
) -> None:
    await producer.gateway.load_scripts()
    async with LossyLine(primary.server.socket, tmp_path / "line").open() as line:
        address = Address(f"unix://{line.path}")
        async with Producer(address=address, namespace=namespace_name, replication=LONG) as lossy:
            await lossy.enqueue("t", queue="other", durability="replicated")
            line.lose(text)
            handle = await soon(lossy.enqueue("t", durability="replicated"))
    assert line.lost == 1
    assert await producer.gateway.command("XLEN", handle.partition.ready) == 1


async def test_a_primary_that_is_demoted_meanwhile_confirms_nothing(
    nodes: tuple[Node, Node], primary: Node, replica: Node, namespace_name: str
) -> None:
    async with producer_on(primary, namespace_name, LONG) as producer:
        producer.gateway.patience = 0.0
        await producer.enqueue("t", durability="replicated")
        replica.freeze()
        waiting = asyncio.create_task(producer.enqueue("t", durability="replicated"))

        await until(lambda: held_up(primary), "the enqueue waits for the replica")
        primary.command("REPLICAOF", "127.0.0.1", "1")
        try:
            with pytest.raises(Unavailable):
                await soon(waiting)
            while True:  # the server has closed the connection that waited; then it refuses to write
                with pytest.raises(Unavailable) as raised:
                    await soon(producer.enqueue("t", durability="replicated"))
                if is_read_only(raised.value.__cause__):
                    break
            await until(lambda: _has_left(primary), "its connection has left the server that refuses writes")
        finally:
            primary.command("REPLICAOF", "NO", "ONE")
            replica.thaw()
            await run_sync(
                wait_for, lambda: replica.info("replication")["master_link_status"] == "up", "the replica to be back"
            )
        producer.gateway.patience = 30.0
        assert await (await soon(producer.enqueue("t", durability="replicated"))).status() is State.QUEUED


async def _has_left(node: Node) -> bool:
    """Whether no connection is there on which somebody waited."""
    return b"cmd=wait" not in node.command("CLIENT", "LIST")


async def test_one_that_waits_is_told_when_the_producer_closes(
    primary: Node, replica: Node, namespace_name: str
) -> None:
    async with producer_on(primary, namespace_name, LONG) as producer:
        await producer.enqueue("t", durability="replicated")
        replica.freeze()
        waiting = asyncio.create_task(producer.enqueue("t", durability="replicated"))

        await until(lambda: held_up(primary), "the enqueue waits for the replica")
    with pytest.raises(Unavailable):
        await soon(waiting)


# steps


@pytest.fixture
async def app(primary: Node, namespace_name: str) -> AsyncIterator[App]:
    settings = Settings(
        redis_url=url_of(primary), namespace=namespace_name, lease=1.0, grace=5.0, replication_timeout=0.1
    )
    async with App("replicated", settings=settings) as app:
        yield app


async def test_a_step_waits_for_the_replica_and_the_task_is_not_blamed(app: App, primary: Node, replica: Node) -> None:
    calls: list[str] = []
    first_done, go_on = asyncio.Event(), asyncio.Event()

    async def act(name: str) -> str:
        calls.append(name)
        return name

    @app.task
    async def job(ctx: Context) -> tuple[int, int]:
        await ctx.step("first", act, "first", durability="replicated")
        first_done.set()
        await go_on.wait()
        await ctx.step("second", act, "second", durability="replicated")
        calls.append("after")
        return ctx.attempt, ctx.crashes

    @app.task
    async def simple(ctx: Context) -> str:
        return await ctx.step("only", act, "simple")

    async with working(app):
        handle = await job.enqueue()
        await soon(first_done.wait())
        assert replica.command("HEXISTS", handle.partition.steps(handle.id), "d:first") == 1
        replica.freeze()
        go_on.set()
        await until(lambda: _has_step(handle, primary, "d:second"), "the second step is recorded on the primary")
        other = await simple.enqueue()
        assert await soon(other.result()) == "simple"
        assert "after" not in calls
        assert await handle.status() is State.RUNNING
        replica.thaw()
        assert await soon(handle.result()) == (1, 0)
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
        await ctx.step("pay", pay, risky=True, verify=lambda: None)

    replica.freeze()
    async with working(app):
        handle = await job.enqueue()
        await until(lambda: _has_step(handle, primary, "i:pay"), "the intent is on the primary")
        assert acted == []
        replica.thaw()
        await soon(handle.result())
    assert acted == ["paid"]
    assert set(await recorded_steps(app, handle)) == {"d:pay"}


# said wrongly


def test_a_command_line_says_what_is_not_confirmed(
    primary: Node, replica: Node, namespace_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_REPLICATION_TIMEOUT", "30")
    where = ("--redis-url", url_of(primary), "--namespace", namespace_name)
    assert call("enqueue", "t", *where, "--durability", "replicated").code == 0
    replica.freeze()
    monkeypatch.setenv("PERDURE_REPLICATION_TIMEOUT", "0.1")
    answer = call("enqueue", "t", "--id", "mine", *where, "--durability", "replicated")
    assert (answer.code, answer.out) == (1, "")
    assert "task mine is stored on" in answer.err
    assert "start the server" not in answer.err
    assert call("enqueue", "t", *where, "--durability", "quorum").code == 2


@pytest.mark.parametrize("name", ["PERDURE_REPLICAS", "PERDURE_REPLICATION_TIMEOUT"])
def test_a_number_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for wrong in ("0", "many"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigurationError, match=f"{name}: .* \\(got '{wrong}'\\)") as of_producer:
            Producer()
        with pytest.raises(ConfigurationError) as of_worker:
            load_settings()
        assert str(of_producer.value) == str(of_worker.value)


async def test_another_word_for_durability_is_refused(producer: Producer) -> None:
    with pytest.raises(ValueError, match="'replicated' or None"):
        await producer.enqueue("t", durability="sync")  # type: ignore[arg-type]
