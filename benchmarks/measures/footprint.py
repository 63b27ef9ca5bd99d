"""Memory of the server per task: queued, running, and finished with its result kept, without steps and with some."""

from __future__ import annotations

from collections.abc import Mapping

from perdure import Context, Worker
from perdure.queues import Partition
from perdure.queues.keys import GROUP

from ..raw import limits as raw_limits
from ..raw.client import RawClient
from ..sizes import Size
from ..support.deployment import Deployment
from .measure import Figure, Line, Measure

__all__ = ["FOOTPRINT"]


_STEPS = (1, 3, 30)
"""Recorded steps of a task, each with an integer as its result."""


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    with RawClient(deployment.url) as client:
        raw_limits.make_group(deployment)
        before = _used(client)
        raw_limits.add(deployment, size.tasks)
        raw = (_used(client) - before) / size.tasks
        app = deployment.app()

        @app.task
        async def noop(ctx: Context, number: int) -> int:
            return number

        async with app:
            before = _used(client)
            for start in range(0, size.tasks, 1000):
                await noop.enqueue_many({"number": number} for number in range(start, min(start + 1000, size.tasks)))
            queued = (_used(client) - before) / size.tasks
            ready = Partition(deployment.namespace, noop.queue, 0).ready
            client.call("XGROUP", "CREATE", ready, GROUP, "0")
            client.call("XREADGROUP", "GROUP", GROUP, "reader", "COUNT", size.tasks, "STREAMS", ready, ">")
            running = (_used(client) - before) / size.tasks
            client.call("XGROUP", "SETID", ready, GROUP, "0")
            client.call("XGROUP", "DELCONSUMER", ready, GROUP, "reader")
            async with Worker(app, concurrency=32) as worker:
                await worker.run(burst=True)
            finished = (_used(client) - before) / size.tasks
            with_steps = {count: await _finished(deployment, client, size.tasks // 10, count) for count in _STEPS}
    return {
        "bytes_queued": Figure(queued, raw),
        "bytes_running": Figure(running, raw),
        "bytes_finished": Figure(finished, raw),
        **{f"bytes_{count}_steps": Figure(found, raw) for count, found in with_steps.items()},
    }


async def _finished(deployment: Deployment, client: RawClient, tasks: int, steps: int) -> float:
    """Return the memory per finished task with recorded steps."""
    app = deployment.app()

    @app.task
    async def counting(ctx: Context, number: int) -> int:
        for step in range(steps):
            await ctx.step("add", _add, number, step)
        return number

    async with app:
        before = _used(client)
        await counting.enqueue_many({"number": number} for number in range(tasks))
        async with Worker(app, concurrency=32) as worker:
            await worker.run(burst=True)
        return (_used(client) - before) / tasks


def _add(number: int, step: int) -> int:
    return number + step


def _used(client: RawClient) -> int:
    info: bytes = client.call("INFO", "memory")
    return int(dict(line.split(b":", 1) for line in info.split(b"\r\n") if b":" in line)[b"used_memory"])


_LIMIT = "one stream entry with the same payload"

FOOTPRINT = Measure(
    "footprint",
    [
        Line("bytes_queued", "server memory per queued task", "bytes", _LIMIT),
        Line("bytes_running", "server memory per running task", "bytes", _LIMIT),
        Line("bytes_finished", "server memory per finished task, result kept", "bytes", _LIMIT),
        *(
            Line(
                f"bytes_{count}_steps",
                f"the same, of a task with {count} recorded step{'s' * (count > 1)}",
                "bytes",
                _LIMIT,
            )
            for count in _STEPS
        ),
    ],
    _round,
)
