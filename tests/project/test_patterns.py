"""Regular expressions of the package: none can backtrack over the text that it is applied to.

A match of `re` holds the interpreter lock until it ends, so a pattern that needs quadratic time on foreign text freezes
the event loop, the heartbeat of the leases and the health report at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.support.paths import ROOT

PACKAGE: Final = ("queues", "deadletter", "worker")
SEARCHES: Final = frozenset({"search", "sub", "subn", "findall", "finditer", "split"})
CALLS: Final = SEARCHES | {"match", "fullmatch"}
UNREAD: Final[set[str]] = set()
"""Modules of adapters whose frameworks are in the environments of the adapters only."""
PROBED: Final = [chr(code) for code in range(0x250)]
"""Characters by which two sets are compared."""

_parser: Any = import_module("re._parser")
_compiler: Any = import_module("re._compiler")
REPEATS: Final = {_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT}
ONE_CHARACTER: Final = {_parser.IN, _parser.ANY, _parser.LITERAL, _parser.NOT_LITERAL}
ZERO_WIDTH: Final = {_parser.AT, _parser.ASSERT, _parser.ASSERT_NOT}
LONG: Final = 1000
"""A repeat with a smaller limit costs a bounded number of steps per position."""


class Use(NamedTuple):
    """A regular expression in a module. searched: whether it is applied at every position of the text."""

    place: str
    pattern: str | bytes
    flags: int
    searched: bool

    def __str__(self) -> str:
        return f"{self.place} {self.pattern!r}"


def uses_of(path: Path) -> Iterator[Use]:
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "re"):
            continue
        name = f"perdure.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
        try:
            values = {"re": re, **vars(import_module(name))}
        except ModuleNotFoundError:
            if not name.startswith("perdure.worker.integrations."):
                raise
            UNREAD.add(str(path.relative_to(ROOT)))
            return
        found = eval(compile(ast.Expression(call.args[0]), str(path), "eval"), values)
        flags = sum(int(eval(ast.unparse(one), values)) for one in call.args[1:] if "re." in ast.unparse(one))
        compiled = call.func.attr == "compile"
        searched = _is_searched(tree, call) if compiled else call.func.attr in SEARCHES
        yield Use(f"{path.relative_to(ROOT)}:{call.lineno}", found, flags, searched)


def _is_searched(tree: ast.AST, compiled: ast.Call) -> bool:
    """Whether the module searches with a compiled pattern; also if it is not clear how the module uses it."""
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is compiled
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    methods = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }
    return not methods or bool(methods & SEARCHES)


def flattened(items: Any) -> list[tuple[Any, Any]]:
    """Return the items of a pattern in order, without its groups; alternatives become one item."""
    found: list[tuple[Any, Any]] = []
    for kind, value in items:
        if kind is _parser.SUBPATTERN:
            found += flattened(value[-1])
        elif kind in REPEATS and value[1] == 1:  # an option
            found.append((_parser.BRANCH, (None, [value[2], []])))
        else:
            found.append((kind, value))
    return found


@lru_cache(maxsize=1024)
def _characters(item: str, kind: Any, value: Any, flags: int, text: bool) -> frozenset[str]:
    state = _parser.State()
    state.flags = flags | (re.UNICODE if text else 0)
    matcher = _compiler.compile(_parser.SubPattern(state, [(kind, value)]), state.flags)
    return frozenset(one for one in PROBED if matcher.fullmatch(one))


def first(items: list[tuple[Any, Any]], flags: int) -> tuple[frozenset[str], bool]:
    """Return the characters that can begin the items, and whether they can match nothing."""
    begins: frozenset[str] = frozenset()
    for kind, value in items:
        if kind in ZERO_WIDTH:
            continue
        if kind in ONE_CHARACTER:
            return begins | characters(kind, value, flags), False
        if kind is _parser.BRANCH:
            options = [first(flattened(one), flags) for one in value[1]]
            begins |= frozenset().union(*(option for option, _ in options))
            if not any(empty for _, empty in options):
                return begins, False
        elif kind in REPEATS:
            begins |= first(flattened(value[2]), flags)[0]
            if value[0] > 0:
                return begins, False
        else:
            return frozenset(PROBED), False
    return begins, True


def characters(kind: Any, value: Any, flags: int) -> frozenset[str]:
    hashable = tuple(value) if isinstance(value, list) else value
    return _characters(repr(value), kind, hashable, flags, True)


def problem_of(pattern: str | bytes, flags: int = 0, *, searched: bool) -> str | None:
    """Return why the pattern may need more than linear time, or None."""
    parsed = _parser.parse(pattern.decode() if isinstance(pattern, bytes) else pattern, flags)
    items = flattened(parsed)
    flags = parsed.state.flags
    anchored = not searched or (bool(items) and items[0] == (_parser.AT, _parser.AT_BEGINNING))
    return _problem(items, [], flags, None if anchored else first(items, flags)[0])


def _problem(
    items: list[tuple[Any, Any]], after: list[tuple[Any, Any]], flags: int, starts: frozenset[str] | None
) -> str | None:
    """starts: characters at which another attempt of a search can begin; None if the pattern is anchored."""
    for place, (kind, value) in enumerate(items):
        rest = [*items[place + 1 :], *after]
        if kind is _parser.BRANCH:
            for option in value[1]:
                if found := _problem(flattened(option), rest, flags, starts):
                    return found
        elif kind in REPEATS and value[1] > LONG:
            body = flattened(value[2])
            if len(body) != 1 or body[0][0] not in ONE_CHARACTER:
                return "an unbounded repeat of more than one character"
            repeated = characters(*body[0], flags)
            follows, _ = first(rest, flags)
            if repeated & follows:
                return f"an unbounded repeat also matches what follows it: {sorted(repeated & follows)[0]!r}"
            if starts is not None and follows and repeated & starts:
                return "another attempt of the search can begin within an unbounded repeat"
        elif kind in {_parser.GROUPREF, _parser.GROUPREF_EXISTS}:
            return "a reference to a group"
    return None


USES: Final = sorted(use for folder in PACKAGE for path in (ROOT / folder).rglob("*.py") for use in uses_of(path))


@pytest.mark.parametrize("use", USES, ids=str)
def test_a_pattern_takes_linear_time(use: Use) -> None:
    assert problem_of(use.pattern, use.flags, searched=use.searched) is None


def test_every_pattern_of_the_package_is_found() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for folder in PACKAGE
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^(import re$|from re import)", path.read_text(), re.MULTILINE)
    }
    assert {use.place.partition(":")[0] for use in USES} == importing - UNREAD


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        (r"input_value=.*?, input_type=", True),
        (r"(a+)+b", False),
        (r"(a|b+)*c", False),
        (r"a*a*b", False),
        (r"\s+$x", True),
        (r"\s+x", True),
        (r"[^=&]*password=", True),
        (r"(.+)\.h[0-9]+", False),
        (r"(a*)\1b", False),
    ],
)
def test_a_pattern_that_backtracks_is_refused(pattern: str, searched: bool) -> None:
    assert problem_of(pattern, searched=searched) is not None


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [(r"\s+", True), (r"//[^/@]*@", True), (r"([0-9]+(?:\.[0-9]+)?)\s*(s|min)?", False), (r"a[^b]*b", False)],
)
def test_a_linear_pattern_is_accepted(pattern: str, searched: bool) -> None:
    assert problem_of(pattern, searched=searched) is None
