"""Waiting for a task: the outcome is pushed to every waiter, soon, and whatever happens to the connection."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest
from perdure.deadletter.letters import find_letter
from perdure.deadletter.replay import Replay, replay
from perdure.queues import (
    Gateway,
    Namespace,
    Partition,
    Producer,
    State,
    TaskCancelled,
    TaskEvent,
    TaskFailed,
    TaskHandle,
    TaskNotFound,
    Unavailable,
)
from perdure.queues.delivery.checkpoint import Entry, Kind
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.errors import NotOpen
from perdure.queues.event_log import read_events
from perdure.queues.pubsub import TaskNotifications
from perdure.queues.transport.gateway import GatewayTimings
from perdure.queues.transport.scripts import queue_script
from redis.asyncio.client import PubSub

from tests.support.consumers import (
    claim_one,
    needs_one_server,
    needs_server,
    promote,
    read,
    read_one,
    take_over,
    worker,
)
from tests.support.delivery_calls import SETTLING, add_entries
from tests.support.lossy_proxy import lossy_gateway
from tests.support.servers.every_node import on_every_node
from tests.support.task_places import DEAD, DUE, PENDING, READY, dump, lifetimes, places

SOON = 15.0
"""Seconds within which a notification must arrive: far less than the 30 between two polls of a waiter."""

SWALLOWS = "its asyncio.wait_for swallows a cancellation that comes together with a reply (up to Python 3.11)"


@pytest.fixture(autouse=True)
def no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no PING find a lost connection within `SOON`: a notification must do."""
    monkeypatch.setattr(Gateway, "timings", GatewayTimings(silence=600.0))


@pytest.fixture
async def handle(producer: Producer) -> TaskHandle[Any]:
    return await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")


@pytest.fixture
async def delivery(gateway: Gateway, partition: Partition, handle: TaskHandle[Any]) -> Delivery:
    return await read_one(await worker(gateway, partition))


async def channels(gateway: Gateway, namespace: Namespace) -> list[bytes]:
    """Return the channels of the namespace that have subscribers."""
    found = await on_every_node(gateway, "PUBSUB", "CHANNELS", f"{{{namespace.name}:*")
    return [name for names in found for name in names]


async def listeners(gateway: Gateway, partition: Partition, *task_ids: str) -> None:
    """Wait until the channels of the tasks have subscribers."""
    wanted = {partition.record(task_id).encode() for task_id in task_ids}
    deadline = time.monotonic() + SOON
    while not wanted <= set(await channels(gateway, Namespace(partition.namespace))):
        assert time.monotonic() < deadline, "no client subscribed"
        await asyncio.sleep(0)


async def connections(gateway: Gateway, kind: str) -> list[str]:
    found = await on_every_node(gateway, "CLIENT", "LIST", "TYPE", kind)
    return [line for listed in found for line in listed.decode().splitlines()]


# results


