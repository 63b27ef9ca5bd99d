"""The gateway on a real Redis Cluster: commands, scripts, reads, notifications and heartbeats find their nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from perdure.queues import Address, Gateway, Namespace, Partition, Producer, QueueError, TaskCancelled, list_tasks
from perdure.queues.delivery.heartbeat import LeaseHeartbeat
from perdure.queues.delivery.leases import Delivery, Leases
from perdure.queues.keys import GROUP
from perdure.queues.transport.cluster.hash_slots import UnknownCommandError
from perdure.queues.transport.scripts import load_script, loaded_scripts, queue_script

from tests.support.consumers import Held
from tests.support.key_leaks import check_for_leaks
from tests.support.paths import ROOT
from tests.support.servers.clusters import Cluster, Migration, private_cluster, slot_of
from tests.support.servers.nodes import Node
from tests.support.workers import bounded

pytestmark = [pytest.mark.cluster, pytest.mark.integration]


@pytest.fixture
async def gateway(shared_cluster: Cluster, namespace_name: str) -> AsyncIterator[Gateway]:
    gateway = Gateway(Address(shared_cluster.url()))
    await gateway.open()
    yield gateway
    await gateway.close()
    for node in shared_cluster.serving():
        check_for_leaks(f"redis://127.0.0.1:{node.port}", namespace_name)


@pytest.fixture
def move(shared_cluster: Cluster, partition: Partition) -> Iterator[Migration]:
    """A migration of the partition's slot to another node, reverted after the test."""
    slot = slot_of(partition.ready)
    source = shared_cluster.owner(slot)
    move = shared_cluster.migrate(slot, others(shared_cluster, slot)[0])
    yield move
    if shared_cluster.owner(slot) is source:  # finish the migration wherever the test has left it
        move.keys()
        move.finish()
    shared_cluster.move_slot(slot, source)


def others(cluster: Cluster, slot: int) -> list[Node]:
    return [node for node in cluster.serving() if node is not cluster.owner(slot)]


async def test_a_pipeline_may_use_all_slots(gateway: Gateway, namespace: Namespace) -> None:
    assert gateway.clustered
    records = [namespace.partition(f"queue{number}").record("id") for number in range(20)]
    await gateway.pipeline([("SET", key, key, "EX", 60) for key in records])
    assert await gateway.pipeline([("GET", key) for key in records]) == [key.encode() for key in records]


async def test_every_primary_knows_the_scripts(gateway: Gateway, shared_cluster: Cluster) -> None:
    await gateway.load_scripts()
    names = [script.sha for script in loaded_scripts()]
    for node in shared_cluster.serving():
        assert node.command("SCRIPT", "EXISTS", *names) == [1] * len(names)


async def test_a_primary_that_is_given_its_first_slot_gets_the_scripts(
    server_program: Path, namespace: Namespace, partition: Partition
) -> None:
    """It serves no slot while the keys of the first one move to it, so no client lists it."""
    with private_cluster(server_program, replicas=0) as cluster:
        gateway = Gateway(Address(cluster.url()))
        await gateway.open()
        try:
            await gateway.load_scripts()
            cluster.migrate(slot_of(partition.due), cluster.add_primary()).begin()
            assert await gateway.run(queue_script("due"), [partition.due], [1]) == [[], -1, -1, -1]
        finally:
            await gateway.close()


async def test_commands_without_key_go_to_the_named_node(
    gateway: Gateway, shared_cluster: Cluster, partition: Partition
) -> None:
    info = await gateway.command("INFO", "server", node_of=partition.ready)
    assert f"tcp_port:{shared_cluster.owner(slot_of(partition.ready)).port}".encode() in info
    assert len(await gateway.command("TIME")) == 2
    with pytest.raises(UnknownCommandError, match="node_of"):
        await gateway.command("SCAN", "0")
    with pytest.raises(ValueError, match="key must be given in a cluster"):
        gateway.blocking_connection()


async def test_tasks_are_listed_and_waited_for(gateway: Gateway, namespace: Namespace) -> None:
    async with Producer(namespace=namespace.name, gateway=gateway) as producer:
        handles = [await producer.enqueue("t", queue=f"queue{number}") for number in range(6)]
        assert {record.id async for record in list_tasks(gateway, namespace)} == {handle.id for handle in handles}
        waiters = [asyncio.create_task(handle.result()) for handle in handles]
        await asyncio.gather(*(handle.cancel() for handle in handles))
        assert {type(end) for end in await bounded(asyncio.gather(*waiters, return_exceptions=True))} == {TaskCancelled}


