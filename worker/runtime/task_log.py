"""Log lines for the start and the end of each run (`--log-tasks`)."""

from __future__ import annotations

from typing import Any

from ...queues.runtime import RUNTIME
from ..durable.context import Context
from ..durable.middleware import CallNext, Middleware, Settlement
from .settlement import RunSettlement


class TaskLog(Middleware):
    """Logs runs. It is part of the hooks only where it was asked for, so that other workers do not pay for it."""

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        ctx.log.bind(attempt=ctx.attempt).info("started")
        return await call_next()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        if isinstance(settlement, RunSettlement):
            seconds = round(RUNTIME.monotonic() - settlement.run.started, 3)
            bound = ctx.log.bind(attempt=settlement.attempt, stop=settlement.stop, seconds=seconds)
            bound.info("ended: {}", settlement.state)
