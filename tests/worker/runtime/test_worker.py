"""The loop of a worker: concurrency, order of messages, and the end of a burst."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry, Settings, State, Unavailable, Worker
from perdure.queues import Partition, list_workers
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.errors import NotOpen
from perdure.queues.keys import GROUP
from perdure.queues.transport.blocking import BlockingConnection
from perdure.worker.runtime import burst
from perdure.worker.runtime.intake import Intake
from perdure.worker.runtime.maintenance import partitions
from perdure.worker.runtime.maintenance.partitions import AssignmentWatcher
from perdure.worker.runtime.reclaim import START, ReclaimSchedule
from perdure.worker.runtime.shared_settings import WorkerTimings
from perdure.worker.runtime.slots import Slots

from tests.support.workers import (
    attended,
    bounded,
    consumers,
    partition_of,
    pending,
    redis_command,
    running_worker,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.app("work")

LONG_LEASE = 60.0

AT_ONCE = LONG_LEASE / 12
"""Seconds that tell what a nudge brings about from what only a sweep would: that comes after 22 s or later."""


@pytest.fixture
async def patient(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    """Return an app whose lease and reclaim interval outlast the tests."""
    monkeypatch.setattr(Worker, "timings", WorkerTimings(sweep_interval=LONG_LEASE))
    async with App("work", settings=settings.model_copy(update={"lease": LONG_LEASE})) as app:
        yield app


# recovery


@pytest.mark.integration
@pytest.mark.parametrize("how", ["at its start", "by a sweep"])
async def test_a_worker_claims_the_tasks_of_a_lost_one_by_xautoclaim(settings: Settings, how: str) -> None:
    lease = 60.0 if how == "at its start" else 1.0
    async with App("work", settings=settings.model_copy(update={"lease": lease})) as app:
        runs: list[str] = []
        finish = asyncio.Event()

        @app.task
        async def job(ctx: Context) -> None:
            runs.append(ctx.task_id)
            await finish.wait()

        async def all_run() -> bool:
            return len(runs) == 64

        handles = await job.enqueue_many([{}] * 64)
        async with attended(app.producer.gateway, partition_of(app), lease):
            entries = [await take_and_die(app) for _ in handles]
            if how == "by a sweep":  # the leases expire after the worker has started
                stream = partition_of(app).ready
                await redis_command(app, "XCLAIM", stream, GROUP, "dead-worker", 0, *entries, "JUSTID")
            await redis_command(app, "CONFIG", "RESETSTAT")
            async with running_worker(app, concurrency=64) as worker:
                await wait_until(all_run, "all tasks run again")
                claimed = [(entry, owner, count) for entry, owner, _, count in await pending(app)]
                finish.set()
                for handle in handles:
                    await bounded(handle.result())
        assert claimed == [(entry, worker.id, 2) for entry in entries]
        assert sorted(runs) == sorted(handle.id for handle in handles)
        assert {(await handle.record()).crashes for handle in handles} == {1}
        assert b"cmdstat_xautoclaim:" in await redis_command(app, "INFO", "commandstats")


# start


@pytest.mark.integration
async def test_a_worker_that_is_not_connected_says_how_to_connect_it(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    worker = Worker(app)
    says = r"await run\(\) within 'async with Worker\(app\) as worker:'"
    with pytest.raises(NotOpen, match=says):
        await worker.run()
    async with worker:
        await worker.run(burst=True)
    with pytest.raises(NotOpen, match=says):
        await worker.run()


# concurrency


@pytest.mark.integration
async def test_a_worker_runs_at_most_one_task_per_slot(patient: App) -> None:
    running, most = [0], [0]
    full = asyncio.Semaphore(0)

    @patient.task
    async def job(ctx: Context) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await ctx.step("pass", asyncio.sleep, 0)
        if running[0] == 3:
            full.release()
        await asyncio.sleep(0.001)
        running[0] -= 1

    handles = await job.enqueue_many({} for _ in range(60))
    async with running_worker(patient, concurrency=3) as worker:
        for handle in handles:
            await bounded(handle.result())
            assert worker.in_flight <= 3
    assert most == [3]
    assert not full.locked()


@pytest.mark.integration
async def test_a_worker_without_a_free_slot_leaves_messages_to_others(patient: App) -> None:
    started, ends = asyncio.Event(), asyncio.Event()

    @patient.task
    async def job(ctx: Context) -> None:
        started.set()
        await ends.wait()

    async with running_worker(patient, concurrency=1) as busy:
        handles = await job.enqueue_many({} for _ in range(10))
        await bounded(started.wait())
        held = await pending(patient)
        assert [(owner, count) for _, owner, _, count in held] == [(busy.id, 1)]
        assert (await redis_command(patient, "XINFO", "GROUPS", partition_of(patient).ready))[0][5] == 1
        async with running_worker(patient, concurrency=9):

            async def all_taken() -> bool:
                return len(await pending(patient)) == 10

            await wait_until(all_taken, "another worker has all the others")
            assert sum(owner == busy.id for _, owner, _, _ in await pending(patient)) == 1
            ends.set()
            for handle in handles:
                await bounded(handle.result())


@pytest.mark.integration
async def test_a_read_of_several_queues_takes_at_most_the_free_slots(patient: App) -> None:
    """Two queues have a message each for a worker with one slot: one message stays in its queue."""
    started: list[str] = []
    ends = asyncio.Event()

    @patient.task
    async def job(ctx: Context) -> str:
        started.append(ctx.queue)
        await ends.wait()
        return ctx.queue

    async with running_worker(patient, concurrency=1, queues=["left", "right"]) as busy:
        handles = await asyncio.gather(*(job.options(queue=queue).enqueue() for queue in ("left", "right")))

        async def one_runs() -> bool:
            return len(started) == 1

        await wait_until(one_runs, "one of the two runs")
        assert busy.in_flight == 1
        assert await pending(patient, "right" if started == ["left"] else "left") == []
        async with asyncio.timeout(AT_ONCE), running_worker(patient, concurrency=1, queues=["left", "right"]):

            async def both_run() -> bool:
                return len(started) == 2

            await wait_until(both_run, "another worker takes it")
            ends.set()
            for handle in handles:
                await handle.result()
    assert sorted(started) == ["left", "right"]
    assert [(await handle.record()).crashes for handle in handles] == [0, 0]


@pytest.mark.integration
async def test_a_busy_queue_does_not_starve_another(patient: App) -> None:
    order: list[str] = []

    @patient.task
    async def job(ctx: Context) -> None:
        order.append(ctx.queue)

    await job.options(queue="busy").enqueue_many({} for _ in range(50))
    await job.options(queue="quiet").enqueue()
    await work_off(patient, concurrency=1, queues=["busy", "quiet"])
    assert len(order) == 51
    assert order.index("quiet") <= 3


# order


@pytest.mark.integration
async def test_messages_of_a_lost_worker_are_claimed_before_a_read(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    claim, read = Consumer.claim, Consumer.read

    async def claiming(self: Consumer, partition: Partition, cursor: str, most: int) -> Any:
        order.append(f"claim {partition.queue}")
        return await claim(self, partition, cursor, most)

    async def reading(self: Consumer, free: int, *, block: float | None, spare: int | None = None) -> Any:
        order.append("read")
        return await read(self, free, block=block, spare=spare)

    monkeypatch.setattr(Consumer, "claim", claiming)
    monkeypatch.setattr(Consumer, "read", reading)

    @app.task
    async def job(ctx: Context, name: str) -> str:
        order.append(name)
        return name

    left = await job.enqueue("left behind")
    await take_and_die(app)
    new = await job.enqueue("new")
    present = attended(app.producer.gateway, partition_of(app), app.settings.lease)
    async with present, running_worker(app, concurrency=4, queues=[app.name, "other"]):
        assert await bounded(new.result()) == "new"
        assert await bounded(left.result()) == "left behind"
    claims = order[: order.index("read")]
    assert {"claim work", "claim other"} <= set(claims)
    assert order.index("left behind") < order.index("new")


@pytest.mark.integration
async def test_all_pending_messages_are_claimed_before_a_read(app: App) -> None:
    """Thirty messages of a lost worker exceed the batch of one claim."""
    order: list[int] = []

    @app.task
    async def job(ctx: Context, number: int) -> None:
        order.append(number)

    await job.enqueue_many({"number": number} for number in range(30))
    for _ in range(30):
        await take_and_die(app)
    last = await job.enqueue(99)
    present = attended(app.producer.gateway, partition_of(app), app.settings.lease)
    async with present, running_worker(app, concurrency=1):
        await bounded(last.result())
    assert order == [*range(30), 99]


# burst


@pytest.mark.integration
async def test_a_burst_ends_when_the_queue_is_empty(app: App) -> None:
    @app.task
    async def job(ctx: Context, depth: int) -> None:
        if depth:
            await job.enqueue(depth - 1)

    await job.enqueue(20)
    await work_off(app, concurrency=2)
    assert await redis_command(app, "XLEN", partition_of(app).ready) == 0


@pytest.mark.integration
async def test_a_burst_on_empty_queues_ends_at_once(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    await work_off(app, queues=[app.name, "never-used"])


@pytest.mark.integration
async def test_a_burst_waits_for_retries_and_not_for_delayed_tasks(app: App) -> None:
    @app.task(retry=Retry(max_attempts=3, base=0.1, jitter=0.0))
    async def job(ctx: Context, fails: bool) -> int:
        if fails and ctx.attempt < 3:
            raise ConnectionError
        return ctx.attempt

    owed = await job.enqueue(True)
    later = await job.options(delay=3600).enqueue(False)
    await work_off(app)
    assert await owed.status() is State.SUCCEEDED
    assert await later.status() is State.SCHEDULED
    await later.cancel()


@pytest.mark.integration
@pytest.mark.parametrize("times", range(20))
async def test_a_burst_runs_a_retry_that_becomes_due_at_once(app: App, times: int) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    assert await handle.status() is State.SUCCEEDED


@pytest.mark.integration
async def test_a_burst_waits_for_the_leases_of_workers_that_died_long_ago(app: App) -> None:
    """No worker has run since, so the leases are restarted. A burst that ended before would never claim the task."""

    @app.task
    async def job(ctx: Context) -> int:
        return ctx.crashes

    handle = await job.enqueue()
    await take_and_die(app)
    await redis_command(app, "DEL", partition_of(app).seen)
    await work_off(app)
    assert await handle.result(timeout=0) == 1


@pytest.mark.integration
async def test_a_burst_looks_for_other_partitions_once_while_a_task_runs(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, refreshes = asyncio.Semaphore(0), 0
    take_once, refresh = Intake.take_once, AssignmentWatcher.refresh

    async def look(intake: Intake) -> bool:
        looks.release()
        return await take_once(intake)

    async def count(watcher: AssignmentWatcher) -> None:
        nonlocal refreshes
        refreshes += 1
        await refresh(watcher)

    @app.task
    async def job(ctx: Context) -> int:
        nonlocal refreshes
        refreshes = 0
        for _ in range(10):
            await looks.acquire()
        return refreshes

    handle = await job.enqueue()
    async with Worker(app) as worker:
        monkeypatch.setattr(Intake, "take_once", look)
        monkeypatch.setattr(AssignmentWatcher, "refresh", count)
        monkeypatch.setattr(burst, "_REFRESH_AGAIN", 3600.0)
        monkeypatch.setattr(partitions, "_INTERVAL", 3600.0)  # the loop that follows the route refreshes at its start
        await worker.run(burst=True)
    during = await handle.result()
    assert during <= 2  # one of the burst and one of that loop, where each of the ten looks had one
    assert refreshes > during  # one precedes the end, whenever the last one was


@pytest.mark.integration
async def test_a_burst_may_be_stopped(patient: App) -> None:
    started = asyncio.Event()

    @patient.task(retry=Retry(base=200.0))
    async def job(ctx: Context) -> None:
        started.set()
        raise ConnectionError

    handle = await job.enqueue()
    async with Worker(patient) as worker:
        running = asyncio.create_task(worker.run(burst=True))
        await bounded(started.wait())
        worker.stop()
        await bounded(running)
    assert await handle.cancel() is State.CANCELLED


# presence


@pytest.mark.integration
async def test_a_worker_is_listed_until_it_ends(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    gateway, namespace = app.producer.gateway, app.producer.namespace
    async with running_worker(app, concurrency=5, queues=[app.name, "other"]) as worker:
        await bounded((await job.enqueue()).result())
        (info,) = await list_workers(gateway, namespace)
        assert (info.id, info.app, info.queues, info.concurrency) == (worker.id, "work", ("work", "other"), 5)
        assert await consumers(app) == {worker.id}
    assert await list_workers(gateway, namespace) == []
    assert await consumers(app) == set()
    assert await consumers(app, "other") == set()


@pytest.mark.integration
async def test_an_unreachable_server_fails_the_worker_without_open_connections(settings: Settings) -> None:
    app = App("work", settings=settings.model_copy(update={"redis_url": "unix:///nowhere/redis.sock"}))

    @app.task
    async def job(ctx: Context) -> None: ...

    with pytest.raises(Exception, match=r"cannot reach Redis at unix:///nowhere/redis\.sock"):
        async with Worker(app):
            pass


# Redis under a running worker


@pytest.mark.integration
async def test_a_worker_reloads_lost_scripts(patient: App) -> None:
    flushed = asyncio.Event()

    @patient.task
    async def job(ctx: Context) -> int:
        await ctx.step("one", len, "1")
        await flushed.wait()
        return await ctx.step("two", len, "22")

    async with running_worker(patient):
        handle = await job.enqueue()
        await redis_command(patient, "SCRIPT", "FLUSH")
        flushed.set()
        assert await bounded(handle.result()) == 2


@pytest.mark.integration
@pytest.mark.app(lease=0.4)
async def test_a_worker_recreates_the_groups_of_deleted_streams(app: App) -> None:
    """A read or a claim fails first; the worker creates the groups again in both cases."""
    done = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        done.set()

    async with running_worker(app):
        for sweeps in (0, 2):
            partition = partition_of(app)
            await redis_command(app, "DEL", partition.ready, partition.nudge)
            await asyncio.sleep(sweeps * app.settings.lease)  # lets a claim run first
            await job.enqueue()
            await bounded(done.wait())
            done.clear()


@pytest.mark.integration
async def test_messages_of_a_lost_reply_run_at_once(patient: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis delivered the message, and the connection broke before the reply arrived."""
    lost: list[Any] = []
    read = BlockingConnection.read

    async def losing(reader: BlockingConnection, *command: Any) -> Any:
        reply = await read(reader, *command)
        if reply and not lost:
            lost.append(reply)
            raise Unavailable("the connection broke before the reply came")
        return reply

    monkeypatch.setattr(BlockingConnection, "read", losing)

    @patient.task
    async def job(ctx: Context, number: int) -> tuple[int, int]:
        return ctx.attempt, ctx.crashes

    async with running_worker(patient, concurrency=2):
        handles = await job.enqueue_many({"number": number} for number in range(5))
        async with asyncio.timeout(AT_ONCE):
            assert [await handle.result() for handle in handles] == [(1, 0)] * 5
    assert lost


