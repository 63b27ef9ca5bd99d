"""Verdict on a run: its counts, and each violated guarantee with the journal lines that show it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..journal import Line
from .counts import counted
from .history import Violation, history
from .rules import RULES

__all__ = ["verdict", "violations"]

_SHOWN = 3
"""Violations of each rule that are explained."""


def violations(lines: Sequence[Line]) -> list[Violation]:
    """Return all violations in a journal."""
    found = history(lines)
    return [violation for rule in RULES for violation in rule(found)]


def verdict(lines: Sequence[Line], folder: Path) -> int:
    """Print the verdict; return the exit code, 1 if a guarantee was violated."""
    found = violations(lines)
    sys.stdout.write("\n".join(_report(lines, found, folder)) + "\n")
    return 1 if found else 0


def _report(lines: Sequence[Line], found: Sequence[Violation], folder: Path) -> Iterator[str]:
    story = history(lines)
    yield from counted(story)
    if not any(line.what == "ends" for line in lines):
        yield "the run did not end: tasks may look lost that are not"
    if not found:
        yield "no guarantee was violated"
        return
    kinds = Counter(violation.rule for violation in found)
    yield f"VIOLATED: {', '.join(f'{count} {rule}' for rule, count in kinds.most_common())}"
    for violation in _some_of_each(found):
        yield f"\n{violation.rule}: {violation.what}"
        yield from (line.shown(story.start) for line in violation.lines[:12])
    yield f"\nthe journal: {folder}; check it again: python -m tests.chaos check {folder}"


def _some_of_each(found: Sequence[Violation]) -> Iterator[Violation]:
    """The first violations of each rule."""
    shown: Counter[str] = Counter()
    for violation in found:
        shown[violation.rule] += 1
        if shown[violation.rule] <= _SHOWN:
            yield violation
