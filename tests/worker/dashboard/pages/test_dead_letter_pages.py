"""Dead letters in the dashboard: lists, one letter, replay, purge, and jobs over many."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Awaitable, Callable, Sequence

import pytest_asyncio
from perdure import App, Context, Retry
from perdure.web import Role
from perdure.worker.job_runner import JobRunner
from playwright.async_api import Page, expect
from pydantic import SecretStr

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, assert_harmless, assert_nothing_ran
from tests.support.workers import partition_of, redis_command, work_off
from tests.worker.dashboard.conftest import BrowserPage, Visit

Bury = Callable[..., Awaitable[list[str]]]


@pytest_asyncio.fixture(loop_scope="session")
async def bury(app: App) -> Bury:
    """`await bury(1, 2)` returns the ids of dead letters of these orders, in the order of their deaths."""

    @app.task(retry=Retry(max_attempts=1))
    async def charge(ctx: Context, order: int, card: SecretStr, note: str = "", fails: bool = True) -> int:
        await ctx.step("reserve stock", lambda: 1)
        if fails:
            raise ValueError(note or f"no order {order}")
        return order

    async def make(*orders: int, note: str = "") -> list[str]:
        found = [(await charge.enqueue(order, SecretStr("4111"), note)).id for order in orders]
        await work_off(app, concurrency=1)
        return found

    return make


async def states(app: App, ids: Sequence[str]) -> set[str]:
    handles = [await app.producer.find(task_id) for task_id in ids]
    return {str(await handle.status()) if handle else "gone" for handle in handles}


async def run(app: App, name: str) -> None:
    """Run a job in this process."""
    async for _ in JobRunner(app.producer, "test").run(name):
        pass


def hidden_fields(text: str) -> dict[str, str]:
    """Return the hidden fields of the form that changes something."""
    form = text.partition('method="post">')[2]
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', form)
    return {name: html.unescape(value) for name, value in found}


async def test_the_list_names_letters_without_secrets(bury: Bury, visit: Visit) -> None:
    ids = await bury(1, 2)
    response = await visit("/dead-letters", Role.VIEWER)
    assert response.status_code == 200
    assert response.text.index(ids[1]) < response.text.index(ids[0]), "the newest is the first"
    assert "no order 1" in response.text
    assert "4111" not in response.text
    assert "Purge all" not in response.text, "a viewer changes nothing"
    response = await visit("/dead-letters?search=no+order+1", Role.OPERATOR)
    assert ids[1] not in response.text
    assert "/sub/dead-letter-jobs/purge?search=no+order+1" in response.text


async def test_a_filter_that_is_refused_is_named(bury: Bury, visit: Visit) -> None:
    await bury(1)
    response = await visit("/dead-letters?queue=nowhere", Role.VIEWER)
    assert response.status_code == 422
    assert "there is no queue" in response.text
    for path in ("/dead-letter-jobs/purge", "/dead-letter-jobs/replay", "/dead-letter-export"):
        for query in ("since=soon", "tags=x", "group=zz"):
            response = await visit(f"{path}?{query}", Role.OPERATOR)
            assert response.status_code == 422, "an ignored filter would select more"


async def test_letters_are_grouped_by_cause(bury: Bury, visit: Visit) -> None:
    ids = await bury(1, 2)
    response = await visit("/dead-letter-groups", Role.OPERATOR)
    assert ids[1] in response.text
    assert ids[0] not in response.text
    group = re.search(r"/sub/dead-letters\?group=([0-9a-f]+)", response.text)
    assert group is not None
    assert ids[0] in (await visit(f"/dead-letters?group={group[1]}", Role.VIEWER)).text


async def test_a_letter_shows_its_cause_and_checkpoint(bury: Bury, visit: Visit) -> None:
    (task_id,) = await bury(7)
    response = await visit(f"/dead-letters/{task_id}", Role.VIEWER)
    assert response.status_code == 200
    for text in ("attempts_exhausted", "ValueError: no order 7", "reserve stock", "**********", "Traceback"):
        assert text in response.text
    assert "4111" not in response.text
    assert (await visit(f"/dead-letters/{task_id}/arguments", Role.VIEWER)).status_code == 200
    assert (await visit("/dead-letters/unknown", Role.VIEWER)).status_code == 404


async def test_a_letter_with_large_arguments_is_cut(bury: Bury, visit: Visit) -> None:
    (task_id,) = await bury(1, note="x" * 900_000)
    for path in ("/dead-letters", "/dead-letter-groups", f"/dead-letters/{task_id}", f"/dead-letters/{task_id}/replay"):
        response = await visit(path, Role.OPERATOR)
        assert response.status_code == 200
        assert len(response.content) < 100_000, path
    assert len((await visit(f"/dead-letters/{task_id}/arguments", Role.VIEWER)).content) > 900_000


async def test_hostile_text_is_harmless(bury: Bury, app: App, visit: Visit) -> None:
    (task_id,) = await bury(1, note=ALL_HOSTILE)
    fields = {b"id": ALL_HOSTILE.encode(), b"\xff<script>": b"\xfe<script>"}
    entry = await redis_command(
        app, "XADD", partition_of(app).dead, "*", *(part for pair in fields.items() for part in pair)
    )
    for letter in (task_id, f"entry-{entry.decode()}"):
        for path in ("", "/arguments", "/replay", "/purge"):
            assert_harmless((await visit(f"/dead-letters/{letter}{path}", Role.OPERATOR)).text)
    for path in ("/dead-letters", "/dead-letter-groups", "/dead-letter-jobs/replay", "/dead-letter-jobs/purge"):
        response = await visit(path, Role.OPERATOR)
        assert response.status_code == 200
        assert_harmless(response.text)


async def test_a_replay_is_confirmed_and_done_once(bury: Bury, app: App, visit: Visit) -> None:
    (task_id,) = await bury(1)
    path = f"/dead-letters/{task_id}/replay"
    shown = await visit(path, Role.OPERATOR)
    assert f"Task {task_id} (charge) goes back to queue shop." in shown.text
    assert await states(app, [task_id]) == {"dead"}, "a GET changes nothing"
    assert (await visit(path, Role.VIEWER, form={})).status_code == 403
    response = await visit(path, Role.OPERATOR, form={"args": json.dumps({"order": 1, "card": "**********"})})
    assert response.status_code == 303
    assert await states(app, [task_id]) == {"queued"}
    response = await visit(path, Role.OPERATOR, form={}, name="bob")
    assert response.status_code == 409
    assert "another user or command may have replayed it" in response.text


async def test_edited_arguments_are_checked_and_keep_the_secret(bury: Bury, app: App, visit: Visit) -> None:
    (task_id,) = await bury(1)
    path = f"/dead-letters/{task_id}/replay"
    for text, problem in (("{", "must be JSON"), ('{"order": "x"}', "order"), ("[]", "dict")):
        response = await visit(path, Role.OPERATOR, form={"args": text})
        assert response.status_code == 422
        assert problem in response.text
        assert html.escape(text) in response.text.replace("&#34;", "&quot;"), "the field keeps what was typed"
    assert await states(app, [task_id]) == {"dead"}
    large = 2**60 + 1
    given = {"order": large, "card": "**********", "fails": False}
    assert (await visit(path, Role.OPERATOR, form={"args": json.dumps(given)})).status_code == 303
    handle = await app.producer.find(task_id)
    assert handle is not None
    assert json.loads((await handle.record()).args or b"") == given | {"card": "4111"}


async def test_a_purge_is_confirmed(bury: Bury, app: App, visit: Visit) -> None:
    (task_id,) = await bury(1)
    path = f"/dead-letters/{task_id}/purge"
    assert "cannot be restored" in (await visit(path, Role.OPERATOR)).text
    assert (await visit(path, Role.OPERATOR, form={})).status_code == 303
    assert await states(app, [task_id]) == {"gone"}
    assert (await visit(path, Role.OPERATOR, form={})).status_code == 404


async def test_a_job_replays_what_its_form_has_shown(bury: Bury, app: App, visit: Visit) -> None:
    ids = await bury(1, 2)
    path = "/dead-letter-jobs/replay?search=no+order&edit=" + "%7B%22fails%22%3A+false%7D"
    shown = await visit(path, Role.OPERATOR)
    assert "A job replays 2 dead letters (2 attempts_exhausted). Changed arguments: fails." in shown.text
    assert "No worker runs now" in shown.text
    (later,) = await bury(3)
    response = await visit(path, Role.OPERATOR, form=hidden_fields(shown.text) | {"rate": "50", "why": "mended"})
    assert response.status_code == 303
    name = response.headers["location"].rpartition("/")[2]
    assert "no worker runs now" in (await visit(f"/jobs/{name}", Role.VIEWER)).text.lower()
    await run(app, name)
    await work_off(app)
    assert await states(app, ids) == {"succeeded"}
    assert await states(app, [later]) == {"dead"}, "it died after the form was shown"


async def test_a_preview_names_letters_whose_edited_arguments_do_not_fit(bury: Bury, visit: Visit) -> None:
    ids = await bury(1)
    shown = await visit("/dead-letter-jobs/replay?edit=%7B%22order%22%3A+%22x%22%7D", Role.OPERATOR)
    assert "1 dead letter would fail" in shown.text
    assert ids[0] in shown.text
    assert (await visit("/dead-letter-jobs/replay?edit=%7B", Role.OPERATOR)).status_code == 422
    assert (await visit("/dead-letter-jobs/replay?edit=1", Role.OPERATOR)).status_code == 422


async def test_a_job_purges_what_matches(bury: Bury, app: App, visit: Visit) -> None:
    ids = await bury(1, 2)
    path = "/dead-letter-jobs/purge?where=order%3D2"
    shown = await visit(path, Role.OPERATOR)
    assert "A job deletes 1 dead letter (1 attempts_exhausted)" in shown.text
    response = await visit(path, Role.OPERATOR, form=hidden_fields(shown.text))
    await run(app, response.headers["location"].rpartition("/")[2])
    assert (await states(app, ids[:1]), await states(app, ids[1:])) == ({"dead"}, {"gone"})


async def test_an_export_has_the_letters_that_match(bury: Bury, visit: Visit) -> None:
    ids = await bury(1, 2)
    response = await visit("/dead-letter-export?search=no+order+2", Role.VIEWER)
    assert "attachment" in response.headers["content-disposition"]
    assert [json.loads(line)["id"] for line in response.text.splitlines()] == ids[1:]


async def test_a_letter_is_edited_and_replayed_in_a_browser(browser_page: BrowserPage, bury: Bury) -> None:
    page, app = browser_page.page, browser_page.dashboard.app
    ids = await bury(1, 2)
    await browser_page.goto("/dead-letters")
    await check_accessible(page)
    await screenshot(page, "dead-letters")
    await page.get_by_role("link", name=ids[0]).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"Dead letter {ids[0]}")
    await check_accessible(page)
    await screenshot(page, "dead-letter")
    await page.get_by_role("link", name="Replay", exact=True).click()
    await check_accessible(page)
    await screenshot(page, "dead-letter-replay")
    field = page.get_by_label("Arguments")
    await field.fill('{"order": "one"}')
    await page.get_by_role("button", name="Replay").click()
    await expect(page.get_by_role("alert")).to_contain_text("Nothing was done")
    browser_page.expected.append("status of 422")
    await field.fill('{"order": 1, "card": "**********", "fails": false}')
    await page.get_by_role("button", name="Replay").click()
    await expect(page.get_by_role("status").filter(has_text="is replayed")).to_be_visible()
    assert (await states(app, ids[:1]), await states(app, ids[1:])) == ({"queued"}, {"dead"})


async def test_many_are_replayed_with_progress_in_a_browser(browser_page: BrowserPage, bury: Bury) -> None:
    page, app = browser_page.page, browser_page.dashboard.app
    await bury(1, 2, 3)
    await browser_page.goto("/dead-letter-groups")
    await check_accessible(page)
    await screenshot(page, "dead-letter-groups")
    await page.get_by_role("link", name="Replay the letters of").click()
    await page.get_by_text("How they are replayed").click()
    await page.get_by_label("Changed arguments").fill('{"fails": false}')
    await page.get_by_role("button", name="Preview").click()
    await expect(page.get_by_text("Changed arguments: fails.")).to_be_visible()
    await check_accessible(page)
    await screenshot(page, "dead-letters-replay")
    await page.get_by_label("Reason").fill("the stock is back")
    await page.get_by_role("button", name="Replay them").click()
    await check_progress(page, app)


async def check_progress(page: Page, app: App) -> None:
    """Run the job of a page, and expect that the page shows its end without being loaded again."""
    await expect(page.get_by_text("No worker runs now")).to_be_visible()
    await check_accessible(page)
    await run(app, page.url.rpartition("/")[2])
    await expect(page.get_by_role("progressbar")).to_have_attribute("value", "1.0")
    await expect(page.get_by_text("3 of 3")).to_be_visible()
    await screenshot(page, "job")


async def test_hostile_text_does_nothing_in_a_browser(browser_page: BrowserPage, bury: Bury) -> None:
    (task_id,) = await bury(1, note=ALL_HOSTILE)
    for path in ("/dead-letters", f"/dead-letters/{task_id}", f"/dead-letters/{task_id}/replay", "/dead-letter-groups"):
        await browser_page.goto(path)
        await assert_nothing_ran(browser_page.page)
