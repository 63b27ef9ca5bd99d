"""Difference of two JSON documents as a JSON Patch (RFC 6902); operations add, remove and replace.

The common head and tail of two lists cost nothing, so a list that grew, or that had items inserted or removed in one
place, costs only the change. The parts between head and tail are compared item by item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

Patch = tuple[dict[str, Any], ...]

_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_ESCAPE: Final = re.compile(r"~(?![01])")


class BadPatch(ValueError):
    """A patch that does not fit its document."""


def diff(before: Any, after: Any) -> Patch:
    """Return the operations that turn `before` into `after`; they share its values."""
    return tuple(_differences("", before, after))


def _differences(path: str, before: Any, after: Any) -> Iterable[dict[str, Any]]:
    if before is after:
        return
    if type(before) is type(after):  # 1, 1.0 and true are not the same in JSON
        if isinstance(before, dict):
            yield from _of_objects(path, before, after)
            return
        if isinstance(before, list):
            yield from _of_lists(path, before, after)
            return
        if before == after:
            return
    yield {"op": "replace", "path": path, "value": after}


def _of_objects(path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for name in before:
        if name not in after:
            yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        place = f"{path}/{_escaped(name)}"
        if name not in before:
            yield {"op": "add", "path": place, "value": value}
        else:
            yield from _differences(place, before[name], value)


def _of_lists(path: str, before: list[Any], after: list[Any]) -> Iterable[dict[str, Any]]:
    shorter = min(len(before), len(after))
    head = 0
    while head < shorter and _same(before[head], after[head]):
        head += 1
    tail = 0
    while tail < shorter - head and _same(before[-1 - tail], after[-1 - tail]):
        tail += 1
    both = shorter - tail
    for at in range(head, both):
        yield from _differences(f"{path}/{at}", before[at], after[at])
    for at in range(len(before) - tail - 1, both - 1, -1):
        yield {"op": "remove", "path": f"{path}/{at}"}
    for at in range(both, len(after) - tail):
        yield {"op": "add", "path": f"{path}/{at if tail else '-'}", "value": after[at]}


def _same(before: Any, after: Any) -> bool:
    """Return whether `_differences` would be empty. Their generation would compare nested lists again at each level."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, dict):
        return len(before) == len(after) and all(
            name in after and _same(value, after[name]) for name, value in before.items()
        )
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return bool(before == after)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def apply(document: Any, patch: Iterable[Mapping[str, Any]]) -> Any:
    """Return the document with the patch applied. The given one is not changed; the result shares its unchanged parts.

    Raises `BadPatch`.
    """
    copies: dict[int, Any] = {}
    for operation in patch:
        try:
            document = _applied(document, _tokens(operation["path"]), operation, copies)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadPatch(f"operation {dict(operation)!r} does not fit: {error!r}") from None
    return document


def _tokens(path: str) -> list[str]:
    """Return the names in a JSON pointer (RFC 6901)."""
    if path and not path.startswith("/"):
        raise ValueError("a path must begin with '/'")
    if _ESCAPE.search(path):
        raise ValueError("'~' in a path must be followed by 0 or 1")
    return [token.replace("~1", "/").replace("~0", "~") for token in path.split("/")[1:]]


def _applied(document: Any, tokens: list[str], operation: Mapping[str, Any], copies: dict[int, Any]) -> Any:
    """Apply one operation to copies of the objects and arrays on its path, each of which a patch copies once."""
    if not tokens:
        return _whole(operation)
    head, rest = tokens[0], tokens[1:]
    if isinstance(document, list):
        return _in_list(_copied(document, copies), head, rest, operation, copies)
    if not isinstance(document, dict):
        raise TypeError(f"{head!r} is not inside an object or an array")
    copy = _copied(document, copies)
    if rest:
        copy[head] = _applied(copy[head], rest, operation, copies)
        return copy
    match operation["op"]:
        case "add":
            copy[head] = operation["value"]
        case "replace":
            if head not in copy:
                raise LookupError(f"{head!r} does not exist")
            copy[head] = operation["value"]
        case "remove":
            del copy[head]
        case unknown:
            raise _Unknown(unknown)
    return copy


def _whole(operation: Mapping[str, Any]) -> Any:
    match operation["op"]:
        case "add" | "replace":
            return operation["value"]
        case "remove":
            raise ValueError("the whole document cannot be removed")
        case unknown:
            raise _Unknown(unknown)


def _copied(document: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of an object or array, or itself if it is one. copies: by id; they live as long as the patch."""
    if id(document) in copies:
        return document
    copy = document.copy()
    copies[id(copy)] = copy
    return copy


def _in_list(
    copy: list[Any], head: str, rest: list[str], operation: Mapping[str, Any], copies: dict[int, Any]
) -> list[Any]:
    adding = operation["op"] == "add" and not rest
    at = len(copy) if head == "-" and adding else _index(head)
    if at >= len(copy) + adding:
        raise IndexError(f"{head} is beyond the end")
    if rest:
        copy[at] = _applied(copy[at], rest, operation, copies)
        return copy
    match operation["op"]:
        case "add":
            copy.insert(at, operation["value"])
        case "replace":
            copy[at] = operation["value"]
        case "remove":
            del copy[at]
        case unknown:
            raise _Unknown(unknown)
    return copy


def _index(token: str) -> int:
    if not _INDEX.fullmatch(token):
        raise ValueError(f"{token!r} is not an index of an array")
    return int(token)


class _Unknown(ValueError):
    def __init__(self, operation: object) -> None:
        super().__init__(f"the operation must be add, remove or replace, got {operation!r}")
