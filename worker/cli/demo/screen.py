"""The one screen with which the demo ends."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...settings import Settings
from ..output import clean
from .app import steps_of_audit
from .evidence import Claim
from .models import FindingKind
from .progress import bar
from .stage import LEASE
from .story import Ending, Published
from .takeovers import Takeover

__all__ = ["show"]

WIDTH_WITHOUT_TERMINAL = 100


def show(ending: Ending, claims: Sequence[Claim]) -> None:
    """Print the screen on stdout."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=WIDTH_WITHOUT_TERMINAL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a file may have any name, and stdout may be ASCII
    console.print(_render(ending, claims, plain=console.options.ascii_only))


def _render(ending: Ending, claims: Sequence[Claim], *, plain: bool) -> RenderableType:
    """All that happened and the evidence for it, in at most 45 lines of 100 columns for three kills."""
    steps = steps_of_audit(len(ending.plan.files))
    hits = ending.takeovers()
    marks = [takeover.begun for takeover in hits]
    failed = [claim for claim in claims if not claim.holds]
    return Group(
        Text(f"Perdure demo   seed {ending.plan.seed}   {ending.seconds:.1f} s", "bold"),
        Text(),
        _what_was_done(ending),
        Text(),
        Text.assemble(bar(steps, steps, marks, ascii_only=plain), f"  {steps:,} steps, {len(hits)} kills"),
        _kills(hits),
        _lease(),
        Text(),
        _dead_letter(ending.published),
        _evidence(claims, "x" if plain else "✗", "ok" if plain else "✓"),
        _verdict(failed, len(claims)),
        Text(f"The report: {clean(str(ending.plan.output))}"),
    )


def _lease() -> Text:
    usual = Settings.model_fields["lease"].default
    return Text(
        f"A dead worker's task is taken over when its lease has passed: {LEASE:g} s here, {usual:g} s by default.",
        "dim",
    )


def _what_was_done(ending: Ending) -> Text:
    summary, found = ending.summary, ending.summary.findings
    return Text(
        f"An agent audited {summary.files:,} files of {clean(ending.plan.title)}, each in a step of its own:\n"
        f"{summary.lines:,} lines, {summary.functions:,} functions; "
        f"{found[FindingKind.BARE_EXCEPT]:,} bare excepts, {found[FindingKind.MUTABLE_DEFAULT]:,} mutable defaults, "
        f"{found[FindingKind.MISSING_DOCSTRING]:,} missing docstrings."
    )


def _kills(hits: Sequence[Takeover]) -> Table:
    table = Table.grid(padding=(0, 1))
    for hit in hits:
        went_on = "nobody went on" if hit.seconds is None else f"worker {hit.by} went on after {hit.seconds:.2f} s"
        table.add_row(
            Text(f"kill -9 {hit.worker}", "red"),
            Text(f"at step {hit.begun:,}"),
            Text(clean(hit.subject or hit.step), overflow="ellipsis", no_wrap=True),
            Text(went_on),
        )
    return table


def _dead_letter(published: Published) -> Table:
    """What `perdure dlq show` says of it, and what was done about it. The demo's folder is shown as `...`."""
    letter = published.letter
    message = letter.message.replace(str(published.site.parent), "...")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=11)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for name, value in (
        ("dead letter", Text(letter.id)),
        ("task", Text(f"{letter.task} in queue {letter.partition.queue}")),
        ("reason", Text(f"{letter.reason}: {letter.attempts} attempts, {letter.crashes} crashes")),
        ("error", Text(clean(f"{letter.error}: {message}"), "red")),
        ("last worker", Text(letter.worker)),
        ("kept", Text(f"{len(published.kept)} recorded steps: {', '.join(published.kept)}")),
        ("repaired", Text(f"mkdir .../{published.site.name}")),
        ("replayed", Text(f"succeeded after {published.seconds:.2f} s", "green")),
    ):
        table.add_row(name, value)
    return table


def _evidence(claims: Sequence[Claim], bad: str, good: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in ("Evidence", "Counted", "Allowed", "Where", ""):
        table.add_column(column, justify="right" if column == "Counted" else "left", no_wrap=True)
    for claim in claims:
        verdict = Text(good, "green") if claim.holds else Text(bad, "bold red")
        table.add_row(claim.what, claim.shown, claim.allowed, claim.source, verdict)
    return table


def _verdict(failed: Sequence[Claim], total: int) -> Text:
    if not failed:
        return Text(f"All {total} hold.", "bold green")
    names = "; ".join(f"{claim.what}: {claim.shown}, allowed {claim.allowed}" for claim in failed)
    return Text(f"{len(failed)} of {total} do not hold: {names}", "bold red")
