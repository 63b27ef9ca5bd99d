"""JSON schemas that other processes published: read as data, bounded, and without a way out of the document.

A schema is checked before it is used. Its references lead to places of the document itself, so that nothing is fetched
or opened. Sizes are bounded, and so is the number of times that schemas apply to one value: references to the same
place multiply it, by level of the schema and by level of the value. Patterns run in an engine of linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import unquote

import orjson

from .wording import listed, shortened

SCHEMA_BYTES: Final = 16_384
"""Largest schema, as JSON."""

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_SCHEMAS: Final = 2_000
"""Largest number of schemas within a schema."""

_DEPTH: Final = 64
"""Deepest nesting of schemas in a document."""

_PATTERNS: Final = 50
_PATTERN_LENGTH: Final = 1_000
_PATTERN_BYTES: Final = 1 << 20
"""Limits of patterns: their number, characters of one, and bytes of one when compiled."""

_APPLIED: Final = 1_000
"""Largest number of schemas that may apply to one value."""

_LEVELS: Final = 100
"""Levels of a value for which that number is computed; recursive schemas have no end."""

_EVALUATIONS: Final = 1_000_000
"""Largest number of evaluations for one set of arguments; beyond it they are not checked here."""

_SHOWN: Final = 80
"""Most characters of a text from a schema or of a name in a problem."""

_COUNTED: Final = 100
"""Most problems that are counted."""

_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE: Final = frozenset(
    {
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("items", "additionalItems", "contains", "unevaluatedItems"),
        *("not", "if", "then", "else", "contentSchema"),
    }
)
"""Keywords whose values hold schemas. What any other keyword holds is data."""

_SAME_VALUE: Final = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"}
)
"""Keywords whose schemas apply to the same value; those of `_NOWHERE` to none, and the others to its members."""

_NOWHERE: Final = frozenset({"$defs", "definitions", "contentSchema"})

_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")

_Path = tuple[str, ...]


class UnusableSchema(ValueError):
    """A schema that is not used, with the reason."""


class _Node:
    """A schema within a schema.

    Attributes:
        same: Schemas that apply to the same value.
        named: Schemas of its members by their names; `other`: of members of any name.
        twice: Whether a keyword evaluates the schemas of `same` once more.
    """

    __slots__ = ("named", "other", "refs", "same", "twice")

    def __init__(self) -> None:
        self.refs: list[tuple[str, str]] = []
        self.same: list[int] = []
        self.named: list[int] = []
        self.other: list[int] = []
        self.twice = False


class _Graph(NamedTuple):
    nodes: list[_Node]
    patterns: list[str]


def check_schema(schema: object, *, thorough: bool = True) -> None:
    """Raise `UnusableSchema` for a schema that readers would not use.

    thorough: check a schema without patterns by the validator too, which takes a moment to import.
    """
    encoded = _encode(schema)
    patterns, _ = _checked(encoded)
    if patterns or thorough:
        _compiled(encoded)


def find_problems(schema: object, arguments: bytes) -> list[str]:
    """Return what is wrong with encoded arguments, by argument. The texts hold no values.

    Arguments for which a recursive schema multiplies too far are not checked: their worker does that.

    Raises:
        UnusableSchema
    """
    encoded = _encode(schema)
    _, bound = _checked(encoded)
    validator = _compiled(encoded)
    values = arguments.count(b",") + arguments.count(b":") + 1
    found = orjson.loads(arguments)
    if bound.levels is not None and not _within(found, bound.levels):
        return []
    if bound.applied * values > _EVALUATIONS:
        return []
    return [_problem(error) for error in islice(validator.iter_errors(found), _COUNTED)]


def _encode(schema: object) -> bytes:
    if not isinstance(schema, dict):
        _refuse((), f"a schema must be an object, got {type(schema).__name__}")
    try:
        encoded = orjson.dumps(schema)
    except (TypeError, ValueError) as error:
        _refuse((), str(error))
    if len(encoded) > SCHEMA_BYTES:
        _refuse((), f"it has {len(encoded):,} bytes, more than {SCHEMA_BYTES:,}")
    return encoded


class _Bound(NamedTuple):
    """applied: most schemas that apply to one value. levels: levels of a value for which that holds; None for all."""

    applied: int
    levels: int | None


@lru_cache(maxsize=64)
def _checked(encoded: bytes) -> tuple[bool, _Bound]:
    """Return whether a schema has patterns, and its bound. Raises `UnusableSchema`."""
    graph = _read(orjson.loads(encoded))
    return bool(graph.patterns), _bound(graph.nodes)


@lru_cache(maxsize=64)
def _compiled(encoded: bytes) -> Any:
    """Return the validator of a checked schema. Raises `UnusableSchema`."""
    import jsonschema_rs

    options = jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES, dfa_size_limit=_PATTERN_BYTES)
    try:
        return jsonschema_rs.Draft202012Validator(
            orjson.loads(encoded), mask="a value", pattern_options=options, retriever=_refuse_retrieval
        )
    except jsonschema_rs.ValidationError as error:
        path = tuple(str(part) for part in error.instance_path)
        if path and (path[-1] == "pattern" or "patternProperties" in path):
            _refuse(path, "its pattern is not valid, too large, or needs an engine that backtracks")
        _refuse(path, "it is not a valid JSON schema")
    except (ValueError, jsonschema_rs.ReferencingError):
        _refuse((), "it is not a valid JSON schema")


def _refuse_retrieval(uri: str) -> NoReturn:
    raise ValueError("schemas are not retrieved")


def _read(schema: dict[str, Any]) -> _Graph:
    """Return the schemas within a schema and the patterns. Raises `UnusableSchema`."""
    graph = _Graph([], [])
    paths: dict[_Path, int] = {}
    anchors: dict[str, int] = {}
    places: list[_Path] = []
    pending: list[tuple[_Path, int, Any, tuple[int, str] | None]] = [((), 0, schema, None)]
    while pending:
        path, depth, found, parent = pending.pop()
        if depth > _DEPTH:
            _refuse((), f"its schemas are nested more than {_DEPTH} deep")
        if len(graph.nodes) == _SCHEMAS:
            _refuse((), f"it has more than {_SCHEMAS:,} schemas")
        number, node = len(graph.nodes), _Node()
        graph.nodes.append(node)
        places.append(path)
        paths[path] = number
        if parent is not None:
            _link(graph.nodes[parent[0]], parent[1], number)
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict):
            _refuse(path, f"a schema must be an object or a boolean, got {type(found).__name__}")
        _check_keywords(path, found, graph.patterns)
        for name in _ANCHORS:
            if (anchor := found.get(name)) is not None:
                if not isinstance(anchor, str) or anchor in anchors:
                    _refuse((*path, name), "an anchor must be a text that occurs once")
                anchors[anchor] = number
        node.refs = [(name, found[name]) for name in _REFERENCES if name in found]
        node.twice = "unevaluatedProperties" in found or "unevaluatedItems" in found
        pending += ((where, depth + 1, each, (number, name)) for name, where, each in _parts(path, found))
    for place, node in zip(places, graph.nodes, strict=True):
        node.same += [_target((*place, name), reference, paths, anchors) for name, reference in node.refs]
    return graph


def _parts(path: _Path, schema: dict[str, Any]) -> Iterator[tuple[str, _Path, Any]]:
    """Yield the schemas directly within a schema, each with its keyword and place."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            for key, each in value.items():
                if name != "dependencies" or not isinstance(each, list):  # a list of names
                    yield name, (*path, name, key), each
        elif name in _LISTS and isinstance(value, list):
            yield from ((name, (*path, name, str(at)), each) for at, each in enumerate(value))
        elif name in _SINGLE:
            yield name, (*path, name), value


