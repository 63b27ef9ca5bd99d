"""`perdure schedule`: add, list, change, fire by hand; and what is wrong, in one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from perdure import App, Context, Every
from perdure.queues.schedules.store import ScheduleStore

from tests.support.command_line import Answer, call
from tests.support.workers import partition_of, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment"), pytest.mark.app("shop")]


async def tool(*args: str) -> Answer:
    return await asyncio.to_thread(call, "schedule", *args)


@pytest.fixture
async def shop(app: App) -> AsyncIterator[App]:
    """An app whose workers have published its tasks and its schedule."""

    @app.task
    async def report(ctx: Context, days: int) -> int:
        return days

    app.schedule("coded", report, Every(86_400), args={"days": 1})
    await work_off(app)
    yield app
    partition = partition_of(app)
    for task in await redis_command(app, "ZRANGE", partition.timeline, 0, -1):
        await redis_command(app, "DEL", partition.record(task.decode()))


async def test_a_schedule_is_added_listed_changed_and_removed(shop: App) -> None:
    added = await tool(
        "add", "weekly", "report", "--cron", "0 6 * * MON", "--tz", "Europe/Berlin", "--args", '{"days": 7}'
    )
    assert added.code == 0, added.err
    listed = {row["name"]: row for row in (await tool("list", "--json")).json}
    assert (listed["weekly"]["owner"], listed["coded"]["owner"]) == ("operator", "code")
    assert listed["weekly"]["when"] == "0 6 * * MON Europe/Berlin"
    assert listed["weekly"]["arguments"] == {"days": 7}
    assert listed["weekly"]["next"]["task_id"].startswith("weekly-")  # before a worker has looked at it
    edited = (await tool("edit", "weekly", "--every", "90s", "--missed", "all", "--args", '{"days": 3}', "--json")).json
    assert (edited["when"], edited["missed"], edited["arguments"]) == ("every 90 s", "all", {"days": 3})
    assert edited["edited"] == ["when", "rules", "call"]
    back = (await tool("edit", "weekly", "--reset", "--json")).json
    assert (back["when"], back["edited"]) == ("0 6 * * MON Europe/Berlin", [])
    moved = (await tool("edit", "weekly", "--tz", "Asia/Tokyo", "--json")).json
    assert moved["when"] == "0 6 * * MON Asia/Tokyo"
    assert (await tool("remove", "weekly")).code == 0
    assert [row["name"] for row in (await tool("list", "--json")).json] == ["coded"]


async def test_a_pause_says_who_and_why_and_survives_a_worker(shop: App) -> None:
    assert (await tool("pause", "coded", "--by", "ann", "--why", "a move")).code == 0
    await work_off(shop)
    [row] = (await tool("list", "--json")).json
    assert (row["state"], row["paused"], row["next"]) == ("paused", {"by": "ann", "why": "a move"}, None)
    assert (await tool("resume", "coded", "--json")).json["state"] == "active"


async def test_a_run_by_hand_and_a_backfill_enqueue_tasks(shop: App) -> None:
    shown = await tool("run", "coded")
    task_id = shown.out.strip().splitlines()[-1]
    handle = await shop.producer.find(task_id)
    assert handle is not None
    since = (datetime.now(UTC) - timedelta(days=3)).isoformat()
    first = (await tool("backfill", "coded", "--since", since)).out.split()
    assert len(first) == 3
    assert (await tool("backfill", "coded", "--since", since)).out.split() == first
    async with running_worker(shop):
        assert await handle.result(30) == 1
    [row] = (await tool("list", "--json")).json
    assert row["runs"][0]["how"] == "by hand"


async def test_a_schedule_is_shown_with_its_last_and_next_runs(shop: App) -> None:
    ran = (await tool("run", "coded")).out.strip()
    late = (await tool("run", "coded")).out.strip()
    async with running_worker(shop):
        handle = await shop.producer.find(ran)
        assert handle is not None
        await handle.result(30)
        other = await shop.producer.find(late)
        assert other is not None
        await other.result(30)
    await redis_command(shop, "DEL", partition_of(shop).record(late))
    shown = (await tool("show", "coded", "--limit", "3", "--json")).json
    assert [(run["task_id"], run["state"]) for run in shown["runs"]] == [(late, None), (ran, "succeeded")]
    assert [one["planned"] for one in shown["coming"]] == sorted(one["planned"] for one in shown["coming"])
    assert len(shown["coming"]) == 3
    assert shown["coming"][0] == shown["next"]
    text = (await tool("show", "coded", "--limit", "1")).out
    rows = text.partition("planned")[2].splitlines()[2:]
    assert [row.split()[-2:] for row in rows] == [
        [shown["next"]["task_id"], "-"],
        [late, "expired"],
        [ran, "succeeded"],
    ]
    assert (await tool("show", "coed")).err.endswith("did you mean 'coded'?\n")
    await tool("pause", "coded")
    assert (await tool("show", "coded", "--json")).json["coming"] == []


async def test_workers_fire_what_an_operator_adds_while_they_run(shop: App) -> None:
    store = ScheduleStore(shop.producer.gateway, shop.producer.namespace)
    async with running_worker(shop):
        assert (await tool("add", "quick", "report", "--every", "1s", "--args", '{"days": 1}')).code == 0

        async def fired() -> bool:
            return len((await store.read("quick")).runs) >= 2

        await wait_until(fired, "it fires twice")
        assert (await tool("remove", "quick")).code == 0


@pytest.mark.parametrize(
    ("args", "code", "problem"),
    [
        (("add", "x", "report", "--cron", "0 0 31 2 *", "--args", '{"days":1}'), 2, "which never does"),
        (("add", "x", "report", "--cron", "0 2 * * *", "--tz", "Mars", "--args", '{"days":1}'), 2, "tz must be"),
        (("add", "x", "report", "--every", "1500us", "--args", '{"days":1}'), 2, "must be a number of seconds"),
        (("add", "x", "report", "--every", "60", "--args", '{"days":"many"}'), 2, "days"),
        (("add", "x", "report", "--every", "60", "--args", "[1]"), 2, "must be a JSON object"),
        (("add", "x", "repotr", "--every", "60"), 2, "did you mean 'report'?"),
        (("add", "x", "report"), 2, "give a cron expression or an interval"),
        (("add", "x", "report", "--every", "60", "--cron", "* * * * *"), 2, "either a cron expression with its"),
        (("add", "x y", "report", "--every", "60"), 2, "schedule must be 1 to 64"),
        (("add", "coded", "report", "--every", "60", "--args", '{"days":1}'), 1, "defines it in its code"),
        (("add", "x", "report", "--every", "60", "--jitter", "90", "--args", '{"days":1}'), 2, "jitter must be less"),
        (("edit", "coded"), 2, "give what is to change"),
        (("edit", "coded", "--args", '{"days":"many"}'), 2, "days"),
        (("edit", "code", "--every", "60"), 1, "there is no schedule 'code'"),
        (("remove", "coded"), 1, "is in the code of app 'shop'"),
        (("pause", "nothing"), 1, "there is no schedule 'nothing'"),
        (("backfill", "coded", "--since", "2026-13-01T00:00"), 2, "or an ISO time such as"),
        (("backfill", "coded", "--since", "2999-01-01T00:00Z"), 2, "neither in the future"),
        (("backfill", "coded", "--since", "1971-01-01T00:00Z"), 2, "more than 1,000 planned times"),
    ],
)
async def test_what_is_wrong_is_said_in_one_sentence_and_changes_nothing(
    shop: App, args: tuple[str, ...], code: int, problem: str
) -> None:
    before = (await tool("list", "--json")).json
    answer = await tool(*args)
    assert (answer.code, len(answer.err.strip().splitlines())) == (code, 1), answer.err
    assert problem in answer.err
    assert [row | {"next": None} for row in (await tool("list", "--json")).json] == [
        row | {"next": None} for row in before
    ]
