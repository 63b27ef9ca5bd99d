"""Escapes of the characters that a terminal or a browser interprets or hides.

Text from tasks is untrusted: it could change the title of a terminal, overwrite lines, or show words in another order
than they are in. This module imports little, since errors of the command line use it too.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

_HIDDEN: Final = (
    "\x7f-\x9f"  # DEL and C1
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0"  # without a width
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"  # zero width, separators, direction of text
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"  # tags and variation selectors
    "\ud800-\udfff"  # surrogates, which no encoding has
)
"""Characters beyond ASCII that a terminal interprets or does not show."""

_IN_TEXT = re.compile(rf"[\x00-\x08\x0b-\x1f{_HIDDEN}]")


def clean(text: str) -> str:
    """Escape control characters, except line breaks and tabs, and characters that change or hide text."""
    return _IN_TEXT.sub(_escaped, text)


def clean_json(text: str) -> str:
    r"""Escape the same characters of JSON as \uXXXX, which are the same value for a parser."""
    return _IN_TEXT.sub(_escaped_in_json, text)


def encode(data: Any, option: int = 0) -> str:
    """Return any data that was read from JSON as JSON: orjson refuses integers of more than 64 bits."""
    try:
        return orjson.dumps(data, option=option).decode()
    except orjson.JSONEncodeError:
        indent = 2 if option & orjson.OPT_INDENT_2 else None
        return json.dumps(data, ensure_ascii=False, indent=indent, separators=None if indent else (",", ":"))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped_in_json(found: re.Match[str]) -> str:
    data = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at]:02x}{data[at + 1]:02x}" for at in range(0, len(data), 2))
