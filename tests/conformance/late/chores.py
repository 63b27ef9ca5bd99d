"""Late duplicates of chores, uploads and edits: their bytes arrive after the task or the partition has changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Producer, State
from perdure.queues.delivery.checkpoint import (
    Entry,
    Kind,
    close_exported,
    edit_checkpoint,
    load_history,
    read_mark,
    read_position,
)
from perdure.queues.delivery.due_set import wake_version
from perdure.queues.delivery.lost_tasks import put_back_lost, replace_exhausted
from perdure.queues.delivery.paused_tasks import await_resume, wake_paused
from perdure.queues.delivery.settlement import Counters, await_version, park
from perdure.queues.derived_tasks import Successor, TaskPast, enqueue_successor, store_copy
from perdure.queues.ended_tasks import Outcome, store_ended
from perdure.queues.envelope import Envelope, EnvelopeTemplate
from perdure.queues.errors import Unavailable
from perdure.queues.inspection.timeline import trim_timeline
from perdure.queues.junk import set_aside
from perdure.queues.keys import DATA_FORMAT
from perdure.queues.limits.kept import renew_kept
from perdure.queues.limits.parked import wake_for_limit
from perdure.queues.pauses import PauseRule, PauseStore, load_pauses
from perdure.queues.transport.scripts import queue_script
from perdure.queues.waits import forget_ended_waits, opening

from tests.conformance.late import Moments, Scene, Table
from tests.support.consumers import pending, read, worker
from tests.support.task_places import DUE, PENDING, READY, places

CHORES = Table()

# chores of a partition


@CHORES.case
async def creation_of_groups(scene: Scene) -> Moments:
    scene.hold("create_groups")
    await worker(scene.late, scene.partition)
    await scene.enqueue()
    yield
    await scene.read()
    yield


@CHORES.case
async def leaving_of_a_worker(scene: Scene) -> Moments:
    """Until another worker has the message, the workers may be notified once more."""
    await scene.enqueue_and_read()
    scene.hold("leave_group")
    await (await worker(scene.late, scene.partition)).leave()
    (again,) = await scene.claim_all("b")
    yield
    await scene.settle("reschedule", again)
    yield


@CHORES.case
async def removal_of_a_consumer(scene: Scene) -> Moments:
    """The worker was silent for long, and not dead: it keeps what it has read since."""
    a = await scene.worker()
    assert await read(a) == []
    scene.hold("remove_consumer")
    keys = [scene.partition.ready, scene.partition.nudge]
    assert await scene.late.run(queue_script("remove_consumer"), keys, ["workers", "a"]) == 1
    yield
    await scene.enqueue()
    (kept,) = await read(a)
    yield
    await scene.settle("succeed", kept)


@CHORES.case
async def touch(scene: Scene) -> Moments:
    """No lease starts again."""
    delivery = await scene.enqueue_and_read()
    scene.hold("touch")
    await (await worker(scene.late, scene.partition)).touch(scene.partition)
    (before,) = await pending(scene.gateway, scene.partition)
    idle = ("IDLE", 50_000, "RETRYCOUNT", 1, "JUSTID")
    await scene.gateway.command("XCLAIM", scene.partition.ready, "workers", "a", 0, delivery.entry, *idle)
    yield
    (after,) = await pending(scene.gateway, scene.partition)
    assert (after[0], after[1], after[3]) == (before[0], before[1], before[3])
    assert after[2] >= 50_000


@CHORES.case
async def search_for_lost_tasks(scene: Scene) -> Moments:
    """Nothing is put back twice."""
    delivery = await scene.enqueue_and_read()
    await scene.gateway.command("XACK", scene.partition.ready, "workers", delivery.entry)
    scene.hold("put_back")
    assert await put_back_lost(scene.late, scene.partition, 0.0) == 1
    yield
    again = await scene.read()
    yield
    await scene.settle("reschedule", again)
    yield
    await scene.settle("succeed", await scene.promote_and_read())
    yield


@CHORES.case
async def replacement_of_a_stream(scene: Scene) -> Moments:
    """What was added since is kept."""
    delivery = await scene.enqueue_and_read()
    await scene.gateway.command("XADD", scene.partition.ready, "18446744073709551615-0", "a", "b")
    scene.hold("replace_stream")
    assert await replace_exhausted(scene.late, scene.partition)
    await scene.enqueue("y")
    yield
    await scene.settle("succeed", delivery)
    yield


@CHORES.case
async def trimming_of_a_timeline(scene: Scene) -> Moments:
    """The next task of the id is kept."""
    delivery = await scene.enqueue_and_read()
    await scene.enqueue("y")
    await scene.settle("succeed", delivery)
    await scene.forget()
    scene.hold("trim_timeline")
    assert await trim_timeline(scene.late, scene.partition) == 1
    yield
    await scene.enqueue()
    yield
    assert await scene.gateway.command("ZSCORE", scene.partition.timeline, "x") is not None


@CHORES.case
async def setting_aside_of_a_member(scene: Scene) -> Moments:
    await scene.enqueue("y", delay=3600)
    await scene.gateway.command("ZADD", scene.partition.due, 1, b"\xff")
    scene.hold("set_aside")
    assert await set_aside(scene.late, scene.partition, scene.partition.due, "zset", [b"\xff"]) == 1
    yield
    assert await scene.gateway.command("ZRANGE", scene.partition.due, 0, -1) == [b"y"]


@CHORES.case
async def setting_aside_of_a_key(scene: Scene) -> Moments:
    await scene.gateway.command("SET", scene.partition.due, "x")
    scene.hold("set_key_aside")
    assert await scene.late.set_keys_aside([scene.partition.due])
    yield
    await scene.enqueue("y", delay=3600)
    yield
    assert await scene.gateway.command("ZRANGE", scene.partition.due, 0, -1) == [b"y"]


@CHORES.case
async def forgetting_of_waits(scene: Scene) -> Moments:
    """A task under the same id waits."""
    delivery = await scene.enqueue_and_read(opening("x", "approval", {}, until=None, early=True))
    await scene.settle("succeed", delivery)
    scene.hold("forget_waits")
    assert await forget_ended_waits(scene.late, scene.partition) == 1
    yield
    await scene.enqueue_fresh()
    second = await scene.read()
    await scene.add_entries(second, opening("x", "approval", {}, until=None, early=True))
    yield
    assert await scene.gateway.command("ZSCORE", scene.partition.waiting, "x") is not None


@CHORES.case
async def waking_for_a_limit(scene: Scene) -> Moments:
    """The worker that released a token has left meanwhile: the task asks once more, and waits again."""
    gateway = scene.gateway
    waits: dict[str, Any] = {"delay": 600, "waits": "limit desk", "conditions": [("limit", "desk")]}
    delivery = await scene.enqueue_and_read()
    await park(gateway, delivery, "x", Counters(), **waits)
    scene.hold("wake_for_limit")
    assert await wake_for_limit(scene.late, scene.partition, "x")
    yield
    await scene.promote()
    yield
    second = await scene.read()
    yield
    await park(gateway, second, "x", Counters(), **waits)
    await scene.proxy.deliver()  # wakes the task once more
    await park(gateway, await scene.promote_and_read(), "x", Counters(), **waits)
    assert await places(gateway, scene.partition, "x") == [DUE]


@CHORES.case
async def noting_kept_tokens(scene: Scene) -> Moments:
    """The task was promoted since, and parked again with another token: what is noted of that stays."""
    gateway, partition = scene.gateway, scene.partition
    delivery = await scene.enqueue_and_read()
    await park(gateway, delivery, "x", Counters(), delay=600, waits="message", keeps="former []")
    scene.hold("note_kept")
    await renew_kept(scene.late, partition, 30.0)
    await gateway.command("HDEL", partition.record("x"), "keeps")  # as the promotion of a task with limits does
    await scene.promote()
    yield
    await park(gateway, await scene.read(), "x", Counters(), delay=600, waits="message", keeps="latter []")
    yield
    assert await gateway.command("HGET", partition.record("x"), "keeps") == b"latter []"
    assert await gateway.command("ZSCORE", partition.kept, "x") is not None


@CHORES.case
async def waking_for_a_version(scene: Scene) -> Moments:
    """The worker that woke the task has left meanwhile: one more delivery, and no attempt or crash."""
    gateway = scene.gateway

    async def counters() -> Any:
        return await gateway.command("HMGET", scene.partition.record("x"), "attempts", "crashes", "newer_since")

    delivery = await scene.enqueue_and_read()
    await await_version(gateway, delivery, "x", DATA_FORMAT, limit=600)
    scene.hold("wake_version")
    assert await wake_version(scene.late, scene.partition) == 1
    yield
    await scene.promote()
    yield
    second = await scene.read()
    yield
    await await_version(gateway, second, "x", DATA_FORMAT + 1, limit=600)
    yield
    await await_version(gateway, await scene.promote_and_read(), "x", DATA_FORMAT, limit=600)
    before = await counters()
    await scene.proxy.deliver()  # wakes the task once more
    fourth = await scene.promote_and_read()
    assert await counters() == before
    await await_version(gateway, fourth, "x", DATA_FORMAT, limit=600)
    assert await counters() == before
    assert await places(gateway, scene.partition, "x") == [DUE]


@CHORES.case
async def wakes_for_an_ended_pause(scene: Scene) -> Moments:
    """The task was parked again since, by a pause that is stored later."""
    store = PauseStore(scene.gateway, scene.namespace)
    first, _ = await store.add(PauseRule(task="t"))
    delivery = await scene.enqueue_and_read()
    await await_resume(scene.gateway, delivery, "x", first.number, Counters())
    await store.remove(first)
    scene.hold("wake_paused")
    assert await wake_paused(scene.late, scene.partition, await load_pauses(scene.gateway, scene.namespace)) == (1, 1)
    yield
    second = await scene.promote_and_read()
    yield
    later, _ = await store.add(PauseRule(task="t"))
    await await_resume(scene.gateway, second, "x", later.number, Counters())
    yield
    await store.remove(later)
    await scene.gateway.command("DEL", scene.partition.paused, scene.namespace.pauses)


# uploads

LARGE = orjson.dumps({"text": "0123456789" * 120_000})


async def enqueue(late: Producer) -> None:
    await late.send([EnvelopeTemplate("t").message(LARGE, task_id="y")], queue="default")


async def enqueue_later(late: Producer) -> None:
    await late.enqueue("t", orjson.loads(LARGE), task_id="y", queue="default", delay=60.0)


async def enqueue_fresh(late: Producer) -> None:
    await late.enqueue_fresh(EnvelopeTemplate("t").message(LARGE, task_id="y"), queue="default")


async def continue_as(late: Producer) -> None:
    following = Successor(Envelope(id="y", task="t"), "default", LARGE, ("#received", b"{}"), "x token")
    await enqueue_successor(late.gateway, late.namespace, following)


async def import_task(late: Producer) -> None:
    log = [("1-0", {"type": b"started", "n": b"1"})]
    past = TaskPast(1, 1, None, [("s:a", b"1")], (), log)
    envelope = Envelope(id="y", task="t").encode()
    how: dict[str, Any] = {"envelope": envelope, "arguments": LARGE, "past": past, "source": "import 1"}
    await store_copy(late.gateway, late.namespace, "default", "y", **how)


UPLOADING: dict[str, tuple[Callable[[Producer], Awaitable[None]], str]] = {
    "enqueue": (enqueue, "enqueue_one"),
    "enqueue_later": (enqueue_later, "enqueue_one"),
    "enqueue_fresh": (enqueue_fresh, "reset_task"),
    "continue_as": (continue_as, "enqueue_successor"),
    "import_task": (import_task, "enqueue_copy"),
}
"""Calls that store task y with large arguments, and the script that stores it."""


async def upload(scene: Scene, how: str, held: str) -> None:
    """Store task y by such a call, and hold the bytes of a script back."""
    async with scene.late_producer() as producer:
        await producer.enqueue("t", queue="warm")
        await producer.find("y")
        scene.hold(held)
        await UPLOADING[how][0](producer)


async def upload_again(scene: Scene) -> None:
    """Upload the chunks of task y once more, as another producer of the same task does before it stores it."""
    record = await scene.gateway.command("HGETALL", scene.partition.record("y"))
    chunks = [(name, chunk) for name, chunk in zip(record[::2], record[1::2], strict=True) if name.startswith(b"args:")]
    place = scene.partition.upload("y", chunks[0][0].split(b":")[1].decode())
    await scene.gateway.command("HSET", place, *(part for pair in chunks for part in pair))
    await scene.gateway.command("PEXPIRE", place, 600_000)


async def run_to_its_end(scene: Scene) -> Moments:
    """Run task y; yield when it is stored, and after each of its changes."""
    yield
    if await places(scene.gateway, scene.partition, "y") == [DUE]:
        await scene.promote("y")
        yield
    delivery = await scene.read()
    yield
    await scene.settle("succeed", delivery, "y")
    yield


@CHORES.each(*UPLOADING)
async def storing_of_large_arguments(scene: Scene, variant: str) -> Moments:
    await upload(scene, variant, UPLOADING[variant][1])
    await upload_again(scene)
    async for _ in run_to_its_end(scene):
        yield


# edits by persons

FINDING = (
    Entry(Kind.EVENT, "started", b"1"),
    Entry(Kind.EVENT, "incoherent", b"2", b'{"check":"progress","key":"k"}'),
)
"""The second event of the task is a finding."""

PARKED = Entry(Kind.EVENT, "started", b"1"), Entry(Kind.SAVED, "a", b"1")


@CHORES.each("enqueued fresh", "replayed fresh")
async def dismissal(scene: Scene, variant: str) -> Moments:
    """A finding is dismissed by its key, and the next run from the start may have the same."""
    delivery = await scene.enqueue_and_read(*FINDING)
    async with scene.late_producer() as producer:
        handle = await producer.find("x")
        assert handle is not None
        scene.hold("dismiss")
        await handle.dismiss(2)
    if variant == "enqueued fresh":
        await scene.settle("succeed", delivery)
        yield
        await scene.enqueue_fresh()
    else:
        await scene.settle("bury", delivery)
        assert await replay(scene.gateway, await scene.letter(), Replay(fresh=True))
    yield
    await scene.add_entries(await scene.read(), *FINDING)
    yield


@CHORES.case
async def edit(scene: Scene) -> Moments:
    """The caller got an error, read the checkpoint again, and edited it."""
    parked = await scene.enqueue_and_read(*PARKED)
    await scene.settle("park", parked)
    scene.hold("edit_checkpoint")
    how: dict[str, Any] = {"event": ("archived", b"{}"), "wakes": "compaction"}
    position = await read_position(scene.gateway, scene.partition, "x")
    with pytest.raises(Unavailable):
        await edit_checkpoint(scene.late, scene.partition, "x", position, fields={"s:a": b"57"}, **how)
    position = await read_position(scene.gateway, scene.partition, "x")
    edited = await edit_checkpoint(scene.gateway, scene.partition, "x", position, fields={"s:a": b"136"}, **how)
    assert edited is not None
    yield
    again = await scene.promote_and_read()
    yield
    assert (await load_history(scene.gateway, again, "x")).saved == {"a": b"136"}


@CHORES.each("message", "run")
async def export(scene: Scene, variant: str) -> Moments:
    """The task has gone on, and is not cancelled."""
    parked = await scene.enqueue_and_read(*PARKED)
    await scene.settle("park", parked)
    mark = await read_mark(scene.gateway, scene.partition, "x")
    scene.hold("close_exported")
    with pytest.raises(Unavailable):
        await close_exported(scene.late, scene.partition, "x", mark, event=b"{}", retention=60)
    if variant == "message":
        handle = await scene.producer.find("x")
        assert handle is not None
        await handle.send("hello")
    else:
        await scene.promote()
        assert await places(scene.gateway, scene.partition, "x") == [READY]
        yield
        again = await scene.read()
        assert await places(scene.gateway, scene.partition, "x") == [PENDING]
        yield
        await scene.settle("park", again)
    yield


@CHORES.each("succeeded", "dead")
async def storing_of_an_ended_task(scene: Scene, variant: str) -> Moments:
    outcome = Outcome(State(variant), {"at": b"7", "finished": b"9"}, {"result": b"1"})
    past = TaskPast(1, 1, None, [("s:a", b"1")], (), [("1-0", {"type": b"started", "n": b"1"})])
    envelope = Envelope(id="y", task="t").encode()
    how: dict[str, Any] = {"envelope": envelope, "arguments": b"{}", "past": past, "outcome": outcome}
    scene.hold("store_ended")
    await store_ended(scene.late, scene.namespace, "default", "y", **how, retention=60)
    yield
    if variant == "dead":
        assert await replay(scene.gateway, await scene.letter(), Replay())
        async for _ in run_to_its_end(scene):
            yield
    else:
        fresh = EnvelopeTemplate("t").message(b"{}", task_id="y")
        await scene.producer.enqueue_fresh(fresh, queue="default")
        async for _ in run_to_its_end(scene):
            yield
