"""An audit of Python code, one file at a time: what `perdure demo` gives its workers to do.

Nothing here knows of tasks or of Redis. `list_files` names the files, `audit_file` measures one of them; both
depend on nothing but the files themselves, so that a step that is run again says the same again. No file is
ever imported or run, and one that cannot be parsed is a finding, not an error.
"""

from __future__ import annotations

import ast
import io
import os
import threading
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict

from ....queues.errors import PerdureError

__all__ = [
    "LISTED_PER_KIND",
    "RANKED",
    "UNREAD",
    "FileAudit",
    "Finding",
    "FindingKind",
    "FunctionMeasure",
    "UnusableFolderError",
    "audit_file",
    "by_complexity",
    "by_length",
    "list_files",
]

RANKED = 10
"""Functions kept per file and ranking: with ten of each file, the ten of all files are exact."""

LISTED_PER_KIND = 40
"""Findings listed per file and kind; `FileAudit.counts` still counts every one."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages"})
LONGEST_TEXT = 160


class UnusableFolderError(PerdureError, ValueError):
    """The folder to audit is missing, is no folder, or may not be read."""

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(f"{root!r} {reason}: name a folder that holds Python files")
        self.root = root


class FindingKind(StrEnum):
    """What can be found in a file. The last four mean that the file was not audited any further."""

    BARE_EXCEPT = "bare-except"
    MUTABLE_DEFAULT = "mutable-default"
    MISSING_DOCSTRING = "missing-docstring"
    SYNTAX_ERROR = "syntax-error"
    UNDECODABLE = "undecodable"
    TOO_DEEP = "too-deep"
    UNREADABLE = "unreadable"


UNREAD = (
    FindingKind.SYNTAX_ERROR,
    FindingKind.UNDECODABLE,
    FindingKind.TOO_DEEP,
    FindingKind.UNREADABLE,
)


class Finding(BaseModel):
    """One thing that a reader of the code should look at, and where."""

    model_config = ConfigDict(frozen=True)

    kind: FindingKind
    path: str
    line: int
    detail: str


class FunctionMeasure(BaseModel):
    """The size of one function or method.

    `name` is dotted (`Class.method`), `line` is that of its `def`, and `lines` runs from there to its end.
    `complexity` is McCabe's cyclomatic complexity (the rules and the source: `_decisions`). `nesting` counts
    the compound statements from the outermost to the innermost; an `elif` is no deeper than its `if`.
    Functions defined inside are measured on their own; lambdas and class bodies count for the function around
    them.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    line: int
    lines: int
    complexity: int
    nesting: int


