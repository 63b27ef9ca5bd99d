"""`python -m benchmarks.profile`: the functions that take most of a worker's time, now and at another commit.

py-spy takes samples of a worker that runs no-op tasks, and of one that runs a task of durable steps. A function's
share is its self time, including C functions that it calls. Microseconds are the share of the CPU time of one task or
step on the thread of the event loop.

The other commit needs its own dependencies beside those of this tree.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from .support.machine import origin_line
from .support.origin import ROOT, commit_of_tree
from .support.profiled_process import profiler
from .support.server import NoServer, own_server, server_line
from .support.trees import unpack

__all__ = ["Profile", "innermost", "profile"]

_SCENARIOS: Final[Mapping[str, str]] = {
    "tasks": "a no-op task, concurrency 32",
    "steps": "a durable step, one after another in one task",
}
_WITHIN: Final = 300.0
_THREAD: Final = "_bootstrap (threading.py)"
"""End of the outermost frame of every thread but the first, which has the event loop. The others mostly wait."""


class _NoProfile(Exception):
    """A worker could not be profiled; the text says why."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Samples of one worker. micros: CPU of a task or step. shares: by function, the largest first; their sum is 1."""

    micros: float
    shares: Mapping[str, float]

    def rows(self, top: int) -> list[str]:
        """Return the first functions, each with its microseconds of a task or step and its share."""
        first = list(self.shares.items())[:top]
        return [f"{self.micros * share:.1f} | {share:.1%} | `{name}`" for name, share in first]


def innermost(samples: str) -> dict[str, float]:
    """Return the share of each innermost function. samples: lines of py-spy's raw format, `outer;inner count`.

    Only those of the first thread count.
    """
    counts: Counter[str] = Counter()
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack.partition(";")[0].endswith(_THREAD):
            continue
        counts[_function(stack.rpartition(";")[2])] += int(count)
    return {name: count / counts.total() for name, count in counts.most_common()}


def _function(frame: str) -> str:
    """Return `module.function` of a frame `function (path/to/module.py)`, whose path may begin with this folder."""
    name, _, path = frame.partition(" (")
    path = path.removeprefix(f"{ROOT.name}/")
    return f"{path.removesuffix(')').removesuffix('.py').replace('/', '.')}.{name}"


def profile(package: Path, scenario: str, count: int) -> Profile:
    """Profile the package `perdure` of a folder. Raises `_NoProfile` if its worker fails."""
    with own_server(fsync=False) as deployment, TemporaryDirectory(prefix="perdure-profile-") as folder:
        file = Path(folder, "samples")
        command = [sys.executable, "-m", "benchmarks.support.profiled_process", scenario, str(count), str(file)]
        environment = {name: value for name, value in deployment.environment.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(package)},
            capture_output=True,
            text=True,
            timeout=_WITHIN,
            check=False,
        )
        if done.returncode:
            raise _NoProfile((done.stderr.strip().splitlines() or ["no message"])[-1])
        return Profile(float(done.stdout) / count * 1e6, innermost(file.read_text()))


def main(
    against: Annotated[str | None, typer.Option(help="A commit to profile beside this tree.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="No-op tasks.")] = 60_000,
    steps: Annotated[int, typer.Option(min=1, help="Durable steps.")] = 30_000,
    top: Annotated[int, typer.Option(min=1, help="Functions to print.")] = 15,
) -> None:
    """Print tables for a document: the functions with most samples."""
    if profiler() is None:
        raise SystemExit("no profile: py-spy is not installed, which `pip install --group test` does")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="perdure-profile-")))
        now = folder / "now"
        now.mkdir()
        (now / "perdure").symlink_to(ROOT)
        trees = {f"`{commit_of_tree()}`": now}
        if against is not None:
            try:
                unpack(against, folder / "against")
            except subprocess.CalledProcessError:
                raise typer.BadParameter(f"there is no commit {against!r}", param_hint="--against") from None
            trees = {f"`{against}`": folder / "against", **trees}
        try:
            for scenario, count in (("tasks", tasks), ("steps", steps)):
                found = {title: profile(package, scenario, count) for title, package in trees.items()}
                print("\n".join(_table(_SCENARIOS[scenario], found, top)))
            with own_server(fsync=False) as deployment:
                print(origin_line(server_line(deployment)))
        except (NoServer, _NoProfile) as error:
            raise SystemExit(f"no profile: {error}") from None


def _table(scenario: str, profiles: Mapping[str, Profile], top: int) -> list[str]:
    head = " | ".join(f"µs | share | {title}: {found.micros:.1f} µs" for title, found in profiles.items())
    rules = " | ".join("---: | ---: | ---" for _ in profiles)
    rows = zip_longest(*(found.rows(top) for found in profiles.values()), fillvalue=" | | ")
    lines = [head, rules, *(" | ".join(row) for row in rows)]
    return [f"{scenario[0].upper()}{scenario[1:]}:", "", *(f"| {line} |" for line in lines), ""]


if __name__ == "__main__":
    typer.run(main)