async def test_a_stored_result_is_returned_at_once(
    gateway: Gateway, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    await succeed(gateway, delivery, "x", b'{"sum":3}', Counters(1), ran=0.1, ttl=60)
    assert await handle.result(timeout=SOON) == {"sum": 3}
    assert await handle.result() == {"sum": 3}


async def test_a_result_is_pushed_to_a_waiter(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    waiting = asyncio.create_task(handle.result())
    await listeners(gateway, partition, "x")
    assert not waiting.done()
    await SETTLING["succeed"](gateway, delivery, "x")
    assert await asyncio.wait_for(waiting, SOON) == {"ok": True}


async def test_a_waiter_keeps_waiting_while_the_server_is_away(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster the subscription may be restored long before the node that has the record."""
    away = asyncio.Event()
    asked = 0
    record = handle.record

    async def absent() -> Any:
        nonlocal asked
        if away.is_set():
            asked += 1
            raise Unavailable("away")
        return await record()

    monkeypatch.setattr(handle, "record", absent)
    waiting = asyncio.create_task(handle.result())
    await listeners(gateway, partition, "x")
    away.set()
    await SETTLING["succeed"](gateway, delivery, "x")
    while not asked and not waiting.done():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)
    away.clear()
    assert await asyncio.wait_for(waiting, SOON) == {"ok": True}
    assert asked


class Meddling(TaskNotifications):
    """Notifications that run a callback just before, or just after, the subscription is confirmed."""

    def __init__(
        self,
        gateway: Gateway,
        before: Callable[[], Awaitable[object]] | None,
        after: Callable[[], Awaitable[object]] | None,
    ) -> None:
        super().__init__(gateway)
        self._before, self._after = before, after

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[asyncio.Queue[bytes]]:
        if self._before is not None:
            await self._before()
        async with super().listen(channel) as inbox:
            if self._after is not None:
                await self._after()
            yield inbox


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_result_during_the_subscription_is_not_missed(
    gateway: Gateway, partition: Partition, delivery: Delivery, when: str
) -> None:
    async def settle() -> None:
        await SETTLING["succeed"](gateway, delivery, "x")

    news = Meddling(gateway, settle if when == "before" else None, settle if when == "after" else None)
    handle: TaskHandle[Any] = TaskHandle("x", partition, gateway, news)
    try:
        assert await handle.result(timeout=SOON) == {"ok": True}
    finally:
        await news.close()


async def test_a_waiter_gets_the_outcome_after_a_retry(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    waiting = asyncio.create_task(handle.result())
    await listeners(gateway, partition, "x")
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "a", b"1")])
    await SETTLING["reschedule"](gateway, delivery, "x")
    await promote(gateway, partition, "x")
    second = await read_one(await worker(gateway, partition))
    await SETTLING["release"](gateway, second, "x")
    third = await claim_one(await worker(gateway, partition, name="b"))
    assert not waiting.done()
    await SETTLING["succeed"](gateway, third, "x")
    assert await asyncio.wait_for(waiting, SOON) == {"ok": True}


async def test_a_task_that_died_raises_with_the_evidence(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    waiting = asyncio.create_task(handle.result())
    await listeners(gateway, partition, "x")
    await SETTLING["bury"](gateway, delivery, "x")
    with pytest.raises(TaskFailed, match=r"attempts_exhausted.*ValueError: no such file") as failed:
        await asyncio.wait_for(waiting, SOON)
    assert (failed.value.task_id, failed.value.reason) == ("x", "attempts_exhausted")
    assert failed.value.error["traceback"] == "Traceback ..."


@pytest.mark.parametrize("how", ["from outside", "by its worker"])
async def test_a_task_that_was_cancelled_raises(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], how: str
) -> None:
    waiting = asyncio.create_task(handle.result())
    await listeners(gateway, partition, "x")
    if how == "from outside":
        assert await handle.cancel() is State.CANCELLED
    else:
        await SETTLING["cancelled"](gateway, await read_one(await worker(gateway, partition)), "x")
    with pytest.raises(TaskCancelled):
        await asyncio.wait_for(waiting, SOON)


async def test_a_replayed_task_can_be_waited_for_again(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    await SETTLING["bury"](gateway, delivery, "x")
    with pytest.raises(TaskFailed):
        await handle.result()
    letter = await find_letter(gateway, [partition], "x")
    assert letter is not None
    await replay(gateway, letter, Replay())
    waiting = asyncio.create_task(handle.result())
    await listeners(gateway, partition, "x")
    await SETTLING["succeed"](gateway, await read_one(await worker(gateway, partition)), "x")
    assert await asyncio.wait_for(waiting, SOON) == {"ok": True}


async def test_a_wait_that_times_out_leaves_no_subscription(
    gateway: Gateway, namespace: Namespace, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await handle.result(timeout=0.05)
    assert 0.05 <= time.monotonic() - began < SOON
    await until_unsubscribed(gateway, namespace)
    waiting = asyncio.create_task(handle.result(timeout=SOON))
    await listeners(gateway, partition, "x")
    await SETTLING["succeed"](gateway, delivery, "x")
    assert await waiting == {"ok": True}


async def test_the_error_of_a_timeout_says_what_the_task_does(
    gateway: Gateway, handle: TaskHandle[Any], partition: Partition
) -> None:
    needs_server(gateway, SWALLOWS)
    with pytest.raises(TimeoutError, match=r"^task x \(t\) did not end within 0\.01 s: it is queued, and no worker"):
        await handle.result(timeout=0.01)
    await read_one(await worker(gateway, partition))
    with pytest.raises(
        TimeoutError, match=r"it has been running since .* on worker a, last heard of less than 1 s ago"
    ):
        await handle.result(timeout=0.01)


async def test_the_error_of_a_timeout_names_the_time_of_a_delayed_task(gateway: Gateway, producer: Producer) -> None:
    needs_server(gateway, SWALLOWS)
    later = await producer.enqueue("t", delay=3600, queue="default")
    with pytest.raises(
        TimeoutError, match=r"it is scheduled: it was enqueued with a delay; it is due in 60 min; no worker"
    ):
        await later.result(timeout=0.2)
    await later.cancel()


async def test_many_waits_that_time_out_at_once_leave_no_subscription(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, SWALLOWS)
    handles = await producer.enqueue_many("t", [{}] * 200, queue="default")
    ends = await asyncio.gather(*(handle.result(timeout=0.2) for handle in handles), return_exceptions=True)
    assert {type(end) for end in ends} == {TimeoutError}
    await until_unsubscribed(gateway, namespace)


async def until_unsubscribed(gateway: Gateway, namespace: Namespace) -> None:
    deadline = time.monotonic() + SOON
    while found := await channels(gateway, namespace):
        assert time.monotonic() < deadline, f"still listened to: {found}"
        await asyncio.sleep(0)


@pytest.mark.parametrize("timeout", [0.0, 0.001])
async def test_a_wait_with_a_timeout_of_zero_ends_at_once(
    gateway: Gateway, handle: TaskHandle[Any], timeout: float
) -> None:
    needs_server(gateway, SWALLOWS)
    with pytest.raises(TimeoutError):
        await handle.result(timeout=timeout)


async def test_a_waiter_that_gives_up_leaves_the_others_waiting(
    gateway: Gateway, namespace: Namespace, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    waiting = [asyncio.create_task(handle.result()) for _ in range(3)]
    await listeners(gateway, partition, "x")
    with pytest.raises(TimeoutError):
        await handle.result(timeout=0.02)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    await SETTLING["succeed"](gateway, delivery, "x")
    assert await asyncio.wait_for(asyncio.gather(*waiting[1:]), SOON) == [{"ok": True}] * 2
    await until_unsubscribed(gateway, namespace)


async def test_a_new_waiter_is_subscribed_while_the_last_one_leaves(
    gateway: Gateway, namespace: Namespace, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    """The last waiter leaves while the next one arrives: each waiter is subscribed."""
    needs_server(gateway, SWALLOWS)

    async def wait_shortly(n: int) -> None:
        with pytest.raises(TimeoutError):
            await handle.result(timeout=0.001 * (n % 7))

    for _ in range(5):
        await asyncio.gather(*(wait_shortly(n) for n in range(20)))
        waiting = asyncio.create_task(handle.result())
        await listeners(gateway, partition, "x")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    last = asyncio.create_task(handle.result())
    await listeners(gateway, partition, "x")
    await SETTLING["succeed"](gateway, delivery, "x")
    assert await asyncio.wait_for(last, SOON) == {"ok": True}
    await until_unsubscribed(gateway, namespace)


async def test_waiting_for_an_unknown_task_fails(producer: Producer, partition: Partition, gateway: Gateway) -> None:
    stranger: TaskHandle[Any] = TaskHandle("missing", partition, gateway, producer.notifications)
    for act in (stranger.result, stranger.status, stranger.cancel, stranger.record):
        with pytest.raises(TaskNotFound, match="missing"):
            await act()
    with pytest.raises(TaskNotFound):
        await anext(stranger.events())


async def test_a_result_past_its_retention_is_not_found(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    await SETTLING["succeed"](gateway, delivery, "x")
    await gateway.command("PEXPIRE", partition.record("x"), 0)
    with pytest.raises(TaskNotFound):
        await handle.result()


async def test_each_waiter_decodes_the_result(
    gateway: Gateway, partition: Partition, producer: Producer, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    await succeed(gateway, delivery, "x", b"[1,2]", Counters(1), ran=0, ttl=60)
    typed: TaskHandle[int] = TaskHandle(
        "x", partition, gateway, producer.notifications, lambda data: sum(orjson.loads(data))
    )
    assert await typed.result() == 3


async def test_200_waiters_share_one_connection(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "there are no connections to count")
    handles = await producer.enqueue_many("t", [{"n": n} for n in range(200)], queue="default")
    waiting = [asyncio.create_task(handle.result()) for handle in handles]
    await listeners(gateway, partition, *(handle.id for handle in handles))
    assert len(await connections(gateway, "pubsub")) == 1
    assert len(await connections(gateway, "normal")) <= 17
    deliveries = await read(await worker(gateway, partition), 200)
    for handle, delivery in zip(handles, deliveries, strict=True):
        await succeed(gateway, delivery, handle.id, delivery.fields[b"args"], Counters(1), ran=0, ttl=60)
    results = await asyncio.wait_for(asyncio.gather(*waiting), SOON)
    assert results == [{"n": n} for n in range(200)]
    await until_unsubscribed(gateway, namespace)


async def test_a_producer_without_waiters_opens_no_subscriber_connection(gateway: Gateway, producer: Producer) -> None:
    needs_server(gateway, "there are no connections to count")
    await producer.enqueue("t", queue="default")
    assert await connections(gateway, "pubsub") == []


async def test_a_killed_connection_is_opened_again(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    needs_server(gateway, "there is no connection to kill")
    handles = await producer.enqueue_many("t", [{"n": n} for n in range(10)], queue="default")
    deliveries = await read(await worker(gateway, partition), 10)
    waiting = [asyncio.create_task(handle.result()) for handle in handles]
    names = [handle.id for handle in handles]
    for delivery, handle in zip(deliveries, handles, strict=True):
        await listeners(gateway, partition, *names)
        await on_every_node(gateway, "CLIENT", "KILL", "TYPE", "pubsub")
        await succeed(gateway, delivery, handle.id, b"1", Counters(1), ran=0, ttl=60)
        names.remove(handle.id)
    assert await asyncio.wait_for(asyncio.gather(*waiting), SOON) == [1] * 10


async def test_a_wait_can_start_on_a_killed_connection(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    needs_server(gateway, "there is no connection to kill")
    handles = await producer.enqueue_many("t", [{}] * 10, queue="default")
    deliveries = await read(await worker(gateway, partition), 10)
    async with producer.notifications.listen(partition.record("another task")):
        for handle, delivery in zip(handles, deliveries, strict=True):
            await on_every_node(gateway, "CLIENT", "KILL", "TYPE", "pubsub")
            waiting = asyncio.create_task(handle.result())
            await listeners(gateway, partition, handle.id)
            await succeed(gateway, delivery, handle.id, b"1", Counters(1), ran=0, ttl=60)
            assert await asyncio.wait_for(waiting, SOON) == 1


async def test_a_subscription_is_restored_after_its_connection_was_killed(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    """It is restored without a new waiter: otherwise waiters would depend on polling alone."""
    needs_server(gateway, "there is no connection to kill")
    names = [partition.record(f"x{number}") for number in range(20)]
    async with AsyncExitStack() as stack:
        inboxes = [await stack.enter_async_context(producer.notifications.listen(name)) for name in names]
        for _ in range(3):
            await on_every_node(gateway, "CLIENT", "KILL", "TYPE", "pubsub")
            assert await channels(gateway, namespace) == []
            await listeners(gateway, partition, *(f"x{number}" for number in range(20)))
        for name, inbox in zip(names, inboxes, strict=True):
            await gateway.command("PUBLISH", name, "news")
            while await asyncio.wait_for(inbox.get(), SOON) != b"news":
                pass


async def test_listeners_of_one_channel_are_subscribed_together_with_another_one(
    gateway: Gateway, partition: Partition
) -> None:
    """Two wait for one confirmation, which comes after a listener of another channel has subscribed as well."""
    needs_one_server(gateway, "the line that waits stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        news = TaskNotifications(lossy)
        async with news.listen(partition.record("w")):
            line.flowing.clear()
            listening = [asyncio.create_task(hear(news, partition.record(name))) for name in ("x", "x", "y")]
            for _ in range(20):  # they send their subscriptions
                await asyncio.sleep(0)
            line.flowing.set()
            try:
                await listeners(gateway, partition, "x", "y")
                async with asyncio.timeout(SOON):
                    while not all(one.done() for one in listening):
                        for name in ("x", "y"):
                            await gateway.command("PUBLISH", partition.record(name), "news")
                        await asyncio.wait(listening, timeout=0.01)
            finally:
                for one in listening:
                    one.cancel()
                await asyncio.gather(*listening, return_exceptions=True)
        await news.close()


async def test_a_message_published_without_a_connection_is_not_missed(
    gateway: Gateway, partition: Partition, producer: Producer, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    """All connections die, and the outcome is published before any of them is open again."""
    needs_one_server(gateway, "the line that breaks stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        news = TaskNotifications(lossy)
        watcher: TaskHandle[Any] = TaskHandle("x", partition, lossy, news)
        waiting = asyncio.create_task(watcher.result())
        await listeners(gateway, partition, "x")
        async with line.down():
            await SETTLING["succeed"](gateway, delivery, "x")
        try:
            assert await asyncio.wait_for(waiting, SOON) == {"ok": True}
        finally:
            await news.close()


async def test_a_message_published_during_a_new_subscription_is_not_missed(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    """The new connection is open and the subscription is sent: the outcome is published first."""
    needs_one_server(gateway, "the line that breaks stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        news = TaskNotifications(lossy)
        watcher: TaskHandle[Any] = TaskHandle("x", partition, gateway, news)
        waiting = asyncio.create_task(watcher.result())
        await listeners(gateway, partition, "x")
        try:
            line.flowing.clear()
            async with line.down():
                line.accepted.clear()
            await asyncio.wait_for(line.accepted.wait(), SOON)
            await SETTLING["succeed"](gateway, delivery, "x")
            assert not waiting.done()
            line.flowing.set()
            assert await asyncio.wait_for(waiting, SOON) == {"ok": True}
        finally:
            await news.close()


async def hear(news: TaskNotifications, channel: str) -> bytes:
    async with news.listen(channel) as inbox:
        return await inbox.get()


async def test_a_failed_subscription_does_not_block_the_next(
    gateway: Gateway, namespace: Namespace, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    needs_one_server(gateway, "the line that breaks stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        news = TaskNotifications(lossy)
        watcher: TaskHandle[Any] = TaskHandle("x", partition, gateway, news)
        try:
            line.accepted.clear()
            line.flowing.clear()
            first = [asyncio.create_task(hear(news, partition.record("x"))) for _ in range(3)]
            await asyncio.wait_for(line.accepted.wait(), SOON)
            async with line.down():
                found = await asyncio.wait_for(asyncio.gather(*first, return_exceptions=True), SOON)
            line.flowing.set()
            assert [type(one) for one in found] == [Unavailable] * 3
            waiting = asyncio.create_task(watcher.result())
            await listeners(gateway, partition, "x")
            await SETTLING["succeed"](gateway, delivery, "x")
            assert await asyncio.wait_for(waiting, SOON) == {"ok": True}
        finally:
            await news.close()
        await until_unsubscribed(gateway, namespace)


async def test_a_listener_that_gives_up_while_it_subscribes_for_others_leaves_them_waiting(
    gateway: Gateway, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listeners x and y wait for the one before them. Then x subscribes for both, and is cancelled."""
    needs_server(gateway, "there is no connection to set up")
    send = PubSub.subscribe
    began, go = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
    calls = iter(range(100))

    async def subscribe(pubsub: PubSub, *names: bytes) -> None:
        call = next(calls)
        if call < 2:
            began[call].set()
            await go[call].wait()
        await send(pubsub, *names)

    monkeypatch.setattr(PubSub, "subscribe", subscribe)
    news = TaskNotifications(gateway)
    names = [partition.record(name) for name in "wxy"]
    listening = [asyncio.create_task(hear(news, name)) for name in names]
    try:
        await asyncio.wait_for(began[0].wait(), SOON)
        go[0].set()
        await asyncio.wait_for(began[1].wait(), SOON)
        listening[1].cancel()
        await listeners(gateway, partition, "y")
        await gateway.command("PUBLISH", names[2], "news")
        heard = await asyncio.wait_for(listening[2], SOON)
        assert heard in (b"news", b""), "nothing but a second confirmation may come before the news"
    finally:
        for one in listening:
            one.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
        await news.close()


async def test_a_close_ends_a_listener_whose_connection_is_being_set_up(
    gateway: Gateway, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_server(gateway, "there is no connection to set up")
    subscription, connected, closed = gateway.subscription, asyncio.Event(), asyncio.Event()

    async def connect() -> PubSub:
        pubsub = await subscription()
        connected.set()
        await closed.wait()
        return pubsub

    monkeypatch.setattr(gateway, "subscription", connect)
    news = TaskNotifications(gateway)
    listening = [asyncio.create_task(hear(news, partition.record("x"))) for _ in range(2)]
    await asyncio.wait_for(connected.wait(), SOON)
    await news.close()
    closed.set()
    found = await asyncio.wait_for(asyncio.gather(*listening, return_exceptions=True), SOON)
    assert [type(one) for one in found] == [NotOpen] * 2
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "perdure notifications"]


async def test_a_close_ends_a_listener_whose_subscription_is_not_confirmed(
    gateway: Gateway, partition: Partition
) -> None:
    needs_one_server(gateway, "the line that breaks stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        news = TaskNotifications(lossy)
        async with news.listen(partition.record("x")):
            line.flowing.clear()
            unconfirmed = asyncio.create_task(hear(news, partition.record("y")))
            await asyncio.sleep(0)  # it has sent its subscription
            await asyncio.sleep(0)
            await news.close()
            with pytest.raises(NotOpen):
                await asyncio.wait_for(unconfirmed, SOON)
        line.flowing.set()


async def test_a_wait_can_start_while_the_server_is_away(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    needs_one_server(gateway, "the line that breaks stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        news = TaskNotifications(lossy)
        watcher: TaskHandle[Any] = TaskHandle("x", partition, lossy, news)
        async with line.down():
            waiting = [asyncio.create_task(watcher.result()) for _ in range(5)]
            await SETTLING["succeed"](gateway, delivery, "x")
        try:
            assert await asyncio.wait_for(asyncio.gather(*waiting), SOON) == [{"ok": True}] * 5
        finally:
            await news.close()


# cancelling


async def test_a_task_without_a_group_is_cancelled_at_once(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any]
) -> None:
    """There is no worker and no group yet."""
    assert await handle.status() is State.QUEUED
    assert await handle.cancel() is State.CANCELLED
    assert await places(gateway, partition, "x") == ["cancelled"]
    assert await gateway.command("XLEN", partition.ready) == 0


@pytest.mark.parametrize("where", [READY, DUE, "retrying", "released", "replayed"])
async def test_a_task_that_is_not_running_is_cancelled_at_once(
    gateway: Gateway, partition: Partition, producer: Producer, where: str
) -> None:
    handle = await producer.enqueue("t", {"n": 1}, task_id="x", delay=60 if where == DUE else 0, queue="default")
    a = await worker(gateway, partition)
    if where == "retrying":
        await SETTLING["reschedule"](gateway, await read_one(a), "x")
    elif where == "released":
        await SETTLING["release"](gateway, await read_one(a), "x")
    elif where == "replayed":
        await SETTLING["bury"](gateway, await read_one(a), "x")
        letter = await find_letter(gateway, [partition], "x")
        assert letter is not None
        await replay(gateway, letter, Replay())
    assert await handle.cancel() is State.CANCELLED
    assert await places(gateway, partition, "x") == ["cancelled"]
    record = await handle.record()
    assert (record.state, record.task, record.args, record.due_at) == (State.CANCELLED, "t", b'{"n":1}', None)
    assert record.finished_at is not None
    assert all(ttl > 0 for ttl in (await lifetimes(gateway, partition, "x")).values())
    assert await read(a) == []
    assert await promote(gateway, partition, "x") == 0
    assert await gateway.command("XLEN", partition.ready) == 0
    assert await handle.cancel() is State.CANCELLED


async def test_a_running_task_gets_a_request_to_cancel(
    gateway: Gateway, namespace: Namespace, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    assert await handle.cancel() is State.RUNNING
    assert await handle.status() is State.RUNNING
    assert await places(gateway, partition, "x") == [PENDING]
    before = await dump(gateway, namespace)
    assert await handle.cancel() is State.RUNNING
    assert await dump(gateway, namespace) == before
    await SETTLING["cancelled"](gateway, delivery, "x")
    assert await handle.cancel() is State.CANCELLED


async def test_a_request_to_cancel_reaches_the_worker_that_claims_the_task(
    gateway: Gateway, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    await handle.cancel()
    second = await take_over(gateway, delivery)
    assert await add_entries(gateway, second, "x", [Entry(Kind.DONE, "a", b"1")])


@pytest.mark.parametrize(("act", "state"), [("succeed", State.SUCCEEDED), ("bury", State.DEAD)])
async def test_a_task_that_has_ended_is_not_cancelled(
    gateway: Gateway, namespace: Namespace, handle: TaskHandle[Any], delivery: Delivery, act: str, state: State
) -> None:
    await SETTLING[act](gateway, delivery, "x")
    before = await dump(gateway, namespace)
    assert await handle.cancel() is state
    assert await dump(gateway, namespace) == before


async def test_cancelling_concurrently_with_a_read_has_one_outcome(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """Either no worker reads the task, or the worker that reads it has the request."""
    crew = [await worker(gateway, partition, name=f"w{n}") for n in range(3)]
    states = set()
    for number in range(30):
        handle = await producer.enqueue("t", task_id=f"x{number}", queue="default")
        taken: list[Delivery] = []

        async def take(one: Consumer, taken: list[Delivery] = taken) -> None:
            await gateway.pipeline(
                [("EXISTS", partition.ready)] * 2
            )  # a cancellation reads two fields before its script
            taken += await read(one)

        async def cancel(handle: TaskHandle[Any] = handle) -> None:
            states.add(await handle.cancel())

        acts = [cancel(), *(take(one) for one in crew)]
        random.Random(number).shuffle(acts)
        await asyncio.gather(*acts)
        if not taken:
            assert await places(gateway, partition, handle.id) == ["cancelled"]
        else:
            (delivery,) = taken
            assert await add_entries(gateway, delivery, handle.id, [Entry(Kind.DONE, "a", b"1")])
            await SETTLING["cancelled"](gateway, delivery, handle.id)
    assert states == {State.CANCELLED, State.RUNNING}


async def test_cancelling_concurrently_with_a_promotion_has_one_outcome(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    for number in range(20):
        handle = await producer.enqueue("t", task_id=f"x{number}", delay=60, queue="default")
        acts: list[Awaitable[object]] = [handle.cancel(), promote(gateway, partition, handle.id)]
        await asyncio.gather(*(acts if number % 2 else reversed(acts)))
        assert await places(gateway, partition, handle.id) == ["cancelled"]


async def test_a_lost_reply_cancels_once(
    gateway: Gateway, partition: Partition, producer: Producer, handle: TaskHandle[Any]
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with lossy_gateway(gateway) as (lossy, line):
        far: TaskHandle[Any] = TaskHandle("x", partition, lossy, producer.notifications)
        line.lose(queue_script("cancel").sha.encode())
        assert await far.cancel() is State.CANCELLED
        assert line.lost == 1
    assert await places(gateway, partition, "x") == ["cancelled"]


async def test_foreign_fields_are_not_copied_to_the_record(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any]
) -> None:
    """Another program added the message, with fields named like those of Perdure."""
    (sent,) = await gateway.command("XRANGE", partition.ready, "-", "+")
    strange = [b"state", b"succeeded", b"dead", b"nonsense", b"entry", b"1", b"result", b"2"]
    entry = await gateway.command("XADD", partition.ready, "*", *sent[1], *strange)
    await gateway.command("XDEL", partition.ready, sent[0])
    await gateway.command("HSET", partition.record("x"), "entry", entry)
    assert await handle.cancel() is State.CANCELLED
    record = await handle.record()
    assert (record.state, record.result, record.task) == (State.CANCELLED, None, "t")


# events


async def collect(events: AsyncIterator[TaskEvent]) -> list[str]:
    return [event.type + (f" {event.step}" if event.step else "") async for event in events]


async def test_events_are_delivered_in_order_to_the_end(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    following = asyncio.create_task(collect(handle.events()))
    await listeners(gateway, partition, "x")
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "a", b"1")])
    await SETTLING["release"](gateway, delivery, "x")
    second = await claim_one(await worker(gateway, partition, name="b"))
    await add_entries(gateway, second, "x", [Entry(Kind.DONE, "b", b"1")])
    assert not following.done()
    await SETTLING["bury"](gateway, second, "x")
    expected = ["step_completed a", "handed_off", "step_completed b", "buried"]
    assert await asyncio.wait_for(following, SOON) == expected
    assert await collect(handle.events()) == expected


async def test_events_are_delivered_one_by_one(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    events = handle.events()
    for step in ("a", "b", "c"):
        coming = asyncio.ensure_future(anext(events))
        await listeners(gateway, partition, "x")
        await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, step, b"1")])
        assert (await asyncio.wait_for(coming, SOON)).step == step
    await SETTLING["succeed"](gateway, delivery, "x")
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(events), SOON)


async def test_events_without_follow_do_not_wait(gateway: Gateway, handle: TaskHandle[Any], delivery: Delivery) -> None:
    assert await collect(handle.events(follow=False)) == []
    await add_entries(gateway, delivery, "x", [Entry(Kind.DONE, "a", b"1")])
    assert await collect(handle.events(follow=False)) == ["step_completed a"]


async def test_followers_get_the_event_of_the_outcome(
    gateway: Gateway, partition: Partition, handle: TaskHandle[Any], delivery: Delivery
) -> None:
    """One script writes log and state; a follower reads the state first, so it never ends too early."""
    following = [asyncio.create_task(collect(handle.events())) for _ in range(20)]
    await listeners(gateway, partition, "x")
    await SETTLING["bury"](gateway, delivery, "x")
    assert await asyncio.wait_for(asyncio.gather(*following), SOON) == [["buried"]] * 20
    assert await places(gateway, partition, "x") == [DEAD]
    assert len(await read_events(gateway, partition, "x")) == 1


async def test_one_notification_stands_for_too_many_others(gateway: Gateway, partition: Partition) -> None:
    """Anyone who may publish can send more than a waiter reads."""
    flooded, other = partition.record("x"), partition.record("y")
    news = TaskNotifications(gateway)
    try:
        async with news.listen(flooded) as inbox, news.listen(other) as last:
            for _ in range(1_000):
                await gateway.command("PUBLISH", flooded, "junk")
            await gateway.command("PUBLISH", other, "last")  # on the same connection: after all others
            while await asyncio.wait_for(last.get(), SOON) != b"last":
                pass
            waiting = [inbox.get_nowait() for _ in range(inbox.qsize())]
    finally:
        await news.close()
    assert waiting[0] == b""
    assert len(waiting) <= 32
