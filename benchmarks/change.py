"""`python -m benchmarks.change`: ratios to the raw client, beside those of the code at the merge base.

Both are measured in turns by the benchmarks of this tree, on the same machine and in the same minute, so the change
says more than the figures. It decides nothing: the exit code is 0 whatever the ratios are, and if nothing can be
compared.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from .report import number
from .support.origin import ROOT
from .support.trees import git, unpack

__all__ = ["compare", "merge_base"]

_BRANCHES = ("origin/HEAD", "origin/main", "main")
"""Branches to compare with: the first that exists."""

_ONLY = ("throughput", "enqueue", "steps")

_MARGIN = 30.0
"""Seconds by which the last turn may exceed the time in which turns are started."""

Ratios = Mapping[str, float]


class _NoFigures(Exception):
    """No comparison is possible; the text says why."""


def merge_base(against: str | None = None) -> str:
    """Return the commit that this tree is compared with: the merge base, or the commit before on the branch itself.

    against: a commit or branch instead of the usual ones. Raises `_NoFigures` if that does not exist.
    """
    head = git("rev-parse", "HEAD")
    for branch in (against,) if against else _BRANCHES:
        with suppress(subprocess.CalledProcessError):
            base = git("merge-base", "HEAD", branch)
            if base != head:
                return base
            if git("status", "--porcelain", "--untracked-files=no"):
                return head
            return git("rev-parse", "HEAD~1")
    raise _NoFigures(f"no merge base with {against or ' or '.join(_BRANCHES)}")


def compare(base: Path, now: Path, *, seconds: float, quick: bool) -> list[str]:
    """Return a line per benchmark.

    base, now: folders that have the package `perdure` of the merge base and of this tree. seconds: in which turns are
    started, at least one; a turn is a run of both. Raises `_NoFigures` if a run fails, or if not one turn ends in time.
    """
    turns: list[tuple[Ratios, Ratios]] = []
    deadline = time.monotonic() + seconds
    took = 0.0
    while not turns or time.monotonic() + took < deadline:
        began = time.monotonic()
        try:
            turns.append(_turn(base, now, deadline + _MARGIN, base_first=len(turns) % 2 == 0, quick=quick))
        except _NoFigures:
            if not turns:
                raise
            break
        took = max(took, time.monotonic() - began)
    count = f"{len(turns)} turn{'' if len(turns) == 1 else 's'}"
    return [f"shares of the raw client, {count}: at the merge base, now", *(_line(key, turns) for key in turns[0][1])]


def _turn(base: Path, now: Path, deadline: float, *, base_first: bool, quick: bool) -> tuple[Ratios, Ratios]:
    """Return the ratios of the base and of this tree. They are first in turns: what warms up counts for both."""
    found = {
        package: _ratios(package, deadline, quick=quick) for package in ((base, now) if base_first else (now, base))
    }
    return found[base], found[now]


def _ratios(package: Path, deadline: float, *, quick: bool) -> Ratios:
    """Return the ratios to the raw client by benchmark, with the package of a folder."""
    options = [word for name in _ONLY for word in ("--only", name)] + (["--quick"] if quick else [])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PYTHON"))}
    command = [sys.executable, "-m", "benchmarks", "--json", "--rounds", "1", *options]
    within = max(1.0, deadline - time.monotonic())
    # In a session of its own, which ends with its server if time is over.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(package)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise _NoFigures(f"a run of {package.name} did not end in the {within:.0f} s that were left") from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        lines = errors.strip().splitlines() or ["no message"]
        raise _NoFigures(f"a run of {package.name} failed: {lines[-1]}")
    return {row["what"]: row["ratio"] for row in json.loads(output)["rows"]}


def _line(key: str, turns: Sequence[tuple[Ratios, Ratios]]) -> str:
    before, now = [before[key] for before, _ in turns], [now[key] for _, now in turns]
    change = statistics.median(now) / statistics.median(before) - 1
    return f"{key}: {_spread(before)}, {_spread(now)}: {change:+.0%}"


def _spread(values: Sequence[float]) -> str:
    return f"{number(statistics.median(values))} ({number(min(values))}-{number(max(values))})"


def main(
    against: Annotated[str | None, typer.Option(help="A commit or branch to compare with.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Start turns for so long.")] = 75.0,
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
) -> None:
    """Print the change of the ratios between the merge base and this tree."""
    try:
        commit = merge_base(against)
        with TemporaryDirectory(prefix="perdure-change-") as name:
            base, now = Path(name, "the merge base"), Path(name, "this tree")
            unpack(commit, base)
            now.mkdir()
            (now / "perdure").symlink_to(ROOT)
            print(f"compared with {commit[:12]}, which decides nothing")
            print(*compare(base, now, seconds=seconds, quick=quick), sep="\n")
    except _NoFigures as error:
        print(f"nothing to compare: {error}")
    except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
        print(f"nothing to compare: {type(error).__name__}: {error}")


if __name__ == "__main__":
    typer.run(main)
