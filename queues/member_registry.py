"""Registries: sorted sets of members, such as workers and apps, each with an entry that expires.

Other programs may write into them. What no part of Perdure wrote is left out and named, and however much that is, a
bounded number of members is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

from .errors import Refused, ServerFull, WrongType
from .junk import report_once, shown_bytes, split
from .keys import LEFT_TTL_MS
from .transport.gateway import Gateway
from .transport.pipelining import Argument, Command
from .transport.scripts import milliseconds, pairs

T = TypeVar("T")

_PAGE: Final = 1000
_PAGES: Final = 30
"""Members that are read at once, and how often."""

AHEAD_MS: Final = 86_400_000
"""Milliseconds after the clock of Redis beyond which a registration is not one of Perdure."""

_TRIMMED_PAGES: Final = 100
"""Pages of members that one call trims."""

_MAX_PROBLEMS: Final = 20
"""Most entries of other programs that are named."""


class MemberRegistry:
    """A registry, and the problems of the reads so far by the name of the member or key.

    Args:
        index: Key of the sorted set of members, by the time of their registration.
        entry_of: Returns the key of a member's entry; None for a member that no part of Perdure writes.
    """

    def __init__(
        self,
        gateway: Gateway,
        index: str,
        entry_of: Callable[[str], str | None],
        kind: Literal["hash", "string"] = "hash",
        problems: dict[str, str] | None = None,
    ) -> None:
        self.problems = {} if problems is None else problems
        self._gateway = gateway
        self._index = index
        self._entry_of = entry_of
        self._read = "HGETALL" if kind == "hash" else "GET"

    async def members(self, *, until: Argument | None = None, limit: int = _PAGE * _PAGES) -> list[str]:
        """Return the members, the latest first. until: latest time of a registration; None for `latest`."""
        until = await self.latest() if until is None else until
        found: list[str] = []
        for start in range(0, _PAGE * _PAGES, _PAGE):
            read = ("ZRANGE", self._index, until, "-inf", "BYSCORE", "REV", "LIMIT", start, _PAGE)
            try:
                page = await self._gateway.command(*read)
            except WrongType as error:
                self.problems[self._index] = f"ignored: {error}"
                break
            good, foreign = split(page, self._is_member)
            found += good
            if foreign:
                self.problems[self._index] = f"members such as {shown_bytes(foreign[0])} are ignored"
            if len(page) < _PAGE or len(found) >= limit:
                break
        return found[:limit]

    async def latest(self) -> int:
        """Return the time in milliseconds after which nothing is registered: later members are of other programs."""
        return milliseconds(await self._gateway.command("TIME", node_of=self._index)) + AHEAD_MS

    async def read(self, decode: Callable[[str, Any, int], T], *, limit: int = _PAGE * _PAGES) -> list[T]:
        """Return the entries of the members, the latest first, without those that have expired or been withdrawn.

        Args:
            decode: Gets a member, its entry and the milliseconds of Redis' clock. An error that the data of another
                program causes is a problem of this member.
        """
        found: list[T] = []
        members = await self.members(limit=limit)
        for start in range(0, len(members), _PAGE):
            some = members[start : start + _PAGE]
            reads: list[Command] = [(self._read, str(self._entry_of(member))) for member in some]
            *entries, time = await self._gateway.pipeline_each([*reads, ("TIME",)], node_of=self._index)
            if isinstance(time, Refused):
                raise time
            for member, entry in zip(some, entries, strict=True):
                problem = None
                try:
                    if (known := self._entry(entry)) is not None:
                        found.append(decode(member, known, milliseconds(time)))
                except WrongType as error:
                    problem = f"ignored: {error}"
                except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
                    problem = "ignored: its registration cannot be read"
                if problem is not None and len(self.problems) < _MAX_PROBLEMS:
                    self.problems[member] = problem
        return found

    async def withdraw(self, member: str) -> None:
        """Remove a member for good: a registration that arrives late does not list it again.

        Its hash says for an hour that it has left. A full server refuses that.
        """
        entry = str(self._entry_of(member))
        with suppress(ServerFull):  # the other commands of the pipeline are executed
            await self._gateway.pipeline(
                [
                    ("ZREM", self._index, member),
                    ("DEL", entry),
                    ("HSET", entry, "left", 1),
                    ("PEXPIRE", entry, LEFT_TTL_MS),
                ]
            )

    async def trim(self) -> None:
        """Remove members that have no entry.

        Such a member was written by another program, or its entry has expired. A process that registers again meanwhile
        lists itself at its next registration.
        """
        start = 0
        for _ in range(_TRIMMED_PAGES):
            members: list[bytes] = await self._gateway.command("ZRANGE", self._index, start, start + _PAGE - 1)
            good, gone = split(members, self._is_member)
            if gone:
                shown = shown_bytes(gone[0])
                report_once(f"members of {self._index} are removed, which no part of Perdure wrote, such as {shown}")
            if good:
                exist = await self._gateway.pipeline([("EXISTS", str(self._entry_of(member))) for member in good])
                gone += [member.encode() for member, stored in zip(good, exist, strict=True) if not stored]
            if gone:
                await self._gateway.command("ZREM", self._index, *gone)
            start += len(members) - len(gone)
            if len(members) < _PAGE:
                break

    def _is_member(self, member: str) -> bool:
        return bool(member) and self._entry_of(member) is not None

    def _entry(self, reply: Any) -> Any:
        """Return the stored entry, or None. Raises the error of a refused read."""
        if isinstance(reply, Refused):
            raise reply
        if not isinstance(reply, list):
            return reply
        fields = pairs(reply)
        return fields if fields and b"left" not in fields else None


def report_problems(what: str, problems: Mapping[str, str]) -> None:
    """Log each problem of a registry once per process."""
    for name, problem in problems.items():
        report_once(f"{what}, {name}: {problem}")
