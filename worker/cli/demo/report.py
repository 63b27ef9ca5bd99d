"""What the audits of many files say together: a summary for a screen, and a report to read.

Both depend on the audits alone, not on their order, nor on the time or the machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from posixpath import commonpath

from pydantic import BaseModel, ConfigDict

from .models import RANKED, UNREAD, FileAudit, Finding, FindingKind, FunctionMeasure, by_complexity, by_length

__all__ = ["AuditSummary", "render", "summarise"]

LISTED = 100
"""Findings of one kind that the report lists; it says how many more there are."""


class AuditSummary(BaseModel):
    """The totals of an audit. `findings` has every kind, with 0 for what was not found."""

    model_config = ConfigDict(frozen=True)

    files: int
    bytes: int
    lines: int
    functions: int
    public: int
    findings: dict[FindingKind, int]


def summarise(audits: Iterable[FileAudit]) -> AuditSummary:
    """Add up what was measured and found."""
    audits = list(audits)
    found: Counter[FindingKind] = Counter()
    for audit in audits:
        found.update(audit.counts)
    return AuditSummary(
        files=len(audits),
        bytes=sum(audit.bytes for audit in audits),
        lines=sum(audit.lines for audit in audits),
        functions=sum(audit.functions for audit in audits),
        public=sum(audit.public for audit in audits),
        findings={kind: found[kind] for kind in FindingKind},
    )


def render(root: str, audits: list[FileAudit]) -> str:
    """The report in Markdown. `root` is the name it gives to the folder, and need not be a path."""
    audits = sorted(audits, key=lambda audit: audit.path)
    sections = [
        f"# Audit of {_code(root)}",
        _totals(summarise(audits)),
        "## Longest functions",
        _ranking(audits, lambda audit: audit.longest, by_length),
        "## Most complex functions",
        _ranking(audits, lambda audit: audit.most_complex, by_complexity),
        "## Bare excepts",
        "`except:` also catches `KeyboardInterrupt` and `SystemExit`; `except Exception:` does not.",
        _listing(audits, FindingKind.BARE_EXCEPT),
        "## Mutable defaults",
        "A default is made once, when the function is defined, and shared by all its calls.",
        _listing(audits, FindingKind.MUTABLE_DEFAULT),
        "## Docstrings by package",
        _coverage(audits),
        "## Files that could not be read",
        _listing(audits, *UNREAD),
    ]
    return "\n\n".join(sections) + "\n"


def _totals(summary: AuditSummary) -> str:
    found = summary.findings
    missing = found[FindingKind.MISSING_DOCSTRING]
    rows = [
        ("Files", f"{summary.files:,}"),
        ("Lines", f"{summary.lines:,}"),
        ("Bytes", f"{summary.bytes:,}"),
        ("Functions", f"{summary.functions:,}"),
        ("Bare excepts", f"{found[FindingKind.BARE_EXCEPT]:,}"),
        ("Mutable defaults", f"{found[FindingKind.MUTABLE_DEFAULT]:,}"),
        ("Missing docstrings", f"{missing:,} of {summary.public:,} public definitions"),
        ("Files that could not be read", f"{sum(found[kind] for kind in UNREAD):,}"),
    ]
    return _table(("Total", "Count>"), rows)


def _ranking(
    audits: Sequence[FileAudit],
    candidates: Callable[[FileAudit], Sequence[FunctionMeasure]],
    rank: Callable[[FunctionMeasure], tuple[int | str, ...]],
) -> str:
    measured = [(audit.path, measure) for audit in audits for measure in candidates(audit)]
    measured.sort(key=lambda entry: (rank(entry[1]), entry[0]))
    rows = [
        (
            _code(measure.name),
            _code(f"{path}:{measure.line}"),
            f"{measure.lines:,}",
            f"{measure.complexity:,}",
            f"{measure.nesting:,}",
        )
        for path, measure in measured[:RANKED]
    ]
    return _table(("Function", "Where", "Lines>", "Complexity>", "Nesting>"), rows)


def _listing(audits: Sequence[FileAudit], *kinds: FindingKind) -> str:
    findings = [finding for audit in audits for finding in audit.findings if finding.kind in kinds]
    total = sum(audit.counts.get(kind, 0) for audit in audits for kind in kinds)
    table = _table(("Where", "What"), [_finding_row(finding) for finding in findings[:LISTED]])
    unlisted = total - min(len(findings), LISTED)
    return f"{table}\n\n… and {unlisted:,} more." if unlisted else table


def _finding_row(finding: Finding) -> tuple[str, str]:
    what = f"{finding.kind}: {finding.detail}" if finding.kind in UNREAD else finding.detail
    return _code(f"{finding.path}:{finding.line}"), _code(what)


def _coverage(audits: Sequence[FileAudit]) -> str:
    packages: dict[str, list[FileAudit]] = {}
    for audit, package in zip(audits, _packages([audit.path for audit in audits]), strict=True):
        packages.setdefault(package, []).append(audit)
    totals = [(package, summarise(members)) for package, members in packages.items()]
    totals.sort(key=lambda entry: (-entry[1].findings[FindingKind.MISSING_DOCSTRING], entry[0]))
    rows = [
        (
            _code(package),
            f"{total.files:,}",
            f"{total.public:,}",
            f"{total.findings[FindingKind.MISSING_DOCSTRING]:,}",
            _documented(total),
        )
        for package, total in totals
    ]
    return _table(("Package", "Files>", "Public definitions>", "Without docstring>", "Coverage>"), rows)


def _packages(paths: Sequence[str]) -> list[str]:
    """For each path the folder that it is counted under: the first one below the folder they all share."""
    if not paths:
        return []
    folders = [PurePosixPath(path).parent for path in paths]
    shared = len(PurePosixPath(commonpath(folders)).parts)
    return [PurePosixPath(*folder.parts[: shared + 1]).as_posix() for folder in folders]


def _documented(total: AuditSummary) -> str:
    if not total.public:
        return "n/a"
    return f"{100 * (total.public - total.findings[FindingKind.MISSING_DOCSTRING]) // total.public} %"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns lined up in plain text too; a column named with `>` holds numbers."""
    if not rows:
        return "None."
    names = [column.rstrip(">") for column in columns]
    signs = [">" if column.endswith(">") else "<" for column in columns]
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    rule = [":".rjust(w, "-") if sign == ">" else "-" * w for w, sign in zip(widths, signs, strict=True)]
    lines = (
        " | ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True))
        for row in (names, rule, *rows)
    )
    return "\n".join(f"| {line} |" for line in lines)


def _code(text: str) -> str:
    """A code span that stays one cell of a table, whatever a file or function is called."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text).replace("|", "\\|")
    if "`" not in shown:
        return f"`{shown}`"
    fence = "`" * (max(map(len, re.findall("`+", shown))) + 1)
    return f"{fence} {shown} {fence}"
