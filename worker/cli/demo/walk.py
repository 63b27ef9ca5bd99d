"""One pass over the tree of one file: its functions measured, its findings noted."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from .defaults import MutableDefaults, dotted
from .models import (
    LISTED_PER_KIND,
    RANKED,
    FileAudit,
    Finding,
    FindingKind,
    FunctionMeasure,
    by_complexity,
    by_length,
    by_nesting,
    shorten,
)

__all__ = ["Walk", "count_lines"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_HOLDERS_OF_CODE = (ast.stmt, ast.excepthandler, ast.match_case)
_LOOPS = frozenset({ast.For, ast.AsyncFor, ast.While})
_BLOCKS = _LOOPS | {ast.If, ast.Match, ast.Try, ast.TryStar, ast.With, ast.AsyncWith}
_TWO_WAYS = _LOOPS | {ast.If, ast.IfExp, ast.Assert, ast.ExceptHandler}
_DECIDING = _TWO_WAYS | {ast.BoolOp, ast.comprehension, ast.match_case}

# Half of a walk would go to nodes that hold no code: the fields that lead there are left out.
_WITHOUT_CODE = frozenset({"ctx", "op", "ops", "id", "attr", "kind", "type_comment", "conversion", "is_async"})
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    kind: tuple(field for field in kind._fields if field not in _WITHOUT_CODE)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
} | {ast.Constant: ()}


@dataclass(slots=True)
class _Function:
    """A function while it is being measured."""

    name: str
    line: int
    lines: int
    complexity: int = 1
    nesting: int = 0

    def measure(self) -> FunctionMeasure:
        return FunctionMeasure(
            name=shorten(self.name),
            line=self.line,
            lines=self.lines,
            complexity=self.complexity,
            nesting=self.nesting,
        )


@dataclass(slots=True, frozen=True)
class _Scope:
    """Where a statement stands: the dotted name around it, and the innermost function, if any."""

    name: str
    public: bool
    function: _Function | None = None

    def named(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


class Walk:
    """One pass over the tree of one file. It keeps its own stack: a tree may be deeper than Python's."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._functions: list[_Function] = []
        self._found: list[tuple[int, FindingKind, str]] = []
        self._public = 0
        self._statements: list[tuple[ast.AST, _Scope, int]] = []
        self._defaults = MutableDefaults()

    def audit(self, tree: ast.Module, data: bytes) -> FileAudit:
        module = _Scope("", _is_public_module(self._path))
        if tree.body:
            self._expect_docstring(tree, 1, "module", module.public)
        self._enter(tree.body, module, 0)
        while self._statements:
            self._visit(*self._statements.pop())
        self._found += [(line, FindingKind.MUTABLE_DEFAULT, detail) for line, detail in self._defaults.found()]
        measures = [function.measure() for function in self._functions]
        return FileAudit(
            path=self._path,
            bytes=len(data),
            lines=count_lines(data),
            functions=len(measures),
            public=self._public,
            longest=tuple(sorted(measures, key=by_length)[:RANKED]),
            most_complex=tuple(sorted(measures, key=by_complexity)[:RANKED]),
            deepest=min(measures, key=by_nesting, default=None),
            findings=self._listed(),
            counts=self._counts(),
        )

    def _enter(self, statements: Sequence[ast.AST], scope: _Scope, depth: int) -> None:
        self._statements.extend((statement, scope, depth) for statement in statements)

    def _visit(self, node: ast.AST, scope: _Scope, depth: int) -> None:
        if isinstance(node, _FUNCTIONS):
            self._visit_function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._visit_class(node, scope, depth)
        else:
            self._visit_statement(node, scope, depth)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: _Scope) -> None:
        name = scope.named(node.name)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        function = _Function(name, node.lineno, lines)
        self._functions.append(function)
        public = scope.public and node.name[0] != "_" and not any(map(_shares_docstring, node.decorator_list))
        self._expect_docstring(node, node.lineno, f"function {name}", public)
        self._defaults.see_parameters(node.args, name)
        self._enter(node.body, _Scope(name, public=False, function=function), 0)
        around = [*node.decorator_list, node.args]
        if node.returns is not None:
            around.append(node.returns)
        self._count_decisions(around, scope)

    def _visit_class(self, node: ast.ClassDef, scope: _Scope, depth: int) -> None:
        name = scope.named(node.name)
        public = scope.public and node.name[0] != "_"
        self._expect_docstring(node, node.lineno, f"class {name}", public)
        self._enter(node.body, _Scope(name, public, scope.function), depth)
        self._count_decisions([*node.decorator_list, *node.bases, *node.keywords], scope)

    def _visit_statement(self, node: ast.AST, scope: _Scope, depth: int) -> None:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            self._find_bare_except(node, scope)
        elif isinstance(node, _IMPORTS):
            self._defaults.see_import(node)
        inner = depth + 1 if type(node) in _BLOCKS else depth
        if scope.function is not None and inner > scope.function.nesting:
            scope.function.nesting = inner
        expressions: list[Any] = []
        for field in _FIELDS[type(node)]:
            value = getattr(node, field)
            if not isinstance(value, list):
                expressions.append(value)
            elif value and isinstance(value[0], _HOLDERS_OF_CODE):
                self._enter(value, scope, depth if _is_elif(node, value) else inner)
            else:
                expressions += value
        self._count_decisions(expressions, scope, _decisions(node))

    def _count_decisions(self, expressions: list[Any], scope: _Scope, decisions: int = 0) -> None:
        """Walk whole expressions, which uses up the list; what is no node (a name, None) is passed over."""
        while expressions:
            node = expressions.pop()
            kind = type(node)
            if kind in _DECIDING:
                decisions += _decisions(node)
            elif kind is ast.Lambda:
                self._defaults.see_parameters(node.args, scope.named("<lambda>"))
            for field in _FIELDS.get(kind, ()):
                value = getattr(node, field)
                if type(value) is list:
                    expressions += value
                else:
                    expressions.append(value)
        if scope.function is not None:
            scope.function.complexity += decisions

    def _expect_docstring(
        self,
        node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
        line: int,
        what: str,
        public: bool,
    ) -> None:
        if not public:
            return
        self._public += 1
        if not (ast.get_docstring(node, clean=False) or "").strip():
            self._found.append((line, FindingKind.MISSING_DOCSTRING, what))

    def _find_bare_except(self, node: ast.ExceptHandler, scope: _Scope) -> None:
        raises_again = any(isinstance(last, ast.Raise) and last.exc is None for last in node.body)
        detail = f"in {scope.name or 'the module'}" + (", raises again" if raises_again else "")
        self._found.append((node.lineno, FindingKind.BARE_EXCEPT, detail))

    def _listed(self) -> tuple[Finding, ...]:
        listed: Counter[FindingKind] = Counter()
        findings = []
        for line, kind, detail in sorted(self._found):
            listed[kind] += 1
            if listed[kind] <= LISTED_PER_KIND:
                findings.append(Finding(kind=kind, path=self._path, line=line, detail=shorten(detail)))
        return tuple(findings)

    def _counts(self) -> dict[FindingKind, int]:
        counted = Counter(kind for _, kind, _ in self._found)
        return {kind: counted[kind] for kind in FindingKind if counted[kind]}


