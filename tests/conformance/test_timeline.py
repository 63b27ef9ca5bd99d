"""The timeline: lists of tasks by time, page by page, and what keeps it true and bounded."""

from __future__ import annotations

import pytest
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, purge, replay
from perdure.queues import Gateway, Namespace, Partition, Producer, Record, State
from perdure.queues.envelope import EnvelopeTemplate
from perdure.queues.inspection import timeline
from perdure.queues.inspection.timeline import page_tasks, trim_timeline
from perdure.queues.task_filter import TaskFilter

from tests.support.consumers import read_one, worker
from tests.support.delivery_calls import SETTLING

ALL = TaskFilter()
DAYS = 24 * 3_600_000


async def listed(gateway: Gateway, namespace: Namespace, limit: int, wanted: TaskFilter = ALL) -> list[list[str]]:
    """Return the ids of all pages."""
    pages: list[list[str]] = []
    cursor = None
    while True:
        page = await page_tasks(gateway, namespace, wanted, limit=limit, cursor=cursor)
        pages.append([record.id for record in page.tasks])
        if (cursor := page.cursor) is None:
            return pages


async def enqueue(producer: Producer, *names: str, queue: str = "default") -> None:
    for name in names:
        await producer.enqueue("t", task_id=name, queue=queue)


async def times(gateway: Gateway, partition: Partition) -> dict[str, int]:
    flat = await gateway.command("ZRANGE", partition.timeline, 0, -1, "WITHSCORES")
    return {name.decode(): int(float(score)) for name, score in zip(flat[::2], flat[1::2], strict=True)}


async def date_back(gateway: Gateway, partition: Partition, **ages: int) -> None:
    """Set tasks back in the timeline, by milliseconds."""
    for name, age in ages.items():
        await gateway.command("ZADD", partition.timeline, "INCR", -age, name)


