"""Metrics of a worker: what it counts, within bounds, and what of it reaches the page for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import orjson
import pytest
from perdure import App, Context, Retry, Worker
from perdure.queues import ConfigurationError
from perdure.queues.delivery.quarantine_store import quarantine
from perdure.queues.runtime import RUNTIME
from perdure.worker.log import logger
from perdure.worker.runtime.metrics import meter as meters
from perdure.worker.runtime.metrics.exposition import exposition
from perdure.worker.runtime.metrics.families import BUCKETS, FAMILIES, MAX_STEPS, Measurements
from perdure.worker.runtime.metrics.meter import Meter, RecentExtreme
from perdure.worker.runtime.metrics.totals import Totals, together
from perdure.worker.runtime.supervisor_link import Link
from prometheus_client.parser import text_string_to_metric_families

from tests.support.consumers import claim_all
from tests.support.consumers import worker as consumer
from tests.support.workers import BOUND, bounded, take_and_die, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.app("shop", heartbeat=0.5)]

Samples = Mapping[tuple[str, ...], float]


def samples(read: Callable[[], Measurements]) -> Samples:
    """Return the samples of a page: name, then the label values but for the namespace, by the names of the labels."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(exposition(read).decode()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "namespace"]
            found[sample.name, *labels] = sample.value
    return found


async def worked_off(app: App) -> Samples:
    """Run a worker until the queues are empty, and return its samples."""
    async with Worker(app, metrics=True) as worker:
        await bounded(worker.run(burst=True))
        return samples(worker.measurements)


async def nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


async def test_runs_waits_steps_and_dead_letters_are_counted_by_task_and_queue(app: App) -> None:
    @app.task
    async def order(ctx: Context, number: int) -> None:
        await ctx.step("charge", nap, 0.03)
        with ctx.scope(f"page-{number}"):
            await ctx.step("read", nap, 0.0)
            await ctx.step("read", nap, 0.0)

    @app.task(retry=Retry(max_attempts=2, base=0.01))
    async def fails(ctx: Context) -> None:
        raise ValueError("no")

    for number in range(3):
        await order.enqueue(number)
    await fails.enqueue()
    found = await worked_off(app)
    assert found["perdure_task_runs_total", "completed", "shop", "order"] == 3
    assert found["perdure_task_runs_total", "failed", "shop", "fails"] == 1
    assert found["perdure_task_runs_total", "buried", "shop", "fails"] == 1
    assert found["perdure_task_dead_letters_total", "shop", "attempts_exhausted", "fails"] == 1
    assert found["perdure_task_run_seconds_count", "shop", "order"] == 3
    assert found["perdure_task_wait_seconds_count", "shop", "order"] == 3
    assert found["perdure_task_wait_seconds_count", "shop", "fails"] == 2  # each attempt was due at a time of its own
    assert found["perdure_step_seconds_count", "shop", "charge", "order"] == 3
    assert found["perdure_step_seconds_count", "shop", "read", "order"] == 6  # no scope and no number is a label
    assert 3 * 0.03 <= found["perdure_step_seconds_sum", "shop", "charge", "order"] < 3 * BOUND
    assert (
        found["perdure_step_seconds_sum", "shop", "charge", "order"]
        < (found["perdure_task_run_seconds_sum", "shop", "order"])
    )
    assert found["perdure_worker_slots",] == 16
    assert found["perdure_worker_memory_bytes",] > 1e7
    assert found["perdure_metrics_errors_total",] == 0


async def test_a_wait_is_the_age_of_the_message_by_the_clock_of_redis(app: App) -> None:
    """A task that was queued while no worker ran has waited since, whatever the clock of this host shows."""

    @app.task
    async def job(ctx: Context) -> None: ...

    handle = await job.enqueue()
    gateway, stream = app.producer.gateway, handle.partition.ready
    ((entry, fields),) = await gateway.command("XRANGE", stream, "-", "+")
    an_hour_ago = int(entry.partition(b"-")[0]) - 3_600_000
    await gateway.command("DEL", stream)
    await gateway.command("XADD", stream, f"{an_hour_ago}-0", *fields)
    await gateway.command("HSET", handle.partition.record(handle.id), "entry", f"{an_hour_ago}-0")
    found = await worked_off(app)
    assert found["perdure_task_wait_seconds_count", "shop", "job"] == 1
    assert 3_600 <= found["perdure_task_wait_seconds_sum", "shop", "job"] < 3_600 + BOUND


