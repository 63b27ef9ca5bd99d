"""Quoting of foreign text: step results, messages, memories, names of files, in prompts and in Markdown.

Foreign text is data. It must not end the line, list item or block that contains it, and must not start structure of
its own: a heading, list, fence, HTML, link, or the marker of a role.

| function | result | place |
|---|---|---|
| `quoted_line` | one line | a list item, or a part of a line |
| `quoted_name` | one line, as a code span | keys, ids, names of files |
| `quoted_block` | a fenced block | text whose lines matter |
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any, Final

_START: Final = re.compile(
    r"""
    \#                                             # a heading
    | [-+*](?=\s|$) | \d{1,9}[.)](?=\s|$)          # a list item
    | ([-*_])\s{0,99}(?:\1\s{0,99}){2,999}$ | =+$  # a thematic break, the underline of a heading
    | ~{3} | > | \|                                # a fence, a quotation, a table
    | \[(?:[A-Za-z\s^]|\d+\s[a-z]|[^\]]*\]:)       # a marker such as "[message from", the definition of a link
    | !?(?:system|developer|user|human|assistant|model|tool|function|ai)\s*[:\uff1a]
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Beginnings of a line that start structure."""

_ROLE: Final = re.compile(r"\s*(?:system|developer|user|human|assistant)\s*[:\uff1a]", re.IGNORECASE)
"""Beginnings of a line in a block that look like the turn of a role."""

_SPECIAL: Final = re.compile(r"<(?=[|\uff5c])|\[(?=/?INST\])", re.IGNORECASE)
"""Beginnings of the tokens that delimit roles in the templates of models, such as `<|im_start|>`."""

_HTML: Final = re.compile(r"<(?=[A-Za-z/!?])")

_CUT: Final = "..."

_READ: Final = 8
"""Characters that are read for each character of the limit: the rest may be space."""


def quoted_line(value: Any, limit: int = 300, *, brief: bool = False) -> str:
    """Return a value as one line that starts no structure; as JSON if it is not a string.

    Args:
        limit: most characters of the value. A longer one is cut, with a note of its length.
        brief: whether three dots are note enough. A value that is longer by no more than them is not cut.
    """
    flat, note = _line(value, limit, brief)
    flat = _HTML.sub("&lt;", flat).replace("](", "] (")
    if "`" in flat and (flat.count("`") % 2 or "``" in flat):
        flat = flat.replace("`", "'")
    if _START.match(flat):
        flat = f"\\{flat}"
    return flat + note


def quoted_name(value: Any, limit: int = 200, *, brief: bool = False) -> str:
    """Return a name as a code span on one line, cut like a line."""
    flat, note = _line(value, limit, brief)
    fence = "`" * (_longest_run(flat) + 1)
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{flat}{space}{fence}{note}"


def quoted_block(value: Any, limit: int = 4000) -> str:
    """Return a value as a fenced block, whose fence is longer than any in it; as indented JSON if it is not a string.

    Args:
        limit: most characters of the value. A longer one is cut, with a note of its length.
    """
    text = _text(value, indent=2)
    note = _note(text) if len(text) > limit else ""
    body = "\n".join(_block_line(line) for line in _visible(text[:limit]).splitlines())
    fence = "`" * max(3, _longest_run(body) + 1)
    return f"{fence}text\n{body}{note}\n{fence}"


def _line(value: Any, limit: int, brief: bool) -> tuple[str, str]:
    """Return a value as one line within the limit, and the note of what is cut."""
    text = _text(value)
    flat = " ".join(_visible(text[: _READ * limit]).split())
    if len(flat) <= limit + len(_CUT) * brief and len(text) <= _READ * limit:
        limit, note = len(flat), ""
    else:
        note = _CUT if brief else _note(text)
    return _SPECIAL.sub(r"\g<0> ", flat[:limit].rstrip()) or "(empty)", note


def _text(value: Any, indent: int | None = None) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True, indent=indent)


def _block_line(line: str) -> str:
    line = _SPECIAL.sub(r"\g<0> ", line)
    return f"\\{line}" if _ROLE.match(line) else line


def _visible(text: str) -> str:
    """Return the text without control characters, invisible ones and those of private use."""
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char in "\n\t\u200c\u200d":  # the last two are invisible, but scripts and emoji need them
        return char
    match unicodedata.category(char):
        case "Zl" | "Zp":
            return "\n"
        case "Cc":
            return "\n" if char.isspace() else ""
        case "Cf" | "Co":
            return ""
        case "Cs":  # half of a character: it has no form in UTF-8
            return "\ufffd"
    return char


def _note(text: str) -> str:
    return f"... ({len(text):,} characters in all)"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
