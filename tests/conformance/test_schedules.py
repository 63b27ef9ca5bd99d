"""Schedules: each planned time is fired once, whatever happens to workers, replies, clocks and partitions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from perdure import Every, Unique
from perdure.queues import Gateway, Namespace, Partition, Producer, State
from perdure.queues.catalog import AppEntry, CatalogTask, publish_entry
from perdure.queues.depth import MaxDepth
from perdure.queues.envelope import Envelope, EnvelopeTemplate, LimitUse
from perdure.queues.errors import ScheduleError
from perdure.queues.partitions.resharding import set_partitions
from perdure.queues.schedules.call import ScheduledCall
from perdure.queues.schedules.definition import Rules, task_id_of
from perdure.queues.schedules.firing import ScheduleFirer
from perdure.queues.schedules.store import FRESH_MS, ScheduleDefinition, ScheduleStore, StoredSchedule
from perdure.queues.schedules.views import ScheduleStatus
from perdure.queues.transport.scripts import Script, milliseconds, queue_script
from perdure.queues.unique import UniqueTask

from tests.support.consumers import needs_one_server
from tests.support.lossy_proxy import lossy_gateway

pytestmark = pytest.mark.integration

HOUR = 3_600_000
ACTS = ("write_compared", "fire_schedule")


@pytest.fixture
def store(gateway: Gateway, namespace: Namespace) -> ScheduleStore:
    return ScheduleStore(gateway, namespace)


@pytest.fixture
def firer(gateway: Gateway, namespace: Namespace) -> ScheduleFirer:
    return ScheduleFirer(gateway, namespace, retention=60.0)


def hourly(
    name: str = "report",
    *,
    missed: str = "once",
    queue: str = "default",
    unique: Unique | None = None,
    limits: tuple[LimitUse, ...] = (),
    expires: float | None = None,
    key: str | None = None,
    day: int = 1,
) -> ScheduleDefinition:
    message = EnvelopeTemplate("report").message(orjson.dumps({"day": day}), key=key).with_limits(limits)
    rule = None if unique is None else UniqueTask(unique, "report")
    call = ScheduledCall.of(message, "report", queue, rule, expires)
    when = Every(3600)
    return ScheduleDefinition(name, when, Rules.of(when, missed, 0), call)


async def put_back(store: ScheduleStore, hours: float, name: str = "report") -> int:
    """Let the last firing be some hours earlier than now; return the last planned time that has come."""
    read = await store.read(name)
    assert await store.write(read, {"last": round(read.now - hours * HOUR)}, look=0)
    return read.now // HOUR * HOUR


async def stored_tasks(gateway: Gateway, *partitions: Partition) -> list[str]:
    """Return the ids of the tasks that were stored, by the timelines, in their order."""
    found: list[str] = []
    for partition in partitions:
        found += [task.decode() for task in await gateway.command("ZRANGE", partition.timeline, 0, -1)]
    return found


async def clean(gateway: Gateway, store: ScheduleStore, *names: str) -> None:
    for name in names or ("report",):
        read = await store.read(name)
        if read.exists and read.owner == "code":
            await store.write(read, {"owner": "operator"})
        if read.exists:
            await store.remove(name)


async def test_a_planned_time_is_fired_once_with_the_id_of_its_time(
    gateway: Gateway, namespace: Namespace, partition: Partition, store: ScheduleStore, firer: ScheduleFirer
) -> None:
    await store.add(hourly(expires=600))
    assert (await firer.fire_due()).fired == [], "a new schedule has missed nothing"
    planned = await put_back(store, 1)
    done = await firer.fire_due()
    [fired] = done.fired
    assert (fired.run.planned, fired.run.task_id) == (planned, task_id_of("report", planned))
    assert (await firer.fire_due()).fired == []
    assert await stored_tasks(gateway, partition) == [fired.run.task_id]
    record = await gateway.command("HGETALL", partition.record(fired.run.task_id))
    fields = dict(zip(record[::2], record[1::2], strict=True))
    envelope = Envelope.decode(fields[b"env"])
    assert (envelope.id, envelope.task, fields[b"args"]) == (fired.run.task_id, "report", b'{"day":1}')
    assert envelope.headers["schedule"] == "report"
    assert envelope.headers["planned"].endswith(":00:00+00:00")
    assert envelope.options.expires == planned / 1000 + 600
    read = await store.read("report")
    assert (read.last, read.next, read.firing) == (planned, planned + HOUR, None)
    assert [run.task_id for run in read.runs] == [fired.run.task_id]
    assert await gateway.command("PTTL", partition.fired("report")) > 0
    await gateway.command("DEL", partition.record(fired.run.task_id), partition.due)
    await clean(gateway, store)


class Killed(BaseException):
    """The end of a worker's process."""


