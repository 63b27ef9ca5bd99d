"""What the audit of one file says: data, and the orders in which functions are ranked."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

__all__ = [
    "LISTED_PER_KIND",
    "RANKED",
    "UNREAD",
    "FileAudit",
    "Finding",
    "FindingKind",
    "FunctionMeasure",
    "by_complexity",
    "by_length",
    "by_nesting",
    "shorten",
]

RANKED = 10
"""Functions kept per file and ranking: with ten of each file, the ten of all files are exact."""

LISTED_PER_KIND = 40
"""Findings listed per file and kind; `FileAudit.counts` still counts every one."""

LONGEST_TEXT = 160


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
    `complexity` is McCabe's cyclomatic complexity (the rules and the source: `walk.py`). `nesting` counts
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


def shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def by_length(measure: FunctionMeasure) -> tuple[int, int, str]:
    """Sorts the longest function first."""
    return (-measure.lines, measure.line, measure.name)


def by_complexity(measure: FunctionMeasure) -> tuple[int, int, int, str]:
    """Sorts the most complex function first, the longer one of two."""
    return (-measure.complexity, -measure.lines, measure.line, measure.name)


def by_nesting(measure: FunctionMeasure) -> tuple[int, int, str]:
    return (-measure.nesting, measure.line, measure.name)
