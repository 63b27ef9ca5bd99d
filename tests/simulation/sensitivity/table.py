"""Table of the guards that were taken out, as tests/simulation/README.md has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .guards import Finding
from .module_guards import FINDINGS_OF_MODULES
from .script_guards import FINDINGS_OF_SCRIPTS

__all__ = ["FINDINGS", "rows"]

FINDINGS: Final[tuple[Finding, ...]] = (*FINDINGS_OF_SCRIPTS, *FINDINGS_OF_MODULES)


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| guard | what is left out | it asks whether | seed and check, or why no run shows it |"
    yield "|---|---|---|---|"
    for one in FINDINGS:
        yield f"| `{one.place}` | `{one.text}` | {one.protects} | {one.outcome} |"
