"""Templates: the environment, and the filters of text, JSON, times, durations and sizes.

All text is escaped for HTML, and characters that a browser interprets or hides are shown as escapes such as `\\u202e`:
text from tasks is untrusted. `exact` leaves them as they are, for fields of forms, whose values are sent back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from ...queues.wording import counted, duration, iso_time, shown_time
from ..shown_text import clean, clean_json, encode

_FOLDER: Final = Path(__file__).parent

STATIC: Final = _FOLDER / "static"

LONGEST: Final = 4_000
"""Characters of a value that are shown before it is cut."""


def _finalize(value: Any) -> Any:
    """Return what a template shows of a value: nothing for None, and clean text."""
    if value is None:
        return ""
    return value if isinstance(value, Markup) else clean(str(value))


def exact(value: Any) -> Markup:
    """Return text for the value of a field of a form: escaped for HTML only."""
    text = "" if value is None else str(value)
    return escape(text.encode("utf-8", "replace").decode())


def json_text(value: Any) -> str:
    """Return data as indented JSON in which hidden characters are escapes; integers of any size stay exact."""
    return clean_json(encode(value, orjson.OPT_INDENT_2))


def json_line(value: Any) -> str:
    """Return data as JSON on one line."""
    return clean_json(encode(value))


def cut(text: Any, limit: int = LONGEST) -> str:
    """Return the start of a text."""
    return str(text)[:limit]


def milliseconds(value: Any) -> int | None:
    """Return a time, as ISO 8601 or in milliseconds since the epoch, in milliseconds; None for none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    try:
        found = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


@pass_context
def when(context: Context, value: Any) -> Markup:
    """Return a time relative to that of Redis, with the absolute one as its title. Empty for None."""
    at = milliseconds(value)
    if at is None:
        return Markup("")
    now = context.get("now")
    absolute = shown_time(at)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        iso_time(at), absolute, absolute if now is None else _relative(at, now)
    )


def _relative(at: int, now: int) -> str:
    apart = now - at
    if abs(apart) < 1000:
        return "now"
    text = duration(abs(apart) / 1000, whole=True)
    return f"{text} ago" if apart > 0 else f"in {text}"


def lasting(seconds: Any) -> str:
    """Return a duration in seconds as text; empty for None."""
    return "" if seconds is None else duration(float(seconds), whole=float(seconds) >= 10)


def number(value: Any) -> str:
    """Return a number with separators of thousands; empty for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def size(octets: int | None) -> str:
    """Return a number of bytes as text; empty for None."""
    if octets is None:
        return ""
    if octets < 1024:
        return counted(octets, "byte")
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if octets >= factor:
            return f"{octets / factor:.1f} {unit}"
    raise AssertionError


def make_environment() -> Environment:
    """Return the environment of the templates. They may use no other filter to write HTML than those of this module."""
    found = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    found.filters.update(
        exact=exact,
        json_text=json_text,
        json_line=json_line,
        cut=cut,
        when=when,
        lasting=lasting,
        number=number,
        size=size,
        counted=counted,
    )
    found.globals.update(LONGEST=LONGEST)
    return found


_TEMPLATES: Final = make_environment()


def render(template: str, root: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template. root: path under which the dashboard is served."""
    shared: dict[str, Any] = {"request": None, "root": root, "static": partial(_static, root), "now": None}
    return _TEMPLATES.get_template(template).render(shared | dict(values))


def _static(root: str, name: str) -> str:
    """Return the path of a static file, which changes with its content."""
    return f"{root}/static/{name}?v={_version(name)}"


@cache
def _version(name: str) -> str:
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
