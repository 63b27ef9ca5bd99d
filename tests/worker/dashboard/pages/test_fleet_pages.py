"""Pages of queues, limits, schedules, workers and budgets: what they show, their actions, and hostile text."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import anyio
import pytest
import pytest_asyncio
from perdure import App, Context, Every, Worker
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.envelope import BudgetUse
from perdure.queues.presence import list_workers
from perdure.queues.supervisors import SupervisorInfo, count_crash, paused_supervisors, supervise
from perdure.web import Role
from playwright.async_api import expect

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, assert_harmless, assert_nothing_ran
from tests.support.workers import bounded, redis_command, running_worker, wait_until
from tests.worker.dashboard.conftest import BrowserPage, Visit
from tests.worker.dashboard.pages.test_questions_pages import hidden_fields

LEDGER = "tenant:00112233445566ff"
PAGES = (
    "/queues",
    "/queues/shop",
    "/junk",
    "/limits",
    "/limits/openai",
    "/schedules",
    "/schedules/nightly",
    "/workers",
    "/catalog",
    "/budgets",
    f"/budgets/{LEDGER}",
)


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(app: App) -> AsyncIterator[Worker]:
    """A worker whose task holds a limit that a second task waits for, a schedule, and a charged budget."""
    openai = app.limit("openai", total=1)
    started, end = anyio.Event(), anyio.Event()

    @app.task(limits=[openai])
    async def report(ctx: Context, days: int = 1) -> None:
        started.set()
        await end.wait()

    app.schedule("nightly", report, Every(86_400), args={"days": 1})
    gateway, namespace = app.producer.gateway, app.producer.namespace
    use = BudgetUse(LEDGER, "tenant", {"usd": 5_000_000_000, "steps": 10}, label="acme")
    await BudgetStore(gateway, namespace).charge([use], "a", {"usd": 2_000_000_000})
    first = await report.enqueue()
    async with running_worker(app, concurrency=4) as worker:
        await bounded(started.wait())
        second = await report.enqueue()
        yield worker
        end.set()
        await bounded(first.result())
        await second.cancel()


async def act(visit: Visit, path: str, **given: str) -> int:
    """Open the form of an action, and send it; return the status of the response."""
    shown = await visit(path, Role.OPERATOR, name="bob")
    assert shown.status_code == 200, shown.text
    done = await visit(path, Role.OPERATOR, form=hidden_fields(shown.text) | given, name="bob")
    return done.status_code


async def test_each_page_shows_what_runs(visit: Visit, fleet: Worker) -> None:
    texts = {path: await visit(path, Role.VIEWER) for path in (*PAGES, f"/workers/{fleet.id}")}
    assert {path: found.status_code for path, found in texts.items()} == dict.fromkeys(texts, 200)
    for path, text in (
        ("/queues", ">shop<"),
        ("/queues/shop", "By priority"),
        ("/limits", "openai"),
        ("/limits/openai", "Keys that wait"),
        ("/schedules", "every 1 d"),
        ("/schedules/nightly", "&#34;days&#34;: 1"),
        ("/workers", fleet.id),
        (f"/workers/{fleet.id}", "consuming"),
        ("/catalog", "report"),
        ("/budgets", "$2.00 of $5.00"),
        (f"/budgets/{LEDGER}", "acme"),
    ):
        assert text in texts[path].text, path
        assert "Release</a>" not in texts[path].text, "a viewer is offered no action"


async def test_a_queue_is_paused_and_resumed(visit: Visit, fleet: Worker) -> None:
    assert await act(visit, "/pauses/add?queue=shop", queue="shop", why="their database is down") == 303
    shown = (await visit("/queues", Role.OPERATOR)).text
    assert "their database is down" in shown
    (path,) = re.findall(r'href="(/sub/pauses/\w+/resume)"', shown)
    assert await act(visit, path) == 303
    gone = await visit(path, Role.OPERATOR)
    assert gone.status_code == 404
    refused = await visit("/pauses/add", Role.OPERATOR, form={"where": "tenant"})
    assert refused.status_code == 422
    assert "must be NAME=VALUE" in refused.text


async def test_a_limit_is_changed_held_released_and_reset(visit: Visit, fleet: Worker) -> None:
    assert await act(visit, "/limits/openai/set", total="1", rate="100/m", why="a 429 each minute") == 303
    shown = (await visit("/limits/openai", Role.VIEWER)).text
    assert "set total=1 rate=100/m" in shown
    assert "a 429 each minute" in shown
    assert await act(visit, "/limits/openai/hold", seconds="10m") == 303
    assert "Nothing starts: held" in (await visit("/limits/openai", Role.VIEWER)).text
    assert await act(visit, "/limits/openai/release") == 303
    assert await act(visit, "/limits/openai/reset") == 303
    assert "Nothing starts" not in (await visit("/limits/openai", Role.VIEWER)).text
    refused = await visit("/limits/openai/set", Role.OPERATOR, form={"total": "many", "revision": "4"})
    assert refused.status_code == 422
    error = refused.text.index("must be a whole number")
    assert refused.text.rindex('id="field-total"', 0, error) > 0, "beside its field"
    assert 'value="many"' in refused.text, "what was typed stays"


async def test_two_people_who_change_the_same_limit_lose_nothing(visit: Visit, fleet: Worker) -> None:
    first = hidden_fields((await visit("/limits/openai/set", Role.OPERATOR)).text)
    second = hidden_fields((await visit("/limits/openai/set", Role.OPERATOR)).text)
    done = await visit("/limits/openai/set", Role.OPERATOR, form=first | {"total": "3"}, name="ada")
    assert done.status_code == 303
    refused = await visit("/limits/openai/set", Role.OPERATOR, form=second | {"total": "9"}, name="bob")
    assert refused.status_code == 409
    assert "it was changed since you have read it: ada: set total=3" in refused.text
    assert "total 3" in refused.text, "what is stored now"
    assert await act(visit, "/limits/openai/set", total="1") == 303


async def test_one_holder_is_released(visit: Visit, fleet: Worker) -> None:
    shown = (await visit("/limits/openai", Role.OPERATOR)).text
    (path,) = re.findall(r'href="(/sub/limits/openai/holders/[\w-]+/release)"', shown)
    assert await act(visit, path, why="frozen") == 303
    assert (await visit(path, Role.OPERATOR, form={})).status_code == 404


async def test_a_schedule_is_added_edited_paused_run_and_removed(visit: Visit, fleet: Worker, app: App) -> None:
    added = {"name": "weekly", "task": "report", "cron": "0 6 * * MON", "arguments": '{"days": 7}'}
    assert await act(visit, "/add-schedule", **added) == 303
    assert await act(visit, "/schedules/weekly/edit", every="6h", arguments='{"days": 7}') == 303
    shown = (await visit("/schedules/weekly", Role.OPERATOR)).text
    assert "every 6 h" in shown
    found = re.findall(r"Set by operators</dt><dd>([^<]*)<", shown)
    assert found == ["when"], "the arguments were left as they are"
    assert await act(visit, "/schedules/weekly/reset") == 303
    assert await act(visit, "/schedules/weekly/pause", why="the database is being moved") == 303
    assert "Paused by bob: the database is being moved" in (await visit("/schedules/weekly", Role.OPERATOR)).text
    assert await act(visit, "/schedules/weekly/resume") == 303
    assert await act(visit, "/schedules/weekly/run") == 303
    run = (await visit("/schedules/weekly", Role.OPERATOR)).text
    (task_id,) = re.findall(r"/sub/tasks/(weekly-[\w-]+)\?", run)
    handle = await app.producer.find(task_id, "shop")
    assert handle is not None
    await handle.cancel()
    assert await act(visit, "/schedules/weekly/remove") == 303
    assert (await visit("/schedules/weekly", Role.OPERATOR)).status_code == 404
    refused = await visit("/add-schedule", Role.OPERATOR, form=added | {"cron": "every monday"})
    assert refused.status_code == 422
    assert 'aria-invalid="true"' in refused.text


async def test_two_people_who_edit_the_same_schedule_lose_nothing(visit: Visit, fleet: Worker) -> None:
    form = hidden_fields((await visit("/schedules/nightly/edit", Role.OPERATOR)).text)
    assert (await visit("/schedules/nightly/edit", Role.OPERATOR, form=form | {"every": "6h"})).status_code == 303
    refused = await visit("/schedules/nightly/edit", Role.OPERATOR, form=form | {"every": "2h"})
    assert refused.status_code == 409
    assert "it was changed since you have read it" in refused.text
    assert "Its times now: every 6 h" in refused.text


async def test_a_budget_is_raised_once_and_reset(visit: Visit, fleet: Worker) -> None:
    path = f"/budgets/{LEDGER}/raise"
    form = hidden_fields((await visit(path, Role.OPERATOR)).text) | {"usd": "$1.50"}
    assert (await visit(path, Role.OPERATOR, form=form)).status_code == 303
    assert (await visit(path, Role.OPERATOR, form=form)).status_code == 409, "a form that is sent twice"
    assert "$2.00 of $6.50" in (await visit(f"/budgets/{LEDGER}", Role.VIEWER)).text
    assert await act(visit, f"/budgets/{LEDGER}/reset") == 303
    refused = await visit(path, Role.OPERATOR, form={"usd": "much"})
    assert (refused.status_code, "must be a number of dollars" in refused.text) == (422, True)


async def test_a_worker_is_drained(visit: Visit, app: App) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    async with Worker(app) as worker, anyio.create_task_group() as group:
        group.start_soon(worker.run)
        assert await act(visit, f"/workers/{worker.id}/drain") == 303
    assert await list_workers(app.producer.gateway, app.producer.namespace) == []


async def test_a_paused_supervisor_is_resumed(visit: Visit, app: App) -> None:
    place = (app.producer.gateway, app.producer.namespace)
    await supervise(*place, SupervisorInfo("s1", "shop-host", window=60.0), 60.0)
    await count_crash(*place, "shop-host", "w1", why="SIGKILL", threshold=0, window=60.0)
    shown = (await visit("/workers", Role.OPERATOR)).text
    assert "SIGKILL" in shown
    assert await act(visit, "/supervisors/shop-host/resume") == 303
    assert await paused_supervisors(*place) == []
    assert (await visit("/supervisors/shop-host/resume", Role.OPERATOR)).status_code == 404


async def test_hostile_text_is_shown_as_text(visit: Visit, app: App, fleet: Worker) -> None:
    """Foreign bytes and markup in every field that people or other programs write."""
    names = app.producer.namespace
    assert await act(visit, "/pauses/add", queue="other", why=ALL_HOSTILE[:2000]) == 303
    assert await act(visit, "/schedules/nightly/pause", why=ALL_HOSTILE[:2000]) == 303
    assert await act(visit, "/limits/openai/hold", seconds="1m", why=ALL_HOSTILE[:2000]) == 303
    await redis_command(app, "HSET", names.worker(fleet.id), "version", ALL_HOSTILE, "host", ALL_HOSTILE)
    await redis_command(app, "HSET", names.schedule("nightly"), "task", ALL_HOSTILE, "queue", ALL_HOSTILE)
    await redis_command(app, "XADD", names.junk, "*", "key", ALL_HOSTILE, "item", ALL_HOSTILE, "content", ALL_HOSTILE)
    await redis_command(app, "HSET", names.limits.limit("openai"), "app", ALL_HOSTILE, "by", ALL_HOSTILE)
    await redis_command(app, "HSET", names.ledger(LEDGER).ledger, "label", ALL_HOSTILE, "by", ALL_HOSTILE)
    await redis_command(app, "ZADD", names.workers, 1, ALL_HOSTILE)
    for path in (*PAGES, f"/workers/{fleet.id}"):
        found = await visit(path, Role.ADMIN)
        assert found.status_code == 200, path
        assert_harmless(found.text)


@pytest.mark.parametrize("field", ["health", "capacity", "rates", "queues", "drain", "drain_by"])
async def test_a_registration_of_another_program_hides_no_page(
    visit: Visit, app: App, fleet: Worker, field: str
) -> None:
    await redis_command(app, "HSET", app.producer.namespace.worker(fleet.id), field, b'{"a": [1, "\xff"]}')
    for path in ("/", "/workers", "/queues"):
        assert (await visit(path, Role.VIEWER)).status_code == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/queues", "queues"),
        ("/queues/shop", "queue"),
        ("/limits", "limits"),
        ("/limits/openai", "limit"),
        ("/schedules", "schedules"),
        ("/schedules/nightly", "schedule"),
        ("/workers", "workers"),
        ("/workers/WORKER", "worker"),
        ("/catalog", "catalog"),
        ("/junk", "junk"),
        ("/budgets", "budgets"),
        (f"/budgets/{LEDGER}", "budget"),
        ("/pauses/add", "pause"),
        ("/limits/openai/set", "change-limit"),
        ("/limits/openai/hold", "hold-limit"),
        ("/schedules/nightly/edit", "edit-schedule"),
        ("/add-schedule", "add-schedule"),
        (f"/budgets/{LEDGER}/raise", "raise-budget"),
    ],
)
async def test_a_page_is_accessible(browser_page: BrowserPage, fleet: Worker, path: str, name: str) -> None:
    await browser_page.goto(path.replace("WORKER", fleet.id))
    await expect(browser_page.page.locator("h1")).to_be_visible()
    await check_accessible(browser_page.page)
    await screenshot(browser_page.page, name)


async def test_a_limit_is_changed_in_a_browser(browser_page: BrowserPage, fleet: Worker) -> None:
    page = browser_page.page
    await browser_page.goto("/limits/openai")
    await page.get_by_role("link", name="Change").click()
    await page.get_by_label("Total").fill("many")
    browser_page.expected.append("422")
    await page.get_by_role("button", name="Change").click()
    await expect(page.get_by_text("must be a whole number from 0 to")).to_be_visible()
    await check_accessible(page)
    await page.get_by_label("Total").fill("2")
    await page.get_by_role("button", name="Change").click()
    await expect(page.get_by_text("Limit openai is changed.")).to_be_visible()
    await expect(page.get_by_text("set total=2")).to_be_visible()


async def test_a_schedule_is_run_and_paused_in_a_browser(browser_page: BrowserPage, fleet: Worker) -> None:
    page = browser_page.page
    await browser_page.goto("/schedules/nightly")
    await page.get_by_role("link", name="Run now").click()
    await page.get_by_role("button", name="Run now").click()
    await expect(page.get_by_text("is enqueued.")).to_be_visible()
    await page.get_by_role("link", name="Pause", exact=True).click()
    await page.get_by_label("Reason").fill("the database is being moved")
    await page.get_by_role("button", name="Pause", exact=True).click()
    await expect(page.get_by_text("Paused by ada: the database is being moved")).to_be_visible()


async def test_a_worker_is_drained_in_a_browser(browser_page: BrowserPage, app: App, fleet: Worker) -> None:
    page = browser_page.page
    await browser_page.goto(f"/workers/{fleet.id}")
    await page.get_by_role("link", name="Drain").click()
    await check_accessible(page)
    await page.get_by_role("button", name="Drain").click()
    await expect(page.get_by_text(f"Worker {fleet.id} drains.")).to_be_visible()

    async def draining() -> bool:
        return [info.draining for info in await list_workers(app.producer.gateway, app.producer.namespace)] == [True]

    await wait_until(draining, "the worker drains")
    await expect(page.get_by_text("draining")).to_be_visible()


async def test_hostile_text_runs_nothing_in_a_browser(browser_page: BrowserPage, app: App, fleet: Worker) -> None:
    names = app.producer.namespace
    await redis_command(app, "HSET", names.worker(fleet.id), "version", ALL_HOSTILE, "host", ALL_HOSTILE)
    await redis_command(app, "XADD", names.junk, "*", "key", ALL_HOSTILE, "item", ALL_HOSTILE, "content", ALL_HOSTILE)
    await redis_command(app, "HSET", names.limits.limit("openai"), "app", ALL_HOSTILE, "by", ALL_HOSTILE)
    await redis_command(app, "HSET", names.schedule("nightly"), "task", ALL_HOSTILE, "queue", ALL_HOSTILE)
    for path in ("/workers", f"/workers/{fleet.id}", "/junk", "/limits/openai", "/schedules/nightly"):
        await browser_page.goto(path)
        await assert_nothing_ran(browser_page.page)