async def test_a_migrated_slot_is_followed(gateway: Gateway, partition: Partition, move: Migration) -> None:
    key = partition.record("id")
    await gateway.command("SET", key, 1, "EX", 60)
    move.begin()
    move.keys()
    move.finish()
    assert await gateway.command("INCR", key, repeatable=False) == 2


async def test_a_key_that_has_migrated_before_its_slot_is_found(
    gateway: Gateway, partition: Partition, move: Migration
) -> None:
    gone, here = partition.record("gone"), partition.record("here")
    await gateway.pipeline([("SET", gone, 1, "EX", 60), ("SET", here, 1, "EX", 60)])
    move.begin()
    move.move(gone)
    sent = [gateway.command("INCR", key, repeatable=False) for key in (gone, here) * 20]
    assert sorted(await asyncio.gather(*sent)) == sorted([*range(2, 22)] * 2)
    assert await gateway.command("GET", gone) == await gateway.command("GET", here) == b"21"


async def test_a_script_waits_until_its_keys_are_on_one_node(
    gateway: Gateway, namespace: Namespace, partition: Partition, move: Migration
) -> None:
    async with Producer(namespace=namespace.name, gateway=gateway) as producer:
        first = await producer.enqueue("t", queue="default")
        move.begin()
        move.move(partition.ready)
        before = refusals(move)
        enqueuing = asyncio.create_task(producer.enqueue("t", queue="default"))
        while refusals(move) == before:  # noqa: ASYNC110 - servers have no event for it
            await asyncio.sleep(0.01)
        assert not enqueuing.done()
        move.keys()
        move.finish()
        second = await bounded(enqueuing)
        assert await gateway.command("XLEN", partition.ready) == 2
        assert [await first.cancel(), await second.cancel()] == ["cancelled", "cancelled"]


def refusals(move: Migration) -> list[str]:
    """Return how many commands with several keys the two nodes have refused."""
    return [node.info("errorstats").get("errorstat_TRYAGAIN", "") for node in (move.source, move.target)]


@pytest.fixture
async def group(gateway: Gateway, partition: Partition) -> None:
    for stream in (partition.ready, partition.nudge):
        await gateway.command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")


def reading(partition: Partition, block: int = 5000) -> tuple[str | int, ...]:
    streams = (partition.nudge, partition.ready)
    return ("XREADGROUP", "GROUP", GROUP, "w", "COUNT", 1, "BLOCK", block, "STREAMS", *streams, ">", ">")


@pytest.mark.usefixtures("group")
async def test_a_blocking_read_follows_its_slot(gateway: Gateway, partition: Partition, move: Migration) -> None:
    connection = gateway.blocking_connection(partition.ready)
    waits = asyncio.create_task(connection.read(*reading(partition)))
    await blocked(move.source)
    move.begin()
    move.keys()
    move.finish()
    entry = await gateway.command("XADD", partition.ready, "*", "field", "value")
    reply = await bounded(waits) or await bounded(connection.read(*reading(partition)))
    assert reply == [[partition.ready.encode(), [[entry, [b"field", b"value"]]]]]
    await connection.close()
    await gateway.command("DEL", partition.ready, partition.nudge)


async def blocked(node: Node) -> None:
    while node.info("clients")["blocked_clients"] == "0":  # noqa: ASYNC110 - servers have no event for it
        await asyncio.sleep(0.005)


@pytest.mark.usefixtures("group")
async def test_a_read_is_interrupted_before_and_while_it_blocks(gateway: Gateway, partition: Partition) -> None:
    connection = gateway.blocking_connection(partition.ready)
    for _ in range(20):
        read = asyncio.create_task(connection.read(*reading(partition, block=0)))
        await asyncio.sleep(0)
        await connection.interrupt()
        assert await bounded(read) is None
    await connection.close()
    await gateway.command("DEL", partition.ready, partition.nudge)


@pytest.mark.usefixtures("group")
async def test_a_heartbeat_follows_a_slot(
    gateway: Gateway, namespace: Namespace, partition: Partition, move: Migration
) -> None:
    heartbeat = RecordingHeartbeat(gateway, partition)
    entry = await gateway.command("XADD", partition.ready, "*", "field", "value")
    heartbeat.hold(await taken(gateway, partition, entry))
    async with heartbeat:
        await renewed(gateway, partition)
        move.begin()
        move.keys()
        move.finish()
        await renewed(gateway, partition)
    assert heartbeat.lost == []
    await gateway.command("DEL", partition.ready, partition.nudge)


async def taken(gateway: Gateway, partition: Partition, entry: bytes) -> Delivery:
    await gateway.command("XREADGROUP", "GROUP", GROUP, "w", "STREAMS", partition.ready, ">", repeatable=False)
    return Delivery(partition, entry, "w", 1, {})


