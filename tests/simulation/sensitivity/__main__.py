"""`python -m tests.simulation.sensitivity`: which defects the simulation finds, and with which seed.

A defect is put back into a script, or a guard of a script or of the worker is left out. Each is played in a process of
its own, seed by seed, until a check reports something.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import orjson

from .defects import DEFECTS, replacement
from .guards import Finding, Guard, Kind
from .module_guards import guards_of_modules
from .removal import Survey, take_out
from .script_guards import guards_of_scripts
from .table import FINDINGS, rows

if TYPE_CHECKING:
    from ..world import World

ROOT: Final = Path(__file__).parents[3]

_PATIENCE: Final = 120
"""Seconds of this machine after which one run counts as endless."""

_OBVIOUS: Final = 3
"""First runs, all of which find what no run can do without."""

_MAX: Final = 60
"""Runs that need a guard of which so many are played without it."""

_PER_PROCESS: Final = 20


def find(
    alter: Callable[[bytes], bytes], seeds: Iterable[int], begin: Callable[[int], object] = int
) -> Iterator[tuple[int, str]]:
    """Play seeds. Yield each with what was found, "" if nothing."""
    from ..plan import draw  # here: a module may have been changed, which must not be imported before
    from ..world import World, log_errors

    kept: list[World] = []
    gc.disable()
    log_errors()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for seed in seeds:
        begin(seed)
        world = World(draw(seed))
        world.server.alter = alter
        kept.append(world)  # see __main__
        signal.alarm(_PATIENCE)
        try:
            violations = world.play().violations
            yield seed, violations[0].kind if violations else ""
        except Exception as error:  # noqa: BLE001 - whatever it is, the defect was seen
            yield seed, repr(error)


def first_found(alter: Callable[[bytes], bytes], seeds: Sequence[int]) -> str:
    """Return the first seed that finds something, and what; "each seed" if the first three of all do."""
    first: list[tuple[int, str]] = []
    for seed, found in find(alter, seeds):
        if found:
            first.append((seed, found))
        if first and (first[-1][0] != len(first) - 1 or len(first) == _OBVIOUS):
            break
    if not first:
        return f"not found in {len(seeds)} seeds"
    return f"{'each seed' if len(first) == _OBVIOUS else f'seed {first[0][0]}'}: {first[0][1]}"


def survey(seeds: range) -> Survey:
    """Return which guards some runs need."""
    watched = Survey()
    for seed, found in find(watched.watch(), seeds, lambda seed: setattr(watched, "seed", seed)):
        if found:
            sys.stderr.write(f"seed {seed} finds something in the sound program: {found}\n")
    return watched


def _run(*options: str) -> str:
    """Run this module in a process of its own, and return what it prints."""
    command = [sys.executable, "-m", "tests.simulation.sensitivity", *options]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return run.stdout.strip() or ("a run does not end" if run.returncode == -signal.SIGALRM else "it fails")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _surveyed(seeds: int) -> Survey:
    """Survey seeds, some per process, so that kept worlds do not fill the memory."""
    whole = Survey()
    for start in range(0, seeds, _PER_PROCESS):
        part = orjson.loads(_run("--survey", str(start), "--seeds", str(min(seeds - start, _PER_PROCESS))))
        for into, found in ((whole.asked, part["asked"]), (whole.needed, part["needed"])):
            for name, numbers in found.items():
                into.setdefault(name, []).extend(numbers)
    return whole


def _guards(count: int, draw: int, seeds: int, jobs: int) -> None:
    """Draw guards, half of them of scripts, and play for each the runs that need it.

    Not counted are those that no run asks for, and those without which no run works.
    """
    surveyed, random = _surveyed(seeds), Random(draw)
    with ThreadPoolExecutor(jobs) as pool:
        for guards in (guards_of_scripts(), guards_of_modules()):
            random.shuffle(guards)
            drawn, counted = iter(guards), 0
            while batch := [*itertools.islice(drawn, count // 2 - counted)]:
                for guard, found in zip(batch, pool.map(partial(_play, surveyed), batch), strict=True):
                    asked, needed = surveyed.counts(str(guard))
                    apart = not asked or found.startswith("each seed")
                    counted += not apart
                    number = "" if apart else counted
                    _say(f"| {number} | `{guard}` | `{guard.text}` | {needed} of {asked} | {found} |")


def _again(seeds: int, jobs: int) -> bool:
    """Play for each guard of the table the seed that finds it missing, else the runs that need it.

    Return whether the table is right about which guards are found.
    """
    surveyed, guards = _surveyed(seeds), {(one.place, one.text): one for one in _all_guards()}

    def play(finding: Finding) -> str:
        guard = guards[finding.place, finding.text]
        if finding.seed is None:
            return _play(surveyed, guard)
        return _run("--one", str(guard), "--played", str(finding.seed))

    right = True
    with ThreadPoolExecutor(jobs) as pool:
        for finding, found in zip(FINDINGS, pool.map(play, FINDINGS), strict=True):
            guard = guards[finding.place, finding.text]
            asked, needed = surveyed.counts(str(guard))
            same = (finding.kind is Kind.FOUND) == _is_found(found)
            right = right and same
            _say(f"{'' if same else 'other: '}{guard} `{guard.text}`: {found} ({needed} of {asked} runs need it)")
            _say(f"    {finding.outcome}")
    return right


def _is_found(found: str) -> bool:
    return not found.startswith(("not found", "no run needs it"))


def _all_guards() -> list[Guard]:
    return [*guards_of_scripts(), *guards_of_modules()]


def _play(surveyed: Survey, guard: Guard) -> str:
    """Play the runs that need a guard without it, in a process of their own."""
    needed = surveyed.needed.get(str(guard), [])[:_MAX]
    return _run("--one", str(guard), "--played", ",".join(map(str, needed))) if needed else "no run needs it"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.sensitivity", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=200, help="runs among which those are that need a guard, or find a defect (200)"
    )
    parser.add_argument("--guards", type=int, default=0, help="number of guards that are left out, one at a time")
    parser.add_argument("--draw", type=int, default=1, help="which guards")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per core)")
    parser.add_argument("--one", help="one defect or guard, in this process")
    parser.add_argument("--played", help="with --one: the seeds, with commas between them")
    parser.add_argument("--table", action="store_true", help="print the table of the guards that were taken out")
    parser.add_argument("--again", action="store_true", help="play the runs of that table again")
    parser.add_argument("--survey", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seeds = range(options.seeds) if not options.played else [int(one) for one in options.played.split(",")]
    if options.survey is not None:
        found = survey(range(options.survey, options.survey + options.seeds))
        _say(orjson.dumps(asdict(found)).decode())
    elif options.one in DEFECTS:
        _say(first_found(replacement(*DEFECTS[options.one]), seeds))
    elif options.one is not None:
        guard = next(one for one in _all_guards() if str(one) == options.one)
        _say(first_found(take_out(guard), seeds))
    elif options.table:
        _say("\n".join(rows()))
    elif options.again:
        return 0 if _again(options.seeds, options.jobs) else 1
    elif options.guards:
        _guards(options.guards, options.draw, options.seeds, options.jobs)
    else:
        for name in DEFECTS:
            _say(f"| {name} | {_run('--one', name, '--seeds', str(options.seeds))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
