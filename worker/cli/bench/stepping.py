"""Durable steps: each recorded before the next line of its handler runs."""

from __future__ import annotations

from typing import Final

from ...runtime import Worker
from . import limits
from .figures import Row, Size, message
from .ground import Ground
from .latency import raw_round_trip
from .tasks import walk

__all__ = ["steps"]

_TASKS: Final = 32
_ALONE: Final = 1_000

_IN_TURN: Final = 2.0
"""Seconds of round trips that the steps of one task may take: on a far server fewer of them are measured."""

_ENDED_WITHIN: Final = 60.0


async def steps(ground: Ground, size: Size) -> list[Row]:
    """Durable steps: of one task, which waits for each, and of several at once."""
    alone = max(1, min(_ALONE, size.tasks, int(_IN_TURN * 1000 / raw_round_trip(ground))))
    return [
        await _steps(ground, alone, 1, "steps", "durable steps, one task"),
        await _steps(ground, size.tasks, _TASKS, "steps_shared", f"durable steps, {_TASKS} tasks at once"),
    ]


async def _steps(ground: Ground, count: int, tasks: int, key: str, what: str) -> Row:
    each = max(1, count // tasks)
    with ground.raw_client() as client:
        client.call("DEL", ground.raw.ready)
        limits.make_groups(client, ground.raw.ready)
        limit = limits.steps(client, ground.raw, message(""), each * tasks, at_once=tasks)
    handles = await walk.enqueue_many({"steps": each} for _ in range(tasks))
    async with Worker(ground.app, concurrency=tasks) as worker:
        await worker.run(burst=True)
    spans = [await handle.result(timeout=_ENDED_WITHIN) for handle in handles]
    took = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return Row(key, what, "steps/s", each * tasks / took, limit, f"EVALSHA check + HSET + XADD, {tasks} a trip")
