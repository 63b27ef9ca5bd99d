"""`perdure demo`."""

from __future__ import annotations

import os
import platform
import secrets
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..support.connection import ConnectionOptions
from ..support.errors import Failed, Misuse
from ..support.output import AsJson, print_json
from ..support.temporary import run_interruptible
from .app import MAX_KILLS, list_files
from .processes import FILES_PER_KILL
from .scenario import DemoPlan, run_demo
from .screen import print_screen

__all__ = ["demo"]

KILLS = 3
FILES = 300


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder to report on. Default: the standard library of this Python.", show_default=False),
    ] = None,
    *,
    files: Annotated[int, typer.Option(min=1, metavar="N", help="Report on at most N files, evenly spread.")] = FILES,
    kills: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_KILLS,
            metavar="N",
            help=f"Number of workers to kill. Default: {KILLS}, or fewer if there are few files.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Repeat the random moments of a run with this seed.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Path of the report. Default: a new temporary file.", show_default=False),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this server, in a new namespace that is removed at the end. Default: a new embedded server.",
            show_default=False,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Use the embedded server of this folder in that way.", show_default=False),
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
    plan = _plan(folder, files, kills, seed, output, ConnectionOptions(redis_url, None, data_dir))
    result = run_interruptible(partial(run_demo, plan))
    evidence = result.evidence
    claims = evidence.claims()
    holds = all(claim.holds for claim in claims)
    if json:
        print_json(
            {
                "holds": holds,
                "seed": plan.seed,
                "seconds": round(result.seconds, 3),
                "report": str(plan.output),
                "kills": evidence.takeovers(),
                "dead_letter": result.letter.summary() | {"kept": evidence.kept},
                "evidence": claims,
            }
        )
    else:
        print_screen(result, claims)
    if not holds:
        raise typer.Exit(1)


def _plan(
    folder: Path | None, files: int, kills: int | None, seed: int | None, output: Path | None, place: ConnectionOptions
) -> DemoPlan:
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder.absolute()
    if not os.access(root, os.R_OK | os.X_OK) or not root.is_dir():
        raise Failed(f"FOLDER must be a readable folder, got {str(folder)!r}")
    found = list_files(str(root), files)
    if not found:
        raise Failed(f"FOLDER must hold files, got {str(folder)!r}, which holds none that the demo can read")
    possible = max(1, len(found) // FILES_PER_KILL)
    if kills is not None and kills > possible:
        raise Misuse(f"--kills must be {possible} or less for {len(found)} files, got {kills}")
    library = f"the standard library of {platform.python_implementation()} {platform.python_version()}"
    return DemoPlan(
        root=root,
        title=library if folder is None else root.resolve().name or str(root),
        files=found,
        kills=min(KILLS, possible) if kills is None else kills,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        output=_output(output),
        place=place,
    )


def _output(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.gettempdir(), f"perdure-demo-{secrets.token_hex(4)}.txt")
    path = wanted.absolute()
    writable = os.access(path if path.exists() else path.parent, os.W_OK)
    if path.is_dir() or not path.parent.is_dir() or not writable:
        raise Failed(f"--output must be a writable file in an existing folder, got {str(wanted)!r}")
    return path
