"""Masking of a task's secrets in its events, value by value.

The JSON text as a whole cannot be masked: a secret such as `step` or `1234` also occurs in field names and inside
numbers, and the result could not be parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel

from ....queues.security.secret_arguments import MASK

M = TypeVar("M", bound=BaseModel)
Redact = Callable[[str], str]

_NAMES: Final = frozenset({"type", "step", "key", "hash", "to", "wait"})
"""Fields with names that are stored openly elsewhere: of a step, an artifact, a task, a wait."""

_SIGNED: Final = ("thinking", "redacted_thinking")
"""Types of blocks of reasoning that their provider has signed, as a sequence: it refuses a changed one."""


def redacted(model: M, redact: Redact) -> M:
    """Return the event, or a part of one, with its secrets masked; the same object if it has none.

    Values that the type fixes stay, such as the role of a message. Signed blocks of reasoning are dropped together if
    one of them has a secret: the provider refuses a request with a changed one. In a patch the names of the state's own
    fields stay: they come from the program.
    """
    changed: dict[str, Any] = {}
    for name, value in model:
        if name in _NAMES or (plan := _plan(type(model)).get(name, _FREE)) == _FIXED:
            continue
        kept = _patch(value, redact) if name == "changes" else _value(value, redact, numbers=plan == _FREE)
        if kept is not value:
            changed[name] = kept
    return model.model_copy(update=changed) if changed else model


def redacted_data(value: Any, redact: Redact) -> Any:
    """Return JSON data with the secrets in it masked."""
    return _value(value, redact, numbers=True)


_FIXED, _TYPED, _FREE = "fixed", "typed", "free"


@lru_cache(maxsize=1024)
def _plan(kind: type[BaseModel]) -> Mapping[str, str]:
    """Return the freedom of each field: fixed values, a known type, or any JSON data."""
    return {name: _freedom(field.annotation) for name, field in kind.model_fields.items()}


def _freedom(annotation: Any) -> str:
    parts = list(_parts(annotation))
    if any(get_origin(part) is Literal or (isinstance(part, type) and issubclass(part, Enum)) for part in parts):
        return _FIXED
    return _FREE if Any in parts else _TYPED


def _parts(annotation: Any) -> Any:
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _parts(part)


def _value(value: Any, redact: Redact, *, numbers: bool) -> Any:
    """Mask a value. numbers: whether a number that is a secret may be replaced by text."""
    if isinstance(value, str):
        shown = redact(value)
        return value if shown == value else shown
    if isinstance(value, BaseModel):
        return redacted(value, redact)
    if isinstance(value, Mapping):
        changed = {
            _value(name, redact, numbers=False): _value(one, redact, numbers=numbers) for name, one in value.items()
        }
        return value if _same(changed, value) else changed
    if isinstance(value, list | tuple):
        items = _items(value, redact, numbers=numbers)
        return items if isinstance(value, list) or items is value else tuple(items)
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        return value if redact(str(value)) == str(value) else MASK
    return value


def _items(values: Sequence[Any], redact: Redact, *, numbers: bool) -> Sequence[Any]:
    items = [_value(one, redact, numbers=numbers) for one in values]
    if all(map(_is, items, values)):
        return values
    if any(_is_signed(one) and kept is not one for one, kept in zip(values, items, strict=True)):
        return [one for one in items if not _is_signed(one)]
    return items


def _is_signed(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _SIGNED


def _is(one: Any, other: Any) -> bool:
    return one is other


def _same(changed: Mapping[Any, Any], value: Mapping[Any, Any]) -> bool:
    return len(changed) == len(value) and all(
        name is former and one is kept
        for (name, one), (former, kept) in zip(changed.items(), value.items(), strict=True)
    )


def _patch(operations: tuple[dict[str, Any], ...], redact: Redact) -> tuple[dict[str, Any], ...]:
    changed = tuple(_operation(one, redact) for one in operations)
    return operations if all(map(_is, changed, operations)) else changed


def _operation(operation: dict[str, Any], redact: Redact) -> dict[str, Any]:
    path = str(operation.get("path", ""))
    field, slash, rest = path[1:].partition("/")
    shown = f"/{field}{slash}{_pointer(rest, redact)}" if slash else path
    value = operation.get("value")
    kept = _value(value, redact, numbers=True)
    if shown == path and kept is value:
        return operation
    return {**operation, "path": shown} | ({"value": kept} if "value" in operation else {})


def _pointer(path: str, redact: Redact) -> str:
    """Mask the names in a JSON pointer, in which `~` and `/` are escaped."""
    names = [name.replace("~1", "/").replace("~0", "~") for name in path.split("/")]
    shown = [name if name.isdigit() else redact(name) for name in names]
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in shown)