class RecordingHeartbeat:
    """A heartbeat every 0.2 s for deliveries of worker `w`, which keeps its errors."""

    def __init__(self, gateway: Gateway, *partitions: Partition) -> None:
        self.leases = Leases()
        self.lost: list[Delivery] = []
        self.troubles: list[QueueError | None] = []
        self._beat = LeaseHeartbeat(gateway.address, lambda: None, "w", self.leases, 0.6, self.troubles.append)

    def hold(self, delivery: Delivery) -> None:
        self.leases.hold(Held(delivery, "id", lost=lambda: self.lost.append(delivery)))

    async def __aenter__(self) -> RecordingHeartbeat:
        self._beat.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._beat.stop)


async def renewed(gateway: Gateway, partition: Partition) -> None:
    """Wait until the idle time of the partition's one pending entry is reset."""
    before = 0
    while True:
        ((_, _, idle, _),) = await gateway.command("XPENDING", partition.ready, GROUP, "-", "+", 1)
        if idle < before:
            return
        before = idle
        await asyncio.sleep(0.01)


async def test_a_lost_node_is_replaced_and_does_not_delay_other_nodes(
    server_program: Path, namespace: Namespace
) -> None:
    with private_cluster(server_program) as cluster:
        gateway = Gateway(Address(cluster.url()), patience=60.0)
        await gateway.open()
        try:
            lost = namespace.partition("default")
            other = next(
                one
                for one in map(namespace.partition, "abcdefghijklmnop")
                if cluster.owner(slot_of(one.ready)) is not cluster.owner(slot_of(lost.ready))
            )
            heartbeat = RecordingHeartbeat(gateway)
            for one in (lost, other):
                await gateway.command("XGROUP", "CREATE", one.ready, GROUP, "0", "MKSTREAM")
                entry = await gateway.command("XADD", one.ready, "*", "field", "value")
                heartbeat.hold(await taken(gateway, one, entry))
            async with heartbeat, Producer(namespace=namespace.name, gateway=gateway) as producer:
                handle = await producer.enqueue("t", queue="default")
                assert await gateway.command("WAIT", 1, 5000, node_of=lost.ready) >= 1
                waiter = asyncio.create_task(handle.result())
                victim = cluster.kill_primary(slot_of(lost.ready))
                await bounded(renewed(gateway, other))
                cancelled = await gateway.command(
                    "HGET", lost.record(handle.id), "state"
                )  # once a replica has taken over
                assert cancelled == b"queued"
                assert cluster.owner(slot_of(lost.ready)) is not victim
                await bounded(renewed(gateway, lost))
                await handle.cancel()
                with pytest.raises(TaskCancelled):
                    await bounded(waiter)
            assert heartbeat.lost == []
            assert heartbeat.troubles[0] is not None
            assert heartbeat.troubles[-1] is None
        finally:
            await gateway.close()


