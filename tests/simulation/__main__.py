"""`python -m tests.simulation`: runs of many seeds, one seed again, or its shortest version."""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from .fleet.elements import ELEMENTS
from .plan import FAULTS, Plan, draw
from .shrink import shrink
from .story import narrate
from .world import Outcome, World, log_errors

_KEPT: list[World] = []
"""Worlds that were played. Their tasks must not be collected, since that would run what a kill has cut off."""

_PER_PROCESS = 20
"""Runs of one process before another takes its place, so that kept worlds do not fill the memory."""


def _play(seed: int, element: str = "") -> Outcome:
    world = World(draw(seed, element))
    _KEPT.append(world)
    return world.play()


def _play_all(seeds: range, jobs: int, element: str) -> Iterator[Outcome]:
    # Nothing of a kept world is garbage, so looking for it takes time only.
    with multiprocessing.get_context("fork").Pool(jobs, gc.disable, maxtasksperchild=_PER_PROCESS) as pool:
        yield from pool.imap_unordered(partial(_play, element=element), seeds, chunksize=_PER_PROCESS)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Run the whole system in one process under virtual time: producers, workers and a server, with "
        "faults between any two awaits. A seed determines a run completely.",
    )
    parser.add_argument("--seeds", type=int, default=1000, help="number of runs (1000)")
    parser.add_argument("--start", type=int, default=0, help="first seed (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per core)")
    parser.add_argument("--seed", type=int, help="run this seed only, and print its story")
    parser.add_argument("--element", choices=ELEMENTS, default="", help="let each run have this element")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out what the violation does not need")
    return parser.parse_args()


def main() -> int:
    """Run what the options say. Return 1 if a guarantee was violated."""
    log_errors()
    options = _options()
    if options.seed is not None:
        return _one(options.seed, options.element, shrunk=options.shrink)
    return _many(range(options.start, options.start + options.seeds), options.jobs, options.element)


def _one(seed: int, element: str, *, shrunk: bool) -> int:
    plan = draw(seed, element)
    if shrunk:
        plan = shrink(plan, sys.stderr)
    world = World(plan)
    outcome = world.play()
    for line in narrate(world, outcome):
        _say(line)
    return 1 if outcome.violations else 0


def _many(seeds: range, jobs: int, element: str) -> int:
    begin, failed, faults = time.perf_counter(), 0, 0
    pairs: Counter[tuple[str, str]] = Counter()
    for done, outcome in enumerate(_play_all(seeds, jobs, element), 1):
        faults += len(outcome.plan.faults)
        pairs.update(_pairs(outcome.plan))
        if outcome.violations:
            failed += 1
            _say(f"seed {outcome.plan.seed}: {outcome.violations[0]}")
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done} of {len(seeds)} seeds")
    took = time.perf_counter() - begin
    possible = len(FAULTS) * (len(FAULTS) + 1) // 2
    _say(f"{len(seeds)} seeds in {took:.1f} s: {len(seeds) / took:.1f} seeds per second")
    _say(f"{faults} faults; {len(pairs)} of {possible} pairs of faults occurred in one run")
    _say(f"{failed} seeds with a violation" if failed else "no guarantee was violated")
    if failed:
        _say("run one again:  python -m tests.simulation --seed N --shrink")
    return 1 if failed else 0


def _pairs(plan: Plan) -> set[tuple[str, str]]:
    kinds = sorted(fault.kind for fault in plan.faults)
    return set(itertools.combinations(kinds, 2))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of text depends on it
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
