"""The page of a task: its tabs, and the actions on it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import anyio
import pytest
import pytest_asyncio
from markupsafe import escape
from perdure import App, Context, Retry
from perdure.queues import generate_key
from perdure.queues.handle import TaskHandle
from perdure.web import Role
from perdure.worker.settings import Settings
from playwright.async_api import expect
from pydantic import SecretStr
from pydantic_core import to_json

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, HOSTILE, assert_harmless, assert_nothing_ran
from tests.support.workers import work_off
from tests.worker.dashboard.conftest import BrowserPage, Visit

TABS = ("", "/steps", "/children", "/events", "/arguments")


@pytest_asyncio.fixture(loop_scope="session")
async def done(app: App) -> TaskHandle[Any]:
    """A task with the recorded steps `load` and `send`, which has succeeded."""

    @app.task
    async def report(ctx: Context, month: int, city: str = "Paris") -> int:
        rows = await ctx.step("load", lambda: month * 2)
        return await ctx.step("send", lambda given: given + 1, rows)

    handle = await report.enqueue(3)
    await work_off(app)
    return handle


async def test_each_tab_shows_the_task(visit: Visit, done: TaskHandle[Any]) -> None:
    for tab in TABS:
        response = await visit(f"/tasks/{done.id}{tab}", Role.VIEWER)
        assert response.status_code == 200, (tab[:20], response.text[-1800:])
        assert done.id in response.text
        assert "style=" not in response.text


async def test_the_first_tab_says_why_the_task_is_here(app: App, visit: Visit) -> None:
    handle = await app.producer.enqueue("audit", {"n": 2**53 + 1}, queue="files")
    response = await visit(f"/tasks/{handle.id}", Role.VIEWER)
    explained = await handle.explain()
    assert str(escape(explained.sentence)) in response.text
    assert str(2**53 + 1) in response.text, "integers stay exact"


async def test_a_viewer_gets_no_actions(visit: Visit, done: TaskHandle[Any]) -> None:
    shown = (await visit(f"/tasks/{done.id}", Role.VIEWER)).text
    assert "/fork" not in shown
    assert "/fork" in (await visit(f"/tasks/{done.id}", Role.OPERATOR)).text
    assert (await visit(f"/tasks/{done.id}/fork", Role.VIEWER)).status_code == 403
    assert (await visit(f"/tasks/{done.id}/cancel", Role.VIEWER, form={})).status_code == 403


async def test_cancelling_asks_first_and_says_what_was_done(app: App, visit: Visit, log: list[str]) -> None:
    handle = await app.producer.enqueue("audit", {}, queue="files")
    path = f"/tasks/{handle.id}/cancel"
    assert "Cancel the task" in (await visit(path, Role.OPERATOR)).text
    assert await handle.status() == "queued"
    answer = await visit(path, Role.OPERATOR, form={})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/sub/tasks/{handle.id}")
    assert await handle.status() == "cancelled"
    assert f"ada: cancel task {handle.id}: done\n" in log
    assert "is cancelled" in (await visit(f"/tasks/{handle.id}", Role.OPERATOR)).text


async def test_two_people_who_cancel_have_one_effect(app: App, visit: Visit) -> None:
    handle = await app.producer.enqueue("audit", {}, queue="files")
    answers: list[int] = []

    async def cancel(name: str) -> None:
        answers.append((await visit(f"/tasks/{handle.id}/cancel", Role.OPERATOR, form={}, name=name)).status_code)

    async with anyio.create_task_group() as group:
        for name in ("ada", "bob"):
            group.start_soon(cancel, name)
    assert answers == [303, 303]
    assert await handle.status() == "cancelled"


async def test_a_message_is_sent_once(app: App, visit: Visit) -> None:
    handle = await app.producer.enqueue("audit", {}, queue="files")
    path = f"/tasks/{handle.id}/send"
    key = re.search(r'name="idempotency_key" value="([^"]+)"', (await visit(path, Role.OPERATOR)).text)
    assert key is not None
    for _ in range(2):
        answer = await visit(path, Role.OPERATOR, form={"text": "go on", "idempotency_key": key[1]})
        assert answer.status_code == 303
    assert [(message.sender, message.content) for message in await handle.pending_messages()] == [("ada", "go on")]
    assert "go on" in (await visit(f"/tasks/{handle.id}", Role.VIEWER)).text


async def test_a_fork_before_a_step_has_edited_arguments(app: App, visit: Visit, done: TaskHandle[Any]) -> None:
    path = f"/tasks/{done.id}/fork?before=send"
    form = (await visit(path, Role.OPERATOR)).text
    new_id = re.search(r'name="new_id" value="([^"]+)"', form)
    assert new_id is not None
    assert "before step &#39;send&#39;" in form
    edited = {"edit": '{"month": 3, "city": "Rome"}', "new_id": new_id[1]}
    for _ in range(2):
        answer = await visit(path, Role.OPERATOR, form=edited)
        assert answer.headers["location"] == f"/sub/tasks/{new_id[1]}", answer.text
    copy = await app.producer.find(new_id[1])
    assert copy is not None
    assert (await copy.record()).args == b'{"month":3,"city":"Rome"}'
    await work_off(app)
    assert [event.step async for event in copy.events(follow=False) if event.type == "step_completed"] == ["send"]


@pytest.mark.parametrize("edit", ["{", "[1]", '{"month.x": 1}', '{"month": "**********"}'])
async def test_an_edit_that_cannot_be_is_shown_beside_the_form(visit: Visit, done: TaskHandle[Any], edit: str) -> None:
    answer = await visit(f"/tasks/{done.id}/fork", Role.OPERATOR, form={"edit": edit})
    assert answer.status_code == 422
    assert "Nothing was done" in answer.text


async def test_secrets_are_shown_to_an_admin_who_asks(app: App, visit: Visit, log: list[str]) -> None:
    @app.task
    async def login(ctx: Context, password: SecretStr) -> None: ...

    handle = await login.enqueue(SecretStr("hunter2"))
    for tab in TABS:
        assert "hunter2" not in (await visit(f"/tasks/{handle.id}{tab}", Role.ADMIN)).text
    path = f"/tasks/{handle.id}/reveal"
    assert (await visit(path, Role.OPERATOR)).status_code == 403
    assert "hunter2" not in (await visit(path, Role.ADMIN)).text
    answer = await visit(path, Role.ADMIN, form={}, name="root")
    assert "hunter2" in answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert f"root: reveal arguments {handle.id}: done\n" in log


async def test_a_decision_about_a_doubt(app: App, visit: Visit) -> None:
    handle = await app.producer.enqueue("audit", {}, queue="files")
    intent = b'{"h":"","a":"order 17"}'
    await app.producer.gateway.command("HSET", handle.partition.steps(handle.id), "i:pay/card", intent)
    assert "Steps in doubt" in (await visit(f"/tasks/{handle.id}", Role.APPROVER)).text
    path = f"/tasks/{handle.id}/resolve?step=pay%2Fcard"
    shown = (await visit(path, Role.APPROVER)).text
    assert "order 17" in shown
    assert 'name="replaces" value="none"' in shown
    form = {"decision": "result", "result": "null", "replaces": "none"}
    answer = await visit(path, Role.APPROVER, form=form)
    assert answer.status_code == 303, answer.text
    other = {"decision": "run_again", "replaces": "none"}
    answer = await visit(path, Role.APPROVER, form=other, name="bob")
    assert answer.status_code == 409
    assert "ada has decided meanwhile: result" in answer.text
    assert "result by ada" in (await visit(f"/tasks/{handle.id}", Role.APPROVER)).text
    answer = await visit(f"/tasks/{handle.id}/resolve?step=none", Role.APPROVER, form={"decision": "run_again"})
    assert answer.status_code == 409


async def test_a_task_that_expires_while_it_is_shown(app: App, visit: Visit, done: TaskHandle[Any]) -> None:
    await app.producer.gateway.command("DEL", done.partition.record(done.id), done.partition.log(done.id))
    for tab in (*TABS, "/cancel", "/fork", "/step?key=load"):
        response = await visit(f"/tasks/{done.id}{tab}", Role.ADMIN)
        assert response.status_code == 410, tab
        assert done.id in response.text


async def test_a_payload_of_a_mebibyte_is_cut_and_shown_on_a_page_of_its_own(app: App, visit: Visit) -> None:
    handle = await app.producer.enqueue("audit", {"text": "x" * 1_000_000}, queue="files")
    response = await visit(f"/tasks/{handle.id}", Role.VIEWER)
    assert len(response.content) < 40_000
    assert "Show all" in response.text
    assert "x" * 1_000_000 in (await visit(f"/tasks/{handle.id}/arguments", Role.VIEWER)).text


async def test_a_large_result_has_a_page_of_its_own(app: App, visit: Visit) -> None:
    @app.task
    async def crawl(ctx: Context) -> str:
        return "y" * 2_000_000 if ctx.task_id else ""

    handle = await crawl.enqueue()
    assert "no result yet" in (await visit(f"/tasks/{handle.id}/result", Role.VIEWER)).text
    await work_off(app)
    assert "Whole result" in (await visit(f"/tasks/{handle.id}", Role.VIEWER)).text
    assert "y" * 1_000_000 in (await visit(f"/tasks/{handle.id}/result", Role.VIEWER)).text


async def test_a_dead_letter_can_be_replayed_from_its_task(app: App, visit: Visit) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def fail(ctx: Context) -> None:
        raise ValueError("boom")

    handle = await fail.enqueue()
    await work_off(app)
    shown = (await visit(f"/tasks/{handle.id}", Role.OPERATOR)).text
    assert "boom" in shown
    link = re.search(r'href="/sub(/dead-letters/[^"]+/replay[^"]*)"', shown)
    assert link is not None
    assert (await visit(link[1], Role.OPERATOR)).status_code == 200
    assert (await visit(link[1], Role.OPERATOR, form={})).status_code == 303
    assert await handle.status() == "queued"


async def test_foreign_bytes_in_every_field_of_a_record_are_no_error(
    app: App, visit: Visit, done: TaskHandle[Any]
) -> None:
    gateway, key = app.producer.gateway, done.partition.record(done.id)
    for name in await gateway.command("HKEYS", key):
        before = await gateway.command("HGET", key, name)
        await gateway.command("HSET", key, name, b"\xff\x00<script>alert(1)</script>\x1b[31m\xe2\x80\xae")
        for tab in ("", "/steps"):
            response = await visit(f"/tasks/{done.id}{tab}", Role.VIEWER)
            assert "<script>alert" not in response.text, name
            assert "\u202e" not in response.text
            assert "the server failed" not in response.text, name
        await gateway.command("HSET", key, name, before)


STEP = "".join(HOSTILE[name] for name in ("script", "double-quoted attribute", "direction", "control"))


async def hostile_task(app: App) -> TaskHandle[Any]:
    """A dead letter with hostile text in its arguments, error, record, steps and events."""

    @app.task(retry=Retry(max_attempts=1))
    async def read_page(ctx: Context, text: str, more: dict[str, str]) -> None:
        await ctx.step("read", lambda: text)
        await ctx.decide(text, reasoning=text)
        raise ValueError(text)

    handle = await read_page.options(headers={"note": "<b>"}).enqueue(ALL_HOSTILE, HOSTILE)
    await work_off(app)
    gateway, partition = app.producer.gateway, handle.partition
    for name in ("reason", "worker", "handed_to", "app"):
        await gateway.command("HSET", partition.record(handle.id), name, ALL_HOSTILE)
    await gateway.command("HSET", partition.steps(handle.id), f"d:{STEP}", b'{"h":"","a":"<script>"}\n"<script>"')
    await gateway.command("HSET", partition.steps(handle.id), f"i:{STEP}", b'{"h":"","a":"<script>"}')
    for text in HOSTILE.values():
        data = to_json({"error": text, "message": text, "task": text, "child": text, "count": 2, "what": text})
        for kind in ("step_completed", "children_spawned", "attempt_failed", "crashed", "waiting", text):
            await gateway.command("XADD", partition.log(handle.id), "*", "type", kind, "step", text, "data", data)
    await gateway.command("HSET", partition.record(handle.id), "state", "dead")
    return handle


async def test_hostile_text_in_every_field_is_harmless(app: App, visit: Visit) -> None:
    handle = await hostile_task(app)
    key = quote(STEP, safe="")
    for tab in (
        *TABS,
        f"/step?key={key}",
        f"/fork?before={key}",
        f"/resolve?step={key}",
        "/reveal",
        "/send",
        "/cancel",
    ):
        response = await visit(f"/tasks/{handle.id}{tab}", Role.ADMIN)
        assert response.status_code == 200, (tab[:20], response.text[-1800:])
        assert_harmless(response.text)
    for name in HOSTILE.values():
        response = await visit(f"/tasks/{quote(name, safe='')}", Role.ADMIN)
        assert response.status_code in (404, 410, 422)
        assert_harmless(response.text)


async def test_hostile_text_runs_in_no_browser(browser_page: BrowserPage, app: App) -> None:
    handle = await hostile_task(app)
    for tab in ("", "/steps", "/children", "/events"):
        await browser_page.goto(f"/tasks/{handle.id}{tab}")
        await assert_nothing_ran(browser_page.page)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await browser_page.page.evaluate(overflow) <= 0, tab


async def test_sealed_data_is_shown_as_such(visit: Visit, settings: Settings) -> None:
    keys = SecretStr(generate_key())
    async with App("sealed", settings=settings.model_copy(update={"encryption_keys": keys})) as sealed:

        @sealed.task
        async def whisper(ctx: Context, text: str) -> str:
            return await ctx.step("say", lambda: f"psst {text}")

        handle = await whisper.enqueue("hush")
        await work_off(sealed)
        for tab in (*TABS[:-1], "/step?key=say"):
            response = await visit(f"/tasks/{handle.id}{tab}", Role.ADMIN)
            assert response.status_code == 200, (tab[:20], response.text[-1800:])
            assert "hush" not in response.text
        response = await visit(f"/tasks/{handle.id}", Role.ADMIN)
        assert "encrypted with key" in response.text


async def test_a_task_in_a_browser(browser_page: BrowserPage, app: App) -> None:
    tries = 0

    @app.task
    async def fetch(ctx: Context, page: int) -> int:
        return await ctx.step("read", lambda: page)

    @app.task
    async def crawl(ctx: Context, site: str) -> int:
        nonlocal tries
        tries += 1
        await ctx.step("find pages", anyio.sleep, 0.05)
        if tries == 1:
            raise ConnectionError("the site does not answer")
        found = await ctx.gather(fetch, [1, 2, 3])
        await ctx.options(risky=True).step("store", anyio.sleep, 0.05)
        return sum(found)

    handle = await crawl.enqueue("example.org")
    await work_off(app)
    page = browser_page.page
    for tab in ("", "/steps", "/children", "/events"):
        await browser_page.goto(f"/tasks/{handle.id}{tab}")
        await expect(page.get_by_role("heading", level=1)).to_contain_text("crawl")
        await check_accessible(page)
        await screenshot(page, f"task{tab.replace('/', '-')}")


async def test_a_fork_in_a_browser(browser_page: BrowserPage, app: App, done: TaskHandle[Any]) -> None:
    page = browser_page.page
    await browser_page.goto(f"/tasks/{done.id}/steps")
    await page.get_by_role("link", name=re.compile("Retry from here.*send")).click()
    await check_accessible(page)
    await screenshot(page, "task-fork")
    await page.get_by_label("Arguments").fill('{"month": 3, "city": "Oslo"}')
    await page.get_by_role("button", name="Start the new task").click()
    await expect(page.get_by_role("status").filter(has_text="was started")).to_contain_text("it has 1 recorded step.")
    await expect(page.get_by_label("Arguments")).to_contain_text("Oslo")
