"""Schedules with workers: months by the clock of a test, deploys, deadlines, and what is wrong in the code."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from perdure import App, Context, Cron, Every, InvalidArguments, TaskFailed
from perdure.deadletter.replay import Replay, replay
from perdure.queues.errors import ConfigurationError, PayloadTooLarge
from perdure.queues.schedules.store import ScheduleStore
from perdure.testing import PerdureClock, run_worker

from tests.support.workers import bounded, letter, running_worker, wait_until

pytestmark = pytest.mark.integration


def nightly(app: App, ran: list[tuple[str, str]], *, zone: str = "Europe/Berlin", **options: Any) -> None:
    @app.task
    async def report(ctx: Context, days: int = 1) -> None:
        planned = datetime.fromisoformat(ctx.headers["planned"]).astimezone(ZoneInfo(zone))
        ran.append((ctx.task_id, planned.strftime("%m-%d %H:%M %z")))

    app.schedule("nightly", report, Cron("30 2 * * *", tz=zone), args={"days": 2}, **options)


@pytest.mark.parametrize(
    ("zone", "start", "expected"),
    [
        ("Europe/Berlin", "2027-03-27", ["03-27 02:30 +0100", "03-28 03:00 +0200", "03-29 02:30 +0200"]),
        ("Europe/Berlin", "2027-10-30", ["10-30 02:30 +0200", "10-31 02:30 +0200", "11-01 02:30 +0100"]),
        ("America/New_York", "2027-03-13", ["03-13 02:30 -0500", "03-14 03:00 -0400", "03-15 02:30 -0400"]),
        ("America/New_York", "2027-11-06", ["11-06 02:30 -0400", "11-07 02:30 -0500", "11-08 02:30 -0500"]),
        ("Asia/Tokyo", "2027-03-27", ["03-27 02:30 +0900", "03-28 02:30 +0900", "03-29 02:30 +0900"]),
    ],
)
async def test_a_nightly_task_runs_once_a_day_through_a_change_of_the_clock(
    perdure_clock: PerdureClock, zone: str, start: str, expected: list[str]
) -> None:
    ran: list[tuple[str, str]] = []
    app = App("shop")
    nightly(app, ran, zone=zone)
    begin = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    perdure_clock.jump(begin - perdure_clock.now())
    async with app, run_worker(app), run_worker(app):
        await perdure_clock.move_to(begin + timedelta(days=3))
    assert [planned for _, planned in ran] == expected
    assert len({task_id for task_id, _ in ran}) == 3


async def test_a_night_without_workers_is_made_up_for_once(perdure_clock: PerdureClock) -> None:
    ran: list[tuple[str, str]] = []
    app = App("shop")
    nightly(app, ran)
    async with app:
        async with run_worker(app):
            await perdure_clock.advance(timedelta(days=1))
        assert len(ran) == 1
        await perdure_clock.advance(timedelta(days=4))
        async with run_worker(app):
            await perdure_clock.advance(60)
            assert len(ran) == 2
            await perdure_clock.advance(timedelta(days=1))
    assert len(ran) == 3


async def test_a_schedule_of_the_decorator_fires_on_a_real_server(app: App) -> None:
    ran: list[str] = []

    @app.task(schedule=Every(1))
    async def tick(ctx: Context) -> None:
        ran.append(ctx.task_id)

    async with running_worker(app), running_worker(app):
        await wait_until(lambda: _true(len(ran) >= 3), "it runs three times")
        stored = await ScheduleStore(app.producer.gateway, app.producer.namespace).read("tick")
    assert len(ran) == len({*ran})
    assert ran == sorted(ran)
    assert {run.task_id for run in stored.runs} >= {*ran[:3]}
    await forget(app)


async def _true(value: object) -> object:
    return value


async def forget(app: App) -> None:
    """Delete what the test's schedules have left for the next worker."""
    gateway, namespace = app.producer.gateway, app.producer.namespace
    partition = namespace.partition(app.name)
    for task in await gateway.command("ZRANGE", partition.due, 0, -1):
        await gateway.command("DEL", partition.record(task.decode()))
    for entry, fields in await gateway.command("XRANGE", partition.ready, "-", "+"):
        del entry
        task = dict(zip(fields[::2], fields[1::2], strict=True))[b"env"].split(b'"id":"')[1].split(b'"')[0]
        await gateway.command("DEL", partition.record(task.decode()))


async def test_a_schedule_that_leaves_the_code_ends_with_its_last_worker(perdure_clock: PerdureClock) -> None:
    ran: list[tuple[str, str]] = []
    old, new = App("shop"), App("shop")
    nightly(old, ran)

    @new.task
    async def report(ctx: Context, days: int = 1) -> None:
        ran.append((ctx.task_id, "new"))

    async with old, run_worker(old):
        await perdure_clock.advance(timedelta(days=1))
    assert len(ran) == 1
    perdure_clock.jump(timedelta(minutes=5))
    async with new, run_worker(new):
        await perdure_clock.advance(timedelta(hours=30))
    assert len(ran) == 1


