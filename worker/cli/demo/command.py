"""`perdure demo`."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from ..support.connection import warn_of_password
from ..support.errors import Failed
from ..support.output import AsJson, print_fields, print_json, print_table, print_text, stdout
from ..support.temporary import run_interruptible
from .app import MAX_KILLS, list_files
from .evidence import LEASE, Claim
from .scenario import DemoResult, run_demo

__all__ = ["demo"]

_FILES_PER_KILL: Final = 10
"""With fewer files, the task could end before the last kill."""


def demo(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to report on. Default: the standard library of this Python.")
    ] = None,
    *,
    files: Annotated[int, typer.Option(min=1, metavar="N", help="Report on at most N files, evenly spread.")] = 300,
    kills: Annotated[
        int, typer.Option(min=1, max=MAX_KILLS, metavar="N", help="Kill N workers, but at most one for ten files.")
    ] = 3,
    redis_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this server, in a new namespace that is removed at the end; see 'perdure enqueue --help' about "
            "passwords. Default: a new embedded server.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Kill workers and replay a dead letter, on real files.

    One task reports on the files of a folder, each file in its own step,
    while its workers are killed with SIGKILL at random moments. A second task
    fails until it is a dead letter, and is replayed. At the end, the demo
    counts the evidence; exit code 1 means that a claim does not hold.

    Example: perdure demo src --kills 5
    """
    warn_of_password("--redis-url", redis_url, "PERDURE_REDIS_URL")
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder.absolute()
    found = list_files(str(root), files)
    if not found:
        raise Failed(f"FOLDER must be a folder with readable files, got {str(folder)!r}")
    possible = max(1, len(found) // _FILES_PER_KILL)
    result = run_interruptible(partial(run_demo, str(root), found, min(kills, possible), redis_url))
    claims = result.evidence.claims()
    holds = all(claim.holds for claim in claims)
    if json:
        letter = result.letter.summary() | {"kept": result.evidence.kept}
        kills_shown = result.evidence.takeovers()
        report = str(result.report)
        print_json({"holds": holds, "report": report, "kills": kills_shown, "dead_letter": letter, "evidence": claims})
    else:
        _print_screen(result, claims)
    if not holds:
        raise typer.Exit(1)


def _print_screen(result: DemoResult, claims: Sequence[Claim]) -> None:
    """Print the kills, the dead letter and the evidence. The tables fit 80 columns."""
    from rich.text import Text

    letter, evidence = result.letter, result.evidence
    print_text(f"One task of {evidence.steps:,} steps, with a step for each file, reported on: {result.root}\n")
    kills = [
        (str(one.killed), f"{one.started:,}", one.subject[-24:], str(one.resumed_by or "none"), _shown(one.seconds))
        for one in evidence.takeovers()
    ]
    print_table(("Killed worker", "In step#", "File", "Resumed by", "After#"), kills)
    print_text(f"Another worker claims the task when its lease of {LEASE:g} s ends.\n")
    print_fields(
        {
            "dead letter": f"{letter.id}, task {letter.task}",
            "reason": f"{letter.reason}: {letter.attempts} attempts, {letter.crashes} crashes",
            "error": f"{letter.error}: {letter.message}",
            "kept": f"recorded steps: {', '.join(evidence.kept)}",
        }
    )
    print_text("")
    verdicts = {True: Text("yes"), False: Text("NO", "red")}
    rows = [(one.statement, _shown(one.counted), one.allowed, one.source, verdicts[one.holds]) for one in claims]
    print_table(("Evidence", "Counted#", "Allowed", "Counted from", "Holds"), rows)
    failed = [f"{one.statement}: {_shown(one.counted)}, allowed {one.allowed}" for one in claims if not one.holds]
    text = f"{len(failed)} of {len(claims)} claims do not hold: {'; '.join(failed)}"
    stdout().print(Text(text, "bold red") if failed else Text(f"All {len(claims)} claims hold.", "bold green"))
    print_text(f"Report: {result.report}")


def _shown(counted: int | float | str | None) -> str:
    if isinstance(counted, int):
        return f"{counted:,}"
    return f"{counted:.2f} s" if isinstance(counted, float) else (counted or "none")[:8]
