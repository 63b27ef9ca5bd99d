"""URLs without their credentials, for messages, logs and reprs."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

_PARAMETER = re.compile(r"[?&\s][^=&?\s]*=")
_SECRET: Final = ("password", "passwd", "secret", "token", "key", "signature")
"""Endings of the names of parameters whose values are masked."""

_NO_PORT = re.compile(r"^([^\[\]:,]+):(?!\d*$).+$")
_HIDDEN: Final = "***"


def shown_url(url: str) -> str:
    """Return a URL without its passwords; any text that is no URL, but may hold one, without what may be it.

    A password may contain every character, since people forget to encode it: it ends at the last `@`.
    """
    url = "".join(text if secret is None else text + _HIDDEN for text, secret in _parameters(url))
    prefix = _scheme(url)
    credentials, at, rest = url[len(prefix) :].rpartition("@")
    if at and (prefix or ":" in credentials or "/" not in credentials):  # else the @ is in the path of a file
        user, colon, _ = credentials.partition(":")
        return f"{prefix}{user if colon and prefix else ''}:{_HIDDEN}@{rest}"
    if not prefix:
        return url
    hosts, mark, path = _split(rest)
    return prefix + ",".join(_NO_PORT.sub(rf"\1:{_HIDDEN}", host) for host in hosts.split(",")) + mark + path


def has_credentials(url: str) -> bool:
    """Return whether a URL holds a password."""
    return bool(url_secrets(url))


def url_secrets(url: str) -> list[str]:
    """Return the passwords of a URL, as they are written and decoded."""
    found = [secret for _, secret in _parameters(url) if secret]
    if prefix := _scheme(url):
        found.append(url[len(prefix) :].rpartition("@")[0].partition(":")[2])
    return [text for text in dict.fromkeys([*found, *map(unquote, found)]) if text]


def _parameters(url: str) -> list[tuple[str, str | None]]:
    """Split a URL after the names of secret parameters: each text, and the value that follows, None for the last."""
    if _scheme(url):
        return _parameters_of(url)
    (text, secret), *others = _parameters_of(f" {url}")  # words of the form name=value
    return [(text[1:], secret), *others]


def _parameters_of(url: str) -> list[tuple[str, str | None]]:
    parts: list[tuple[str, str | None]] = []
    at = 0
    for found in _PARAMETER.finditer(url):
        if found.start() >= at and unquote(found[0][1:-1]).lower().endswith(_SECRET):
            end = url.find("&", found.end())
            end = len(url) if end < 0 else end
            parts.append((url[at : found.end()], url[found.end() : end]))
            at = end
    return [*parts, (url[at:], None)]


def _scheme(url: str) -> str:
    """Return the beginning of a URL up to `://`; empty for any other text."""
    name, mark, _ = url.partition("://")
    valid = name[:1].isalpha() and name.isascii() and all(char.isalnum() or char in "+.:-" for char in name)
    return name + mark if mark and valid else ""


def _split(rest: str) -> tuple[str, str, str]:
    place = re.search(r"[/?]", rest)
    return (rest, "", "") if place is None else (rest[: place.start()], place[0], rest[place.end() :])
