"""Pages of questions: the list, what a question shows, answers, and links for people without an account."""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest_asyncio
from perdure import App, Context
from perdure.web import Role
from playwright.async_api import expect
from pydantic import BaseModel, Field

from tests.support.browser import check_accessible, screenshot
from tests.support.hostile_text import ALL_HOSTILE, assert_harmless, assert_nothing_ran
from tests.support.workers import work_off
from tests.worker.dashboard.conftest import BrowserPage, Visit


class Refund(BaseModel):
    approved: bool
    note: str = Field("", description="The customer reads it.")
    amount: int = Field(ge=1, description="Euros.")


Ask = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture(loop_scope="session")
async def ask(app: App) -> Ask:
    """Enqueue a task that asks for an approval of a call, and return its id when it waits."""

    @app.task
    async def refund(ctx: Context, order: str, hostile: str = "", amount: int = 2**60 + 1) -> Any:
        shown = {"tool": f"refund{hostile}", "arguments": {"order": order + hostile, "amount": amount}}
        why = f"Refund order {order}?{hostile}"
        answer = await ctx.wait_for(
            "approval", Refund, who=f"finance{hostile}", why=why, shows=shown, token=f"order:{order}"
        )
        return answer.model_dump()

    async def enqueue(order: str = "17", **given: Any) -> str:
        handle = await refund.enqueue(order, **given)
        await work_off(app)
        return handle.id

    return enqueue


def hidden_fields(text: str) -> dict[str, str]:
    """Return the hidden inputs of a form."""
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', text)
    return {name: html.unescape(value) for name, value in found}


async def test_the_list_leads_to_the_questions_of_a_task(visit: Visit, ask: Ask) -> None:
    task_id = await ask()
    page = await visit("/questions", Role.VIEWER)
    assert (page.status_code, "Refund order 17?" in page.text, "finance" in page.text) == (200, True, True)
    [path] = re.findall(rf'href="(/sub/questions/{task_id}[^"]*)"', page.text)
    task = await visit(f"/tasks/{task_id}", Role.APPROVER)
    assert ("Call that runs after an approval" in task.text, "Answer approval" in task.text) == (True, True)
    shown = await visit(html.unescape(path), Role.VIEWER)
    assert f"<code>{2**60 + 1}</code>" in shown.text, "the exact number"
    assert "Call that runs after an approval" in shown.text
    assert "/answer?" not in shown.text, "a viewer is offered no answer"
    assert (await visit("/questions?token=order:17", Role.VIEWER)).text.count(task_id) > 0
    assert (await visit("/questions?token=order:18", Role.VIEWER)).text.count(task_id) == 0


async def test_text_of_a_task_is_only_text(visit: Visit, ask: Ask) -> None:
    task_id = await ask(hostile=ALL_HOSTILE)
    for path in ("/questions", f"/questions/{task_id}", f"/questions/{task_id}/answer?wait=approval"):
        page = await visit(path, Role.APPROVER)
        assert page.status_code == 200
        assert_harmless(page.text)


async def test_a_form_answers_once_in_the_name_of_the_user(visit: Visit, app: App, ask: Ask) -> None:
    task_id = await ask()
    path = f"/questions/{task_id}/answer?wait=approval"
    first = hidden_fields((await visit(path, Role.APPROVER)).text)
    second = hidden_fields((await visit(path, Role.APPROVER)).text)
    wrong = await visit(path, Role.APPROVER, form=first | {"f0": "true", "f1": "kept", "f2": "0"})
    assert (wrong.status_code, "kept</textarea>" in wrong.text) == (422, True)
    sent = first | {"f0": "true", "f1": "", "f2": "9"}
    done = await visit(path, Role.APPROVER, form=sent, name="eve")
    assert (done.status_code, done.headers["location"]) == (303, "/sub/questions")
    for form in (sent, second | {"f0": "false", "f2": "1"}):
        late = await visit(path, Role.APPROVER, form=form, name="bob")
        assert late.status_code == 409
        assert f"&#39;eve&#39; has answered wait &#39;approval&#39; of task {task_id}" in late.text
    await work_off(app)
    assert "has answered wait" in (await visit(path, Role.APPROVER)).text, "the task has read the answer"
    handle = await app.producer.find(task_id)
    assert handle is not None
    assert await handle.result() == {"approved": True, "note": "", "amount": 9}
    assert [event.data["by"] async for event in handle.events() if event.type == "answered"] == ["eve"]


async def test_an_answer_is_void_if_the_call_changed_while_the_page_was_open(visit: Visit, app: App) -> None:
    amounts, attempt = [9, 90], {"number": 0}

    @app.task
    async def pay(ctx: Context) -> Any:
        shown = {"tool": "pay", "arguments": {"amount": amounts[attempt["number"]]}}
        return await ctx.wait_for("approval", bool, shows=shown)

    handle = await pay.enqueue()
    await work_off(app)
    path = f"/questions/{handle.id}/answer?wait=approval"
    opened = await visit(path, Role.APPROVER)
    assert "<code>9</code>" in opened.text
    attempt["number"] = 1
    await handle.answer("approval", True)  # for the first amount: the next run drops it and asks again
    await work_off(app)
    void = await visit(path, Role.APPROVER, form=hidden_fields(opened.text) | {"chosen": "true"})
    assert void.status_code == 409
    assert "asks another question now" in void.text
    assert "<code>90</code>" in void.text, "the call as it is now"
    [wait] = await handle.waits()
    assert not wait.answered
    again = await visit(path, Role.APPROVER, form=hidden_fields(void.text) | {"chosen": "true"})
    assert again.status_code == 303


