"""Correction of an agent's state by a person: new values by path, in the stored form of the state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")

_KEPT: Final = frozenset({"archive", "artifacts", "current", "files", "messages", "waiting_for"})
"""Fields that account for what happened."""

_OF_STEP: Final = ("key", "status", "attempts", "error")
"""Fields of an open step that only the run changes."""

_MOST_NAMES: Final = 20
"""Names that an error lists."""


class CannotCorrect(ValueError):
    """A correction that does not fit the state."""


def corrected(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with other values. The given one is not changed, and the result shares its unchanged parts.

    Args:
        wanted: Values by path: names and indexes with dots between them, or a JSON pointer, for names with dots.

    Raises:
        CannotCorrect: A path does not exist or is read-only. A new key of an object within a field is accepted.
    """
    after = dict(state)
    for path, value in wanted.items():
        names = _names(path)
        if names[0] not in after:
            raise CannotCorrect(f"{path}: the state has no field {names[0]!r}; it has {_listed(after, _KEPT)}")
        if names[0] in _KEPT:
            raise CannotCorrect(f"{path}: {names[0]} is read-only")
        after[names[0]] = _replaced(after[names[0]], names[1:], value, path)
    _check_plan(state.get("plan"), after.get("plan"))
    return after


def _names(path: str) -> list[str]:
    if path.startswith("/"):
        return [name.replace("~1", "/").replace("~0", "~") for name in path[1:].split("/")]
    return path.split(".")


def _replaced(held: Any, names: list[str], value: Any, path: str) -> Any:
    """Return a copy of a value in which the part at this place is another one."""
    if not names:
        return value
    name, *rest = names
    if isinstance(held, dict):
        if name not in held and rest:
            raise CannotCorrect(f"{path}: there is no {name!r}; there is {_listed(held)}")
        return {**held, name: _replaced(held.get(name), rest, value, path)}
    if isinstance(held, list):
        if not _INDEX.fullmatch(name) or int(name) >= len(held):
            raise CannotCorrect(f"{path}: {name!r} is no index of a list of {len(held)} items")
        index = int(name)
        return [*held[:index], _replaced(held[index], rest, value, path), *held[index + 1 :]]
    raise CannotCorrect(f"{path}: there is no {name!r}, because what should have it is neither an object nor a list")


def _listed(names: Mapping[str, Any], without: frozenset[str] = frozenset()) -> str:
    found = [name for name in names if name not in without]
    more = len(found) - _MOST_NAMES
    return (", ".join(map(repr, found[:_MOST_NAMES])) or "nothing") + (f" and {more} more" if more > 0 else "")


def _check_plan(before: Any, after: Any) -> None:
    """Refuse changes to closed steps, and to the account of the open ones."""
    if before is after:
        return
    if not isinstance(after, list) or len(after) != len(before):
        raise CannotCorrect(f"plan: it must keep its {len(before)} steps")
    for old, new in zip(before, after, strict=True):
        if old is new:
            continue
        if old["status"] not in ("pending", "running"):
            raise CannotCorrect(f"plan: step {old['key']!r} is {old['status']} and read-only")
        if not isinstance(new, dict) or any(old.get(name) != new.get(name) for name in _OF_STEP):
            raise CannotCorrect(f"plan: {', '.join(_OF_STEP)} of step {old['key']!r} are read-only")