async def test_pages_are_in_order_over_queues_and_partitions(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    await gateway.command("HSET", namespace.queues, "wide", 3)
    names = [f"x{number}" for number in range(12)]
    for number, name in enumerate(names):
        await enqueue(producer, name, queue="wide" if number % 2 else "default")
    partitions = [namespace.partition("default"), *(namespace.partition("wide", index) for index in range(3))]
    for partition in partitions:
        for name in await times(gateway, partition):
            await gateway.command("ZADD", partition.timeline, 1_000 + int(name[1:]), name)
    pages = await listed(gateway, namespace, 5)
    assert [len(page) for page in pages] == [5, 5, 2]
    assert [name for page in pages for name in page] == names[::-1]


async def test_new_tasks_do_not_move_the_pages_that_follow(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer, "a", "b", "c")
    await date_back(gateway, partition, a=3_000, b=2_000, c=1_000)
    first = await page_tasks(gateway, namespace, ALL, limit=1)
    assert [record.id for record in first.tasks] == ["c"]
    await enqueue(producer, "d")
    rest = await page_tasks(gateway, namespace, ALL, limit=5, cursor=first.cursor)
    assert [record.id for record in rest.tasks] == ["b", "a"]
    assert rest.cursor is None


async def test_tasks_of_one_millisecond_are_listed_once(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 450, queue="default")
    for start in range(0, 450, 150):
        pairs = [part for handle in handles[start : start + 150] for part in (1_000, handle.id)]
        await gateway.command("ZADD", partition.timeline, *pairs)
    names = [name for page in await listed(gateway, namespace, 100) for name in page]
    assert names == sorted((handle.id for handle in handles), reverse=True)


async def test_filters(gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer) -> None:
    await enqueue(producer, "dead")
    await SETTLING["bury"](gateway, await read_one(await worker(gateway, partition)), "dead")
    await enqueue(producer, "old", "new")
    await producer.enqueue("other", task_id="other", queue="default", delay=60)
    await date_back(gateway, partition, old=10_000)
    at = await times(gateway, partition)

    async def found(wanted: TaskFilter) -> set[str]:
        return {name for page in await listed(gateway, namespace, 2, wanted) for name in page}

    record = await read(producer, "dead")
    assert record.error is not None
    assert await found(ALL) == {"dead", "old", "new", "other"}
    assert await found(TaskFilter(states=[State.DEAD, State.SCHEDULED])) == {"dead", "other"}
    assert await found(TaskFilter(task="other")) == {"other"}
    assert await found(TaskFilter(until=at["old"])) == {"old"}
    assert await found(TaskFilter(since=at["old"] + 1)) == {"dead", "new", "other"}
    assert await found(TaskFilter(error=str(record.reason).upper())) == {"dead"}
    assert await found(TaskFilter(error="no such text")) == set()


async def test_filters_by_key_and_tag(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    await enqueue(producer, "plain")
    await producer.enqueue("t", task_id="a", queue="default", key="customer-9", tags=["nightly", "eu"])
    await producer.enqueue("t", task_id="b", queue="default", tags=["nightly"], delay=60)

    async def found(wanted: TaskFilter) -> set[str]:
        return {name for page in await listed(gateway, namespace, 2, wanted) for name in page}

    assert await found(TaskFilter(key="customer-9")) == {"a"}
    assert await found(TaskFilter(tags=["nightly"])) == {"a", "b"}
    assert await found(TaskFilter(tags=["nightly", "eu"])) == {"a"}
    assert await found(TaskFilter(key="customer-9", tags=["us"])) == set()
    shown = (await read(producer, "a")).summary()
    assert (shown["key"], shown["tags"]) == ("customer-9", ["nightly", "eu"])
    assert not {"key", "tags"} & (await read(producer, "plain")).summary().keys()


async def read(producer: Producer, task_id: str) -> Record:
    handle = await producer.find(task_id)
    assert handle is not None
    return await handle.record()


async def test_a_page_reads_a_bounded_number_of_records(
    gateway: Gateway, namespace: Namespace, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.inspection.timeline._MAX_READ", 3)
    await enqueue(producer, "wanted", *(f"x{number}" for number in range(7)))
    await gateway.command("ZADD", namespace.partition("default").timeline, 1, "wanted")
    rare = TaskFilter(error="no such text")
    page = await page_tasks(gateway, namespace, rare, limit=3)
    assert (page.tasks, page.cursor is None) == ([], False)
    assert len(await listed(gateway, namespace, 3, rare)) == 3


async def test_a_cursor_that_is_none_is_refused(gateway: Gateway, namespace: Namespace) -> None:
    for text in ("x", "", "WzFd", "bnVsbA"):
        with pytest.raises(ValueError, match="cursor must be one that an earlier page of the same list"):
            await page_tasks(gateway, namespace, ALL, limit=1, cursor=text)


async def test_running_tasks_are_listed_exactly_whatever_the_backlog_is(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("perdure.queues.inspection.running._PAGE", 2)
    running = TaskFilter(states=[State.RUNNING])
    assert await listed(gateway, namespace, 2, running) == [[]]
    other = namespace.partition("other")
    for number in range(4):
        await enqueue(producer, f"a{number}")
        await enqueue(producer, f"b{number}", queue="other")
    await enqueue(producer, "settled")
    for place, count in ((partition, 5), (other, 3)):
        held = await worker(gateway, place)
        for _ in range(count):
            delivery = await read_one(held)
            if delivery.task_id == "settled":
                await SETTLING["succeed"](gateway, delivery, "settled")
    await enqueue(producer, *(f"queued{number}" for number in range(20)))
    monkeypatch.setattr("perdure.queues.inspection.timeline._MAX_READ", 3)
    pages = await listed(gateway, namespace, 2, running)
    assert [len(page) for page in pages] == [2, 2, 2, 1]
    assert sorted(name for page in pages for name in page) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2"]
    assert [name for page in pages for name in page if name[0] == "a"] == ["a3", "a2", "a1", "a0"]
    first = await page_tasks(gateway, namespace, running, limit=2)
    await read_one(await worker(gateway, other, name="c"))  # begins meanwhile, and moves no page
    rest = await page_tasks(gateway, namespace, running, limit=9, cursor=first.cursor)
    assert [record.id for record in first.tasks + rest.tasks] == [name for page in pages for name in page]
    only = await page_tasks(gateway, namespace, TaskFilter(states=[State.RUNNING], key="none"), limit=2)
    assert (only.tasks, only.cursor is None, only.read) == ([], False, 4)
    for wanted, cursor in ((ALL, first.cursor), (running, (await page_tasks(gateway, namespace, ALL, limit=1)).cursor)):
        with pytest.raises(ValueError, match="cursor must be one that an earlier page of the same list"):
            await page_tasks(gateway, namespace, wanted, limit=1, cursor=cursor)


async def test_a_queue_without_tasks_is_listed_without_a_scan_of_the_keys(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue(producer, "a")
    await gateway.command("DEL", partition.record("a"), partition.ready, partition.timeline)
    monkeypatch.setattr(timeline, "list_tasks", None)
    assert await listed(gateway, namespace, 3) == [[]]


async def test_tasks_are_listed_without_a_timeline(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer, "a", "b", "c")
    await producer.enqueue("t", task_id="later", queue="default", delay=60)
    await gateway.command("DEL", partition.timeline)
    assert {name for page in await listed(gateway, namespace, 3) for name in page} == {"a", "b", "c", "later"}
    await gateway.command("ZADD", partition.timeline, 1, "a")
    await gateway.command("PEXPIRE", partition.timeline, DAYS)
    assert {name for page in await listed(gateway, namespace, 3) for name in page} == {"a", "b", "c", "later"}


async def test_a_repeated_enqueue_keeps_the_first_time(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer, "a")
    await date_back(gateway, partition, a=5_000)
    before = await times(gateway, partition)
    await enqueue(producer, "a")
    assert await times(gateway, partition) == before


async def test_a_purged_task_leaves_the_timeline_and_a_fresh_one_is_the_newest(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    a = await worker(gateway, partition)
    for name in ("purged", "replayed", "fresh"):
        await enqueue(producer, name)
        await SETTLING["bury"](gateway, await read_one(a), name)
    await date_back(gateway, partition, purged=3_000, replayed=2_000, fresh=2_000)
    before = await times(gateway, partition)
    letters = {letter.id: letter async for letter in list_letters(gateway, [partition], Filter())}
    assert await purge(gateway, letters["purged"])
    assert await replay(gateway, letters["replayed"], Replay())
    await producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="fresh"), queue="default")
    after = await times(gateway, partition)
    assert after == {"replayed": before["replayed"], "fresh": after["fresh"]}
    assert after["fresh"] > before["fresh"] + 1_000


async def test_a_replay_after_the_record_has_expired_lists_the_task_again(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await enqueue(producer, "a")
    await SETTLING["bury"](gateway, await read_one(await worker(gateway, partition)), "a")
    (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
    await gateway.command("DEL", partition.record("a"))
    assert await trim_timeline(gateway, partition) == 1
    assert await replay(gateway, letter, Replay())
    assert list(await times(gateway, partition)) == ["a"]


async def test_ids_of_expired_records_are_skipped_and_trimmed(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handles = await producer.enqueue_many("t", [{}] * 40, queue="default")
    await enqueue(producer, "kept")
    await gateway.command("DEL", *(partition.record(handle.id) for handle in handles))
    await gateway.command("DEL", partition.ready)
    assert [name for page in await listed(gateway, namespace, 7) for name in page] == ["kept"]
    assert await trim_timeline(gateway, partition) == 40
    assert list(await times(gateway, partition)) == ["kept"]
    assert await trim_timeline(gateway, partition) == 0


async def test_an_id_that_is_no_text_is_skipped_and_set_aside(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", queue="default")
    await gateway.command("ZADD", partition.timeline, 1, b"\xff")
    assert await trim_timeline(gateway, partition) == 1
    assert await gateway.command("XLEN", partition.junk) == 1
    page = await page_tasks(gateway, namespace, TaskFilter(), limit=10)
    assert [record.id for record in page.tasks] == [handle.id]


async def test_old_live_tasks_do_not_shield_expired_ones_from_the_trimming(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.inspection.timeline._TRIMMED", 20)
    live = await producer.enqueue_many("t", [{}] * 30, queue="default")
    gone = await producer.enqueue_many("t", [{}] * 300, queue="default")
    pairs = [part for handle in live for part in (1_000, handle.id)]
    await gateway.command("ZADD", partition.timeline, *pairs)
    await gateway.command("DEL", *(partition.record(handle.id) for handle in gone))
    assert await trim_timeline(gateway, partition) > 200
    assert {handle.id for handle in live} <= (await times(gateway, partition)).keys()


async def test_an_abandoned_timeline_expires(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    """A producer has no right to give keys a TTL: the first outcome does."""
    await (await producer.enqueue("t", queue="default")).cancel()
    assert 29 * DAYS < await gateway.command("PTTL", partition.timeline) <= 30 * DAYS
    await gateway.command("PEXPIRE", partition.timeline, 1_000)
    await trim_timeline(gateway, partition)
    assert 29 * DAYS < await gateway.command("PTTL", partition.timeline) <= 30 * DAYS
