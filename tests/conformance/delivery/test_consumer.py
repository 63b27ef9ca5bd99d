"""The consumer: it reads each message once, in order, and claims no message that another worker's lease covers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace, Partition, Producer, Unavailable
from perdure.queues.delivery.checkpoint import load_history
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery, Leases
from perdure.queues.delivery.settlement import release
from perdure.queues.delivery.stream_reader import SingleNodeReader
from perdure.queues.keys import GROUP, RELEASED
from perdure.queues.transport.gateway import GatewayTimings
from perdure.queues.transport.pipelining import Argument, Command
from perdure.queues.transport.scripts import Script, queue_script

from tests.support.consumers import (
    Held,
    SharedReader,
    age,
    claim_all,
    claim_one,
    consumers,
    ids,
    needs_one_server,
    needs_server,
    pending,
    read,
    read_one,
    take_over,
    worker,
)
from tests.support.lossy_proxy import lossy_gateway
from tests.support.task_places import PENDING, dump, places

BOUND = 30.0


@pytest.fixture(autouse=True)
def long_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no blocking read end by itself within `BOUND`."""
    monkeypatch.setattr(Gateway, "timings", GatewayTimings(block=600.0))


def blocking(gateway: Gateway, *partitions: Partition) -> tuple[Consumer, SingleNodeReader]:
    """Create a worker with a connection of its own, as in the runtime. The caller closes the reader."""
    reading = SingleNodeReader(gateway, gateway.blocking_connection(partitions[0].ready), "a")
    return Consumer(gateway, reading, partitions, "a", 60.0, Leases()), reading


# reading


async def test_messages_are_read_in_order_and_up_to_the_limit(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 5, queue="default")
    a = await worker(gateway, partition)
    first, second, third = await read(a, 3), await read(a, 3), await read(a, 3)
    assert (len(first), len(second), len(third)) == (3, 2, 0)
    assert ids([*first, *second]) == [handle.id for handle in handles]
    assert {(one.count, one.claimed, one.worker) for one in first} == {(1, False, "a")}


async def test_concurrent_reads_return_each_message_once(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 100, queue="default")
    crew = [await worker(gateway, partition, name=f"w{n}") for n in range(5)]
    got = await asyncio.gather(*(read(crew[n % 5], 4) for n in range(40)))
    assert sorted(ids([one for batch in got for one in batch])) == sorted(handle.id for handle in handles)


