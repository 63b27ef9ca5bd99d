"""Rendering: hostile text in every part of a page, data as JSON, times, durations, sizes, and cut values."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import pytest
from jinja2 import DictLoader, UndefinedError
from perdure.web import Role
from perdure.worker.dashboard import rendering
from perdure.worker.dashboard.actions import FormField
from perdure.worker.dashboard.page import Html, PageRequest, page
from playwright.async_api import expect

from tests.support.browser import check_accessible
from tests.support.hostile_text import (
    ALL_HOSTILE,
    EACH_HOSTILE_TEXT,
    HOSTILE,
    MARK,
    assert_harmless,
    assert_nothing_ran,
)

from .conftest import BrowserPage, Visit

PARTS = """
{% extends "base.html" %}
{% from "macros.html" import facts, figure, filter_field, filters, form_field, json_value, long_text, pager, state,
   table, tabs with context %}
{% block heading %}{{ text }}{% endblock %}
{% block above %}
{{ tabs(text, [(text, url("all_parts", {"text": text}), true), (text, request.here(text=text), false)]) }}
{% call filters() %}
{{ filter_field("text", text, help=text) }}
{{ filter_field("other", "Other", [(text, text), ("b", "B")]) }}
{% endcall %}
{% endblock %}
{% block live %}
<dl class="figures">{{ figure(text, text, text) }}</dl>
{% call table(text, [text, (text, "number")], rows=[text]) %}
<tr><th scope="row"><a href="{{ url('one_part', key=text) }}">{{ text }}</a></th>
<td title="{{ text }}">{{ state(text) }}</td></tr>
{% endcall %}
{{ facts([(text, text), ("at", at|when), ("none", none)]) }}
{{ long_text(text, url("one_part", key=text), "All text") }}
{{ json_value({text: [text, 9007199254740993]}, "", "Data") }}
{{ pager(text, 3, 9) }}
{% endblock %}
{% block below %}
<form class="fields" method="post">
{% for field in fields %}{{ form_field(field, text) }}{% endfor %}
</form>
{% endblock %}
"""

PART = '{% extends "base.html" %}{% block live %}{{ text }}{% endblock %}'

FIELDS = ("text", "area", "json", "number", "checkbox", "choice", "several", "hidden")


def fields(text: str) -> list[FormField]:
    """Return a field of each kind with a text in all its parts."""
    return [FormField(f"a-{kind}", text, kind, text, [(text, text)], text) for kind in FIELDS]  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def parts(own_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that show a text of their query in all parts."""
    loader = rendering._TEMPLATES.loader
    monkeypatch.setattr(rendering._TEMPLATES, "loader", _Both(loader))

    @page("/parts", title="Parts", nav="Overview")
    async def all_parts(request: PageRequest) -> Html:
        text = request.request.query_params["text"]
        return request.render("parts.html", text=text, fields=fields(text), at=1_767_225_600_000)

    @page("/part/{key:path}", title="Part")
    async def one_part(request: PageRequest) -> Html:
        return request.render("part.html", text=request.path["key"])


class _Both(DictLoader):
    def __init__(self, others: Any) -> None:
        super().__init__({"parts.html": PARTS, "part.html": PART})
        self._others = others

    def get_source(self, environment: Any, template: str) -> Any:
        if template in self.mapping:
            return super().get_source(environment, template)
        return self._others.get_source(environment, template)


@EACH_HOSTILE_TEXT
async def test_hostile_text_is_text_in_every_part(visit: Visit, hostile: str) -> None:
    response = await visit("/parts", Role.ADMIN, params={"text": hostile})
    assert response.status_code == 200
    assert_harmless(response.text)
    assert MARK in response.text


async def test_hostile_text_does_not_run_in_a_browser(browser_page: BrowserPage) -> None:
    for hostile in (*HOSTILE.values(), ALL_HOSTILE):
        await browser_page.goto(f"/parts?{_query(hostile)}")
        await assert_nothing_ran(browser_page.page)
    await expect(browser_page.page.get_by_role("heading", level=1)).to_contain_text(MARK)


def _query(text: str) -> str:
    return urlencode({"text": text})


async def test_all_parts_are_accessible(browser_page: BrowserPage) -> None:
    await browser_page.goto(f"/parts?{_query('a plain text')}")
    await check_accessible(browser_page.page)


async def test_the_value_of_a_field_is_sent_back_as_it_is(browser_page: BrowserPage) -> None:
    text = "\n first line\u202e\u200d </textarea>\n\nlast line "
    await browser_page.goto(f"/parts?{_query(text)}")
    assert await browser_page.page.locator("#field-a-area").input_value() == text
    assert await browser_page.page.locator("#filter-text").input_value() == text.replace("\n", "")


async def test_a_path_with_any_text_leads_to_its_page(visit: Visit) -> None:
    for text in ("a/b?c#d", "50 %", "ü\u202e", "a//b"):
        response = await visit(f"/part/{quote(text, safe='/')}", Role.VIEWER)
        assert response.status_code == 200, text


def test_a_missing_value_of_a_template_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        rendering._TEMPLATES.from_string("{{ missing }}").render()


def shown(template: str, **values: Any) -> str:
    return rendering._TEMPLATES.from_string(template).render(values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**53 + 1, "9007199254740993"),
        (10**400, "1" + "0" * 400),
        ("\u202eabc", '"\\u202eabc"'),
        ({"a": [1, None]}, '{\n  "a": [\n    1,\n    null\n  ]\n}'),
        ("</script>", '"</script>"'),
    ],
    ids=["beyond 2^53", "400 digits", "direction", "nested", "markup"],
)
def test_data_is_shown_as_json(value: Any, text: str) -> None:
    assert rendering.json_text(value) == text


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (1_000_000, "now"),
        (1_000_500, "now"),
        (995_000, "5 s ago"),
        (700_000, "5 min ago"),
        (1_120_000, "in 2 min"),
        ("1970-01-01T00:11:40Z", "5 min ago"),
        ("1970-01-01T00:11:40.000", "5 min ago"),
        (None, ""),
        ("no time", ""),
        (True, ""),
    ],
)
def test_times_are_relative_with_the_absolute_one(at: Any, text: str) -> None:
    found = shown("{{ at|when }}", at=at, now=1_000_000)
    assert found == "" if not text else found.endswith(f">{text}</time>")
    if text == "5 min ago":
        assert found == ('<time datetime="1970-01-01T00:11:40.000Z" title="1970-01-01 00:11:40 UTC">5 min ago</time>')


def test_a_time_is_absolute_while_redis_is_away() -> None:
    assert ">1970-01-01 00:11:40 UTC<" in shown("{{ at|when }}", at=700_000, now=None)


def test_durations_sizes_and_numbers() -> None:
    assert shown("{{ 0.25|lasting }} {{ 90|lasting }} {{ none|lasting }}") == "250 ms 90 s "
    assert (
        shown("{{ 0|size }} {{ 1|size }} {{ 2048|size }} {{ (3 * 1024 ** 3)|size }}")
        == "0 bytes 1 byte 2.0 KiB 3.0 GiB"
    )
    assert shown("{{ 1234567|number }} {{ 1.25|number }} {{ none|number }}") == "1,234,567 1.2 "


def test_a_long_value_is_cut() -> None:
    template = '{% from "macros.html" import long_text %}{{ long_text(text, "/all", "Text") }}'
    found = shown(template, text="x" * 1_000_000)
    assert found.count("x") < 5_000
    assert '4,000 of 1,000,000 characters. <a href="/all">Show all</a>' in found
    assert "Show all" not in shown(template, text="x" * 4_000)