async def claim_twice(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    arguments: list[str | int] = [GROUP, "w", 1000, "-released", "-", 10]
    keys = [partition.ready, partition.seen]
    await gateway.run(queue_script("claim"), keys, arguments)
    touched = (await gateway.run(queue_script("claim"), keys, arguments))[0]
    assert touched[1] >= 0
    assert await gateway.command("EXISTS", partition.seen) == 1


async def promote_last(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    keys = [partition.due, partition.ready, partition.record("due"), partition.record("not-due")]
    assert await gateway.run(queue_script("promote"), keys, ["due", "not-due"]) == 1


async def replay_fresh(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    task = [key("dead") for key in (partition.record, partition.steps, partition.log)]
    keys = [partition.dead, *task, partition.ready, partition.inbox("dead"), partition.timeline]
    letter = (await gateway.command("XRANGE", partition.dead, "-", "+"))[0][0]
    replay = load_script(ROOT / "deadletter/lua/replay.lua")
    assert await gateway.run(replay, keys, [letter, "1", "", "1", "dead"]) == 1
    assert await gateway.command("TTL", partition.inbox("dead")) == -1


async def wake_all(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    await gateway.command("ZADD", partition.due, LATER, "format", LATER, "code")
    keys = [partition.due, partition.versions, partition.task_versions("t")]
    assert await gateway.run(queue_script("wake_version"), keys, [200, 1, 2]) == 2


async def join_alone(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    assert await gateway.run(queue_script("join_group"), [namespace.sharing("q")], ["w", 60_000, 3_600_000]) == [b"w"]


async def register_again(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    keys = [namespace.worker("w"), namespace.workers, namespace.config]
    keys += [namespace.schedules, namespace.pauses, namespace.jobs]
    await gateway.run(queue_script("register_worker"), keys, ["w", 60_000, 0, -1, "host", "h"])
    assert await gateway.command("HGET", namespace.worker("w"), "old") is None


@pytest.mark.parametrize("act", [claim_twice, promote_last, replay_fresh, wake_all, join_alone, register_again])
async def test_no_script_uses_a_key_that_it_has_deleted(
    gateway: Gateway, namespace: Namespace, partition: Partition, shared_cluster: Cluster, act: Callable[..., Any]
) -> None:
    """A node refuses a key that does not exist if its slot is migrating, even in a script that has written already."""
    await stored_data(gateway, namespace, partition)
    slots = [slot_of(partition.ready), slot_of(namespace.workers)]
    moves = [shared_cluster.migrate(slot, others(shared_cluster, slot)[0]) for slot in slots]
    for move in moves:
        move.begin()
    try:
        await act(gateway, namespace, partition)
    finally:
        for move in moves:
            for node in (move.target, move.source):
                node.command("CLUSTER", "SETSLOT", move.slot, "STABLE")
        await gateway.command("DEL", partition.ready, partition.nudge, partition.due, partition.dead, partition.seen)
        await gateway.command("DEL", partition.timeline, partition.versions, partition.task_versions("t"))
        await gateway.command("DEL", namespace.sharing("q"), namespace.workers, namespace.worker("w"), namespace.config)
        await gateway.command("DEL", namespace.schedules, namespace.pauses, namespace.jobs)
        for task in ("due", "not-due", "dead"):
            await gateway.command("DEL", *partition.run_keys(task))


async def test_an_outcome_waits_for_a_stream_that_migrates(
    gateway: Gateway, partition: Partition, move: Migration
) -> None:
    """Only the record says which streams there are, so no node can know in advance that a script needs them."""
    dead, record, parts = partition.dead, partition.record("x"), (partition.steps("x"), partition.log("x"))
    stream, inbox = partition.stream("x", "output"), partition.inbox("x")
    await gateway.command("XADD", dead, "1-1", "id", "x", "env", "{}")
    await gateway.command("HSET", record, "state", "dead", "dead", "1-1", "streams", "output")
    await gateway.command("ZADD", partition.timeline, 1, "x")
    for key in (parts[0], inbox):
        await gateway.command("HSET", key, "a", "b")
    for key in (parts[1], stream):
        await gateway.command("XADD", key, "1-0", "a", "b")
    move.begin()
    move.move(stream)
    script = load_script(ROOT / "deadletter" / "lua" / "discard.lua")
    keys = [dead, record, *parts, inbox, partition.timeline]
    discarding = asyncio.create_task(gateway.run(script, keys, ["1-1", "x"]))
    await asyncio.sleep(0.3)
    assert not discarding.done()
    assert await gateway.command("HGET", record, "state") == b"dead"
    move.keys()
    move.finish()
    assert await bounded(discarding) == 1
    assert await gateway.command("EXISTS", stream) == 0


LATER = 9_000_000_000_000
"""A due time that does not come, in milliseconds."""


async def stored_data(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    """Store every key that the acts use, so that the node of a migrating slot accepts their scripts."""
    await gateway.command("XGROUP", "CREATE", partition.ready, GROUP, "0", "MKSTREAM")
    await gateway.pipeline(
        [
            ("SET", partition.seen, 1),
            ("ZADD", partition.due, 1, "due"),
            ("HSET", partition.record("due"), "state", "scheduled", "env", "{}"),
            ("HSET", partition.record("not-due"), "state", "queued"),
            ("HSET", partition.record("dead"), "state", "dead", "dead", "1-1"),
            ("HSET", partition.steps("dead"), "d:a", "1"),
            ("XADD", partition.log("dead"), "*", "type", "buried"),
            ("HSET", partition.inbox("dead"), "sent", 0),
            ("EXPIRE", partition.inbox("dead"), 60),
            ("XADD", partition.dead, "1-1", "id", "dead", "env", "{}"),
            ("ZADD", partition.timeline, 1, "dead"),
            ("XADD", partition.nudge, "*", "why", "due"),
            ("ZADD", partition.versions, 1, "format"),
            ("ZADD", partition.task_versions("t"), 2, "code"),
            ("ZADD", namespace.sharing("q"), 1, "stale"),
            ("ZADD", namespace.workers, 1, "stale"),
            ("HSET", namespace.worker("w"), "old", 1),
            ("HSET", namespace.config, "lease", 30),
            ("ZADD", namespace.schedules, LATER, "nightly"),
            ("HSET", namespace.pauses, "revision", 1),
            ("ZADD", namespace.jobs, LATER, "purge"),
        ]
    )