async def test_messages_sent_before_the_first_worker_are_read(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    assert ids(await read(await worker(gateway, partition))) == [handle.id]


async def test_a_lost_group_is_created_again_and_misses_no_message(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """The server was emptied, or restored from an old state, while the worker runs."""
    needs_server(gateway, "XREADGROUP on a stream that is gone answers with an error of its own, not NOGROUP")
    a = await worker(gateway, partition)
    await gateway.command("DEL", partition.ready, partition.nudge)
    handle = await producer.enqueue("t", queue="default")
    assert await read(a) == []
    assert ids(await read(a)) == [handle.id]


async def test_concurrent_workers_create_the_groups_once(gateway: Gateway, namespace: Namespace) -> None:
    mail, video = namespace.partition("mail"), namespace.partition("video")
    await asyncio.gather(*(worker(gateway, mail, video, name=f"w{n}") for n in range(10)))
    for partition in (mail, video):
        assert len(await gateway.command("XINFO", "GROUPS", partition.ready)) == 1


async def test_queues_are_read_in_turn_up_to_the_limit(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    queues = ("mail", "video", "news")
    for queue in queues:
        await producer.enqueue_many("t", [{}] * 10, queue=queue)
    a = await worker(gateway, *(namespace.partition(queue) for queue in queues))
    taken = [one.partition.queue for _ in range(6) for one in await read(a, 2)]
    assert {queue: taken.count(queue) for queue in queues} == {"mail": 4, "video": 4, "news": 4}
    assert len(taken) == 12


async def test_one_read_returns_messages_of_several_queues(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await producer.enqueue("t", queue="mail")
    await producer.enqueue("t", queue="video")
    a = await worker(gateway, namespace.partition("mail"), namespace.partition("video"))
    assert {one.partition.queue for one in await read(a, 8)} == {"mail", "video"}


async def test_a_read_of_an_empty_queue_returns_nothing(gateway: Gateway, partition: Partition) -> None:
    taken = await (await worker(gateway, partition)).read(5, block=None)
    assert (taken.deliveries, taken.claimable, taken.due) == ([], False, False)


async def test_a_blocking_read_ends_when_a_message_arrives(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "XREADGROUP BLOCK does not wait on a client that others use at the same time")
    a, reader = blocking(gateway, partition)
    await a.create_groups()
    waiting = asyncio.create_task(a.read(1, block=BOUND))
    await until_blocked(gateway, partition)
    began = time.monotonic()
    handle = await producer.enqueue("t", queue="default")
    taken = await waiting
    assert time.monotonic() - began < 2
    assert ids(taken.deliveries) == [handle.id]
    await reader.close()


async def test_a_blocking_read_ends_at_its_timeout(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    needs_server(gateway, "XREADGROUP BLOCK does not wait on a client that others use at the same time")
    a, reader = blocking(gateway, partition)
    await a.create_groups()
    began = time.monotonic()
    assert (await a.read(1, block=0.05)).deliveries == []
    assert time.monotonic() - began >= 0.05
    await reader.close()


async def test_a_blocking_read_can_be_interrupted(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "CLIENT UNBLOCK is not there")
    a, reader = blocking(gateway, partition)
    await a.create_groups()
    waiting = asyncio.create_task(a.read(1, block=BOUND))
    await until_blocked(gateway, partition)
    await a.interrupt()
    assert (await asyncio.wait_for(waiting, BOUND / 2)).deliveries == []
    handle = await producer.enqueue("t", queue="default")
    assert ids((await a.read(1, block=BOUND)).deliveries) == [handle.id]
    await reader.close()


async def test_a_reader_whose_connection_was_killed_raises_and_reads_again(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "there is no connection to kill")
    a, reader = blocking(gateway, partition)
    await a.create_groups()
    waiting = asyncio.create_task(a.read(1, block=BOUND))
    blocked = await until_blocked(gateway, partition)
    await gateway.command("CLIENT", "KILL", "ID", blocked, node_of=partition.ready)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, BOUND / 2)
    handle = await producer.enqueue("t", queue="default")
    assert ids((await a.read(1, block=BOUND)).deliveries) == [handle.id]
    await reader.close()


async def test_a_blocking_read_continues_after_its_stream_was_deleted(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """It was deleted, or moved to another node of a cluster."""
    needs_server(gateway, "XREADGROUP BLOCK does not wait on a client that others use at the same time")
    a, reader = blocking(gateway, partition)
    await a.create_groups()
    waiting = asyncio.create_task(a.read(1, block=BOUND))
    await until_blocked(gateway, partition)
    await gateway.command("DEL", partition.ready)
    handle = await producer.enqueue("t", queue="default")
    taken = await waiting
    while not taken.deliveries:
        taken = await a.read(1, block=BOUND)
    assert ids(taken.deliveries) == [handle.id]
    await reader.close()


async def until_blocked(gateway: Gateway, partition: Partition) -> str:
    """Wait until a client of the server is in a blocking call; return its id."""
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        listed: bytes = await gateway.command("CLIENT", "LIST", node_of=partition.ready)
        for line in listed.decode().splitlines():
            fields = dict(part.partition("=")[::2] for part in line.split(" "))
            if "b" in fields["flags"]:
                return fields["id"]
    raise AssertionError("no read began to wait")


# claiming


async def test_a_valid_lease_is_not_claimed(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    await read_one(await worker(gateway, partition))
    before = await dump(gateway, namespace)
    assert await claim_all(await worker(gateway, partition, name="b")) == []
    assert await dump(gateway, namespace) == before


async def test_an_expired_lease_is_claimed_and_counted(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    first = await read_one(await worker(gateway, partition))
    await age(gateway, first, 59_000)
    b = await worker(gateway, partition, name="b", lease=60.0)
    assert await claim_all(b) == []
    await age(gateway, first, 61_000)
    second = await claim_one(b)
    assert (second.entry, second.worker, second.count, second.claimed) == (first.entry, "b", 2, True)
    assert second.has_history
    assert second.fields == first.fields
    assert await places(gateway, partition, "x") == [PENDING]


async def test_concurrent_claims_return_each_message_once(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 60, queue="default")
    for one in await read(await worker(gateway, partition), 60):
        await age(gateway, one)
    crew = [await worker(gateway, partition, name=f"w{n}") for n in range(6)]
    got = await asyncio.gather(*(claim_all(one) for one in crew))
    claimed = [one for batch in got for one in batch]
    assert sorted(ids(claimed)) == sorted(handle.id for handle in handles)
    assert {one.count for one in claimed} == {2}
    owners = {entry: (owner, count) for entry, owner, _, count in await pending(gateway, partition)}
    assert owners == {one.entry: (one.worker, one.count) for one in claimed}


async def test_a_worker_with_nothing_of_its_own_claims_by_xautoclaim(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """XAUTOCLAIM would take its own entries, too; then it uses XCLAIM. The fences are new either way."""
    needs_one_server(gateway, "the calls of commands are counted by one server")
    handles = await producer.enqueue_many("t", [{}] * 66, queue="default")
    lost = await read(await worker(gateway, partition), 66)
    for delivery in lost:
        await age(gateway, delivery)
    leases = Leases()
    b = await worker(gateway, partition, name="b", leases=leases)
    await gateway.command("CONFIG", "RESETSTAT")
    cursor, claimed = await b.claim(partition, "0-0", 64)
    assert (await calls(gateway, "xautoclaim"), await calls(gateway, "xclaim")) == (1, 0)
    for delivery, handle in zip(claimed, handles, strict=False):
        leases.hold(Held(delivery, handle.id))
    cursor, rest = await b.claim(partition, cursor, 64)
    assert (await calls(gateway, "xautoclaim"), await calls(gateway, "xclaim")) == (1, 2)
    assert cursor == "0-0"
    assert ids([*claimed, *rest]) == [handle.id for handle in handles]
    owners = [(entry, owner, count) for entry, owner, _, count in await pending(gateway, partition)]
    assert owners == [(delivery.entry, "b", 2) for delivery in lost]
    assert [(one.entry, one.worker, one.count) for one in [*claimed, *rest]] == owners
    assert len({one.fence for one in [*claimed, *rest, *lost]}) == 132


async def calls(gateway: Gateway, command: str) -> int:
    """Return how often the server has executed a command since its last CONFIG RESETSTAT."""
    info: bytes = await gateway.command("INFO", "commandstats")
    found = re.search(rf"^cmdstat_{command}:calls=(\d+)", info.decode(), re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("own", [False, True], ids=["xautoclaim", "xclaim"])
async def test_tasks_between_deleted_and_running_ones_are_claimed(
    gateway: Gateway, partition: Partition, producer: Producer, own: bool
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 40, queue="default")
    leases = Leases()
    b = await worker(gateway, partition, name="b", leases=leases)
    if own:
        leases.hold(Held(await read_one(b), handles[0].id))
    lost = await read(await worker(gateway, partition), 40)
    expired = [delivery for number, delivery in enumerate(lost) if number % 3]
    for delivery in expired:
        await age(gateway, delivery)
    deleted = expired[::4]
    await gateway.command("XDEL", partition.ready, *(delivery.entry for delivery in deleted))
    claimed, cursor = list[Delivery](), ""
    while cursor != "0-0":
        cursor, more = await b.claim(partition, cursor or "0-0", 5)
        for delivery in more:
            leases.hold(Held(delivery, "x"))
        claimed += more
    left = [delivery.entry for delivery in expired if delivery not in deleted]
    assert [(one.entry, one.count) for one in claimed] == [(entry, 2) for entry in left]
    owners = {entry: (owner, count) for entry, owner, _, count in await pending(gateway, partition)}
    assert {entry for entry, (owner, _) in owners.items() if owner == "a"} == {one.entry for one in lost} - {
        one.entry for one in expired
    }
    assert not owners.keys() & {delivery.entry for delivery in deleted}


async def test_a_claim_stops_at_its_limit_and_continues_at_the_cursor(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 5, queue="default")
    for one in await read(await worker(gateway, partition), 5):
        await age(gateway, one)
    b = await worker(gateway, partition, name="b")
    cursor, first = await b.claim(partition, "0-0", 3)
    assert (len(first), cursor != "0-0") == (3, True)
    cursor, second = await b.claim(partition, cursor, 3)
    assert (len(second), cursor) == (2, "0-0")
    assert ids([*first, *second]) == [handle.id for handle in handles]


async def test_a_claim_skips_running_tasks_in_one_call(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of one, XAUTOCLAIM would scan them ten at a time."""
    await producer.enqueue_many("t", [{}] * 200, queue="default")
    held = await read(await worker(gateway, partition), 200)
    b = await worker(gateway, partition, name="b")
    called: list[str] = []
    run = Gateway.run_once

    async def counted(self: Gateway, script: Script, *parts: Any, **options: Any) -> Any:
        called.append(script.name)
        return await run(self, script, *parts, **options)

    monkeypatch.setattr(Gateway, "run_once", counted)
    assert await b.claim(partition, "0-0", 1) == ("0-0", [])
    await age(gateway, held[150])
    cursor, (claimed,) = await b.claim(partition, "0-0", 1)
    assert claimed.entry == held[150].entry
    assert await b.claim(partition, cursor, 1) == ("0-0", [])
    assert called == ["claim"] * 3


async def test_a_worker_does_not_claim_what_it_holds(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """Its heartbeat was late, or the clock of Redis was set forward. Entries of others are claimed behind them."""
    handles = await producer.enqueue_many("t", [{}] * 6, queue="default")
    leases = Leases()
    a = await worker(gateway, partition, leases=leases)
    mine = await read(a, 5)
    others = await read(await worker(gateway, partition, name="b"))
    for delivery, handle in zip([*mine, *others], handles, strict=True):
        await age(gateway, delivery)
        if delivery in mine:
            leases.hold(Held(delivery, handle.id))
    before = await pending(gateway, partition)
    assert [one.entry for one in await claim_all(a)] == [others[0].entry]
    after = await pending(gateway, partition)
    assert [row[:2] + row[3:] for row in after[:5]] == [row[:2] + row[3:] for row in before[:5]]
    cursor, claimed = await a.claim(partition, "0-0", 1)
    assert (cursor, claimed) == ("0-0", [])


async def test_a_worker_claims_its_own_message_that_it_does_not_run(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """Its run failed outside the handler, or the reply was lost. The delivery ended without an outcome: it counts."""
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    leases = Leases()
    a = await worker(gateway, partition, leases=leases)
    first, second, third = await read(a, 3)
    for delivery in (first, second):
        await age(gateway, delivery)
    leases.hold(Held(first, handles[0].id))
    (claimed,) = await claim_all(a)
    assert (claimed.entry, claimed.count, claimed.claimed) == (second.entry, 2, True)
    counts = [(owner, count) for _, owner, _, count in await pending(gateway, partition)]
    assert counts == [("a", 1), ("a", 2), ("a", 1)]
    assert (third.entry, 1) == (await pending(gateway, partition))[2][::3]


class Interrupted(Gateway):
    """A gateway that runs a callback just before it sends the first pipeline."""

    def __init__(self, gateway: Gateway, meanwhile: Callable[[], Awaitable[object]]) -> None:
        super().__init__(gateway.address)
        self._gateway = gateway
        self._meanwhile: Callable[[], Awaitable[object]] | None = meanwhile

    async def command(self, *command: Argument, repeatable: bool = True, node_of: str | None = None) -> Any:
        return await self._gateway.command(*command, repeatable=repeatable, node_of=node_of)

    async def pipeline(self, commands: Sequence[Command], *, node_of: str | None = None) -> list[Any]:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await self._gateway.pipeline(commands, node_of=node_of)


async def test_a_message_claimed_by_another_before_it_was_recovered_is_dropped(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """The worker was frozen between the list of its messages and the messages, for longer than a lease."""
    await producer.enqueue("t", queue="default")
    await age(gateway, await read_one(await worker(gateway, partition, name="b")))
    thief = await worker(gateway, partition, name="thief")
    taken: list[Delivery] = []

    async def steal() -> None:
        taken.extend(await claim_all(thief))

    b = Consumer(
        Interrupted(gateway, steal),
        SingleNodeReader(gateway, SharedReader(gateway), "b"),
        [partition],
        "b",
        60.0,
        Leases(),
    )
    assert await b.recover_own(partition) == []
    assert [(one.worker, one.count) for one in taken] == [("thief", 2)]


async def test_a_deleted_entry_is_acknowledged(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    deliveries = await read(await worker(gateway, partition), 3)
    for one in deliveries:
        await age(gateway, one)
    await gateway.command("XDEL", partition.ready, deliveries[0].entry, deliveries[2].entry)
    b = await worker(gateway, partition, name="b")
    assert ids(await claim_all(b)) == [handles[1].id]
    assert [(entry, owner) for entry, owner, _, _ in await pending(gateway, partition)] == [(deliveries[1].entry, "b")]


async def test_a_claim_whose_reply_was_lost_is_not_repeated(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """A second call would count two deliveries. The claimed messages are adopted instead."""
    needs_one_server(gateway, "the line that loses replies stands before one server")
    handle = await producer.enqueue("t", queue="default")
    await age(gateway, await read_one(await worker(gateway, partition)))
    async with lossy_gateway(gateway) as (lossy, line):
        b = await worker(lossy, partition, name="b")
        line.lose(queue_script("claim").sha.encode())
        with pytest.raises(Unavailable):
            await b.claim(partition, "0-0", 10)
        assert line.lost == 1
        assert await claim_all(b) == []
        (adopted,) = await b.recover_own(partition)
    assert (ids([adopted]), adopted.count, adopted.claimed) == ([handle.id], 3, True)


# adopting


async def test_messages_of_a_lost_reply_are_adopted(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    handle = await producer.enqueue("t", queue="default")
    async with lossy_gateway(gateway) as (lossy, line):
        a = await worker(lossy, partition)
        line.lose(b"XREADGROUP")
        with pytest.raises(Unavailable):
            await a.read(1, block=None)
        assert line.lost == 1
        assert await read(a) == []
        (adopted,) = await a.recover_own(partition)
        assert ids([adopted]) == [handle.id]
        history = await load_history(gateway, adopted, handle.id)
    assert (adopted.count, history.counters.crashes) == (2, 0)


async def test_a_reply_that_arrives_after_its_messages_were_adopted_is_known(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 2, queue="default")
    leases = Leases()
    a, b = await worker(gateway, partition, leases=leases), await worker(gateway, partition)  # b's reply is late
    late = await read(b, 2)
    assert [one.repeated for one in late] == [False, False]
    assert [one.entry for one in await a.recover_own(partition)] == [one.entry for one in late]
    assert [leases.note_read(partition, one.entry) for one in late] == [True, True]


async def test_a_message_that_redis_hands_out_again_is_known(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """A server that lost its last second has forgotten that it handed out the message, and perhaps its outcome."""
    await producer.enqueue_many("t", [{}] * 2, queue="default")
    a = await worker(gateway, partition)
    first, second = await read(a, 2)
    await gateway.command("XACK", partition.ready, GROUP, second.entry)
    await gateway.command("XGROUP", "SETID", partition.ready, GROUP, first.entry)
    await producer.enqueue("t", queue="default")
    again, other = await read(a, 2)
    assert (again.fence, again.repeated) == (second.fence, True)
    assert not other.repeated


async def test_only_own_messages_outside_the_table_are_adopted(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 4, queue="default")
    leases = Leases()
    a = await worker(gateway, partition, leases=leases)
    held, missing = await read(a, 2)
    await read(await worker(gateway, partition, name="b"))
    leases.hold(Held(held, handles[0].id))
    adopted = await a.recover_own(partition)
    assert [one.entry for one in adopted] == [missing.entry]
    assert [one.count for one in adopted] == [missing.count + 1]


async def test_adopting_without_pending_messages_returns_nothing(gateway: Gateway, partition: Partition) -> None:
    assert await (await worker(gateway, partition)).recover_own(partition) == []


# releasing on leave


async def test_a_worker_that_leaves_releases_its_messages_uncounted(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 3, queue="default")
    a = await worker(gateway, partition)
    await read(a, 3)
    await a.leave()
    assert "a" not in await consumers(gateway, partition.ready) | await consumers(gateway, partition.nudge)
    assert {owner for _, owner, _, _ in await pending(gateway, partition)} == {RELEASED}
    b = await worker(gateway, partition, name="b", lease=3600.0)
    claimed = await claim_all(b)
    assert ids(claimed) == [handle.id for handle in handles]
    assert {one.count for one in claimed} == {2}
    for one, handle in zip(claimed, handles, strict=True):
        assert (await load_history(gateway, one, handle.id)).counters.crashes == 0


async def test_leaving_keeps_the_crashes_of_former_workers(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    await take_over(gateway, await read_one(await worker(gateway, partition)), "b")
    await (await worker(gateway, partition, name="b")).leave()
    third = await claim_one(await worker(gateway, partition, name="c", lease=3600.0))
    assert (await load_history(gateway, third, "x")).counters.crashes == 1


async def test_leaving_wakes_another_worker(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    await producer.enqueue("t", queue="default")
    a, b = await worker(gateway, partition), await worker(gateway, partition, name="b")
    await read(a)
    await a.leave()
    assert (await b.read(5, block=None)).claimable


async def test_leaving_twice_or_with_no_messages_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    a = await worker(gateway, partition)
    await a.leave()
    before = await dump(gateway, namespace)
    await a.leave()
    assert await dump(gateway, namespace) == before
    assert await gateway.command("XLEN", partition.nudge) == 0


async def test_leaving_keeps_the_messages_of_other_workers(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue_many("t", [{}] * 2, queue="default")
    a, b = await worker(gateway, partition), await worker(gateway, partition, name="b")
    await read(a)
    other = await read_one(b)
    await a.leave()
    assert (other.entry, "b", 1) in [
        (entry, owner, count) for entry, owner, _, count in await pending(gateway, partition)
    ]


async def test_a_lost_reply_to_leaving_releases_once(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    await producer.enqueue("t", queue="default")
    async with lossy_gateway(gateway) as (lossy, line):
        a = await worker(lossy, partition)
        await read(a)
        line.lose(queue_script("leave_group").sha.encode())
        await a.leave()
        assert line.lost == 1
    assert [(owner, count) for _, owner, _, count in await pending(gateway, partition)] == [(RELEASED, 1)]


# forgetting consumers


async def idle(gateway: Gateway, partition: Partition, *names: str) -> Consumer:
    """Create workers that are in the groups and hold no message; return the last."""
    last = await worker(gateway, partition, name=names[-1])
    for name in names:
        for stream in (partition.ready, partition.nudge):
            await gateway.command("XGROUP", "CREATECONSUMER", stream, GROUP, name)
    return last


async def test_an_idle_consumer_without_messages_is_removed(gateway: Gateway, partition: Partition) -> None:
    b = await idle(gateway, partition, "a", "b")
    assert await b.remove_idle_consumers(partition, -1.0, present=["b"]) == 1
    assert await consumers(gateway, partition.ready) == {"b"}
    assert await consumers(gateway, partition.nudge) == {"b"}


async def test_a_consumer_that_only_received_nudges_is_removed(gateway: Gateway, partition: Partition) -> None:
    b = await idle(gateway, partition, "a", "b")
    await gateway.command("XGROUP", "DELCONSUMER", partition.ready, GROUP, "a")
    assert await b.remove_idle_consumers(partition, -1.0, present=["b"]) == 1
    assert await consumers(gateway, partition.nudge) == {"b"}


async def test_a_consumer_with_pending_messages_stays(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """Deleting it would drop the pending list: the task would be lost."""
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    b = await worker(gateway, partition, name="b")
    before = await dump(gateway, namespace)
    assert await b.remove_idle_consumers(partition, -1.0, present=[]) == 0
    assert await dump(gateway, namespace) == before
    assert await places(gateway, partition, "x") == [PENDING]
    assert (await take_over(gateway, delivery, "b")).count == 2


async def test_a_consumer_that_read_since_it_was_listed_stays(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """Between the list of consumers and the removal the worker resumed and read."""
    await producer.enqueue("t", task_id="x", queue="default")
    await read_one(await worker(gateway, partition))
    keys = [partition.ready, partition.nudge]
    assert await gateway.run(queue_script("remove_consumer"), keys, [GROUP, "a"]) == 0
    assert await places(gateway, partition, "x") == [PENDING]


async def test_a_recently_active_or_present_consumer_stays(gateway: Gateway, partition: Partition) -> None:
    b = await idle(gateway, partition, "a", "b")
    assert await b.remove_idle_consumers(partition, 3600.0, present=[]) == 0
    assert await b.remove_idle_consumers(partition, -1.0, present=["a", "b"]) == 0
    assert "a" in await consumers(gateway, partition.ready)


async def test_the_consumer_of_released_messages_stays(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", queue="default")
    a = await worker(gateway, partition)
    await release(gateway, await read_one(a), None, data=None)
    await claim_one(a)
    assert await a.remove_idle_consumers(partition, -1.0, present=["a"]) == 0
    assert RELEASED in await consumers(gateway, partition.ready)


async def test_forgetting_in_an_unused_partition_removes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    a = await worker(gateway, partition)
    assert await a.remove_idle_consumers(namespace.partition("other"), -1.0, present=[]) == 0


# paused queues


async def test_a_paused_queue_is_not_read_but_its_nudges_are(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    other = namespace.partition("other")
    a = await worker(gateway, partition, other)
    await a.pause({"default"})
    waits, found = await producer.enqueue("t", queue="default"), await producer.enqueue("t", queue="other")
    await a.nudge(partition)
    taken = await a.read(8, block=None)
    assert (ids(taken.deliveries), taken.claimable) == ([found.id], True)
    assert (a.is_paused(partition), a.is_paused(other)) == (True, False)
    assert await read(a, 8) == []
    await a.pause(())
    assert ids(await read(a, 8)) == [waits.id]


async def test_a_pause_ends_a_blocking_read(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    needs_server(gateway, "CLIENT UNBLOCK is not there")
    a, reader = blocking(gateway, partition)
    await a.create_groups()
    waiting = asyncio.create_task(a.read(1, block=BOUND))
    await until_blocked(gateway, partition)
    await a.pause({"default"})
    await producer.enqueue("t", queue="default")
    assert (await asyncio.wait_for(waiting, BOUND / 2)).deliveries == []
    assert (await a.read(1, block=0.01)).deliveries == []
    await reader.close()


# nudging


async def test_a_nudge_announces_messages_to_claim(gateway: Gateway, partition: Partition) -> None:
    a, b = await worker(gateway, partition), await worker(gateway, partition, name="b")
    await a.nudge(partition)
    taken = await b.read(5, block=None)
    assert (taken.claimable, taken.due, taken.deliveries) == (True, False, [])
    assert not (await a.read(5, block=None)).claimable
    assert await gateway.command("XPENDING", partition.nudge, GROUP, "-", "+", 10) == []


async def test_nudges_do_not_accumulate(gateway: Gateway, partition: Partition) -> None:
    a = await worker(gateway, partition)
    for _ in range(40):
        await a.nudge(partition)
    assert await gateway.command("XLEN", partition.nudge) == 16
