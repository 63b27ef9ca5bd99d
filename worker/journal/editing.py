"""Changing a state and arguments by hand, before a task goes on from there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from ...queues.marks import ANY
from .delta import BadPatch, apply
from .reducer import State
from .state import AgentState

__all__ = ["BadEdit", "edited"]


class BadEdit(ValueError):
    """A change to the state or the arguments that cannot be made."""


def edited(
    state: State, arguments: dict[str, Any], edit: Mapping[str, Any], *, agent: bool, secret: Collection[str]
) -> tuple[State, dict[str, Any]]:
    """A state and arguments with new values, by name or path (`context.mood`). Raises `BadEdit`.

    agent: whether it has a state of its own; else only arguments change. secret: arguments that no state has, `*` for
    all of them.
    """
    for path, value in edit.items():
        name = path.partition(".")[0]
        if agent and name not in state and name not in arguments:
            raise BadEdit(f"there is no {name!r} to be changed: the state has {', '.join(sorted(state))}")
        if agent and not (name in arguments and (name in secret or ANY in secret)):
            state = _set(state, path, value)
        if name in arguments or not agent:
            arguments = _set(arguments, path, value)
    if agent and edit:
        try:
            AgentState.model_validate({name: state[name] for name in AgentState.model_fields if name in state})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise BadEdit(f"the state would be none: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return state, arguments


def _set(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    names = path.split(".")
    place: Any = document
    for name in names[:-1]:
        try:
            place = place[int(name) if isinstance(place, list) else name]
        except (LookupError, TypeError, ValueError):
            raise BadEdit(f"there is no {path!r} to be changed: {name!r} is not there") from None
    there = isinstance(place, list) and names[-1].isdigit()
    pointer = "/" + "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)
    try:
        changed: dict[str, Any] = apply(
            document, [{"op": "replace" if there else "add", "path": pointer, "value": value}]
        )
    except BadPatch:
        raise BadEdit(f"there is no {path!r} to be changed") from None
    return changed
