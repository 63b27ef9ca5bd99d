"""Final screen of the demo."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich.text import Text

from ...settings import Settings
from ..support.output import print_fields, print_table, print_text, stdout
from .evidence import Claim
from .scenario import LEASE, DemoResult

__all__ = ["print_screen"]


def print_screen(result: DemoResult, claims: Sequence[Claim]) -> None:
    """Print the kills, the dead letter and the evidence. The tables fit 80 columns."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a file may have any name, and stdout may be ASCII
    plan, letter, evidence = result.plan, result.letter, result.evidence
    print_text(f"Perdure demo, seed {plan.seed}, {result.seconds:.1f} s\n")
    print_text(f"One task reported on {len(plan.files):,} files of {plan.title}, each file in its own step.\n")
    kills = [
        (str(one.killed), f"{one.started:,}", _cut(one.subject, 24), str(one.resumed_by or "none"), _shown(one.seconds))
        for one in evidence.takeovers()
    ]
    print_table(("Killed worker", "In step#", "File", "Resumed by", "After#"), kills)
    usual = Settings.model_fields["lease"].default
    print_text(f"Another worker claims the task when its lease ends: {LEASE:g} s here, {usual:g} s by default.\n")
    print_fields(
        {
            "dead letter": f"{letter.id}, task {letter.task}",
            "reason": f"{letter.reason}: {letter.attempts} attempts, {letter.crashes} crashes",
            "error": _cut(f"{letter.error}: {letter.message}", 60),
            "kept": f"recorded steps: {', '.join(evidence.kept)}",
            "replayed": f"succeeded {result.replay_seconds:.2f} s after the missing folder was made",
        }
    )
    print_text("")
    verdicts = {True: Text("yes"), False: Text("NO", "red")}
    rows = [(one.statement, _shown(one.counted), one.allowed, one.source, verdicts[one.holds]) for one in claims]
    print_table(("Evidence", "Counted#", "Allowed", "Counted from", "Holds"), rows)
    failed = [f"{one.statement}: {_shown(one.counted)}, allowed {one.allowed}" for one in claims if not one.holds]
    text = f"{len(failed)} of {len(claims)} claims do not hold: {'; '.join(failed)}"
    stdout().print(Text(text, "bold red") if failed else Text(f"All {len(claims)} claims hold.", "bold green"))
    print_text(f"Report: {plan.output}")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width // 2 - 3]}...{text[-width // 2 :]}"


def _shown(counted: int | float | str | None) -> str:
    if isinstance(counted, int):
        return f"{counted:,}"
    return f"{counted:.2f} s" if isinstance(counted, float) else (counted or "none")[:8]
