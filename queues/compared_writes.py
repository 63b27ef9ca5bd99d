"""Compared writes: changes of a hash that succeed only if no other caller has changed it since it was read.

A hash that is changed so has a field `revision`, which each change raises. It may have an entry in the index of its
kind: a sorted set in the same hash slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from .runtime import RUNTIME
from .transport.gateway import Gateway
from .transport.pipelining import Argument
from .transport.scripts import queue_script

_WRITE: Final = queue_script("write_compared")

Change = Mapping[str, str | int | bytes]
"""New values of fields; an empty one deletes the field."""


async def write_compared(
    gateway: Gateway,
    key: str,
    revision: int,
    change: Change,
    *,
    index: str | None = None,
    name: str = "",
    score: int | Literal["-"] | None = None,
    ttl: int | None = None,
    index_ttl: int | None = None,
) -> bool:
    """Change a hash if it still has the revision that was read; return whether it was changed.

    Args:
        revision: 0 if there was no hash.
        index, name: the index, and its member there; None for a hash without one.
        score: its score in the index; "-" removes it from there, None leaves it as it is.
        ttl: milliseconds after which the hash is deleted; None for never.
        index_ttl: milliseconds after which the index is deleted; None leaves its TTL as it is.
    """
    given = ("" if value is None else value for value in (score, ttl, index_ttl))
    args: list[Argument] = [name, revision, RUNTIME.token(8), *given]
    args += [item for pair in change.items() for item in pair]
    return bool(await gateway.run(_WRITE, [key] if index is None else [key, index], args))