@pytest.mark.integration
async def test_an_idle_worker_blocks_in_its_read(patient: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker blocks after its tasks as well; it does not poll Redis."""
    reads: list[float | None] = []
    read = Consumer.read

    async def counted(consumer: Consumer, most: int, *, block: float | None, spare: int | None = None) -> Any:
        reads.append(block)
        return await read(consumer, most, block=block, spare=spare)

    monkeypatch.setattr(Consumer, "read", counted)

    @patient.task
    async def job(ctx: Context) -> None: ...

    async def waits() -> bool:
        return b"blocked_clients:1" in await redis_command(patient, "INFO", "clients")

    async with running_worker(patient, concurrency=1):
        for _ in range(2):
            await wait_until(waits, "the worker waits in its read")
            before = len(reads)
            await anyio.sleep(0.3)
            assert len(reads) <= before + 1
            for handle in [await job.enqueue() for _ in range(3)]:
                await bounded(handle.result())
    assert reads


@pytest.mark.integration
async def test_the_heartbeat_records_the_running_step(settings: Settings) -> None:
    app = App("work", settings=settings.model_copy(update={"lease": 0.6}))
    ends = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("long", ends.wait)

    async with app, running_worker(app):
        handle = await job.enqueue()
        seen: list[int] = []

        async def noted_twice() -> bool:
            record = await handle.record()
            if record.alive_at is not None and record.alive_at not in seen:
                assert record.step == "long"
                seen.append(record.alive_at)
            return len(seen) >= 2

        await wait_until(noted_twice, "two heartbeats have named the step")
        ends.set()
        await bounded(handle.result())
        record = await handle.record()
        assert (record.step, record.alive_at) == (None, None)


# components


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_reclaim_round_covers_all_partitions_and_then_waits(names: Sequence[str]) -> None:
    partitions = [Partition("ns", name, 0) for name in names]
    sweep = ReclaimSchedule(partitions, lease=1000.0)
    for partition in partitions:
        assert sweep.until_next() == 0.0
        assert sweep.next_claim() == (partition, START)
        sweep.reached(partition, "5-0")
        assert sweep.next_claim() == (partition, "5-0")
        sweep.reached(partition, START)
    assert sweep.next_claim() is None
    assert 2.0 < sweep.until_next() <= 3.75
    sweep.request()
    assert sweep.until_next() == 0.0
    assert sweep.next_claim() == (partitions[0], START)


def test_a_reclaim_round_starts_within_a_short_lease() -> None:
    partition = Partition("ns", "a", 0)
    sweep = ReclaimSchedule([partition], lease=0.4)
    sweep.reached(partition, START)
    assert sweep.until_next() <= 0.25


def test_a_request_during_a_reclaim_round_starts_another_round() -> None:
    partition = Partition("ns", "a", 0)
    sweep = ReclaimSchedule([partition], lease=1000.0)
    sweep.reached(partition, "5-0")
    sweep.request()
    assert sweep.next_claim() == (partition, "5-0")
    sweep.reached(partition, START)
    assert sweep.next_claim() == (partition, START)
    sweep.reached(partition, START)
    assert sweep.next_claim() is None


async def test_slots_are_counted_and_awaited() -> None:
    slots, ends = Slots(2), [asyncio.Event(), asyncio.Event()]
    for end in ends:
        slots.fill(end.wait())
    assert slots.free == 0
    waiting = asyncio.create_task(slots.wait_free())
    emptying = asyncio.create_task(slots.wait_empty())
    await asyncio.sleep(0)
    ends[0].set()
    await bounded(waiting)
    assert slots.free == 1
    assert not emptying.done()
    ends[1].set()
    await bounded(emptying)


async def test_a_new_execution_runs_between_two_resumed_ones() -> None:
    """Each of many resumed tasks keeps the event loop busy; together they would delay the new one by all of it."""
    slots, resumed = Slots(40), asyncio.Event()
    started: list[str] = []

    async def resume(number: int) -> None:
        await slots.wait_turn()
        for _ in range(5):  # its round trips
            await asyncio.sleep(0)
        started.append(f"resumed {number}")
        resumed.set()

    async def new() -> None:
        started.append("new")

    for number in range(32):
        slots.fill(resume(number))
    await bounded(resumed.wait())
    slots.fill(new())
    await bounded(slots.wait_empty())
    assert [one for one in started if one != "new"] == [f"resumed {number}" for number in range(32)]
    assert started.index("new") < 32


async def test_a_slot_is_free_while_its_outcome_is_sent_and_taken_again_if_that_fails() -> None:
    slots, sent, failed, stays, end = Slots(1), asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await sent.wait()
        slots.leave()
        await failed.wait()
        slots.stay()
        stays.set()
        await end.wait()

    slots.fill(work())
    waiting = asyncio.create_task(slots.wait_free())
    await asyncio.sleep(0)
    assert (slots.free, slots.taken) == (0, 1)
    sent.set()
    await bounded(waiting)
    assert (slots.free, slots.busy, slots.taken) == (1, 0, 1)
    failed.set()
    await bounded(stays.wait())
    assert (slots.free, slots.taken) == (0, 1)
    end.set()
    await bounded(slots.wait_empty())
    assert (slots.free, slots.taken) == (1, 0)
