"""Findings: what a check has found, what that means, and the remedy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

Fix: TypeAlias = Callable[[], Awaitable[str]]
"""Idempotent repair that is safe while workers run. Returns what it did, empty if there was nothing to do."""


class Severity(StrEnum):
    """Severity of a finding, the lowest first.

    ok: nothing to do. note: good to know. warning: a risk, or work that waits. error: data is lost or tasks stop,
    now or at the next fault.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Position in the order of severity."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check.

    Attributes:
        check: Name of the check.
        found: What was found, with its figures.
        meaning: Consequence; empty if there is nothing to do.
        remedy: What to do.
        where: Server, queue or worker that it is about; empty for all.
        fix: Safe repair, which `perdure doctor --fix` runs.
        done: What the repair did; None if it was not run.
    """

    check: str
    severity: Severity
    found: str
    meaning: str = ""
    remedy: str = ""
    where: str = ""
    fix: Fix | None = field(default=None, compare=False, repr=False)
    done: str | None = None

    def summary(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "where": self.where,
            "found": self.found,
            "meaning": self.meaning,
            "remedy": self.remedy,
            "fixable": self.fix is not None,
            "fixed": self.done,
        }
