"""Hostile text, for every field that the dashboard shows: what must never become markup, script, link or template.

for text in HOSTILE: ...                 # or @EACH_HOSTILE_TEXT on a test with a parameter `hostile`
assert_harmless(response.text)           # HTML of a page that shows them
await assert_nothing_ran(page)           # a page in a browser
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

import pytest
from playwright.async_api import Page

MARK: Final = "hostile"
"""Name that hostile script sets on the window, and word that all texts have."""

HOSTILE: Final = {
    "script": f"<script>window.{MARK}=1</script>",
    "end of script": f"</script><script>window.{MARK}=1</script>",
    "image": f"<img src=x onerror=window.{MARK}=1>",
    "svg": f"<svg/onload=window.{MARK}=1>",
    "double-quoted attribute": f'" autofocus onfocus=window.{MARK}=1 x="',
    "single-quoted attribute": f"' onmouseover=window.{MARK}=1 x='",
    "unquoted attribute": f"x onmouseenter=window.{MARK}=1",
    "end of textarea": f"</textarea><script>window.{MARK}=1</script>",
    "end of title": f"</title><script>window.{MARK}=1</script>",
    "end of pre": f"</pre><iframe srcdoc='<script>parent.{MARK}=1</script>'></iframe>",
    "comment": f"--><script>window.{MARK}=1</script><!--",
    "end of the live part": f"<!-- end of live --><script>window.{MARK}=1</script>",
    "javascript link": f"javascript:window.{MARK}=1//",
    "data link": f"data:text/html,<script>opener.{MARK}=1</script>",
    "link in Markdown": f"[{MARK}](javascript:window.{MARK}=1)",
    "foreign form": f"<form action=https://example.com/{MARK}><button>",
    "base": f"<base href=https://example.com/{MARK}/>",
    "refresh": f'<meta http-equiv="refresh" content="0;url=https://example.com/{MARK}">',
    "style": f"<style>body{{background:url(https://example.com/{MARK})}}</style>",
    "htmx": f'<div hx-get="/sign-out" hx-trigger="load" hx-on:load="window.{MARK}=1"></div>',
    "server-sent event": f"\n\nevent: live\ndata: <script>window.{MARK}=1</script>\n\n",
    "template expression": f"{{{{ {MARK} }}}}{{{{ 'was' ~ 'rendered' }}}}",
    "template statement": f"{{% include 'sign_in.html' %}}{{# {MARK} #}}",
    "entities": f"&lt;script&gt;{MARK}&lt;/script&gt;&#x27;&quot;",
    "format": f"{MARK} {{0}} {{request}} %s %(x)s ${{x}}",
    "direction": f"\u202e{MARK}\u202c \u2066txt.exe\u2069 \u200f",
    "hidden": f"{MARK}\u200b\u00ad\ufeff\u2060\U000e0041",
    "control": f"\x00\x01\x07\x08\x0b\x0c\x1b[31m{MARK}\x7f\x85\x9b",
    "lines": f"{MARK}\r\nSet-Cookie: a=b\r\n\r\n\u2028\u2029",
    "surrogate": f"{MARK} \\ud800",
    "long word": MARK + "W" * 5_000,
    "path": f"../../{MARK}/..%2f..%2fsign-out?next=//example.com#x",
    "number": f"9007199254740993 1e999 -0 {MARK}",
    "spaces": f"  {MARK}   \t  ",
}
"""Texts by what they try."""

EACH_HOSTILE_TEXT: Final = pytest.mark.parametrize("hostile", list(HOSTILE.values()), ids=list(HOSTILE))

ALL_HOSTILE: Final = "\n".join(HOSTILE.values())
"""All of them in one text."""

_HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)

_ALLOWED_SCRIPTS = re.compile(r"[\w/.-]*/static/(vendor/)?[\w.-]+\.js\?v=\w+")


class _Parser(HTMLParser):
    """Collects what a browser would run, load or follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "script" and not _ALLOWED_SCRIPTS.fullmatch(values.get("src") or ""):
            self.found.append(f"<script> {attrs}")
        if tag in ("iframe", "object", "embed", "base", "style", "img") or (tag == "meta" and "http-equiv" in values):
            self.found.append(f"<{tag}> {attrs}")
        for name, value in attrs:
            if name.startswith(("on", "hx-on")) or name == "style":
                self.found.append(f"<{tag} {name}={value!r}>")
            if name in ("href", "src", "action", "formaction", "hx-get", "hx-post", "sse-connect") and (
                value is None or not value.startswith(("/", "#")) or value.startswith("//")
            ):
                self.found.append(f"<{tag} {name}={value!r}>")


def assert_harmless(html: str) -> None:
    """Fail if HTML of a page has a script, a handler, a foreign link, or a hidden character outside of its fields."""
    parser = _Parser()
    parser.feed(html)
    assert not parser.found, "\n".join(parser.found)
    shown = re.sub(r'<textarea[^>]*>.*?</textarea>| value="[^"]*"', "", html, flags=re.DOTALL)
    hidden = _HIDDEN.search(shown)
    assert hidden is None, f"{hidden[0]!r} in {shown[max(0, hidden.start() - 80) : hidden.end() + 20]!r}"
    assert "wasrendered" not in html, "a template in data was run"


async def assert_nothing_ran(page: Page) -> None:
    """Fail if hostile text ran as script in a page."""
    assert await page.evaluate(f"window.{MARK} === undefined"), "hostile text ran as script"
    assert await page.locator("main iframe, main base, main style, main script, main img").count() == 0
