"""Actions: the page that says what will happen, its form, the act, and who may take it."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from perdure import App
from perdure.web import Role, User
from perdure.worker.dashboard import actions
from perdure.worker.dashboard.actions import Action, FormField, action
from perdure.worker.dashboard.application import application
from perdure.worker.dashboard.page import PageRequest
from perdure.worker.web.binding import parse_form
from perdure.worker.web.operation import Call, Inputs, ResultModel, operation
from perdure.worker.web.problems import Problem
from perdure.worker.web.service import Service
from playwright.async_api import expect
from pydantic import Field

from tests.support.browser import check_accessible
from tests.support.hostile_text import ALL_HOSTILE, assert_harmless, assert_nothing_ran

from .conftest import HOST, BrowserPage, Visit, user_of


class PaintInputs(Inputs):
    thing: str
    colour: str = Field(max_length=2_000_000)
    coats: int = Field(default=1, ge=1, le=3)
    data: dict[str, Any] = Field(default={})
    rooms: list[str] = Field(default=[])
    wet: bool = False


class PaintedView(ResultModel):
    thing: str


@pytest.fixture(autouse=True)
def painted(own_pages: None) -> list[PaintInputs]:
    """Calls of an operation that an action of this test takes."""
    calls: list[PaintInputs] = []

    @operation("POST", "/things/{thing}/paint", roles=[Role.OPERATOR], changes=True)
    async def paint(call: Call, given: PaintInputs) -> PaintedView:
        """Paint a thing."""
        if given.colour == "plaid":
            raise Problem(409, "no-colour", "plaid is no colour: choose another")
        calls.append(given)
        return PaintedView(thing=given.thing)

    @action("/things/{thing}/paint", paint, title="Paint a thing", nav="Overview")
    async def paint_thing(request: PageRequest) -> Action:
        thing = request.path["thing"]
        return Action(
            f"The thing {thing} gets a colour.",
            button="Paint",
            inputs=request.path,
            fields=[
                FormField("colour", "Colour", required=True, help="A word."),
                FormField("coats", "Coats", "number", 1),
                FormField("data", "Data", "json", "{}"),
                FormField("rooms", "Rooms", "several", [], [("a", "Room A"), ("b", "Room B")]),
                FormField("wet", "Wet", "checkbox"),
            ],
            then=request.url("overview"),
            done=lambda result: f"{result.thing} is painted.",
        )

    return calls


async def test_the_page_says_what_will_happen_and_changes_nothing(visit: Visit, painted: list[PaintInputs]) -> None:
    response = await visit("/things/door/paint", Role.OPERATOR)
    assert response.status_code == 200
    assert "The thing door gets a colour." in response.text
    assert not painted


async def test_an_act_is_done_once_with_a_notice_and_an_audit_line(
    visit: Visit, painted: list[PaintInputs], log: list[str]
) -> None:
    form = {"colour": "red", "coats": "2", "data": '{"n": 9007199254740993}', "rooms": ["a", "b"], "wet": "true"}
    response = await visit("/things/door/paint", Role.OPERATOR, form=form)
    assert (response.status_code, response.headers["location"]) == (303, "/sub/")
    assert painted == [
        PaintInputs(thing="door", colour="red", coats=2, data={"n": 2**53 + 1}, rooms=["a", "b"], wet=True)
    ]
    assert "ada: paint door: done\n" in log
    assert '<p class="notice" role="status">door is painted.</p>' in (await visit("/", Role.OPERATOR)).text
    assert "door is painted." not in (await visit("/", Role.OPERATOR)).text, "a notice is shown once"


async def test_empty_fields_leave_the_defaults(visit: Visit, painted: list[PaintInputs]) -> None:
    await visit("/things/door/paint", Role.OPERATOR, form={"colour": "red", "coats": " ", "data": ""})
    assert painted == [PaintInputs(thing="door", colour="red")]


async def test_a_form_changes_no_input_of_the_path(visit: Visit, painted: list[PaintInputs]) -> None:
    await visit("/things/door/paint", Role.OPERATOR, form={"colour": "red", "thing": "roof", "unknown": "1"})
    assert [given.thing for given in painted] == ["door"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"colour": "red", "coats": "9"}, "less than or equal to 3"),
        ({"colour": "red", "coats": "many"}, "valid integer"),
        ({"coats": "1"}, "Field required"),
        ({"colour": "red", "data": "{"}, "must be JSON"),
        ({"colour": "red", "data": "[1]"}, "valid dictionary"),
        ({"colour": "red", "data": "NaN"}, "must be JSON"),
    ],
    ids=["too large", "no number", "missing", "no JSON", "no object", "no number of JSON"],
)
async def test_an_invalid_field_is_marked_and_keeps_its_value(
    visit: Visit, painted: list[PaintInputs], form: dict[str, str], message: str
) -> None:
    response = await visit("/things/door/paint", Role.OPERATOR, form=form)
    assert response.status_code == 422
    assert re.search(f'<span class="error"[^>]*>[^<]*{message}', response.text)
    assert "Nothing was done" in response.text
    for value in form.values():
        assert f'value="{value}"' in response.text or f"\n{value}</textarea>" in response.text
    assert not painted


async def test_a_refused_act_is_explained_on_its_page(visit: Visit, painted: list[PaintInputs]) -> None:
    response = await visit("/things/door/paint", Role.OPERATOR, form={"colour": "plaid"})
    assert response.status_code == 409
    assert "plaid is no colour: choose another" in response.text
    assert 'value="plaid"' in response.text
    assert not painted


async def test_an_act_needs_the_role_of_its_operation(visit: Visit, painted: list[PaintInputs]) -> None:
    for form in (None, {"colour": "red"}):
        response = await visit("/things/door/paint", Role.VIEWER, form=form)
        assert response.status_code == 403
        assert "must have the role operator" in response.text
    assert not painted


async def test_a_read_only_dashboard_takes_no_act(app: App, painted: list[PaintInputs]) -> None:
    site = application(Service(app, authenticate=user_of), actions=False)
    headers = {"x-user": "ada", "x-roles": "admin", "sec-fetch-site": "same-origin"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(site), base_url=f"http://{HOST}", headers=headers
    ) as client:
        for response in (
            await client.get("/things/a/paint"),
            await client.post("/things/a/paint", data={"colour": "r"}),
        ):
            assert response.status_code == 403
            assert "this dashboard is read-only: start it with --actions" in response.text
        assert "read-only" in (await client.get("/")).text
    assert not painted


async def test_an_act_of_another_site_is_refused(visit: Visit, painted: list[PaintInputs]) -> None:
    response = await visit("/things/door/paint", Role.OPERATOR, form={"colour": "red"}, sec_fetch_site="cross-site")
    assert response.status_code == 403
    assert not painted


async def test_large_forms_are_bounded(
    visit: Visit, painted: list[PaintInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = await visit("/things/door/paint", Role.OPERATOR, form={"colour": "x" * 1_000_000})
    assert large.status_code == 303, "a value of a megabyte fits"
    monkeypatch.setattr(actions, "_MAX_FORM", 100_000)
    larger = await visit("/things/door/paint", Role.OPERATOR, form={"colour": "x" * 100_000})
    assert larger.status_code == 413
    many = await visit("/things/door/paint", Role.OPERATOR, form={f"f{number}": "" for number in range(6_000)})
    assert many.status_code == 422
    assert len(painted) == 1


async def test_a_body_that_is_no_form_names_the_missing_field(visit: Visit) -> None:
    assert parse_form(b"\xff\x00=&&;&a") == {"\ufffd\x00": [""], ";": [""], "a": [""]}
    assert (await visit("/things/door/paint", Role.OPERATOR, form={"\x00": "\xff"})).status_code == 422


async def test_hostile_values_of_an_act_are_text(visit: Visit) -> None:
    for form in ({"colour": ALL_HOSTILE, "coats": "9"}, {"colour": ALL_HOSTILE, "data": ALL_HOSTILE}):
        response = await visit("/things/<script>/paint", Role.OPERATOR, form=form)
        assert response.status_code == 422
        assert_harmless(response.text)


async def test_an_act_in_a_browser(browser_page: BrowserPage, painted: list[PaintInputs]) -> None:
    page = browser_page.page
    browser_page.expected.append("status of 422")
    await browser_page.goto("/things/door/paint")
    await check_accessible(page)
    await page.get_by_label("Colour").fill("red")
    await page.get_by_label("Coats").fill("9")
    await page.get_by_label("Room B").check()
    await page.get_by_role("button", name="Paint").click()
    await expect(page.get_by_text("correct the marked fields")).to_be_visible()
    await expect(page.get_by_label("Coats")).to_have_attribute("aria-invalid", "true")
    await check_accessible(page)
    await page.get_by_label("Coats").fill("3")
    await page.get_by_role("button", name="Paint").click()
    await expect(page.get_by_role("status").filter(has_text="door is painted.")).to_be_visible()
    assert painted == [PaintInputs(thing="door", colour="red", coats=3, rooms=["b"])]
    await assert_nothing_ran(page)


async def test_an_act_is_not_offered_to_a_user_who_may_not_take_it(browser_page: BrowserPage) -> None:
    browser_page.dashboard.user = User("eve", [Role.VIEWER])
    browser_page.expected.append("status of 403")
    response = await browser_page.goto("/things/door/paint")
    assert response.status == 403
    await check_accessible(browser_page.page)
