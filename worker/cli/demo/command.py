"""`perdure demo`."""

from __future__ import annotations

import os
import platform
import secrets
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..connection import Place
from ..failures import Failed, Misuse
from ..interruption import run_interruptible
from ..output import AsJson, print_json
from .app import MOST_KILLS
from .folder import list_files
from .killer import FILES_PER_KILL
from .progress import Progress
from .screen import show
from .story import Ending, Plan, perform

__all__ = ["demo"]

KILLS = 3
FILES = 300


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(help="The Python code to audit. Else the standard library of this Python.", show_default=False),
    ] = None,
    *,
    files: Annotated[int, typer.Option(min=1, metavar="N", help="Audit at most N files, evenly spread.")] = FILES,
    kills: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_KILLS,
            metavar="N",
            help=f"Workers to kill. Else {KILLS}, or fewer where there are few files.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Draw the moments of the kills as another run did.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to put the report. Else a new temporary file.", show_default=False),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this server, in a namespace that is removed at the end. Else a server of the demo's own.",
            show_default=False,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Use the embedded server of this folder in that way.", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """See the whole story on real input, in half a minute.

    An agent audits Python code, each file in a step of its own, while its
    workers are killed with SIGKILL at random moments. A task that always
    fails becomes a dead letter, is repaired and replayed. The evidence is
    counted at the end; exit code 1 says that some of it does not hold.

    Example: perdure demo src --kills 5
    """
    plan = _plan(folder, files, kills, seed, output, Place(redis_url, None, data_dir))
    ending = _perform(plan)
    claims = ending.claims()
    if json:
        print_json(_summary(ending))
    else:
        show(ending, claims)
    if not all(claim.holds for claim in claims):
        raise typer.Exit(1)


def _plan(
    folder: Path | None, files: int, kills: int | None, seed: int | None, output: Path | None, place: Place
) -> Plan:
    """What is to be done, or `Misuse` or `Failed` where it cannot be."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder.absolute()
    title = (
        f"the standard library of {platform.python_implementation()} {platform.python_version()}"
        if folder is None
        else root.resolve().name or str(root)
    )
    found = list_files(str(root), files)
    if not found:
        raise Failed(f"{str(folder)!r} holds no Python files: name a folder that does")
    possible = max(1, len(found) // FILES_PER_KILL)
    if kills is not None and kills > possible:
        raise Misuse(
            f"{kills} kills need {kills * FILES_PER_KILL} files to strike in, and there are {len(found)}: "
            f"ask for {possible} or fewer with --kills"
        )
    return Plan(
        root=root,
        title=title,
        files=found,
        kills=min(KILLS, possible) if kills is None else kills,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        output=_output(output),
        place=place,
    )


def _output(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.gettempdir(), f"perdure-audit-{secrets.token_hex(4)}.md")
    output = wanted.absolute()
    if output.is_dir() or not output.parent.is_dir():
        raise Failed(f"the report cannot be put at {str(wanted)!r}: name a file in a folder that exists")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise Failed(f"the report cannot be put at {str(wanted)!r}: it may not be written")
    return output


def _perform(plan: Plan) -> Ending:
    """Carry the plan out, and clean up also when interrupted."""
    progress = Progress(Console(stderr=True, markup=False, highlight=False))
    return run_interruptible(partial(perform, plan, progress))


def _summary(ending: Ending) -> dict[str, Any]:
    """The ending as plain data, for programs."""
    claims = ending.claims()
    letter = ending.published.letter
    return {
        "holds": all(claim.holds for claim in claims),
        "seed": ending.plan.seed,
        "seconds": round(ending.seconds, 3),
        "report": str(ending.plan.output),
        "sha256": ending.audited.result.sha256,
        "undisturbed_sha256": ending.audited.undisturbed,
        "audit": ending.summary.model_dump(mode="json"),
        "kills": [takeover.summary() for takeover in ending.takeovers()],
        "dead_letter": letter.summary() | {"kept": ending.published.kept},
        "evidence": [claim.summary() for claim in claims],
    }