class FileAudit(BaseModel):
    """What was measured and found in one file.

    `path` is relative to the folder audited. `functions` counts functions and methods, nested ones too;
    `longest` and `most_complex` rank up to `RANKED` of them, `deepest` has the deepest nesting. `public`
    counts the modules, classes and functions that should have a docstring: none with a private name or inside
    a function, no overloads, no setters, no empty modules. `findings` lists up to `LISTED_PER_KIND` of each
    kind in the order of their lines; `counts` is complete, and leaves out the kinds that were not found.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    bytes: int
    lines: int
    functions: int = 0
    public: int = 0
    longest: tuple[FunctionMeasure, ...] = ()
    most_complex: tuple[FunctionMeasure, ...] = ()
    deepest: FunctionMeasure | None = None
    findings: tuple[Finding, ...] = ()
    counts: dict[FindingKind, int] = {}


def list_files(root: str, limit: int | None = None) -> list[str]:
    """The Python files below a folder: sorted POSIX paths, relative to it.

    Left out are hidden folders, `__pycache__`, `site-packages`, folders behind symbolic links (so that loops
    end), folders that may not be read, links that lead nowhere, and names that are not UTF-8, which cannot
    travel as JSON.

    A `limit` takes that many files, spread evenly over the list, the same ones each time.

    Raises `UnusableFolderError` if `root` is no readable folder, and `ValueError` for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: ask for at least one file, or leave it out for all")
    files = sorted(_python_files(_readable_folder(root)))
    if limit is None or limit >= len(files):
        return files
    return [files[index * len(files) // limit] for index in range(limit)]


def _readable_folder(root: str) -> Path:
    folder = Path(root)
    try:
        with os.scandir(folder):
            return folder
    except FileNotFoundError:
        raise UnusableFolderError(root, "does not exist") from None
    except NotADirectoryError:
        raise UnusableFolderError(root, "is a file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnusableFolderError(root, f"cannot be read ({reason})") from error


def _python_files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and _is_file(path):
                relative = path.relative_to(root).as_posix()
                if relative.isascii() or _is_unicode(relative):
                    yield relative


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # it is there and may not be looked at: the audit of the file says so
        return True


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def audit_file(root: str, path: str) -> FileAudit:
    """Measure one file, named as `list_files` names it.

    A file that cannot be read, decoded (by the rules of `tokenize.open`) or parsed yields an audit with that
    one finding. Warnings about the code are suppressed.
    """
    try:
        data = Path(root, path).read_bytes()
    except OSError as error:
        return _unread(path, b"", FindingKind.UNREADABLE, 1, error.strerror or type(error).__name__)
    try:
        tree = _parse(data)
    except _ParseError as refusal:
        return _unread(path, data, refusal.kind, refusal.line, refusal.reason)
    return _Walk(path).audit(tree, data)


def _unread(path: str, data: bytes, kind: FindingKind, line: int, detail: str) -> FileAudit:
    return FileAudit(
        path=path,
        bytes=len(data),
        lines=_count_lines(data),
        findings=(Finding(kind=kind, path=path, line=line, detail=_short(detail)),),
        counts={kind: 1},
    )


def _count_lines(data: bytes) -> int:
    return len(data.splitlines())  # of bytes: splits at \n, \r and \r\n only, as Python's own reader does


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


class _ParseError(Exception):
    def __init__(self, kind: FindingKind, line: int | None, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.line = line or 1
        self.reason = reason


# Filters of warnings belong to the process: two threads inside `catch_warnings` would restore each other's.
# Nothing is lost by taking turns, as the parser holds the GIL anyway.
_filtering_warnings = threading.Lock()


def _parse(data: bytes) -> ast.Module:
    with _filtering_warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = _decode(data)
        try:
            return ast.parse(text)
        except SyntaxError as error:
            raise _ParseError(FindingKind.SYNTAX_ERROR, error.lineno, error.msg) from None
        except ValueError as error:  # null bytes before 3.11.4; lone surrogates out of an escaping codec
            raise _ParseError(FindingKind.SYNTAX_ERROR, None, str(error)) from None
        except (RecursionError, MemoryError):
            reason = "nested too deeply for Python's parser"
            raise _ParseError(FindingKind.TOO_DEEP, None, reason) from None


def _decode(data: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = _count_lines(error.object[: error.start] + b".")
        offending = error.object[error.start : error.start + 1].hex()
        reason = f"not {error.encoding}: {error.reason} (0x{offending})"
        raise _ParseError(FindingKind.UNDECODABLE, line, reason) from None
    except (SyntaxError, LookupError, ValueError) as error:  # a wrong declaration, a codec for no text
        raise _ParseError(FindingKind.UNDECODABLE, None, str(error)) from None


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_HOLDERS_OF_CODE = (ast.stmt, ast.excepthandler, ast.match_case)
_LOOPS = frozenset({ast.For, ast.AsyncFor, ast.While})
_BLOCKS = _LOOPS | {ast.If, ast.Match, ast.Try, ast.TryStar, ast.With, ast.AsyncWith}
_TWO_WAYS = _LOOPS | {ast.If, ast.IfExp, ast.Assert, ast.ExceptHandler}
_DECIDING = _TWO_WAYS | {ast.BoolOp, ast.comprehension, ast.match_case}

# Half of a walk would go to nodes that hold no code: the fields that lead there are left out.
_WITHOUT_CODE = frozenset(
    {"ctx", "op", "ops", "id", "attr", "kind", "type_comment", "conversion", "is_async"}
)
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    kind: tuple(field for field in kind._fields if field not in _WITHOUT_CODE)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
} | {ast.Constant: ()}

_DISPLAYS: dict[type[ast.AST], tuple[str, str]] = {
    ast.List: ("[]", "[...]"),
    ast.Dict: ("{}", "{...}"),
    ast.Set: ("{...}", "{...}"),
    ast.ListComp: ("[... for ...]", "[... for ...]"),
    ast.DictComp: ("{... for ...}", "{... for ...}"),
    ast.SetComp: ("{... for ...}", "{... for ...}"),
}
_MUTABLE_BUILTINS = frozenset({"list", "dict", "set", "bytearray"})
_MUTABLE_COLLECTIONS = frozenset(
    {"ChainMap", "Counter", "OrderedDict", "UserDict", "UserList", "defaultdict", "deque"}
)


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
            name=_short(self.name),
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


class _Walk:
    """One pass over the tree of one file. It keeps its own stack: a tree may be deeper than Python's."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._functions: list[_Function] = []
        self._found: list[tuple[int, FindingKind, str]] = []
        self._public = 0
        self._statements: list[tuple[ast.AST, _Scope, int]] = []
        self._called_defaults: list[tuple[int, str, str]] = []  # line, detail, dotted name of what is called
        self._collections = {"collections"}  # the names that the module goes by in this file
        self._mutable_calls = set(_MUTABLE_BUILTINS)

    def audit(self, tree: ast.Module, data: bytes) -> FileAudit:
        module = _Scope("", _is_public_module(self._path))
        if tree.body:
            self._expect_docstring(tree, 1, "module", module.public)
        self._enter(tree.body, module, 0)
        while self._statements:
            self._visit(*self._statements.pop())
        self._judge_called_defaults()
        measures = [function.measure() for function in self._functions]
        return FileAudit(
            path=self._path,
            bytes=len(data),
            lines=_count_lines(data),
            functions=len(measures),
            public=self._public,
            longest=tuple(sorted(measures, key=by_length)[:RANKED]),
            most_complex=tuple(sorted(measures, key=by_complexity)[:RANKED]),
            deepest=min(measures, key=_by_nesting, default=None),
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
        self._check_defaults(node.args, name)
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
            self._note_imports(node)
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
                self._check_defaults(node.args, scope.named("<lambda>"))
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

    def _check_defaults(self, arguments: ast.arguments, function: str) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        late = positional[len(positional) - len(arguments.defaults) :]
        pairs = [*zip(late, arguments.defaults, strict=True)]
        pairs += [
            (argument, default)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        ]
        for argument, default in pairs:
            place = f"{function}({argument.arg}="
            if type(default) in _DISPLAYS:
                empty, filled = _DISPLAYS[type(default)]
                shown = filled if getattr(default, "elts", None) or getattr(default, "keys", None) else empty
                self._found.append((default.lineno, FindingKind.MUTABLE_DEFAULT, f"{place}{shown})"))
            elif isinstance(default, ast.Call) and (called := _dotted(default.func)):
                shown = "(...)" if default.args or default.keywords else "()"
                self._called_defaults.append((default.lineno, f"{place}{called}{shown})", called))

    def _note_imports(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            self._collections.update(
                alias.asname for alias in node.names if alias.name == "collections" and alias.asname
            )
        elif node.module == "collections" and node.level == 0:
            self._mutable_calls.update(
                alias.asname or alias.name for alias in node.names if alias.name in _MUTABLE_COLLECTIONS
            )

    def _judge_called_defaults(self) -> None:
        """Once all imports are known, wherever in the file they stand."""
        for module in self._collections:
            self._mutable_calls.update(f"{module}.{name}" for name in _MUTABLE_COLLECTIONS)
        self._found += [
            (line, FindingKind.MUTABLE_DEFAULT, detail)
            for line, detail, called in self._called_defaults
            if called in self._mutable_calls
        ]

    def _listed(self) -> tuple[Finding, ...]:
        listed: Counter[FindingKind] = Counter()
        findings = []
        for line, kind, detail in sorted(self._found):
            listed[kind] += 1
            if listed[kind] <= LISTED_PER_KIND:
                findings.append(Finding(kind=kind, path=self._path, line=line, detail=_short(detail)))
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
    return _dotted(decorator).rpartition(".")[2] in {"overload", "setter", "deleter"}


def _dotted(node: ast.expr) -> str:
    """`a.b.c` for the expression that says so, an empty string for any other."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _is_public_module(path: str) -> bool:
    """Whether no part of the path is private; `__init__` and `__main__` are public."""
    parts = PurePosixPath(path).with_suffix("").parts
    return all(part[0] != "_" or (part[:2] == "__" and part[-2:] == "__") for part in parts)


def by_length(measure: FunctionMeasure) -> tuple[int, int, str]:
    """Sorts the longest function first."""
    return (-measure.lines, measure.line, measure.name)


def by_complexity(measure: FunctionMeasure) -> tuple[int, int, int, str]:
    """Sorts the most complex function first, the longer one of two."""
    return (-measure.complexity, -measure.lines, measure.line, measure.name)


def _by_nesting(measure: FunctionMeasure) -> tuple[int, int, str]:
    return (-measure.nesting, measure.line, measure.name)
