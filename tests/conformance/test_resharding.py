"""Resharding: a change of the partition count loses no task, stores none twice, and keeps the order of a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from perdure.deadletter.burial import bury
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import (
    Gateway,
    Namespace,
    Partition,
    Producer,
    Refused,
    State,
    TaskExists,
    TaskHandle,
    Unavailable,
    find_task,
    list_queues,
    set_partitions,
)
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.envelope import Envelope, EnvelopeTemplate
from perdure.queues.inspection.views import queue_partitions
from perdure.queues.junk import set_hash_aside
from perdure.queues.keys import KEY_FORMAT, junk_keys
from perdure.queues.partitions.assignment import PartitionAssignment
from perdure.queues.partitions.resharding import (
    PartitionStatus,
    close_partition,
    load_route,
    open_again,
    partition_status,
    retire_generation,
    sync_route,
)
from perdure.queues.partitions.route import SINGLE, Generation, Route, spread
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import Script, queue_script

from tests.support.consumers import ids, make_due, needs_one_server, needs_server, read, read_one, worker
from tests.support.delivery_calls import EVIDENCE, SETTLING
from tests.support.lossy_proxy import LossyProxy, lossy_gateway
from tests.support.task_places import DUE, READY, places

FOUR = Route((Generation(0, 1), Generation(1, 4)))


def at(namespace: Namespace, index: int, queue: str = "default") -> Partition:
    return namespace.partition(queue, index)


def home(key: str, generation: Generation) -> int:
    return generation.index_of(spread(key))


async def lengths(gateway: Gateway, namespace: Namespace) -> list[int]:
    """Return how many messages each partition of the default queue has."""
    found = await queue_partitions(gateway, namespace, "default")
    return [await gateway.command("XLEN", partition.ready) for partition in found]


async def known_by(
    gateway: Gateway, namespace: Namespace, name: str = "a", *, share: bool = False
) -> PartitionAssignment:
    """Return what a worker that has just started sees of the default queue."""
    assignment = PartitionAssignment(gateway, namespace, ["default"], name, share=share)
    await assignment.refresh()
    return assignment


def indexes(partitions: Sequence[Partition]) -> list[int]:
    return [partition.index for partition in partitions]


# the route


async def test_a_new_queue_starts_with_its_partitions(gateway: Gateway, namespace: Namespace) -> None:
    assert await set_partitions(gateway, namespace, "default", 4) == Route((Generation(0, 4),))
    assert await gateway.command("HGET", namespace.queues, "default") == b"4"


async def test_a_queue_in_use_gets_new_partitions(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    await producer.enqueue("t", queue="default")
    assert await set_partitions(gateway, namespace, "default", 4) == FOUR
    assert await load_route(gateway, namespace, "default") == FOUR
    assert await set_partitions(gateway, namespace, "default", 4) == FOUR
    assert (await set_partitions(gateway, namespace, "default", 2)).last == Generation(5, 2)


async def test_data_of_a_newer_format_is_refused(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    await producer.enqueue("t", queue="default")
    assert await gateway.command("HGET", namespace.deployment, "format") == str(KEY_FORMAT).encode()
    await gateway.command("HSET", namespace.deployment, "format", KEY_FORMAT + 1)
    refused = rf"namespace '{namespace.name}': its data has format {KEY_FORMAT + 1}.*upgrade"
    async with Producer(namespace=namespace.name, gateway=gateway) as later:
        with pytest.raises(Refused, match=refused):
            await later.enqueue("t", queue="default")
    with pytest.raises(Refused, match=refused):
        await known_by(gateway, namespace)
    with pytest.raises(Refused, match=refused):
        await list_queues(gateway, namespace)


async def test_a_queue_whose_name_is_not_valid_is_neither_stored_nor_read(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    with pytest.raises(ValueError, match=r"queue must be 1 to 64 letters, .*, got 'a b'"):
        await sync_route(gateway, namespace, "a b")
    assert await gateway.command("HKEYS", namespace.queues) == [b"default"]
    await gateway.command("HSET", namespace.queues, "a b", "1")
    listed = {stats.queue: stats.problem for stats in await list_queues(gateway, namespace)}
    assert listed.keys() == {"default", "'a b'"}
    assert not listed["default"]
    assert "names no queue" in listed["'a b'"]


@pytest.mark.parametrize("count", [0, 1025])
async def test_an_invalid_count_is_refused(gateway: Gateway, namespace: Namespace, count: int) -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        await set_partitions(gateway, namespace, "default", count)
    assert await load_route(gateway, namespace, "default") is None


async def test_concurrent_changes_never_share_an_index(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    await asyncio.gather(*(set_partitions(gateway, namespace, "default", 2 + number) for number in range(6)))
    route = await load_route(gateway, namespace, "default")
    assert route is not None
    assert sorted(one.count for one in route.generations) == [1, 2, 3, 4, 5, 6, 7]
    assert list(route.indexes) == list(range(28))
    for index in (index for one in route.previous for index in one.indexes):
        assert await partition_status(gateway, at(namespace, index)) >= PartitionStatus.CLOSED
    assert await partition_status(gateway, at(namespace, route.last.first)) is PartitionStatus.OPEN


async def test_a_route_of_a_newer_version_is_reported(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """A newer format of routes is one of the namespace; any other route was written by another program."""
    await gateway.command("HSET", namespace.queues, "default", '{"rings": 3}')
    await gateway.command("HSET", namespace.deployment, "format", KEY_FORMAT + 1)
    with pytest.raises(Refused, match=r"format .*upgrade"):
        await producer.enqueue("t", queue="default")
    await gateway.command("HSET", namespace.deployment, "format", KEY_FORMAT)
    await producer.enqueue("t", queue="default")
    assert await gateway.command("HGET", namespace.queues, "default") == b"1"


@pytest.mark.parametrize("mark", [b"x", b"5", b"\xff", b"{}"])
async def test_a_mark_of_another_program_closes_no_partition(
    gateway: Gateway, namespace: Namespace, producer: Producer, mark: bytes
) -> None:
    partition = namespace.partition("default")
    await gateway.command("HSET", partition.closed, "route", mark, "last", "x")
    assert await partition_status(gateway, partition) is PartitionStatus.EMPTY
    handle = await producer.enqueue("t", queue="default")
    assert handle.partition == partition
    assert await gateway.command("EXISTS", partition.closed) == 0
    assert await gateway.command("HGET", junk_keys(partition.closed).value, "route") == mark


async def test_a_mark_that_was_stored_meanwhile_stays(gateway: Gateway, namespace: Namespace) -> None:
    partition = namespace.partition("default")
    await gateway.command("HSET", partition.closed, "route", "x")
    await gateway.command("HSET", partition.closed, "route", Route((Generation(0, 1), Generation(1, 2))).encode())
    assert not await set_hash_aside(gateway, partition.closed, "route", b"x")
    assert not await open_again(gateway, partition)
    assert await gateway.command("EXISTS", partition.closed)
    await gateway.command("DEL", partition.closed)


# producers


async def test_the_format_of_former_versions_is_used(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await gateway.command("HSET", namespace.queues, "default", 3)
    handles = [await producer.enqueue("t", queue="default") for _ in range(6)]
    assert await lengths(gateway, namespace) == [2, 2, 2]
    assert {handle.partition.index for handle in handles} == {0, 1, 2}


async def test_tasks_of_one_key_are_together_and_in_order(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_partitions(gateway, namespace, "default", 4)
    sent: dict[str, list[str]] = {f"k{number}": [] for number in range(8)}
    for _ in range(3):
        for key, sent_ids in sent.items():
            sent_ids.append((await producer.enqueue("t", key=key, queue="default")).id)
    many = await producer.enqueue_many(
        "t", [{"k": f"k{n % 8}"} for n in range(40)], key=lambda args: args["k"], queue="default"
    )
    for number, handle in enumerate(many):
        sent[f"k{number % 8}"].append(handle.id)
    for key, sent_ids in sent.items():
        partition = at(namespace, home(key, Generation(0, 4)))
        taken = ids([one async for one in every_message(gateway, partition)])
        assert [one for one in taken if one in set(sent_ids)] == sent_ids


async def every_message(gateway: Gateway, partition: Partition) -> Any:
    a = await worker(gateway, partition, name="reader")
    for delivery in await read(a, 10_000):
        yield delivery
    await gateway.command("XGROUP", "DESTROY", partition.ready, "workers")


async def test_tasks_without_a_key_go_to_all_partitions(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_partitions(gateway, namespace, "default", 4)
    await producer.enqueue_many("t", [{}] * 1_000, queue="default")
    assert await lengths(gateway, namespace) == [250] * 4
    await producer.enqueue_many("t", [{}] * 10, queue="default")
    assert sorted(await lengths(gateway, namespace)) == [250, 250, 250, 260]


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_a_producer_with_an_old_route_is_redirected(
    gateway: Gateway, namespace: Namespace, producer: Producer, delay: float
) -> None:
    place = DUE if delay else READY
    before = await producer.enqueue("t", key="k", delay=delay, queue="default")
    await set_partitions(gateway, namespace, "default", 4)
    after = await producer.enqueue("t", key="k", delay=delay, queue="default")
    many = await producer.enqueue_many(
        "t",
        [{"n": n} for n in range(1_200)],
        key=lambda args: f"k{args['n']}",
        delay=delay,
        queue="default",
    )
    assert before.partition.index == 0
    assert after.partition.index == home("k", FOUR.last)
    assert [one.partition.index for one in many] == [home(f"k{n}", FOUR.last) for n in range(1_200)]
    for handle in (before, after, many[0], many[-1]):
        assert await places(gateway, handle.partition, handle.id) == [place]


async def test_a_change_during_a_bulk_call_keeps_the_order(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """Between two scripts of the call the partition is closed: refused tasks follow those that were stored."""
    await producer.enqueue("t", queue="default")

    async def rows() -> Any:
        for number in range(3_000):
            if number == 1_700:
                await set_partitions(gateway, namespace, "default", 4)
            yield {"n": number, "k": f"k{number % 5}"}

    stored = [
        handle.id async for handle in producer.enqueue_stream("t", rows(), key=lambda args: args["k"], queue="default")
    ]
    assert len(stored) == 3_000
    assert 0 < await gateway.command("XLEN", at(namespace, 0).ready) < 2_000
    order = {task_id: number for number, task_id in enumerate(stored)}
    for key in range(5):
        seen: list[int] = []
        for partition in (at(namespace, 0), at(namespace, home(f"k{key}", FOUR.last))):
            async for delivery in every_message(gateway, partition):
                number = order.get(Envelope.decode(delivery.fields[b"env"]).id)
                if number is not None and number % 5 == key:
                    seen.append(number)
        assert seen == list(range(key, 3_000, 5))


async def test_an_id_from_before_the_change_is_not_stored_again(
    gateway: Gateway, namespace: Namespace, producer: Producer, namespace_name: str
) -> None:
    await producer.enqueue("t", {"n": 1}, task_id="order-7", queue="default")
    await producer.enqueue("t", {"n": 1}, task_id="order-8", key="k", queue="default")
    await set_partitions(gateway, namespace, "default", 4)
    async with Producer(namespace=namespace_name, gateway=gateway) as fresh:
        for one, learns in ((producer, False), (fresh, False), (producer, True)):
            if learns:  # a refusal: the partition is closed; until then it asks there, and gets 'known'
                await one.enqueue("t", key="k", queue="default")
            found = await one.enqueue("t", {"n": 1}, task_id="order-7", queue="default")
            assert (found.partition.index, (await found.record()).args) == (0, b'{"n":1}')
            found = await one.enqueue("t", {"n": 1}, task_id="order-8", key="k", delay=60, queue="default")
            assert (found.partition.index, (await found.record()).args) == (0, b'{"n":1}')
            with pytest.raises(TaskExists, match=r"order-7 exists already with other arguments \(n\)"):
                await one.enqueue("t", {"n": 2}, task_id="order-7", queue="default")
            named = EnvelopeTemplate("t").message(b'{"n":1}', task_id="order-7")
            other = EnvelopeTemplate("t").message(b"{}", task_id="order-9")
            handles: list[TaskHandle[Any]] = await one.send([named, other], queue="default")
            assert [handle.partition.index for handle in handles] == [0, home("order-9", FOUR.last)]
    assert sum(await lengths(gateway, namespace)) == 2 + 1 + 1


async def test_a_lost_reply_stores_no_second_task(gateway: Gateway, namespace: Namespace, namespace_name: str) -> None:
    """The task is stored, the reply is lost, the partition is closed, and only then the script is repeated."""
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with (
        lossy_gateway(gateway) as (lossy, line),
        Producer(namespace=namespace_name, gateway=lossy) as producer,
    ):
        await producer.enqueue("t", queue="default")
        line.lose(queue_script("enqueue").sha.encode())
        async with once_a_reply_was_lost(line, set_partitions(gateway, namespace, "default", 4)):
            handle = await producer.enqueue("t", queue="default")
        assert handle.partition.index == 0
    assert sum(await lengths(gateway, namespace)) == 2


@asynccontextmanager
async def once_a_reply_was_lost(line: LossyProxy, meanwhile: Awaitable[object]) -> AsyncIterator[None]:
    """While the block runs, await something after the first lost reply, before any client can repeat the call."""

    async def watch() -> None:
        while not line.lost:  # noqa: ASYNC110 - the proxy has a counter, no event
            await asyncio.sleep(0)
        async with line.down():
            await meanwhile

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        await watcher


async def test_a_lost_route_is_restored_from_closed_partitions(
    gateway: Gateway, namespace: Namespace, producer: Producer, namespace_name: str
) -> None:
    await producer.enqueue("t", queue="default")
    await set_partitions(gateway, namespace, "default", 4)
    await gateway.command("HSET", namespace.queues, "default", 1)
    async with Producer(namespace=namespace_name, gateway=gateway) as fresh:
        assert (await fresh.enqueue("t", key="k", queue="default")).partition.index == home("k", FOUR.last)
    assert await load_route(gateway, namespace, "default") == FOUR


async def test_a_change_after_a_lost_one_uses_new_indexes(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    await set_partitions(gateway, namespace, "default", 4)
    await gateway.command("HSET", namespace.queues, "default", 1)
    assert (await set_partitions(gateway, namespace, "default", 2)).last == Generation(5, 2)


async def test_a_change_of_a_queue_whose_first_route_was_lost_keeps_its_tasks_known(
    gateway: Gateway, namespace: Namespace, producer: Producer, namespace_name: str
) -> None:
    names = [f"order-{number}" for number in range(8)]
    for name in names:
        await producer.enqueue("t", task_id=name, queue="default")
    await gateway.command("HDEL", namespace.queues, "default")
    assert (await set_partitions(gateway, namespace, "default", 2)).generations == (Generation(0, 1), Generation(1, 2))
    async with Producer(namespace=namespace_name, gateway=gateway) as fresh:
        for name in names:
            assert (await fresh.enqueue("t", task_id=name, queue="default")).partition.index == 0


@pytest.mark.parametrize("many", [False, True])
async def test_an_id_is_stored_once_after_the_server_has_lost_two_changes(
    gateway: Gateway, namespace: Namespace, producer: Producer, namespace_name: str, many: bool
) -> None:
    """One producer knows both changes, another one the first, and the server neither."""

    async def enqueue(one: Producer, name: str) -> int:
        message = EnvelopeTemplate("t").message(b"{}", task_id=name)
        if many:
            return (await one.send([message], queue="default"))[0].partition.index
        return (await one.enqueue("t", task_id=name, queue="default")).partition.index

    names = [f"order-{number}" for number in range(6)]
    async with Producer(namespace=namespace_name, gateway=gateway) as other:
        await producer.enqueue("t", queue="default")
        await set_partitions(gateway, namespace, "default", 3)
        await other.enqueue("t", queue="default")  # learns of it
        await set_partitions(gateway, namespace, "default", 2)
        for index in range(4):  # learns of both
            await producer.enqueue("t", key=f"k{index}", queue="default")
        await gateway.command("DEL", namespace.queues)
        for index in range(4):
            await gateway.command("DEL", at(namespace, index).closed)
        assert [await enqueue(producer, name) for name in names] == [0] * 6
        assert [await enqueue(other, name) for name in names] == [0] * 6


async def test_an_emptied_server_gets_the_route_from_a_client_that_has_it(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    await set_partitions(gateway, namespace, "default", 4)
    assignment = await known_by(gateway, namespace)
    await gateway.command("DEL", at(namespace, 0).ready)
    await assignment.refresh()
    await assignment.refresh()
    assert indexes(assignment.served) == [1, 2, 3, 4]
    await gateway.pipeline([("DEL", namespace.queues), ("DEL", at(namespace, 0).closed)])
    async with Producer(namespace=namespace.name, gateway=gateway) as fresh:
        lonely = await fresh.enqueue("t", queue="default")
        assert lonely.partition.index == 0
    await assignment.refresh()
    assert await load_route(gateway, namespace, "default") == FOUR
    assert await partition_status(gateway, at(namespace, 0)) is PartitionStatus.CLOSED
    assert indexes(assignment.read_from) == [0]


# the command may die at any call


class Dies(Gateway):
    """A gateway whose process dies at its n-th call."""

    def __init__(self, gateway: Gateway, at_call: int) -> None:
        super().__init__(gateway.address)
        self._gateway = gateway
        self._left = at_call

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Unavailable("dead")

    async def command(self, *command: Argument, repeatable: bool = True, node_of: str | None = None) -> Any:
        self._count()
        return await self._gateway.command(*command, repeatable=repeatable)

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        derived: Callable[[], Iterable[str]] | None = None,
    ) -> Any:
        self._count()
        return await self._gateway.run(script, keys, args, derived)

    async def pipeline(self, commands: Sequence[Sequence[Argument]], *, node_of: str | None = None) -> list[Any]:
        self._count()
        return await self._gateway.pipeline(commands, node_of=node_of)


@pytest.mark.parametrize("line", range(8))
async def test_a_command_that_dies_at_any_call_loses_no_task(
    gateway: Gateway, namespace: Namespace, producer: Producer, line: int
) -> None:
    """The queue has three partitions with a task in each; a worker completes an interrupted change to two."""
    await gateway.command("HSET", namespace.queues, "default", 3)
    before = [await producer.enqueue("t", key=f"k{number}", queue="default") for number in range(9)]
    try:
        await set_partitions(Dies(gateway, line), namespace, "default", 2)
        died = False
    except Unavailable:
        died = True
    assert died == (line < 7)
    between = [await producer.enqueue("t", key=f"k{number}", queue="default") for number in range(9)]
    assignment = await known_by(gateway, namespace)
    route = assignment.routes["default"]
    changed = len(route.generations) > 1
    assert changed == (line >= 4)
    assert indexes(assignment.served) == list(route.indexes)
    assert indexes(assignment.read_from) == [0, 1, 2]
    if changed:
        assert [await partition_status(gateway, at(namespace, index)) for index in range(3)] == [
            PartitionStatus.CLOSED
        ] * 3
    after = [await producer.enqueue("t", key=f"k{number}", queue="default") for number in range(9)]
    order = await taken_in_order(gateway, namespace, assignment)
    for one, other, last in zip(before, between, after, strict=True):
        assert [task_id for task_id in order if task_id in {one.id, other.id, last.id}] == [one.id, other.id, last.id]
    assert len(order) == 27


async def taken_in_order(gateway: Gateway, namespace: Namespace, assignment: PartitionAssignment) -> list[str]:
    """Return all messages that a worker takes, in order."""
    taken: list[str] = []
    a = await worker(gateway, *assignment.served)
    await a.assign(assignment.read_from, assignment.served)
    while True:
        found = ids(await read(a, 2))
        taken += found
        before = assignment.read_from
        await assignment.refresh()
        await a.assign(assignment.read_from, assignment.served)
        if not found and before == assignment.read_from:
            return taken


# workers


async def test_the_next_generation_waits_until_the_former_is_drained(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    a = await worker(gateway, at(namespace, 0))
    (first,) = await read(a)
    await set_partitions(gateway, namespace, "default", 2)
    assignment = await known_by(gateway, namespace)
    assert (indexes(assignment.read_from), indexes(assignment.served), assignment.changing) == ([0], [0, 1, 2], True)
    await handles[1].cancel()
    await assignment.refresh()
    assert indexes(assignment.read_from) == [0]
    (last,) = await read(a, 5)
    await assignment.refresh()
    assert (indexes(assignment.read_from), assignment.changing) == ([0, 1, 2], False)
    for delivery, handle in ((first, handles[0]), (last, handles[2])):
        await succeed(gateway, delivery, handle.id, b"null", Counters(), ran=0, ttl=60)
    await assignment.refresh()
    assert (indexes(assignment.read_from), indexes(assignment.served)) == ([1, 2], [1, 2])


async def test_a_generation_whose_tasks_were_all_cancelled_is_drained(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """There is no message left that could move the group's position to the last id."""
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    later = await producer.enqueue("t", delay=60, queue="default")
    await worker(gateway, at(namespace, 0))
    await set_partitions(gateway, namespace, "default", 2)
    for handle in handles:
        assert await handle.cancel() is State.CANCELLED
    assignment = await known_by(gateway, namespace)
    assert indexes(assignment.read_from) == [0, 1, 2]
    await make_due(gateway, later.partition, later.id)
    await promote_due(gateway, later.partition)
    assignment = await known_by(gateway, namespace)
    assert indexes(assignment.read_from) == [0, 1, 2], "what comes later holds the next generation up no more"


