"""Where the server is: URLs, and what they may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from .errors import BadAddress

__all__ = ["Address"]

_SCHEMES = ("redis", "rediss", "unix")
_KNOWN = "redis://host:6379/0, rediss://..., unix:///path/to.sock, embedded: or embedded:/data/dir"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address: a URL for the Redis client, or the data directory of an embedded server."""

    url: str = ""
    directory: Path | None = None

    @classmethod
    def parse(cls, text: str, *, data_dir: Callable[[], Path]) -> Address:
        """Read a URL; `BadAddress` says what is wrong with it.

        `embedded:` without a path means the server in `data_dir()`, which is asked for in that case only.
        """
        text = text.strip()
        scheme, colon, rest = text.partition(":")
        if not colon:
            raise BadAddress(f"{text!r} is not a URL; known are {_KNOWN}")
        if scheme == "embedded":
            path = rest.removeprefix("//")
            return cls(directory=(Path(unquote(path)).expanduser() if path else data_dir()).absolute())
        if scheme not in _SCHEMES:
            raise BadAddress(f"unknown scheme {scheme!r} in {cls(text).shown!r}; known are {_KNOWN}")
        try:
            parts = urlsplit(text)
            _ = parts.port
        except ValueError as error:
            raise BadAddress(f"{cls(text).shown!r}: {error}") from None
        if scheme == "unix" and not parts.path:
            raise BadAddress(f"{cls(text).shown!r} names no socket: write unix:///path/to.sock")
        if scheme != "unix":
            _check_database(text, parts.path, parse_qs(parts.query))
        return cls(text)

    @property
    def embedded(self) -> bool:
        return self.directory is not None

    @property
    def shown(self) -> str:
        """The address as it may be printed: without its password."""
        if self.directory is not None:
            return f"embedded:{self.directory}"
        head, at, tail = self.url.rpartition("@")
        if not at:
            return self.url
        scheme, _, credentials = head.partition("://")
        user = credentials.partition(":")[0]
        return f"{scheme}://{user}:***@{tail}"


def _check_database(url: str, path: str, query: dict[str, list[str]]) -> None:
    database = query.get("db", [path.strip("/")])[0]
    if database and not database.isdigit():
        raise BadAddress(f"{Address(url).shown!r}: the database must be a number, not {database!r}")