async def test_pages_refuse_what_they_must(visit: Visit, ask: Ask) -> None:
    task_id = await ask()
    path = f"/questions/{task_id}/answer?wait=approval"
    assert (await visit(path, Role.OPERATOR)).status_code == 403
    form = hidden_fields((await visit(path, Role.APPROVER)).text) | {"f0": "true", "f2": "1"}
    foreign = await visit(path, Role.APPROVER, form=form, sec_fetch_site="cross-site")
    assert foreign.status_code == 403
    for wrong in (f"/questions/{task_id}/answer", f"/questions/{task_id}/answer?wait=other", "/questions/none/answer"):
        assert (await visit(wrong, Role.APPROVER)).status_code == 404
    assert (await visit("/questions/none", Role.VIEWER)).status_code == 404
    assert (await visit("/questions?cursor=x&limit=0&queue=a%20b", Role.VIEWER)).status_code in (200, 422)


async def test_a_link_is_made_and_shown_once(visit: Visit, ask: Ask) -> None:
    task_id = await ask()
    path = f"/questions/{task_id}/link?wait=approval"
    assert (await visit(path, Role.APPROVER)).status_code == 200
    wrong = await visit(path, Role.APPROVER, form={"person": "", "days": "x"})
    assert wrong.status_code == 422
    made = await visit(path, Role.APPROVER, form={"person": "carol", "days": "1"}, name="eve")
    [url] = re.findall(r'value="http://dashboard.test(/sub/answer/[^"]+)"', made.text)
    page = await visit(url)
    assert (page.status_code, "For carol, asked by eve" in page.text) == (200, True)
    answered = await visit(url, form={"f0": "true", "f2": "3"})
    assert (answered.status_code, "Your answer is stored, carol" in answered.text) == (200, True)
    assert "&#39;carol, by a link of eve&#39; has answered" in (await visit(path, Role.APPROVER)).text


async def test_a_question_is_answered_in_a_browser(browser_page: BrowserPage, ask: Ask) -> None:
    await ask(hostile=ALL_HOSTILE)
    task_id = await ask("18")
    page = browser_page.page
    await browser_page.goto("/questions")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Questions")
    await assert_nothing_ran(page)
    await check_accessible(page)
    await page.get_by_role("row", name="Refund order 18?").get_by_role("link", name="approval").click()
    await expect(page.get_by_role("table", name="Arguments of refund")).to_be_visible()
    await check_accessible(page)
    await page.get_by_role("link", name="Answer approval").click()
    await page.get_by_label("Amount").fill("0")
    await page.get_by_role("button", name="Answer").click()
    await expect(page.get_by_role("alert")).to_contain_text("correct the marked fields")
    browser_page.expected.append("status of 422")
    await check_accessible(page)
    await page.get_by_label("Approved").select_option("Yes")
    await page.get_by_label("Amount").fill("18")
    await page.get_by_role("button", name="Answer").click()
    await expect(page.get_by_role("status").filter(has_text="is stored")).to_be_visible()
    await expect(page.get_by_role("row", name="Refund order 18?")).to_contain_text("answered by ada")
    handle = await browser_page.dashboard.app.producer.find(task_id)
    assert handle is not None
    await work_off(browser_page.dashboard.app)
    assert (await handle.result())["amount"] == 18


async def test_a_person_without_an_account_answers_in_a_browser(browser_page: BrowserPage, ask: Ask) -> None:
    task_id = await ask("19")
    page = browser_page.page
    await browser_page.goto(f"/questions/{task_id}")
    await page.get_by_role("link", name="Make a link").click()
    await page.get_by_label("Person").fill("carol@example.com")
    await page.get_by_role("button", name="Make a link").click()
    url = await page.get_by_label("Link").input_value()
    await page.context.clear_cookies()
    await page.goto(url)
    await check_accessible(page)
    await page.get_by_label("Approved").select_option("No")
    await page.get_by_label("Amount").fill("1")
    await page.get_by_role("button", name="Answer").click()
    await expect(page.get_by_role("status")).to_contain_text("Your answer is stored, carol@example.com")
    await check_accessible(page)
    browser_page.expected.append("status of 409")
    await page.goto(url)
    await expect(page.get_by_role("alert")).to_contain_text("'carol@example.com, by a link of")


async def test_pictures_of_questions(browser_page: BrowserPage, ask: Ask) -> None:
    page = browser_page.page
    ids = [await ask(order, amount=90) for order in ("17", "18", "19")]
    await browser_page.goto("/questions")
    await expect(page.get_by_role("row", name="Refund order 17?")).to_be_visible()
    await screenshot(page, "questions")
    await browser_page.goto(f"/questions/{ids[-1]}/answer?wait=approval")
    await expect(page.get_by_role("table", name="Arguments of refund")).to_be_visible()
    await screenshot(page, "question")
