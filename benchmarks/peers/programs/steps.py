"""`python -m programs.steps MODULE TASKS AT_ONCE LIMIT`: the caller of the durable benchmark.

It runs durable tasks of ten steps, AT_ONCE concurrently, each from its call to its result, and starts no more after
TASKS tasks or LIMIT seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from .harness import NoFigure, report, reporting_failure, run

STEPS = 10

Walk = Callable[[int], Awaitable[int]]


async def _measure(walk: Walk, tasks: int, at_once: int, limit: float) -> None:
    numbers = count()

    async def one() -> None:
        number = next(numbers)
        if (found := await walk(number)) != number + STEPS:
            raise NoFigure(f"a task of {STEPS} steps from {number} ended at {found}")

    # Open connections and prepare statements before the clock runs.
    await asyncio.gather(*(one() for _ in range(at_once)))
    left = iter(range(tasks))
    began = time.monotonic()

    async def repeat() -> int:
        """Return how many tasks this caller ran."""
        ran = 0
        while time.monotonic() - began < limit and next(left, None) is not None:
            await one()
            ran += 1
        return ran

    ran = sum(await asyncio.gather(*(repeat() for _ in range(at_once))))
    report(ran=ran * STEPS, seconds=time.monotonic() - began, limited=ran < tasks)


async def _main(name: str, tasks: int, at_once: int, limit: float) -> None:
    module = importlib.import_module(f".frameworks.{name}", __package__)
    if module.BLOCKING:
        with module.walker() as walk, ThreadPoolExecutor(at_once) as threads:
            loop = asyncio.get_running_loop()
            await _measure(lambda number: loop.run_in_executor(threads, walk, number), tasks, at_once, limit)
    else:
        async with module.walker() as walk:
            await _measure(walk, tasks, at_once, limit)


if __name__ == "__main__":
    with reporting_failure():
        run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
