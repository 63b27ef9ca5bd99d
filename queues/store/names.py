"""Names of namespaces of the key-value store, and the list of them.

A namespace has a name of several parts, such as `("threads", "user-42")`. The list is one sorted set. A process adds a
name with its first change of the namespace, and again after a change that found it empty; a list removes the names of
those that it finds empty, and looks again after that. So a name that a list removes while another process fills the
namespace is added again, by the one or the other.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Final

from ..errors import Refused
from ..junk import report_once
from ..keys import KEY_FORMAT, Namespace
from ..partitions.resharding import read_schema
from ..runtime import RUNTIME
from ..transport.gateway import Gateway

MAX_PARTS: Final = 16
"""Most parts of the name of a namespace."""

MAX_PART: Final = 256
"""Most characters of a part."""

_PAGE: Final = 200
"""Names of a page of the list."""

_KNOWN: Final = 10_000
"""Names that a process remembers to have added."""

_CHECKED: Final = 60.0
"""Seconds after which the format of the deployment is read again."""

Name = tuple[str, ...]


def check_parts(parts: object) -> Name:
    """Return the name of a namespace. Raises `ValueError`."""
    name = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, list | tuple) else ()
    if not 1 <= len(name) <= MAX_PARTS or not all(map(_is_part, name)):
        raise ValueError(
            f"namespace of the store must be 1 to {MAX_PARTS} texts of 1 to {MAX_PART} characters without control "
            f"characters, got {parts!r}"
        )
    return name


def _is_part(part: object) -> bool:
    return (
        isinstance(part, str)
        and 1 <= len(part) <= MAX_PART
        and not any(
            character < " " or "\x7f" <= character < "\xa0" or "\ud800" <= character <= "\udfff" for character in part
        )
    )


def shown_name(name: Sequence[str]) -> str:
    """Return a name as people see and write it: `threads/user-42`. A `/` or `%` in a part is written as in a URL."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in name)


def read_name(text: str) -> Name:
    """Return the name that people write as `shown_name` does. Raises `ValueError`."""
    return check_parts([part.replace("%2F", "/").replace("%25", "%") for part in text.split("/")])


class StoreNames:
    """Names of the namespaces of a deployment."""

    def __init__(self, gateway: Gateway, namespace: Namespace) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._added: OrderedDict[Name, None] = OrderedDict()
        self._checked = -math.inf

    def is_added(self, name: Name) -> bool:
        """Return whether this process has added a name."""
        return name in self._added

    async def check(self) -> None:
        """Refuse a deployment that is being restored, or whose keys this version does not know. Raises `Refused`."""
        if RUNTIME.monotonic() - self._checked > _CHECKED:
            (await read_schema(self._gateway, self._namespace)).check(self._namespace)
            self._checked = RUNTIME.monotonic()

    async def add(self, name: Name) -> None:
        """Add a name to the list, and the format of its keys to a deployment that has no data yet."""
        if not self._added:
            await self._gateway.command("HSETNX", self._namespace.deployment, "format", KEY_FORMAT)
        await self._gateway.command("ZADD", self._namespace.stores, 0, _member(name))
        self._added[name] = None
        if len(self._added) > _KNOWN:
            self._added.popitem(last=False)

    async def list(self, prefix: Sequence[str] = (), *, after: Sequence[str] = ()) -> AsyncIterator[Name]:
        """Yield the namespaces that have entries, sorted by their parts.

        Args:
            prefix: the first parts of their names.
            after: name after which the list continues.
        """
        start = _member(check_parts(tuple(prefix))) if prefix else b""
        first = b"(" + _member(check_parts(tuple(after))) if after else b"[" + start
        while True:
            command = ("ZRANGEBYLEX", self._namespace.stores, first, b"(" + start + b"\xff", "LIMIT", 0, _PAGE)
            members: list[bytes] = await self._gateway.command(*command)
            readable = {member: name for member in members if (name := _name(member)) is not None}
            keys = [self._namespace.store(name) for name in readable.values()]
            there = await self._gateway.pipeline([("EXISTS", key.names) for key in keys])
            empty = [member for member, exists in zip(readable, there, strict=True) if not exists]
            if empty:
                with suppress(Refused):  # a user that only reads
                    await self._remove(empty)
            for name, exists in zip(readable.values(), there, strict=True):
                if exists:
                    yield name
                else:
                    self._added.pop(name, None)
            if len(members) < _PAGE:
                return
            first = b"(" + members[-1]

    async def _remove(self, members: Sequence[bytes]) -> None:
        """Remove namespaces that were empty, but for those that another process has filled since."""
        await self._gateway.command("ZREM", self._namespace.stores, *members)
        keys = [self._namespace.store(_name(member) or ()) for member in members]
        there = await self._gateway.pipeline([("EXISTS", key.names) for key in keys])
        for member, exists in zip(members, there, strict=True):
            if exists:
                await self._gateway.command("ZADD", self._namespace.stores, 0, member)


def _name(member: bytes) -> Name | None:
    """Return a listed name; None for what no version has written, which is reported once."""
    try:
        return check_parts(member.decode().rstrip("\0").split("\0"))
    except ValueError as error:
        report_once(f"a namespace of the key-value store is left out of lists: {member!r}: {error}")
        return None


def _member(name: Name) -> bytes:
    """Return a name as it is listed: each part ends with a zero byte, so that parts sort one after the other."""
    return b"".join(part.encode() + b"\0" for part in name)
