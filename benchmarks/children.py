"""`python -m benchmarks.children`: a parent that gathers many children: time from the spawn to the results, and memory.

The parent runs in this process, its children in a worker process of their own. The memory is the largest number of
bytes that Python had allocated in the parent's process, beside what it had before.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tracemalloc
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final

import typer
from perdure import App, Context, Worker
from perdure.worker.log import configure_logging

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.server import own_server, server_line

_CHILDREN: Final = "bench-children"
_WORKER: Final = "import sys; from benchmarks.children import work; work(int(sys.argv[1]))"


def _app(deployment: Deployment) -> tuple[App, Any, Any]:
    app = deployment.app()

    @app.task(queue=_CHILDREN)
    async def child(ctx: Context, number: int) -> dict[str, int]:
        return {"number": number, "square": number * number}

    @app.task
    async def parent(ctx: Context, count: int, limit: int) -> list[float]:
        runs.append(perf_counter())
        found = await ctx.gather(child, range(count), limit=limit)
        return [perf_counter() - runs[0], len(runs), len(found)]

    runs: list[float] = []
    return app, parent, child


def work(concurrency: int) -> None:
    """Run the children until standard input is closed."""
    configure_logging("ERROR")

    async def main() -> None:
        app, _, _ = _app(Deployment.from_environment())
        async with app, Worker(app, queues=[_CHILDREN], concurrency=concurrency) as worker:
            running = asyncio.create_task(worker.run())
            await asyncio.to_thread(sys.stdin.read)
            worker.stop()
            await running

    asyncio.run(main())


async def _measure(deployment: Deployment, count: int, limit: int, *, traced: bool) -> tuple[list[float], int]:
    """Return seconds, runs of the parent and number of results, and the largest number of allocated bytes."""
    app, parent, _ = _app(deployment)
    async with app, Worker(app, queues=["bench"], concurrency=1) as worker:
        running = asyncio.create_task(worker.run())
        if traced:
            tracemalloc.start()
        handle = await parent.enqueue(count, limit)
        found = await handle.result(600)
        largest = tracemalloc.get_traced_memory()[1] if traced else 0
        tracemalloc.stop()
        worker.stop()
        await running
    return found, largest


def children(
    count: Annotated[int, typer.Option(help="Children of the parent.", min=1)] = 10_000,
    limit: Annotated[int, typer.Option(help="Children that are open at once.", min=1)] = 500,
    concurrency: Annotated[int, typer.Option(help="Slots of the children's worker.", min=1)] = 32,
) -> None:
    """Measure a parent that gathers many children, once for the time and once for the memory."""
    configure_logging("ERROR")
    with own_server(fsync=False) as deployment:
        command = [sys.executable, "-c", _WORKER, str(concurrency)]
        root = Path(__file__).parents[1]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=deployment.environment, cwd=root) as process:
            (seconds, runs, results), _ = run(_measure(deployment, count, limit, traced=False))
            _, largest = run(_measure(deployment, count, limit, traced=True))
            assert process.stdin is not None
            process.stdin.close()
        print(origin_line(server_line(deployment)))
    print(f"{results:g} children, {limit} open at once, gathered in {seconds:.2f} s by {runs:g} runs of the parent")
    print(f"{count / seconds:,.0f} children per second; the parent's process allocated {largest / 1e6:.1f} MB at most")


if __name__ == "__main__":
    typer.run(children)
