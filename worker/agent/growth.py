"""Lists that only grew at their end, as conversations and discoveries do: what came, without looking at all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Growth", "grown"]


class Growth(NamedTuple):
    """length: before. dropped: how many went at the head. added: what came at the end."""

    length: int
    dropped: int
    added: list[Any]


def grown(before: Any, after: Any) -> Growth | None:
    """How a list has grown, where what stayed is the very same; None where something else happened to it."""
    if not isinstance(before, list) or not isinstance(after, list):
        return None
    for dropped in (0, 1):
        stayed = len(before) - dropped
        if 0 <= stayed <= len(after) and all(
            one is other for one, other in zip(before[dropped:], after[:stayed], strict=True)
        ):
            return Growth(len(before), dropped, after[stayed:])
    return None