def _link(node: _Node, keyword: str, number: int) -> None:
    if keyword in _SAME_VALUE:
        node.same.append(number)
    elif keyword == "properties":
        node.named.append(number)
    elif keyword not in _NOWHERE:
        node.other.append(number)


def _check_keywords(path: _Path, schema: dict[str, Any], patterns: list[str]) -> None:
    for name in ("$id", "$vocabulary"):
        if name in schema:
            _refuse((*path, name), "a published schema must have no address of its own")
    if schema.get("$schema", DIALECT) not in (DIALECT, f"{DIALECT}#"):
        _refuse((*path, "$schema"), f"the dialect must be {DIALECT}")
    texts = [schema["pattern"]] if "pattern" in schema else []
    if isinstance(listed := schema.get("patternProperties"), dict):
        texts += listed
    for text in texts:
        if not isinstance(text, str) or len(text) > _PATTERN_LENGTH:
            _refuse(path, f"a pattern must be a text of at most {_PATTERN_LENGTH:,} characters")
        patterns.append(text)
    if len(patterns) > _PATTERNS:
        _refuse((), f"it has more than {_PATTERNS} patterns")


def _target(place: _Path, reference: object, paths: dict[_Path, int], anchors: dict[str, int]) -> int:
    """Return the schema that a reference leads to. Raises `UnusableSchema`."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        _refuse(place, f"reference {_shown(reference)} leaves the document")
    fragment = unquote(reference[1:])
    if not fragment or fragment.startswith("/"):
        parts = fragment.split("/")[1:]
        found = paths.get(tuple(part.replace("~1", "/").replace("~0", "~") for part in parts))
    else:
        found = anchors.get(fragment)
    if found is None:
        _refuse(place, f"reference {_shown(reference)} leads to no schema of the document")
    return found


def _bound(nodes: list[_Node]) -> _Bound:
    """Return how many schemas apply to one value at most.

    The number for the members of a value is that of the schemas that apply to it, each with those of its members: the
    largest of a name, and all that hold for any name. Raises `UnusableSchema`.
    """
    order = _ordered(nodes)
    counts = [1] * len(nodes)
    most = 0
    for level in range(_LEVELS):
        former, counts = counts, [0] * len(nodes)
        for number in order:
            node = nodes[number]
            if level:
                own = max((former[each] for each in node.named), default=0) + sum(former[each] for each in node.other)
            else:
                own = 1
            same = sum(counts[each] for each in node.same)
            counts[number] = min(own + same * (2 if node.twice else 1), _APPLIED + 1)
        if not level and max(counts) > _APPLIED:
            _refuse((), f"more than {_APPLIED:,} of its schemas apply to one value")
        if counts[0] > _APPLIED:
            return _Bound(most, level)
        most = max(most, counts[0])
        if level and counts == former:
            break
    return _Bound(most, None)


def _ordered(nodes: list[_Node]) -> list[int]:
    """Return the schemas so that each follows those that apply to the same value. Raises `UnusableSchema`."""
    order: list[int] = []
    state = bytearray(len(nodes))  # 1: on the path that is followed; 2: in order
    for first in range(len(nodes)):
        pending = [first]
        while pending:
            number = pending[-1]
            if state[number] == 2:
                pending.pop()
                continue
            if state[number] == 1:
                pending.pop()
                state[number] = 2
                order.append(number)
                continue
            state[number] = 1
            for each in nodes[number].same:
                if state[each] == 1:
                    _refuse((), "references lead in a circle without a member of the value between them")
                if not state[each]:
                    pending.append(each)
    return order


def _within(value: Any, levels: int) -> bool:
    """Return whether a value has at most so many levels of members."""
    level = [value]
    for _ in range(levels):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for found in members for each in found if isinstance(each, dict | list) and each]
        if not level:
            return True
    return False


def _problem(error: Any) -> str:
    """Return one problem as text: names of arguments and what the schema asks for, no values."""
    keyword, kind = str(error.schema_path[-1]) if error.schema_path else "", error.kind
    if keyword == "type":
        types = ", ".join(f'"{name}"' for name in kind.types)
        text = f"the value is not of type {types}" if len(kind.types) == 1 else f"the value is not of types {types}"
    elif keyword == "required":
        text = f'"{_name(kind.property)}" is a required property'
    elif keyword in ("additionalProperties", "unevaluatedProperties") and getattr(kind, "unexpected", None):
        names = listed((f"'{_name(name)}'" for name in kind.unexpected), 3)
        were = "was" if len(kind.unexpected) == 1 else "were"
        text = f"additional properties are not allowed ({names} {were} unexpected)"
    elif isinstance(limit := getattr(kind, "limit", None), int | float):
        text = f"the value does not fit {keyword!r}: {limit}"
    else:
        text = f"the value does not fit {_name(keyword)!r} of the schema"
    where = ".".join(_name(str(part)) for part in error.instance_path)
    return f"{where}: {text}" if where else text


_PLAIN: Final = re.compile(r"[\w $.-]*")


def _name(text: str) -> str:
    shown = shortened(text, _SHOWN)
    return shown if _PLAIN.fullmatch(shown) else repr(shown)[1:-1]


def _shown(value: object) -> str:
    return shortened(repr(value), _SHOWN)


def _refuse(path: _Path, why: str) -> NoReturn:
    where = ".".join(map(_name, path))
    raise UnusableSchema(f"at {where}: {why}" if where else why)