async def test_a_delayed_task_keeps_its_partition_until_it_has_run(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    later = await producer.enqueue("t", delay=60, queue="default")
    await set_partitions(gateway, namespace, "default", 2)
    assignment = await known_by(gateway, namespace)
    assert indexes(assignment.served) == [0, 1, 2]
    await make_due(gateway, later.partition, later.id)
    await promote_due(gateway, later.partition)
    a = await worker(gateway, later.partition)
    await succeed(gateway, await read_one(a), later.id, b"42", Counters(), ran=0, ttl=60)
    await assignment.refresh()
    assert indexes(assignment.served) == [1, 2]
    assert await find_task(gateway, namespace, later.id) == later.partition


async def test_a_nudge_notifies_a_worker_of_the_change(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    a = await worker(gateway, at(namespace, 0))
    await set_partitions(gateway, namespace, "default", 2)
    assert (await a.read(5, block=None)).route_changed


async def test_closing_twice_changes_nothing(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    await producer.enqueue("t", queue="default")
    await set_partitions(gateway, namespace, "default", 2)
    before = await gateway.command("HGETALL", at(namespace, 0).closed)
    await close_partition(gateway, at(namespace, 0), SINGLE)
    assert await gateway.command("HGETALL", at(namespace, 0).closed) == before


async def test_a_message_of_a_former_version_in_a_closed_partition_is_found(
    gateway: Gateway, namespace: Namespace
) -> None:
    await sync_route(gateway, namespace, "default")
    await set_partitions(gateway, namespace, "default", 2)
    assignment = await known_by(gateway, namespace)
    await assignment.refresh()
    assert indexes(assignment.read_from) == [1, 2]
    await gateway.command("XADD", at(namespace, 0).ready, "*", "env", "{}")
    await assignment.refresh()
    assert indexes(assignment.read_from) == [0, 1, 2]


# retiring


async def test_a_generation_that_stays_empty_is_retired(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    route = await set_partitions(gateway, namespace, "default", 2)
    partition, gone = at(namespace, 0), route.previous[0]

    async def retire() -> bool:
        return await retire_generation(gateway, namespace, "default", route, gone)

    assert not await retire()
    await succeed(gateway, await read_one(await worker(gateway, partition)), handle.id, b"1", Counters(), ran=0, ttl=60)
    assert not await retire()
    assert await handle.result() == 1
    await gateway.command("HINCRBY", partition.closed, "empty", -80_000)  # it has been empty for a while
    assert await retire()
    assert await load_route(gateway, namespace, "default") == Route((Generation(1, 2),))
    for key in (partition.ready, partition.nudge, partition.retentions):
        assert 0 < await gateway.command("PTTL", key) <= 3_600_000
    assert await gateway.command("PTTL", partition.closed) > 3_600_000
    assert (await producer.enqueue("t", queue="default")).partition.index in (1, 2)
    assert await handle.result() == 1
    (stats,) = await list_queues(gateway, namespace)
    assert [one.index for one in stats.partitions] == [1, 2]


async def test_a_generation_is_not_retired_from_a_route_that_has_changed(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await sync_route(gateway, namespace, "default")
    route = await set_partitions(gateway, namespace, "default", 2)
    longer = await set_partitions(gateway, namespace, "default", 3)
    assert not await retire_generation(gateway, namespace, "default", route, route.previous[0])
    assert await load_route(gateway, namespace, "default") == longer


async def finish_one(gateway: Gateway, producer: Producer, ttl: float) -> None:
    handle = await producer.enqueue("t", queue="default")
    delivery = await read_one(await worker(gateway, handle.partition))
    await succeed(gateway, delivery, handle.id, b"1", Counters(), ran=0, ttl=ttl)


async def test_each_retention_counts_from_its_last_use(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """A month that was used long ago does not keep a partition whose other records are kept for a minute."""
    partition = at(namespace, 0)
    for ttl in (86_400 * 30, 60):
        await finish_one(gateway, producer, ttl)
    longest = max(await gateway.command("ZRANGE", partition.retentions, 0, -1), key=int)
    await gateway.command("ZADD", partition.retentions, "XX", 1, longest)
    left_ms = await gateway.command("PTTL", partition.retentions)
    await finish_one(gateway, producer, 120)
    assert await gateway.command("ZCARD", partition.retentions) == 2, "what is past is removed"
    assert 120_000 < await gateway.command("PTTL", partition.retentions) < left_ms
    route = await set_partitions(gateway, namespace, "default", 2)
    assert not await retire_generation(gateway, namespace, "default", route, route.previous[0])
    await gateway.command("HINCRBY", partition.closed, "empty", -150_000)
    assert await retire_generation(gateway, namespace, "default", route, route.previous[0])


async def test_a_retention_that_is_registered_is_not_written_again(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    partition = at(namespace, 0)
    await finish_one(gateway, producer, 3600)
    registered = await gateway.command("ZRANGE", partition.retentions, 0, -1, "WITHSCORES")
    await finish_one(gateway, producer, 3600)
    assert await gateway.command("ZRANGE", partition.retentions, 0, -1, "WITHSCORES") == registered
    member, until = registered[0], int(registered[1])
    await gateway.command("ZADD", partition.retentions, until - 61_000, member)
    await finish_one(gateway, producer, 3600)
    assert int(await gateway.command("ZSCORE", partition.retentions, member)) >= until


@pytest.mark.parametrize(
    ("member", "score"),
    [
        *((b"\xff", "1"), (b"", "1e300"), (b" 1 2 ", "inf"), (b"nan", "-inf"), (b"inf", "9007199254740993")),
        *((b"1e400", "1"), (b"9" * 400, "inf"), (b"-1", "1e300"), (b"0x10", "1")),
    ],
)
async def test_a_foreign_retention_stops_no_outcome(
    gateway: Gateway, namespace: Namespace, producer: Producer, member: bytes, score: str
) -> None:
    partition = at(namespace, 0)
    await gateway.command("ZADD", partition.retentions, score, member)
    await finish_one(gateway, producer, 60)
    assert await gateway.command("ZSCORE", partition.retentions, member) is None
    assert 60_000 < await gateway.command("PTTL", partition.retentions) < 240_000
    await gateway.command("ZADD", partition.retentions, score, member)
    (kept,) = {*await gateway.command("ZRANGE", partition.retentions, 0, -1)} - {member}
    await gateway.command("ZADD", partition.retentions, "XX", "inf", kept)
    await finish_one(gateway, producer, 60)
    assert 60_000 < await gateway.command("PTTL", partition.retentions) < 240_000
    route = await set_partitions(gateway, namespace, "default", 2)
    await gateway.command("ZADD", partition.retentions, score, member)
    await retire_generation(gateway, namespace, "default", route, route.previous[0])
    await gateway.command("HINCRBY", partition.closed, "empty", -150_000)
    assert await retire_generation(gateway, namespace, "default", route, route.previous[0])


async def test_a_record_is_found_whose_retention_redis_had_lost(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """A power cut takes the registered retention, and the worker that made it has another task to settle."""
    await finish_one(gateway, producer, 3600)
    await gateway.command("DEL", at(namespace, 0).retentions)
    await finish_one(gateway, producer, 3600)
    route = await set_partitions(gateway, namespace, "default", 2)
    assert not await retire_generation(gateway, namespace, "default", route, route.previous[0])


async def test_a_dead_letter_registers_its_retention(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    delivery = await read_one(await worker(gateway, handle.partition))
    counters = Counters()
    await bury(
        *(gateway, delivery, handle.id),
        task="t",
        reason=Reason.TIMEOUT,
        evidence=EVIDENCE,
        counters=counters,
        retention=3600,
    )
    (kept,) = await gateway.command("ZRANGE", at(namespace, 0).retentions, 0, -1)
    assert int(kept) >= 3_600_000


async def test_an_id_of_an_expired_dead_letter_runs_once_after_a_change(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """The record expires before the letter; then the id is free, and belongs to the task that took it."""
    for task_id in ("taken", "free"):
        handle = await producer.enqueue("t", task_id=task_id, queue="default")
        await SETTLING["bury"](gateway, await read_one(await worker(gateway, handle.partition)), task_id)
        await gateway.command("DEL", handle.partition.record(task_id))
    await set_partitions(gateway, namespace, "default", 2)
    taken, free = [one async for one in list_letters(gateway, [at(namespace, 0)], Filter(), oldest_first=True)]
    assert (await producer.enqueue("t", task_id="taken", queue="default")).partition.index in (1, 2)
    assert not await replay(gateway, taken, Replay())
    assert await replay(gateway, free, Replay())
    assert await lengths(gateway, namespace) in ([1, 1, 0], [1, 0, 1])


async def test_a_dead_letter_keeps_its_partition_until_it_is_replayed(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    await SETTLING["bury"](gateway, await read_one(await worker(gateway, handle.partition)), handle.id)
    route = await set_partitions(gateway, namespace, "default", 2)
    assignment = await known_by(gateway, namespace)
    assert indexes(assignment.read_from) == [1, 2]
    assert indexes(assignment.known) == [0, 1, 2]
    assert not await retire_generation(gateway, namespace, "default", route, route.previous[0])
    (letter,) = [one async for one in list_letters(gateway, assignment.known, Filter())]
    assert await replay(gateway, letter, Replay())
    await assignment.refresh()
    assert indexes(assignment.read_from) == [0, 1, 2]
    a = await worker(gateway, *assignment.read_from, name="b")
    assert ids(await read(a)) == [handle.id]


# sharing


async def test_workers_divide_the_partitions_and_take_over(gateway: Gateway, namespace: Namespace) -> None:
    await set_partitions(gateway, namespace, "default", 12)
    crew = {name: await known_by(gateway, namespace, name, share=True) for name in ("a", "b", "c")}
    for assignment in crew.values():
        await assignment.refresh()
    taken = [index for assignment in crew.values() for index in indexes(assignment.read_from)]
    assert sorted(taken) == sorted([*range(12), *range(12)])
    gone = crew.pop("b")
    await gone.leave()
    await gone.refresh()  # while it completes its tasks
    assert b"b" not in await gateway.command("ZRANGEBYSCORE", namespace.sharing("default"), 0, "+inf")
    for assignment in crew.values():
        await assignment.refresh()
        assert indexes(assignment.read_from) == list(range(12))
    await gateway.command("ZADD", namespace.sharing("default"), 1, "c")  # it has been silent for long
    await crew["a"].refresh()
    assert await gateway.command("ZRANGEBYSCORE", namespace.sharing("default"), 0, "+inf") == [b"a"]
    assert 0 < await gateway.command("PTTL", namespace.sharing("default")) <= 3_600_000


async def test_one_of_many_workers_claims_in_a_partition(gateway: Gateway, partition: Partition) -> None:
    crew = [await worker(gateway, partition, name=f"w{number}") for number in range(4)]
    assert [await one.acquire_claim_lock(partition, 60.0) for one in crew] == [True, False, False, False]
    await gateway.command("DEL", partition.sweep_lock)
    assert await crew[3].acquire_claim_lock(partition, 60.0)


# reading


async def test_a_read_returns_no_more_than_its_limit(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_partitions(gateway, namespace, "default", 7)
    await producer.enqueue_many("t", [{}] * 700, queue="default")
    a = await worker(gateway, *(at(namespace, index) for index in range(7)))
    taken: list[int] = []
    for most in (1, 2, 3, 5, 7, 8, 20, 40):
        found = await read(a, most)
        assert len(found) == most
        taken += [one.partition.index for one in found]
    assert set(taken) == set(range(7))


async def test_a_message_in_one_of_many_partitions_is_found_at_once(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await set_partitions(gateway, namespace, "default", 7)
    a = await worker(gateway, *(at(namespace, index) for index in range(7)))
    for _ in range(7):
        handle = await producer.enqueue("t", queue="default")
        assert ids(await read(a, 1)) == [handle.id]


async def test_a_nudge_hides_no_message(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    """A burst worker stops when a read returns no message."""
    await set_partitions(gateway, namespace, "default", 7)
    a = await worker(gateway, *(at(namespace, index) for index in range(7)))
    for partition in a.partitions:
        await a.nudge(partition)
    handle = await producer.enqueue("t", queue="default")
    assert ids(await read(a, 1)) == [handle.id]


async def test_messages_in_transit_during_a_change_of_partitions_are_kept(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    needs_server(gateway, "XREADGROUP BLOCK does not wait on a client that others use at the same time")
    await set_partitions(gateway, namespace, "default", 2)
    handle = await producer.enqueue("t", queue="default")
    here, there = handle.partition, at(namespace, 1 - handle.partition.index)
    a = await worker(gateway, here, there)
    reading = asyncio.create_task(a.read(4, block=None))
    await asyncio.sleep(0)
    await a.assign([there], [there])
    assert ids((await reading).deliveries) == [handle.id]
