"""Late duplicates of chores, uploads and edits: their bytes arrive after the task or the partition has changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import orjson
import pytest
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway, Namespace, Partition, Producer
from perdure.queues.delivery.checkpoint import (
    Entry,
    Kind,
    Position,
    close_exported,
    edit_checkpoint,
    load_history,
    read_mark,
    read_position,
)
from perdure.queues.delivery.due_set import wake_version
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.lost_tasks import put_back_lost, replace_exhausted
from perdure.queues.delivery.quarantine_store import quarantine, take_quarantined
from perdure.queues.delivery.settlement import await_version
from perdure.queues.derived_tasks import Successor, TaskPast, enqueue_successor, read_task_input, store_copy
from perdure.queues.envelope import Envelope, EnvelopeTemplate
from perdure.queues.errors import Unavailable
from perdure.queues.event_log import read_events
from perdure.queues.inspection.timeline import trim_timeline
from perdure.queues.junk import set_aside
from perdure.queues.keys import DATA_FORMAT
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import claim_all, pending, promote, read, read_one, worker
from tests.support.delivery_calls import SETTLING, add_entries
from tests.support.lossy_proxy import LossyProxy, deliver_unchanged
from tests.support.task_places import DUE, PENDING, READY, dump, places

Line = tuple[Gateway, LossyProxy]

LARGE = orjson.dumps({"text": "0123456789" * 120_000})


# chores of a partition


async def test_groups_that_are_created_late_change_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, line: Line
) -> None:
    late, proxy = line
    proxy.hold(queue_script("create_groups").sha.encode())
    await worker(late, partition)
    await producer.enqueue("t", task_id="x", queue="default")
    await deliver_unchanged(gateway, namespace, proxy)
    await read_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_worker_that_leaves_late_takes_nothing_from_the_others(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, line: Line
) -> None:
    """Until another worker has the message, the workers may be notified once more."""
    late, proxy = line
    proxy.hold(queue_script("leave_group").sha.encode())
    await (await worker(late, partition)).leave()
    (again,) = await claim_all(await worker(gateway, partition, name="b"))
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["reschedule"](gateway, again, "x")
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_consumer_that_is_removed_late_keeps_what_it_has_read_since(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, line: Line
) -> None:
    """The worker was silent for long, and not dead."""
    late, proxy = line
    a = await worker(gateway, partition)
    assert await read(a) == []
    proxy.hold(queue_script("remove_consumer").sha.encode())
    assert await late.run(queue_script("remove_consumer"), [partition.ready, partition.nudge], ["workers", "a"]) == 1
    await deliver_unchanged(gateway, namespace, proxy)
    await producer.enqueue("t", task_id="x", queue="default")
    kept = await read_one(a)
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["succeed"](gateway, kept, "x")


async def test_a_touch_that_arrives_late_restarts_no_lease(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, line: Line
) -> None:
    late, proxy = line
    proxy.hold(queue_script("touch").sha.encode())
    await (await worker(late, partition)).touch(partition)
    (before,) = await pending(gateway, partition)
    await gateway.command(
        "XCLAIM", partition.ready, "workers", "a", 0, delivery.entry, "IDLE", 50_000, "RETRYCOUNT", 1, "JUSTID"
    )
    await deliver_unchanged(gateway, namespace, proxy)
    (after,) = await pending(gateway, partition)
    assert (after[0], after[1], after[3]) == (before[0], before[1], before[3])
    assert after[2] >= 50_000


async def test_a_search_for_lost_tasks_that_arrives_late_puts_nothing_back_twice(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, line: Line
) -> None:
    late, proxy = line
    await gateway.command("XACK", partition.ready, "workers", delivery.entry)
    proxy.hold(queue_script("put_back").sha.encode())
    assert await put_back_lost(late, partition, 0.0) == 1
    await deliver_unchanged(gateway, namespace, proxy)
    again = await read_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["reschedule"](gateway, again, "x")
    await deliver_unchanged(gateway, namespace, proxy)
    await promote(gateway, partition, "x")
    await SETTLING["succeed"](gateway, await read_one(await worker(gateway, partition)), "x")
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_stream_that_is_replaced_late_keeps_what_was_added_since(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, delivery: Delivery, line: Line
) -> None:
    late, proxy = line
    await gateway.command("XADD", partition.ready, "18446744073709551615-0", "a", "b")
    proxy.hold(queue_script("replace_stream").sha.encode())
    assert await replace_exhausted(late, partition)
    await producer.enqueue("t", task_id="y", queue="default")
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["succeed"](gateway, delivery, "x")
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_timeline_that_is_trimmed_late_keeps_the_next_task_of_the_id(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, delivery: Delivery, line: Line
) -> None:
    late, proxy = line
    await producer.enqueue("t", task_id="y", queue="default")
    await SETTLING["succeed"](gateway, delivery, "x")
    await gateway.command("DEL", partition.record("x"), partition.steps("x"), partition.log("x"))
    proxy.hold(queue_script("trim_timeline").sha.encode())
    assert await trim_timeline(late, partition) == 1
    await deliver_unchanged(gateway, namespace, proxy)
    await producer.enqueue("t", task_id="x", queue="default")
    await deliver_unchanged(gateway, namespace, proxy)
    assert await gateway.command("ZSCORE", partition.timeline, "x") is not None


async def test_a_member_that_is_set_aside_late_is_one_that_another_program_wrote_again(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, line: Line
) -> None:
    late, proxy = line
    await producer.enqueue("t", task_id="y", queue="default", delay=3600)
    await gateway.command("ZADD", partition.due, 1, b"\xff")
    proxy.hold(queue_script("set_aside").sha.encode())
    assert await set_aside(late, partition, partition.due, "zset", [b"\xff"]) == 1
    await deliver_unchanged(gateway, namespace, proxy)
    assert await gateway.command("ZRANGE", partition.due, 0, -1) == [b"y"]


async def test_a_key_that_is_moved_late_is_one_that_another_program_replaced_again(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, line: Line
) -> None:
    late, proxy = line
    await gateway.command("SET", partition.due, "x")
    proxy.hold(queue_script("set_key_aside").sha.encode())
    assert await late.set_keys_aside([partition.due])
    await deliver_unchanged(gateway, namespace, proxy)
    await producer.enqueue("t", task_id="y", queue="default", delay=3600)
    await deliver_unchanged(gateway, namespace, proxy)
    assert await gateway.command("ZRANGE", partition.due, 0, -1) == [b"y"]


async def test_tasks_that_are_woken_late_wait_for_their_version_again(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, line: Line
) -> None:
    """The worker that woke them has left meanwhile. That costs a task one more delivery, and no attempt or crash."""
    late, proxy = line
    await await_version(gateway, delivery, "x", DATA_FORMAT, limit=600)
    proxy.hold(queue_script("wake_version").sha.encode())
    assert await wake_version(late, partition) == 1
    await deliver_unchanged(gateway, namespace, proxy)
    await promote(gateway, partition, "x")
    await deliver_unchanged(gateway, namespace, proxy)
    second = await read_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)
    await await_version(gateway, second, "x", DATA_FORMAT + 1, limit=600)
    await deliver_unchanged(gateway, namespace, proxy)
    await promote(gateway, partition, "x")
    third = await read_one(await worker(gateway, partition))
    await await_version(gateway, third, "x", DATA_FORMAT, limit=600)
    counters = await gateway.command("HMGET", partition.record("x"), "attempts", "crashes", "newer_since")
    await proxy.deliver()
    await promote(gateway, partition, "x")
    fourth = await read_one(await worker(gateway, partition))
    assert await gateway.command("HMGET", partition.record("x"), "attempts", "crashes", "newer_since") == counters
    await await_version(gateway, fourth, "x", DATA_FORMAT, limit=600)
    assert await gateway.command("HMGET", partition.record("x"), "attempts", "crashes", "newer_since") == counters
    assert await places(gateway, partition, "x") == [DUE]


# commands that hand out messages, which are never sent again


@pytest.mark.parametrize("act", ["read", "claim", "take_quarantined"])
async def test_a_message_that_is_handed_out_late_is_recovered_by_its_worker(
    gateway: Gateway, partition: Partition, producer: Producer, line: Line, act: str
) -> None:
    """The caller got an error in place of the reply, and has the message all the same."""
    late, proxy = line
    await producer.enqueue("t", task_id="x", queue="default")
    a = await worker(late, partition)
    if act != "read":
        first = await read_one(await worker(gateway, partition, name="b"))
        await (SETTLING["release"] if act == "claim" else quarantine)(gateway, first, "x")
    proxy.hold(b"XREADGROUP" if act == "read" else queue_script(act).sha.encode())
    calls: dict[str, Callable[[], Any]] = {
        "read": partial(read, a),
        "claim": partial(claim_all, a),
        "take_quarantined": partial(take_quarantined, late, partition, "a"),
    }
    with pytest.raises(Unavailable):
        await calls[act]()
    await proxy.deliver()
    ((_, owner, _, _),) = await pending(gateway, partition)
    assert owner == "a"
    (recovered,) = await a.recover_own(partition)
    await SETTLING["succeed"](gateway, recovered, "x")
    assert await places(gateway, partition, "x") == ["succeeded"]


# uploads


async def enqueue(late: Producer, gateway: Gateway) -> None:
    await late.send([EnvelopeTemplate("t").message(LARGE, task_id="y")], queue="default")


async def enqueue_later(late: Producer, gateway: Gateway) -> None:
    await late.enqueue("t", orjson.loads(LARGE), task_id="y", queue="default", delay=60.0)


async def enqueue_fresh(late: Producer, gateway: Gateway) -> None:
    await late.enqueue_fresh(EnvelopeTemplate("t").message(LARGE, task_id="y"), queue="default")


async def continue_as(late: Producer, gateway: Gateway) -> None:
    following = Successor(Envelope(id="y", task="t"), "default", LARGE, ("#received", b"{}"), "x token")
    await enqueue_successor(late.gateway, late.namespace, following)


async def import_task(late: Producer, gateway: Gateway) -> None:
    log = [("1-0", {"type": b"started", "n": b"1"})]
    past = TaskPast(1, 1, None, [("s:a", b"1")], (), log)
    envelope = Envelope(id="y", task="t").encode()
    how: dict[str, Any] = {"envelope": envelope, "arguments": LARGE, "past": past, "source": "import 1"}
    await store_copy(late.gateway, late.namespace, "default", "y", **how)


UPLOADING = {one.__name__: one for one in (enqueue, enqueue_later, enqueue_fresh, continue_as, import_task)}
"""Calls that store task y with large arguments."""

STORING = {
    "enqueue": "enqueue_large",
    "enqueue_later": "enqueue_large",
    "enqueue_fresh": "reset_task",
    "continue_as": "enqueue_successor",
    "import_task": "enqueue_copy",
}
"""The script that stores the task."""


async def upload_again(gateway: Gateway, partition: Partition) -> None:
    """Upload the chunks of task y once more, as another producer of the same task does before it stores it."""
    record = await gateway.command("HGETALL", partition.record("y"))
    chunks = [(name, chunk) for name, chunk in zip(record[::2], record[1::2], strict=True) if name.startswith(b"args:")]
    upload = partition.upload("y", chunks[0][0].split(b":")[1].decode())
    await gateway.command("HSET", upload, *(part for pair in chunks for part in pair))
    await gateway.command("PEXPIRE", upload, 600_000)


async def run_to_its_end(gateway: Gateway, partition: Partition, task_id: str) -> AsyncIterator[str]:
    """Run a task; yield after each of its changes."""
    yield "stored"
    if await places(gateway, partition, task_id) == [DUE]:
        await promote(gateway, partition, task_id)
        yield "due"
    delivery = await read_one(await worker(gateway, partition))
    yield "read"
    await SETTLING["succeed"](gateway, delivery, task_id)
    yield "succeeded"


@pytest.mark.parametrize("how", UPLOADING)
async def test_a_task_with_large_arguments_is_not_stored_again_late(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, line: Line, how: str
) -> None:
    late, proxy = line
    async with Producer(namespace=namespace.name, gateway=late) as another:
        await another.enqueue("t", queue="warm")
        await another.find("y")
        proxy.hold(queue_script(STORING[how]).sha.encode())
        await UPLOADING[how](another, gateway)
    await upload_again(gateway, partition)
    async for _ in run_to_its_end(gateway, partition, "y"):
        await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize(
    ("script", "how"), [*(("upload_chunk", how) for how in UPLOADING), ("upload_events", "import_task")]
)
async def test_a_portion_that_is_uploaded_late_changes_no_task_and_expires(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, line: Line, how: str, script: str
) -> None:
    late, proxy = line
    async with Producer(namespace=namespace.name, gateway=late) as another:
        await another.enqueue("t", queue="warm")
        await another.find("y")
        proxy.hold(queue_script(script).sha.encode())
        await UPLOADING[how](another, gateway)
    async for _ in run_to_its_end(gateway, partition, "y"):
        before = await dump(gateway, namespace)
        await proxy.deliver()
        after = await dump(gateway, namespace)
        (upload,) = after.keys() - before.keys()
        assert 0 < await gateway.command("PTTL", upload) <= 600_000
        assert {key: value for key, value in after.items() if key != upload} == before
        await gateway.command("DEL", upload)


async def test_a_late_portion_spoils_no_later_upload_of_the_same_arguments(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, line: Line
) -> None:
    late, proxy = line
    async with Producer(namespace=namespace.name, gateway=late) as another:
        proxy.hold(queue_script("upload_chunk").sha.encode())
        await enqueue(another, gateway)
    first = await read_one(await worker(gateway, partition))
    await SETTLING["succeed"](gateway, first, "y")
    await proxy.deliver()
    await producer.enqueue_fresh(EnvelopeTemplate("t").message(LARGE, task_id="y"), queue="default")
    assert (await read_task_input(gateway, partition, "y")).arguments == LARGE


# edits of persons


@pytest.fixture
async def finding(gateway: Gateway, delivery: Delivery) -> Delivery:
    """Task x, whose second event is a finding."""
    found = Entry(Kind.EVENT, "incoherent", b"2", b'{"check":"plan","key":"k"}')
    await add_entries(gateway, delivery, "x", [Entry(Kind.EVENT, "started", b"1"), found])
    return delivery


@pytest.mark.parametrize("then", ["enqueued fresh", "replayed fresh"])
async def test_a_dismissal_that_arrives_late_spares_the_next_run_from_the_start(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    finding: Delivery,
    line: Line,
    then: str,
) -> None:
    """A finding is dismissed by its key, and the next run may have the same."""
    late, proxy = line
    async with Producer(namespace=namespace.name, gateway=late) as another:
        handle = await another.find("x")
        assert handle is not None
        proxy.hold(queue_script("dismiss").sha.encode())
        await handle.dismiss(2)
    if then == "enqueued fresh":
        await SETTLING["succeed"](gateway, finding, "x")
        await deliver_unchanged(gateway, namespace, proxy)
        await producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="x"), queue="default")
    else:
        await SETTLING["bury"](gateway, finding, "x")
        (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
        assert await replay(gateway, letter, Replay(fresh=True))
    await deliver_unchanged(gateway, namespace, proxy)
    again = await read_one(await worker(gateway, partition))
    found = Entry(Kind.EVENT, "incoherent", b"2", b'{"check":"plan","key":"k"}')
    await add_entries(gateway, again, "x", [Entry(Kind.EVENT, "started", b"1"), found])
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_dismissal_that_arrives_late_is_logged_twice_at_most(
    gateway: Gateway, partition: Partition, producer: Producer, finding: Delivery, line: Line
) -> None:
    late, proxy = line
    async with Producer(namespace=partition.namespace, gateway=late) as another:
        handle = await another.find("x")
        assert handle is not None
        proxy.hold(queue_script("dismiss").sha.encode())
        await handle.dismiss(2)
    await proxy.deliver()
    events = await read_events(gateway, partition, "x")
    assert [(one.type, one.data) for one in events[2:]] == [("dismissed", {"event": 2, "finding": "k"})] * 2


@pytest.fixture
async def parked(gateway: Gateway, delivery: Delivery) -> Delivery:
    """Task x, which waits, with one event and two entries."""
    await add_entries(gateway, delivery, "x", [Entry(Kind.EVENT, "started", b"1"), Entry(Kind.SAVED, "a", b"1")])
    await SETTLING["park"](gateway, delivery, "x")
    return delivery


async def test_an_edit_that_arrives_late_is_refused_after_the_next_one(
    gateway: Gateway, namespace: Namespace, partition: Partition, parked: Delivery, line: Line
) -> None:
    """The caller got an error, read the checkpoint again, and edited it."""
    late, proxy = line

    async def edit(through: Gateway, position: Position, value: bytes) -> bool | None:
        event, fields = ("archived", b"{}"), {"s:a": value}
        return await edit_checkpoint(through, partition, "x", position, event=event, fields=fields, wakes="compaction")

    position = await read_position(gateway, partition, "x")
    proxy.hold(queue_script("edit_checkpoint").sha.encode())
    with pytest.raises(Unavailable):
        await edit(late, position, b"57")
    assert await edit(gateway, await read_position(gateway, partition, "x"), b"136") is not None
    await deliver_unchanged(gateway, namespace, proxy)
    await promote(gateway, partition, "x")
    again = await read_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)
    assert (await load_history(gateway, again, "x")).saved == {"a": b"136"}


@pytest.mark.parametrize("then", ["message", "run"])
async def test_an_export_that_arrives_late_cancels_no_task_that_went_on(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    parked: Delivery,
    line: Line,
    then: str,
) -> None:
    late, proxy = line
    mark = await read_mark(gateway, partition, "x")
    proxy.hold(queue_script("close_exported").sha.encode())
    with pytest.raises(Unavailable):
        await close_exported(late, partition, "x", mark, event=b"{}", retention=60)
    if then == "message":
        handle = await producer.find("x")
        assert handle is not None
        await handle.send("hello")
    else:
        await promote(gateway, partition, "x")
        assert await places(gateway, partition, "x") == [READY]
        await deliver_unchanged(gateway, namespace, proxy)
        again = await read_one(await worker(gateway, partition))
        assert await places(gateway, partition, "x") == [PENDING]
        await deliver_unchanged(gateway, namespace, proxy)
        await SETTLING["park"](gateway, again, "x")
    await deliver_unchanged(gateway, namespace, proxy)