async def test_a_task_that_has_not_started_by_its_deadline_is_a_dead_letter(app: App) -> None:
    ran: list[str] = []

    @app.task
    async def late(ctx: Context) -> str:
        ran.append(ctx.task_id)
        return "done"

    handle = await late.options(expires=0.001).enqueue()
    in_time = await late.options(expires=timedelta(hours=1)).enqueue()
    async with running_worker(app):
        with pytest.raises(TaskFailed, match="was to start by its deadline") as raised:
            await bounded(handle.result())
        assert raised.value.reason == "expired"
        assert await bounded(in_time.result()) == "done"
        assert await replay(app.producer.gateway, await letter(app, handle), Replay())
        assert await bounded(handle.result()) == "done", "an operator wants it to run"
    assert ran == [in_time.id, handle.id]


async def test_a_retry_after_the_deadline_still_runs(app: App) -> None:
    from perdure import Retry

    @app.task(retry=Retry(max_attempts=2, base=0.3, jitter=0.0))
    async def flaky(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise ValueError("once")
        return ctx.attempt

    async with running_worker(app):
        handle = await flaky.options(expires=0.25).enqueue()
        assert await bounded(handle.result()) == 2


@pytest.mark.parametrize("expires", [0, -1, float("nan"), "5", datetime(2030, 1, 1)])  # noqa: DTZ001 - naive
async def test_a_deadline_is_a_time_to_come(app: App, expires: Any) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    with pytest.raises(InvalidArguments, match="expires must"):
        work.options(expires=expires)


def an_app() -> tuple[App, Any]:
    app = App("shop")

    @app.task
    async def report(ctx: Context, days: int) -> None: ...

    return app, report


DAILY = Cron("0 2 * * *")


def test_what_is_wrong_in_the_code_is_said_in_one_sentence_and_nothing_is_kept() -> None:
    app, report = an_app()
    other, foreign = an_app()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((report, "0 2 * * *"), {"args": {"days": 1}}, r"must be a Cron or an Every"),
        (("reprot", DAILY), {}, r"app 'shop' has no task 'reprot'; did you mean 'report'\?"),
        ((foreign, DAILY), {"args": {"days": 1}}, r"'report' of another app"),
        ((print, DAILY), {}, r"its task must be a registered task"),
        ((report, DAILY), {"args": {"days": 1}, "missed": "twice"}, r"missed must be one of skip, once, all"),
        ((report, DAILY), {"args": {"days": 1}, "jitter": 90_000}, r"jitter must be less than the 86400 seconds"),
        ((report, DAILY), {"args": {"days": 1}, "expires": 0}, r"expires must be more than 0"),
        ((report, DAILY), {"args": {"days": 1}, "expires": datetime.now(UTC)}, r"expires must be seconds"),
        ((report, DAILY), {"args": [1]}, r"args must be a dict"),
        ((report.options(delay=5), DAILY), {"args": {"days": 1}}, r"cannot have the option delay"),
        ((report.options(task_id="x"), DAILY), {"args": {"days": 1}}, r"cannot have the option task_id"),
        ((report.options(expires=5), DAILY), {"args": {"days": 1}}, r"cannot have the option expires"),
    ]
    for given, options, problem in cases:
        with pytest.raises(ConfigurationError, match=problem):
            app.schedule("nightly", *given, **options)
    with pytest.raises(InvalidArguments, match="days"):
        app.schedule("nightly", report, DAILY, args={"days": "many"})
    with pytest.raises(InvalidArguments, match="days"):
        app.schedule("nightly", report, DAILY)
    with pytest.raises(PayloadTooLarge):
        app.schedule("nightly", other_text(app), DAILY, args={"text": "x" * 2**21})
    with pytest.raises(ConfigurationError, match="schedule must be 1 to 64"):
        app.schedule("night ly", report, DAILY, args={"days": 1})
    assert app.schedules == {}
    app.schedule("nightly", report, DAILY, args={"days": 1})
    with pytest.raises(ConfigurationError, match="the app has a schedule of this name already"):
        app.schedule("nightly", report, DAILY, args={"days": 1})
    assert other.schedules == {}


def other_text(app: App) -> Any:
    @app.task
    async def text(ctx: Context, text: str) -> None: ...

    return text


def test_a_task_that_cannot_have_its_schedule_is_not_registered() -> None:
    app = App("shop")
    with pytest.raises(InvalidArguments, match="days"):

        @app.task(schedule=DAILY)
        async def report(ctx: Context, days: int) -> None: ...

    assert "report" not in app.tasks
    assert app.schedules == {}