def _decisions(node: ast.AST) -> int:
    """The decisions taken at this node itself; the complexity of a function is theirs, added up, plus one.

    Cyclomatic complexity after T. J. McCabe, "A Complexity Measure", IEEE Transactions on Software
    Engineering SE-2(4), 1976: the number of predicates plus one, where each condition of a compound predicate
    counts. That is one for each `if`, `elif`, conditional expression, loop, `assert`, `except`, and `case`
    that may fail to match; for each `for` and `if` of a comprehension; and for each operand of `and` or `or`
    after the first.
    """
    if type(node) in _TWO_WAYS:
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    if isinstance(node, ast.match_case):
        always = isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None and node.guard is None
        return 0 if always else 1
    return 0


def _is_elif(parent: ast.AST, block: list[ast.AST]) -> bool:
    """Only an `elif` is an `if` inside an `if` and in the same column."""
    only = block[0]
    return isinstance(parent, ast.If) and isinstance(only, ast.If) and parent.col_offset == only.col_offset


def _shares_docstring(decorator: ast.expr) -> bool:
    """Whether the docstring stands elsewhere: overloads, and the setter and deleter of a property."""
    return dotted(decorator).rpartition(".")[2] in {"overload", "setter", "deleter"}


def _is_public_module(path: str) -> bool:
    """Whether no part of the path is private; `__init__` and `__main__` are public."""
    parts = PurePosixPath(path).with_suffix("").parts
    return all(part[0] != "_" or (part[:2] == "__" and part[-2:] == "__") for part in parts)


def count_lines(data: bytes) -> int:
    return len(data.splitlines())  # of bytes: splits at \n, \r and \r\n only, as Python's own reader does
