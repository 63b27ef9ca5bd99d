"""Memory of the server after a million tasks have expired."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from perdure import App, Context, Worker
from perdure.queues import Partition

from ..raw.client import RawClient
from ..sizes import Size
from ..support.deployment import Deployment
from .measure import Figure, Line, Measure

__all__ = ["MEMORY"]

_CHUNK = 10_000
_KEPT = 2.0
"""Retention of results in seconds."""

_GONE_WITHIN = 120.0
_OTHERS = 10
"""More keys with a TTL than a queue has besides its records, and each worker leaves one, which says that it left."""


async def _round(deployment: Deployment, size: Size) -> Mapping[str, Figure]:
    before, after = await _expired(deployment, size.expired)
    return {"expired_memory": Figure(after / before, 1.0)}


async def _expired(deployment: Deployment, count: int) -> tuple[int, int]:
    """Return the server's memory before the tasks, and after all of them have run and expired."""
    app = deployment.app()

    @app.task(result_ttl=_KEPT)
    async def noop(ctx: Context, number: int) -> int:
        return number

    async def run_all(many: int) -> None:
        await noop.enqueue_many({"number": number} for number in range(many))
        async with Worker(app, concurrency=32) as worker:
            await worker.run(burst=True)

    with RawClient(deployment.url) as client:
        async with app:
            await run_all(min(count, _CHUNK))  # scripts, streams and groups exist from the first task on
            await _until_gone(app, client, _OTHERS + 1)
            before = _info(client, "memory", b"used_memory")
            for done in range(0, count, _CHUNK):
                await run_all(min(_CHUNK, count - done))
            await _until_gone(app, client, _OTHERS + 2 + -(-count // _CHUNK))
        return before, _info(client, "memory", b"used_memory")


async def _until_gone(app: App, client: RawClient, others: int) -> None:
    """Wait until the server has removed the records, and a worker the ids of their tasks.

    others: keys that do not expire yet.
    """
    timeline = Partition(app.settings.namespace, app.name, 0).timeline
    async with Worker(app) as worker, asyncio.timeout(_GONE_WITHIN):
        running = asyncio.create_task(worker.run())
        while True:
            found = re.search(r"expires=(\d+)", client.call("INFO", "keyspace").decode())
            if (found is None or int(found[1]) <= others) and not client.call("ZCARD", timeline):
                break
            await asyncio.sleep(0.1)
        worker.stop()
        await running


def _info(client: RawClient, section: str, name: bytes) -> int:
    info: bytes = client.call("INFO", section)
    return int(dict(line.split(b":", 1) for line in info.split(b"\r\n") if b":" in line)[name])


MEMORY = Measure(
    "memory",
    [Line("expired_memory", "server memory after all tasks have expired", "times", "before them")],
    _round,
    repeated=False,
)
