"""`python -m benchmarks.several_processes`: no-op tasks of one, two and four processes, and what the server carries.

All tasks are enqueued before the workers start. The measurement begins when all processes are ready, and ends before
the queue is empty. The server executes commands in one thread: what it carries is the rate divided by its load, the
share of a core that it used. Its CPU time of a finished task includes reading and acknowledging the message.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Final

import hiredis
import redis
import typer
from perdure import PerdureError, Producer
from perdure.queues import Partition
from perdure.worker.log import configure_logging

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.processes import started
from .support.server import NoServer, own_server, server_line
from .support.usage import Meter

_PROCESSES: Final = (1, 2, 4)
_CONCURRENCY: Final = 32
_WITHIN: Final = 300.0
_LOOK: Final = 0.02
_LEFT: Final = 0.05
"""Share of the tasks that is left at the end, so that no process is idle."""


@dataclass(frozen=True, slots=True)
class Share:
    """One number of processes. rate: tasks per second. server: microseconds of its CPU per finished task. load: share
    of a core that the server used.
    """

    processes: int
    rate: float
    server: float
    load: float

    @property
    def carried(self) -> float:
        """Tasks per second at which the server would use a whole core."""
        return self.rate / self.load


async def share(deployment: Deployment, processes: int, count: int) -> Share:
    """Measure so many processes with so many tasks."""
    ready = Partition(deployment.namespace, "bench", 0).ready
    async with Producer(deployment.url, namespace=deployment.namespace) as producer, AsyncExitStack() as stack:
        await producer.enqueue_many("noop", ({"number": number} for number in range(count)), queue="bench")
        starting = [
            stack.enter_async_context(started("benchmarks.scale.many_workers", deployment, "1", str(_CONCURRENCY)))
            for _ in range(processes)
        ]
        for start in starting:
            await start
        before, began, meter = await producer.gateway.command("XLEN", ready), time.monotonic(), Meter(deployment)
        left, deadline = before, began + _WITHIN
        while left > count * _LEFT:
            if time.monotonic() > deadline:
                raise PerdureError(f"{left} of {count} tasks were left after {_WITHIN:g} s")
            await asyncio.sleep(_LOOK)
            left = await producer.gateway.command("XLEN", ready)
        took, used = time.monotonic() - began, meter.read()
    if before == left:
        raise PerdureError(f"{count} tasks ended before {processes} processes were ready; give more with --tasks")
    return Share(processes, (before - left) / took, used.cpu / (before - left) * 1e6, used.load)


async def shares(deployment: Deployment, tasks: int) -> list[Share]:
    """Measure each number of processes. tasks: of each process."""
    found = []
    for processes in _PROCESSES:
        here = deployment.within(f"processes-{processes}")
        found.append(await share(here, processes, tasks * processes))
        here.purge()
    return found


def main(
    tasks: Annotated[int, typer.Option(help="No-op tasks of each process.", min=100)] = 60_000,
    quick: Annotated[bool, typer.Option("--quick", help="Few tasks, to try the program.")] = False,
) -> None:
    """Measure several worker processes on one server."""
    configure_logging("ERROR")
    try:
        with own_server(fsync=False) as deployment:
            print(origin_line(server_line(deployment)))
            for found in run(shares(deployment, 20_000 if quick else tasks)):
                print(
                    f"{found.processes} processes: {found.rate:,.0f} tasks/s, {found.rate / found.carried:.2f} of "
                    f"{found.carried:,.0f} that the server carries; its CPU {found.server:.1f} us per finished task"
                )
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
