"""Doing to a field of a state what an event did to its stored form, without looking at all of it.

Lists grow at their end, steps of a plan change one at a time, results are added: the cost is that of what came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..journal import AgentState, PlanStep

__all__ = ["follow"]

_MISSING: Final = object()

Read = Callable[[Any], Any]


def follow(state: AgentState, name: str, before: Any, after: Any, read: Read) -> bool:
    """Change a field as its stored form was changed; False, with nothing done, where that cannot be told from this.

    before, after: its stored forms, of which what stayed is the very same. read: makes of a stored form, or of one with
    some of its parts, what the state has. What the agent has changed itself stays.
    """
    match before, after, getattr(state, name, None):
        case list(), list(), list() as held:
            return _grow(held, before, after, read) or (name == "plan" and _update_steps(held, before, after))
        case dict(), dict(), dict() as held:
            return _add(held, before, after, read)
        case _:
            setattr(state, name, read(after))
            return True


def _grow(held: list[Any], before: list[Any], after: list[Any], read: Read) -> bool:
    """New items at the end, for which the oldest may have gone."""
    if len(held) != len(before):
        return False
    for dropped in (0, 1):
        stayed = len(before) - dropped
        if 0 <= stayed <= len(after) and all(
            one is other for one, other in zip(before[dropped:], after[:stayed], strict=True)
        ):
            added = read(after[stayed:])
            del held[:dropped]
            held += added
            return True
    return False


def _update_steps(held: list[PlanStep], before: list[Any], after: list[Any]) -> bool:
    """New values in fields of steps that are there. The steps stay the same objects."""
    if len(before) != len(after):
        return False
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    found = {step.key: step for step in held}
    if any(old["key"] != new["key"] or new["key"] not in found for old, new in changed):
        return False
    for old, new in changed:
        for name, value in new.items():
            if old.get(name, _MISSING) != value:
                setattr(found[new["key"]], name, value)
    return True


def _add(held: dict[str, Any], before: dict[str, Any], after: dict[str, Any], read: Read) -> bool:
    """New values under some names."""
    if not before.keys() <= after.keys():
        return False
    held.update(read({name: value for name, value in after.items() if before.get(name, _MISSING) is not value}))
    return True