async def test_a_run_without_the_lease_counts_as_lost(app: App) -> None:
    began = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        began.set()
        await ctx.step("nap", nap, BOUND)

    await job.enqueue()
    async with Worker(app, metrics=True) as worker:
        running = asyncio.create_task(worker.run())
        await bounded(began.wait())
        (run,) = worker._executor.runs
        run.on_lost()

        async def lost() -> bool:
            return ("perdure_task_runs_total", "lost", "shop", "job") in samples(worker.measurements)

        await wait_until(lost, "the lost run is counted")
        worker.stop()
        await bounded(running)


async def test_a_delivery_whose_worker_died_counts_as_a_crash(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    await job.enqueue()
    await take_and_die(app)
    found = await worked_off(app)
    assert found["perdure_task_crashes_total", "shop", "job"] == 1
    assert found["perdure_task_runs_total", "completed", "shop", "job"] == 1
    assert ("perdure_task_wait_seconds_count", "shop", "job") not in found  # the first hand-out has ended the wait


async def test_tries_of_a_step_are_counted_and_recorded_steps_are_not(app: App) -> None:
    calls: list[int] = []

    def flaky() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError
        return len(calls)

    @app.task(retry=Retry(max_attempts=2, base=0.01))
    async def job(ctx: Context) -> None:
        await ctx.options(retry=Retry(max_attempts=3, base=0.01)).step("call", flaky)
        if ctx.attempt == 1:
            raise ValueError("once more")

    await job.enqueue()
    found = await worked_off(app)
    assert found["perdure_step_seconds_count", "shop", "call", "job"] == 1
    assert found["perdure_step_retries_total", "shop", "job"] == 2


async def test_steps_beyond_the_bound_count_as_other(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None:
        for number in range(MAX_STEPS + 5):
            await ctx.step(f"file-{number}", nap, 0.0)

    await job.enqueue()
    found = await worked_off(app)
    names = {key[2] for key in found if key[0] == "perdure_step_seconds_count"}
    assert len(names) == MAX_STEPS + 1
    assert found["perdure_step_seconds_count", "shop", "other", "job"] == 5
    assert found["perdure_metrics_other_total", "step"] == 5


async def test_the_name_of_an_unknown_task_is_no_label(app: App) -> None:
    """Foreign producers could send any number of names."""

    @app.task
    async def job(ctx: Context) -> None: ...

    async with Worker(app, metrics=True) as worker:
        running = asyncio.create_task(worker.run())
        for name in ("one", "two"):
            await app.producer.enqueue(name, queue="shop")

        async def returned() -> bool:
            return samples(worker.measurements).get(("perdure_task_runs_total", "returned", "shop", "other")) == 2

        await wait_until(returned, "both were returned")
        worker.stop()
        await bounded(running)


async def test_a_message_that_cannot_be_read_counts_as_a_dead_letter(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    await app.producer.gateway.command("XADD", app.producer.namespace.partition("shop").ready, "*", "env", "{")
    found = await worked_off(app)
    assert found["perdure_task_dead_letters_total", "shop", "unreadable", "other"] == 1


async def test_no_task_fails_because_of_a_metric(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def job(ctx: Context) -> int:
        return await ctx.step("seven", lambda: 7)

    def broken(*_given: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(meters, "_observe", broken)
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    try:
        handle = await job.enqueue()
        found = await worked_off(app)
        assert await bounded(handle.result()) == 7
    finally:
        logger.remove(handler)
    assert found["perdure_metrics_errors_total",] == 3
    assert [line.partition("\n")[0] for line in lines] == [
        "could not count what a run did; its task is not affected"  # once a minute
    ]


class Pipe:
    """A link to a supervisor, which may be full."""

    role, reports = "worker", True

    def __init__(self) -> None:
        self.totals = Totals()
        self.gauges: dict[str, float] = {}
        self.lines: list[int] = []
        self.full = True

    def send(self, what: str, **more: Any) -> bool:
        if what == "counts" and not self.full:
            line = orjson.dumps(more)
            self.lines.append(len(line))
            message = orjson.loads(line)
            self.totals.add("w", message["rows"])
            self.gauges = message["gauges"]
        return not self.full


@pytest.mark.parametrize("role", ["worker", "isolated"])
async def test_a_supervisor_has_every_count_when_its_worker_has_stopped(app: App, role: str) -> None:
    """Also those that the full pipe did not take, in lines that leave room for other messages."""

    @app.task
    async def job(ctx: Context) -> None:
        for number in range(MAX_STEPS):
            await ctx.step(f"step-{number}", nap, 0.0)

    pipe = Pipe()
    pipe.role = role
    if role == "isolated":
        await quarantine_new(app)
    async with Worker(app, link=cast("Link", pipe), metrics=True) as worker:
        running = asyncio.create_task(worker.run())
        if role == "worker":
            await job.enqueue()

        async def ran() -> bool:
            return worker.settled == 1

        await wait_until(ran, "the task has run")
        assert pipe.totals.copied() == {}
        pipe.full = False
        worker.stop()
        await bounded(running)
    found = pipe.totals.copied()
    assert found["perdure_task_runs_total", "shop", "job", "completed"] == [1]
    assert len([key for key in found if key[0] == "perdure_step_seconds"]) == MAX_STEPS
    assert pipe.gauges["perdure_worker_slots"] == worker.concurrency
    assert max(pipe.lines) < 16_384


async def quarantine_new(app: App) -> None:
    """Put a new task of the app into quarantine."""
    gateway, partition = app.producer.gateway, app.producer.namespace.partition("shop")
    handle = await app.tasks["job"].enqueue()
    await take_and_die(app)
    for delivery in await claim_all(await consumer(gateway, partition, name="finder")):
        await quarantine(gateway, delivery, handle.id)


async def test_a_worker_without_metrics_says_how_to_get_them(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    with pytest.raises(ConfigurationError, match=r"create it with Worker\(app, metrics=True\)"):
        Worker(app).measurements()


# parts


def test_extremes_are_those_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(RUNTIME, "monotonic", lambda: now[0])
    lag = RecentExtreme(max)
    assert lag.value is None
    for value, after, expected in ((3.0, 0, 3.0), (1.0, 50, 3.0), (2.0, 65, 3.0), (0.5, 100, 3.0), (0.5, 190, 0.5)):
        now[0] = 1000.0 + after
        lag.note(value)
        assert lag.value == expected, after
    now[0] += 200
    assert lag.value is None  # what was measured long ago says nothing about now


def histogram(*observed: float) -> list[float]:
    numbers = [0.0] * (len(BUCKETS) + 2)
    for seconds in observed:
        meters._observe(numbers, seconds)
    return numbers


def test_buckets_reach_from_a_millisecond_to_a_day() -> None:
    read = lambda: Measurements("n", {("perdure_task_run_seconds", "q", "t"): histogram(0.001, 0.3, 7e5)}, {})  # noqa: E731
    found = samples(read)
    buckets = {key[1]: value for key, value in found.items() if key[0] == "perdure_task_run_seconds_bucket"}
    assert (buckets["0.001"], buckets["0.25"], buckets["0.5"], buckets["86400.0"], buckets["+Inf"]) == (1, 1, 2, 2, 3)
    assert found["perdure_task_run_seconds_sum", "q", "t"] == pytest.approx(700000.301)


def test_totals_keep_what_workers_counted_that_have_ended() -> None:
    totals, key = Totals(), ("perdure_task_runs_total", "q", "t", "completed")
    totals.add("w1", [[key, [5]]])
    totals.add("w1", [[key, [7]]])
    totals.add("w2", [[key, [10]]])
    assert totals.copied()[key] == [17]
    totals.forget("w1")
    totals.add("w3", [[key, [1]]])
    totals.add("w2", [[key, [10]]])
    assert totals.copied()[key] == [18]
    totals.add("w2", [[key, [3]]])  # no total falls, whatever a worker sends
    assert totals.copied()[key] == [18]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        7,
        [7],
        [[]],
        [[["perdure_task_runs_total", "q", "t"], [1]]],
        [[["perdure_task_runs_total", "q", "t", 7], [1]]],
        [[["perdure_task_runs_total", "q", "t", "x" * 257], [1]]],
        [[["perdure_task_runs_total", "q", "t", "lost"], [-1]]],
        [[["perdure_task_runs_total", "q", "t", "lost"], [True]]],
        [[["perdure_task_runs_total", "q", "t", "lost"], ["1"]]],
        [[["perdure_task_runs_total", "q", "t", "lost"], [1, 2]]],
        [[["perdure_task_run_seconds", "q", "t"], [1]]],
        [[["perdure_worker_slots"], [1]]],
        [[["evil_metric"], [1]]],
        [[["perdure_task_runs_total", "q", "t", "lost"], [float("inf")]]],
    ],
)
def test_rows_that_a_task_wrote_into_the_pipe_are_dropped(rows: object) -> None:
    totals = Totals()
    totals.add("w", rows)
    assert totals.copied() == {}


def test_the_totals_of_a_supervisor_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reload may bring other tasks and steps."""
    monkeypatch.setattr("perdure.worker.runtime.metrics.totals.MAX_SERIES", 10)
    totals = Totals()
    for number in range(100):
        totals.add(f"w{number}", [[("perdure_step_seconds", "q", "t", f"step-{number}"), histogram(1.0)]])
    found = totals.copied()
    assert len(found) <= 20
    assert sum(sum(value[1:]) for key, value in found.items() if key[0] == "perdure_step_seconds") == 100
    assert (
        sum(found["perdure_step_seconds", "q", "other", "other"][1:]) == found["perdure_metrics_other_total", "step"][0]
    )


def test_gauges_of_several_workers_become_one() -> None:
    one = {"perdure_worker_slots": 16, "perdure_worker_loop_lag_seconds": 0.2, "perdure_worker_lease_margin_ratio": 0.6}
    two = {"perdure_worker_slots": 4, "perdure_worker_loop_lag_seconds": 0.1, "perdure_worker_lease_margin_ratio": 0.5}
    hostile = {"perdure_worker_slots": "7", "evil": 1, "perdure_task_runs_total": 1, "perdure_workers": 3}
    assert together([one, two, hostile]) == {
        ("perdure_worker_slots",): 20,
        ("perdure_worker_loop_lag_seconds",): 0.2,
        ("perdure_worker_lease_margin_ratio",): 0.5,
    }


def test_a_copy_may_be_made_at_any_time_by_another_thread() -> None:
    """Each number of a later copy is at least that of an earlier one, while the loop adds new label sets."""
    meter = Meter([f"t{number}" for number in range(200)], ["q"], (), lambda partition: None)

    async def fill() -> None:
        for number in range(4_000):
            counts = meter._of("q", f"t{number % 200}")
            meters._observe(counts.ran, 0.5)
            meters._observe(meter._new_step(counts, f"s{number % 7}"), 0.5)
            counts.outcomes[f"o{number % 11}"] = counts.outcomes.get(f"o{number % 11}", 0) + 1
            if number % 100 == 0:
                await asyncio.sleep(0)

    async def main() -> int:
        filling, copies = asyncio.create_task(fill()), 0
        before: dict[tuple[str, ...], list[float]] = {}
        while not filling.done():
            now = await asyncio.to_thread(meter.copied)
            for key, numbers in before.items():
                assert all(later >= earlier for earlier, later in zip(numbers, now[key], strict=True)), key
            before, copies = now, copies + 1
        await filling
        return copies

    assert asyncio.run(main()) > 1
    assert {key[0] for key in meter.copied()} <= set(FAMILIES)
