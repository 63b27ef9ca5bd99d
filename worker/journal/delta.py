"""What changed between two JSON documents, as a JSON Patch (RFC 6902): operations add, remove and replace.

A list that only grew at its end costs what was added; any other list that changed is compared place by place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["BadPatch", "Patch", "apply", "diff"]

Patch = tuple[dict[str, Any], ...]


class BadPatch(ValueError):
    """A patch that does not fit its document."""


def diff(before: Any, after: Any) -> Patch:
    """The operations that make `after` of `before`."""
    return tuple(_differences("", before, after))


def _differences(path: str, before: Any, after: Any) -> Iterable[dict[str, Any]]:
    if type(before) is type(after):
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
    for at, (old, new) in enumerate(zip(before, after, strict=False)):
        yield from _differences(f"{path}/{at}", old, new)
    for at in range(len(before) - 1, len(after) - 1, -1):
        yield {"op": "remove", "path": f"{path}/{at}"}
    for value in after[len(before) :]:
        yield {"op": "add", "path": f"{path}/-", "value": value}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def apply(document: Any, patch: Iterable[Mapping[str, Any]]) -> Any:
    """The document with the patch applied; the one given stays as it is. Raises `BadPatch`."""
    for operation in patch:
        try:
            tokens = [token.replace("~1", "/").replace("~0", "~") for token in operation["path"].split("/")[1:]]
            document = _applied(document, tokens, operation)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise BadPatch(f"operation {dict(operation)!r} does not fit: {error!r}") from None
    return document


def _applied(document: Any, tokens: list[str], operation: Mapping[str, Any]) -> Any:
    if not tokens:
        if operation["op"] != "replace":
            raise ValueError("only replace is for the whole document")
        return operation["value"]
    head, rest = tokens[0], tokens[1:]
    copy = document.copy()
    if rest:
        place: Any = int(head) if isinstance(copy, list) else head
        copy[place] = _applied(copy[place], rest, operation)
        return copy
    match operation["op"], copy:
        case "remove", list():
            del copy[int(head)]
        case "remove", dict():
            del copy[head]
        case "add", list():
            copy.insert(len(copy) if head == "-" else int(head), operation["value"])
        case "replace", list():
            copy[int(head)] = operation["value"]
        case (("add" | "replace"), dict()):
            copy[head] = operation["value"]
        case unknown, _:
            raise ValueError(f"{unknown!r} is none of add, remove and replace")
    return copy
