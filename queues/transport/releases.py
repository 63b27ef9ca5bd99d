"""Releases of Redis and Valkey with fixes that matter to a deployment: security, and loss of acknowledged data.

An entry names the first fixed release of each branch, as its source lists them. A branch that is not listed, and is
older than the newest listed one, has no fixed release. A release line that is not listed because the source is about
one branch only has `branches_only`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Version: TypeAlias = tuple[int, int, int]

Condition: TypeAlias = Literal["", "tls", "cluster", "append-only", "client-eviction"]
"""Feature that a server must use to be affected; empty: every server is."""


@dataclass(frozen=True, slots=True)
class FixedRelease:
    """A defect of servers, and the releases that fix it.

    Attributes:
        name: Identifier of the defect.
        text: What it allows or loses.
        fixed: First fixed release of each branch, by the kind of server.
        source: Page that says so.
        needs: Feature that a server must use to be affected.
        branches_only: Whether branches that are not listed are not judged.
    """

    name: str
    text: str
    fixed: Mapping[Literal["Redis", "Valkey"], Sequence[Version]]
    source: str
    needs: Condition = ""
    branches_only: bool = False

    def first_fixed(self, kind: str, version: Version) -> Version | None:
        """Return the release to upgrade to, None if the version is not affected.

        That is the fixed release of the same branch, else that of the next branch that has one.
        """
        releases = sorted(fixed for name, all_fixed in self.fixed.items() if name == kind for fixed in all_fixed)
        own = next((fixed for fixed in releases if fixed[:2] == version[:2]), None)
        if own is not None:
            return own if version < own else None
        return None if self.branches_only else next((fixed for fixed in releases if fixed > version), None)


FIXED_RELEASES: Final = (
    FixedRelease(
        "CVE-2025-49844",
        "a user who may run scripts of their own can run any code in the server",
        {
            "Redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
            "Valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
        },
        "https://redis.io/blog/security-advisory-cve-2025-49844/",
    ),
    FixedRelease(
        "CVE-2025-67733",
        "a user who may run scripts can forge replies to other clients of a shared connection",
        {"Valkey": ((7, 2, 12), (8, 0, 7), (8, 1, 6), (9, 0, 3))},
        "https://github.com/valkey-io/valkey/releases/tag/9.0.3",
    ),
    FixedRelease(
        "CVE-2026-63639",
        "a user who may load dumps of streams can run code in the server",
        {"Valkey": ((7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1))},
        "https://github.com/valkey-io/valkey/releases/tag/9.1.1",
    ),
    FixedRelease(
        "CVE-2026-56684",
        "a user who may end connections can crash the server, or run code in it",
        {"Valkey": ((7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1))},
        "https://github.com/valkey-io/valkey/releases/tag/9.1.1",
        needs="tls",
    ),
    FixedRelease(
        "CVE-2026-23479",
        "a user can run code in the server through a blocked command that is ended",
        {"Redis": ((7, 4, 9), (8, 2, 6), (8, 4, 3), (8, 6, 3))},
        "https://github.com/redis/docs/pull/3292/files",
        branches_only=True,
    ),
    FixedRelease(
        "CVE-2026-81934",
        "a client without a password can run code in the server",
        {
            "Redis": (
                *((6, 2, 24), (7, 2, 16), (7, 4, 11)),
                *((8, 2, 9), (8, 4, 6), (8, 6, 6), (8, 8, 2), (8, 10, 1)),
            )
        },
        "https://www.cve.org/CVERecord?id=CVE-2026-81934",
        needs="tls",
    ),
    FixedRelease(
        "valkey#4342",
        "after a power cut, writes that follow the recovery are lost at the next restart",
        {"Valkey": ((8, 0, 11), (8, 1, 10))},
        "https://github.com/valkey-io/valkey/releases/tag/8.1.10",
        needs="append-only",
        branches_only=True,
    ),
    FixedRelease(
        "GHSA-f4q9-j22m-xqq9",
        "a user who may publish can run code in another node of the cluster",
        {"Valkey": ((9, 1, 3),)},
        "https://github.com/valkey-io/valkey/releases/tag/9.1.3",
        needs="cluster",
        branches_only=True,
    ),
    FixedRelease(
        "CVE-2026-130822",
        "the server may crash when it ends a client that uses too much memory",
        {"Valkey": ((9, 1, 4),)},
        "https://github.com/valkey-io/valkey/releases/tag/9.1.4",
        needs="client-eviction",
        branches_only=True,
    ),
)
"""Known defects, the oldest first. State of November 2026."""


def missing_fixes(kind: str, version: Version, uses: Collection[Condition]) -> Iterator[tuple[FixedRelease, Version]]:
    """Yield the defects of a server, each with the release to upgrade to.

    Args:
        kind: `Redis` or `Valkey`; others are not judged.
        uses: Features that the server uses.
    """
    for defect in FIXED_RELEASES:
        fixed = defect.first_fixed(kind, version)
        if fixed is not None and (not defect.needs or defect.needs in uses):
            yield defect, fixed


def parse_version(text: str) -> Version | None:
    """Return a version of three numbers; None for any other text."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])