class Scripts:
    """Scripts of a gateway whose worker dies before or after one of its acts."""

    def __init__(self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dies_at = -1
        self.when = "after"
        self.runs: list[str] = []
        self._run = gateway.run
        monkeypatch.setattr(gateway, "run", self.run)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any], derived: Any = None) -> Any:
        if script.name not in ACTS:
            return await self._run(script, keys, args, derived)
        number = len(self.runs)
        self.runs.append(script.name)
        if number == self.dies_at and self.when == "before":
            raise Killed
        answer = await self._run(script, keys, args, derived)
        if number == self.dies_at:
            raise Killed
        return answer


async def end_records(gateway: Gateway, partition: Partition) -> None:
    """Let the records of all tasks expire."""
    for task in await gateway.command("ZRANGE", partition.timeline, 0, -1):
        await gateway.command("DEL", partition.record(task.decode()))
    await gateway.command("DEL", partition.due)


@pytest.mark.parametrize("expired", [False, True], ids=["known", "expired"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("act", range(5))
async def test_a_worker_that_dies_at_any_write_leaves_each_time_fired_once(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    store: ScheduleStore,
    firer: ScheduleFirer,
    monkeypatch: pytest.MonkeyPatch,
    act: int,
    when: str,
    expired: bool,
) -> None:
    await store.add(hourly(missed="all"))
    last = await put_back(store, 3)
    expected = [task_id_of("report", last - hours * HOUR) for hours in (2, 1, 0)]
    with monkeypatch.context() as patch:
        scripts = Scripts(gateway, patch)
        scripts.dies_at, scripts.when = act, when
        with pytest.raises(Killed):
            await firer.fire_due()
        assert scripts.runs == ["write_compared", *["fire_schedule"] * 3, "write_compared"][: act + 1]
    before = await stored_tasks(gateway, partition)
    if expired:
        await end_records(gateway, partition)
    await ScheduleFirer(gateway, namespace, retention=60.0).fire_due()
    assert await stored_tasks(gateway, partition) == expected
    counted = Counter(run.task_id for run in (await store.read("report")).runs)
    assert counted == Counter(expected), "each run is noted once"
    scheduled = await gateway.command("ZRANGE", partition.due, 0, -1)
    again = [task for task in expected if expired and task in before]
    assert sorted(task.decode() for task in scheduled) == [task for task in expected if task not in again]
    await end_records(gateway, partition)
    await clean(gateway, store)


async def test_two_workers_at_once_fire_each_time_once(
    gateway: Gateway, namespace: Namespace, partition: Partition, store: ScheduleStore
) -> None:
    await store.add(hourly(missed="all"))
    last = await put_back(store, 5)
    firers = [ScheduleFirer(gateway, namespace, retention=60.0) for _ in range(4)]
    await asyncio.gather(*(firer.fire_due() for firer in firers))
    await asyncio.gather(*(firer.fire_due() for firer in firers))
    expected = [task_id_of("report", last - hours * HOUR) for hours in (4, 3, 2, 1, 0)]
    assert await stored_tasks(gateway, partition) == expected
    assert [run.task_id for run in (await store.read("report")).runs] == expected[::-1]
    await end_records(gateway, partition)
    await clean(gateway, store)


@pytest.mark.parametrize("script", ACTS)
async def test_a_lost_reply_fires_once(
    gateway: Gateway, namespace: Namespace, partition: Partition, store: ScheduleStore, script: str
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    await store.add(hourly())
    await put_back(store, 1)
    async with lossy_gateway(gateway) as (lossy, line):
        line.lose(queue_script(script).sha.encode())
        done = await ScheduleFirer(lossy, namespace, retention=60.0).fire_due()
    assert len(await stored_tasks(gateway, partition)) == 1
    assert (await store.read("report")).firing is None or not done.fired
    await ScheduleFirer(gateway, namespace, retention=60.0).fire_due()
    assert len((await store.read("report")).runs) == 1
    await end_records(gateway, partition)
    await clean(gateway, store)


async def test_bytes_that_arrive_late_store_nothing_though_the_record_has_expired(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    store: ScheduleStore,
    firer: ScheduleFirer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await store.add(hourly())
    await put_back(store, 1)
    sent: list[tuple[Script, Sequence[str], Sequence[Any]]] = []
    run = gateway.run

    async def recording(script: Script, keys: Sequence[str], args: Sequence[Any], derived: Any = None) -> Any:
        if script.name in ACTS:
            sent.append((script, keys, args))
        return await run(script, keys, args, derived)

    with monkeypatch.context() as patch:
        patch.setattr(gateway, "run", recording)
        await firer.fire_due()
    await end_records(gateway, partition)
    before = await store.read("report")
    await store.pause("report")
    for script, keys, args in sent:
        assert await gateway.run(script, keys, args) == 0
    after = await store.read("report")
    assert (after.last, after.runs, after.firing) == (before.last, before.runs, None)
    assert await gateway.command("EXISTS", partition.due) == 0
    await store.remove("report")
    for script, keys, args in sent:
        assert await gateway.run(script, keys, args) == 0, "nor after it was removed"
    assert not (await store.read("report")).exists


async def test_a_clock_that_is_set_back_fires_nothing_again_until_an_operator_resumes(
    gateway: Gateway, partition: Partition, store: ScheduleStore, firer: ScheduleFirer
) -> None:
    await store.add(hourly())
    last = await put_back(store, 1)
    await firer.fire_due()
    await end_records(gateway, partition)
    read = await store.read("report")
    # as after a firing by a clock that was ahead
    assert await store.write(read, {"last": last + 2 * HOUR}, look=0)
    await gateway.command("SET", partition.fired("report"), f"{read.epoch} {last + 2 * HOUR}", "PX", 60_000)
    assert (await firer.fire_due()).fired == []
    assert (await store.read("report")).ahead
    resumed = await store.resume("report")
    assert not resumed.ahead
    assert resumed.epoch > read.epoch
    await put_back(store, 1)
    assert len((await firer.fire_due()).fired) == 1
    assert await gateway.command("ZCARD", partition.due) == 1
    await end_records(gateway, partition)
    await clean(gateway, store)


@pytest.mark.parametrize("fired", [0, 1, 2])
async def test_a_partition_that_closes_passes_the_times_that_are_left_to_the_next(
    gateway: Gateway,
    namespace: Namespace,
    store: ScheduleStore,
    monkeypatch: pytest.MonkeyPatch,
    fired: int,
) -> None:
    await store.add(hourly(missed="all"))
    last = await put_back(store, 2)
    with monkeypatch.context() as patch:
        scripts = Scripts(gateway, patch)
        scripts.dies_at = fired
        with pytest.raises(Killed):
            await ScheduleFirer(gateway, namespace, retention=60.0).fire_due()
    await set_partitions(gateway, namespace, "default", 3)
    others = [ScheduleFirer(gateway, namespace, retention=60.0) for _ in range(2)]
    await asyncio.gather(*(firer.fire_due() for firer in others))
    await others[0].fire_due()
    partitions = [namespace.partition("default", index) for index in range(4)]
    stored = await stored_tasks(gateway, *partitions)
    assert sorted(stored) == [task_id_of("report", last - HOUR), task_id_of("report", last)]
    assert await stored_tasks(gateway, partitions[0]) == stored[:fired]
    assert len((await store.read("report")).runs) == 2
    for partition in partitions:
        await end_records(gateway, partition)
    await clean(gateway, store)


async def test_a_limited_task_waits_for_its_limit_after_it_is_promoted(
    gateway: Gateway, namespace: Namespace, store: ScheduleStore, firer: ScheduleFirer, producer: Producer
) -> None:
    from perdure.queues.delivery.due_set import promote_due

    await store.add(hourly(limits=(LimitUse("openai", "-"),)))
    await put_back(store, 1)
    [fired] = (await firer.fire_due()).fired
    handle = await producer.find(fired.run.task_id)
    assert handle is not None
    await promote_due(gateway, handle.partition, on_requests=_nothing)
    assert await handle.status() is State.LIMITED
    await handle.cancel()
    await clean(gateway, store)


async def _nothing(_: Sequence[bytes]) -> None:
    pass


async def test_a_unique_task_is_not_enqueued_while_another_has_its_key(
    gateway: Gateway, namespace: Namespace, store: ScheduleStore, firer: ScheduleFirer, producer: Producer
) -> None:
    await store.add(hourly(unique=Unique("while_running")))
    await put_back(store, 2)
    [first] = (await firer.fire_due()).fired
    assert first.run.how == "fired"
    read = await store.read("report")
    await store.write(read, {"last": read.last - HOUR, "epoch": read.epoch + 1}, look=0)
    renamed = await store.read("report")
    assert renamed.last < read.last
    await store.add(hourly("other", unique=Unique("while_running")))
    await put_back(store, 1, "other")
    other = [fired for fired in (await firer.fire_due()).fired if fired.schedule == "other"]
    assert [(fired.run.how, fired.run.task_id) for fired in other] == [("unique", first.run.task_id)]
    handle = await producer.find(first.run.task_id)
    assert handle is not None
    await handle.cancel()
    await clean(gateway, store, "report", "other")


async def test_an_edit_while_a_firing_is_open_leaves_the_task_of_the_firing(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    store: ScheduleStore,
    firer: ScheduleFirer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await store.add(hourly(missed="all"))
    await put_back(store, 2)
    with monkeypatch.context() as patch:
        scripts = Scripts(gateway, patch)
        scripts.dies_at = 1  # one of two is stored
        with pytest.raises(Killed):
            await firer.fire_due()
    await store.edit("report", call=hourly(queue="elsewhere", day=2).call)
    await store.pause("report")
    await firer.fire_due()
    assert len(await stored_tasks(gateway, partition)) == 2, "also in a pause"
    assert await stored_tasks(gateway, namespace.partition("elsewhere")) == []
    await end_records(gateway, partition)
    await store.resume("report")
    await put_back(store, 1)
    await clean(gateway, store)


# publishing and changes


async def published(
    store: ScheduleStore, *definitions: ScheduleDefinition, app: str = "shop", starts: bool = True
) -> list[str]:
    return await store.publish(definitions, app, starts=starts, fresh=15.0)


async def test_what_an_operator_sets_survives_a_start_with_other_code(gateway: Gateway, store: ScheduleStore) -> None:
    assert await published(store, hourly()) == []
    await store.edit("report", when=Every(60))
    await store.pause("report", by="ann", why="maintenance")
    assert await published(store, hourly(day=2, missed="all")) == []
    read = await store.read("report")
    assert (read.when, read.edited, read.rules.missed) == (Every(60), ["when"], "all")
    assert read.call.arguments == b'{"day":2}'
    assert read.paused is not None
    assert (read.paused["by"], read.paused["why"]) == ("ann", "maintenance")
    reset = await store.edit("report", reset=True)
    assert (reset.when, reset.edited) == (Every(3600), [])
    await clean(gateway, store)


async def test_only_a_worker_that_starts_replaces_a_definition(gateway: Gateway, store: ScheduleStore) -> None:
    await published(store, hourly(day=1))
    await published(store, hourly(day=2))
    await published(store, hourly(day=1), starts=False)
    assert (await store.read("report")).call.arguments == b'{"day":2}', "the renewal of an older worker changes nothing"
    await clean(gateway, store)


async def test_a_schedule_that_no_worker_has_any_more_is_not_fired_until_it_is_published_again(
    gateway: Gateway, partition: Partition, store: ScheduleStore, firer: ScheduleFirer
) -> None:
    await published(store, hourly())
    read = await store.read("report")
    await store.write(read, {"seen": read.now - FRESH_MS - 1, "last": read.now - HOUR}, look=0)
    assert (await firer.fire_due()).fired == []
    await published(store, hourly(), starts=False)
    assert len((await firer.fire_due()).fired) == 1
    await end_records(gateway, partition)
    await clean(gateway, store)


async def test_two_owners_of_one_name_are_reported(gateway: Gateway, store: ScheduleStore) -> None:
    await store.add(hourly())
    [problem] = await published(store, hourly())
    assert "an operator has added one of this name" in problem
    await store.remove("report")
    assert await published(store, hourly()) == []
    [problem] = await published(store, hourly(), app="other")
    assert "app 'shop' has one of this name" in problem
    with pytest.raises(ScheduleError, match="app 'shop' defines it in its code"):
        await store.add(hourly())
    with pytest.raises(ScheduleError, match="is in the code of app 'shop'"):
        await store.remove("report")
    await clean(gateway, store)


async def test_pausing_leaves_planned_times_out(gateway: Gateway, store: ScheduleStore, firer: ScheduleFirer) -> None:
    await store.add(hourly())
    await store.pause("report")
    await put_back(store, 3)
    assert (await firer.fire_due()).fired == []
    await store.resume("report")
    assert (await firer.fire_due()).fired == []
    assert (await store.read("report")).next is not None
    await clean(gateway, store)


async def test_a_damaged_schedule_is_reported_and_the_others_are_fired(
    gateway: Gateway, namespace: Namespace, partition: Partition, store: ScheduleStore, firer: ScheduleFirer
) -> None:
    damage: list[tuple[str, dict[str, str]]] = [
        ("a", {"when": '{"cron": "nonsense", "tz": "UTC"}'}),
        ("b", {"call": "junk"}),
        ("c", {"rules": "7"}),
        ("d", {"firing": "[1]"}),
        ("e", {"when": "\xff"}),
    ]
    for name, fields in damage:
        await store.add(hourly(name))
        await put_back(store, 1, name)
        for field, value in fields.items():
            await gateway.command("HSET", namespace.schedule(name), field, value)
    await store.add(hourly())
    await put_back(store, 1)
    done = await firer.fire_due()
    assert [fired.schedule for fired in done.fired] == ["report"]
    assert {*done.failed} == {name for name, _ in damage}
    assert all(isinstance(error, ScheduleError) for error in done.failed.values())
    await end_records(gateway, partition)
    await clean(gateway, store, "report", *(name for name, _ in damage))


async def test_a_time_of_redis_decides(gateway: Gateway, namespace: Namespace, store: ScheduleStore) -> None:
    read = await store.add(hourly())
    now = milliseconds(await gateway.command("TIME", node_of=namespace.schedules))
    assert abs(now - read.now) < 60_000
    await clean(gateway, store)


def test_a_stored_schedule_tolerates_any_bytes() -> None:
    fields = dict.fromkeys((b"owner", b"runs", b"firing", b"paused", b"last", b"seen", b"rules"), b"\xff\x00{")
    read = StoredSchedule("s", fields, 0)
    assert (read.runs, read.firing, read.paused, read.last) == ([], {}, {}, 0)


async def test_a_planned_time_waits_for_room_in_its_queue(
    gateway: Gateway, namespace: Namespace, partition: Partition, store: ScheduleStore, producer: Producer
) -> None:
    published = CatalogTask("report", "default", app="shop", depth=MaxDepth(3).published())
    await publish_entry(gateway, namespace, AppEntry("shop", [published]), 0)
    waiting = [await producer.enqueue("other", queue="default") for _ in range(3)]
    await store.add(hourly(missed="all"))
    last = await put_back(store, 3)
    firer = ScheduleFirer(gateway, namespace, retention=60.0)
    for _ in range(2):
        done = await firer.fire_due()
        assert (done.fired, done.failed) == ([], {})
        assert done.full["report"].depth == 3
        assert done.wait is not None
        assert 0 < done.wait < 3
        assert ScheduleStatus.of(await store.read("report")).state == "queue is full"
        await gateway.command("ZADD", namespace.schedules, 0, "report")
    for handle in waiting[:2]:
        await handle.cancel()
    fired = (await firer.fire_due()).fired
    assert [one.run.planned for one in fired] == [last - 2 * HOUR, last - HOUR]
    read = await store.read("report")
    assert (read.last, read.next, ScheduleStatus.of(read).state) == (last - HOUR, last, "")
    await gateway.command("ZADD", namespace.schedules, 0, "report")
    await waiting[2].cancel()
    fired = (await firer.fire_due()).fired
    assert [one.run.planned for one in fired] == [last]
    for task_id in await stored_tasks(gateway, partition):
        await gateway.command("DEL", partition.record(task_id), partition.due)
    await clean(gateway, store)


async def test_the_depth_of_another_queue_or_app_is_of_no_concern(
    gateway: Gateway, namespace: Namespace, partition: Partition, store: ScheduleStore, producer: Producer
) -> None:
    full = MaxDepth(1).published()
    entry = AppEntry("shop", [CatalogTask("report", "elsewhere", app="shop", depth=full)])
    await publish_entry(gateway, namespace, entry, 0)
    damaged = AppEntry("bad", [CatalogTask("report", "default", app="bad", depth={"max_depth": "many"})])
    await publish_entry(gateway, namespace, damaged, 1)
    waiting = await producer.enqueue("other", queue="default")
    await store.add(hourly())
    await put_back(store, 1)
    [fired] = (await ScheduleFirer(gateway, namespace, retention=60.0).fire_due()).fired
    await waiting.cancel()
    await gateway.command("DEL", partition.record(fired.run.task_id), partition.due)
    await clean(gateway, store)
