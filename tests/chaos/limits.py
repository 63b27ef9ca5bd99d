"""Tasks of the run that hold tokens of limits: by their declaration, in their body and in their steps.

What runs in a limit is logged from its first line to its last, with Redis' clock at both, as far as Redis replies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from perdure import App, Context, Producer, Rate, current_context
from perdure.queues import QueueError

from .children import Grown, joined
from .instrumentation import JOURNAL, began, logged, made, options_of, running, stepped, work
from .planned import register_schedules

__all__ = ["left_over", "register_limits"]

_ASKED_WITHIN: Final = 0.3
"""Seconds in which Redis tells its time, else the line has none."""


_COST: Final = 60
"""Cost that a task reserves, of which it uses the half."""


def register_limits(app: App) -> None:
    """Register the tasks with an app, and those of schedules, which hold tokens as well."""
    pool = app.limit("pool", total=4)
    tenants = app.limit("tenants", total=6, running=2, by="tenant")
    orders = app.limit("orders", running=1, by="tenant", ordered=True)
    pace = app.limit("pace", rate=Rate(5, per=2, burst=4))
    seat = app.limit("seat", running=1, by="tenant", while_parked=True)
    desk = app.limit("desk", total=2)
    spend = app.limit("spend", cost=Rate(100, per=1, burst=100))
    lone = app.limit("lone", total=1, over="drop")
    latest = app.limit("latest", running=1, by="tenant", over="replace")

    async def clock() -> float | None:
        """Return Redis' clock in seconds; None if it does not reply in time."""
        with anyio.move_on_after(_ASKED_WITHIN):
            try:
                seconds, micros = await app.producer.gateway.command("TIME")
            except QueueError:
                return None
            return int(seconds) + int(micros) / 1e6
        return None

    @asynccontextmanager
    async def holding(task: str, limit: str, key: str = "", used: int = 1, step: str = "") -> AsyncIterator[None]:
        """Log that the block runs with a token. step: which took it; empty for the task."""
        told: dict[str, Any] = {"task": task, "run": running(), "limit": limit, "key": key, "used": used, "step": step}
        JOURNAL.write("holds", **told)
        JOURNAL.write("held", **told, clock=await clock())
        try:
            yield
            JOURNAL.write("held", **told, clock=await clock())
        finally:
            JOURNAL.write("frees", **told)

    async def worked(ctx: Context, steps: int, pause: float) -> list[str]:
        found: list[str] = []
        for number in range(min(steps, 3)):
            found.append(await stepped(ctx, f"step-{number}", work, list(found), pause))
        return found

    @app.task(**options_of("pooled"), limits=[pool])
    @logged
    async def pooled(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has one of the tokens of all."""
        async with holding(ctx.task_id, "pool"):
            return await worked(ctx, steps, pause)

    @app.task(**options_of("rents"), limits=[tenants])
    @logged
    async def rents(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has a token of its tenant."""
        async with holding(ctx.task_id, "tenants", tenant):
            return await worked(ctx, steps, pause)

    @app.task(**options_of("doubles"), limits=[pool, tenants])
    @logged
    async def doubles(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has tokens of two limits."""
        async with holding(ctx.task_id, "pool"), holding(ctx.task_id, "tenants", tenant):
            return await worked(ctx, steps, pause)

    @app.task(**options_of("lines"), limits=[orders])
    @logged
    async def lines(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Runs in its turn."""
        async with holding(ctx.task_id, "orders", tenant):
            return await worked(ctx, steps, pause / 3)

    @app.task(**options_of("halts"), limits=[orders])
    @logged
    async def halts(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Keeps its turn while it is parked, and until its last attempt."""
        async with holding(ctx.task_id, "orders", tenant):
            found = [await stepped(ctx, "step-0", work, [], pause / 3)]
            await ctx.sleep(3 * pause)
            if ctx.attempt < 2:
                raise ValueError(f"attempt {ctx.attempt} fails")
            return [*found, await stepped(ctx, "step-1", work, found, pause / 3)]

    @app.task(**options_of("paced"), limits=[pace])
    @logged
    async def paced(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Starts at a pace."""
        async with holding(ctx.task_id, "pace"):
            return await worked(ctx, 1, pause)

    @app.task(**options_of("keeps"), limits=[seat])
    @logged
    async def keeps(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Keeps its token while it is parked."""
        async with holding(ctx.task_id, "seat", tenant):
            found = [await stepped(ctx, "step-0", work, [], pause / 3)]
            await ctx.sleep(4 * pause)
            return [*found, await stepped(ctx, "step-1", work, found, pause / 3)]

    @app.task(**options_of("yields"), limits=[pool])
    @logged
    async def yields(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has no token while it is parked, and another one after."""
        async with holding(ctx.task_id, "pool"):
            found = [await stepped(ctx, "step-0", work, [], pause)]
            await ctx.sleep(4 * pause)
            return [*found, await stepped(ctx, "step-1", work, found, pause)]

    @app.task(**options_of("lone"), limits=[lone])
    @logged
    async def lone_one(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Waits for nothing."""
        async with holding(ctx.task_id, "lone"):
            return await worked(ctx, steps, pause)

    @app.task(**options_of("latest"), limits=[latest])
    @logged
    async def latest_one(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Takes the place of those of its tenant that wait."""
        async with holding(ctx.task_id, "latest", tenant):
            return await worked(ctx, steps, pause)

    async def held(limit: tuple[str, str, int], inputs: list[str], pause: float) -> str:
        """Work with a token that was taken before."""
        token = began(inputs)
        async with holding(current_context().task_id, *limit, step=token):
            await anyio.sleep(pause)
        return made(token)

    @app.task(**options_of("borrows"))
    @logged
    async def borrows(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Takes a token for some of its steps."""
        found = [await stepped(ctx, "step-0", work, [], pause)]
        async with ctx.limit(desk):
            for number in (1, 2):
                found.append(await stepped_in(ctx, ("desk", "", 1), f"step-{number}", list(found), pause))
        return [*found, await stepped(ctx, "last", work, list(found), pause)]

    async def stepped_in(ctx: Context, limit: tuple[str, str, int], name: str, inputs: list[str], pause: float) -> str:
        async def within(inputs: list[str], pause: float) -> str:
            return await held(limit, inputs, pause)

        return await stepped(ctx, name, within, inputs, pause)

    async def served(inputs: list[str], pause: float) -> str:
        """Wait for the desk, in a step."""
        async with current_context().limit(desk):
            return await held(("desk", "", 1), inputs, pause)

    @app.task(**options_of("dips"))
    @logged
    async def dips(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Takes a token in each step."""
        found: list[str] = []
        for number in range(min(steps, 2)):
            found.append(await stepped(ctx, f"step-{number}", served, list(found), pause))
        return found

    @app.task(**options_of("spends"))
    @logged
    async def spends(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Reserves a cost, and uses the half of it."""
        found: list[str] = []
        for number in range(2):
            async with ctx.limit(spend, cost=_COST) as use:
                limit = ("spend", "", _COST // 2)
                found.append(await stepped_in(ctx, limit, f"step-{number}", list(found), pause / 2))
                use.cost = _COST // 2
        return found

    @app.task(**options_of("lodger"), limits=[tenants])
    @logged
    async def lodger(ctx: Context, spot: str, pause: float, tenant: str) -> Grown:
        """Has a token of the tenant of its parent."""
        JOURNAL.write("child", task=ctx.task_id, kind=ctx.task, run=running(), spot=spot)
        async with holding(ctx.task_id, "tenants", tenant):
            return {"spot": spot, "token": await stepped(ctx, "step-0", work, [], pause)}

    @app.task(**options_of("houses"))
    @logged
    async def houses(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has limited children."""
        spots = [f"{ctx.task_id}/{number}" for number in range(3)]
        calls = [{"spot": spot, "pause": pause, "tenant": tenant} for spot in spots]
        grown = await ctx.gather(lodger, calls, limit=2)
        return [joined(ctx, spot, found) for spot, found in zip(spots, grown, strict=True)]

    register_schedules(app, pool, holding, lodger)


_LISTS: Final = frozenset(
    {*("limited", "turns", "rings", "kept"), *("waiting", "joins", "join", "open", "todo", "outbox")}
)
"""Kinds of keys that only tasks have which have not ended; what marks a closed join has a TTL."""


async def left_over(producer: Producer) -> list[str]:
    """Return what a namespace has of tasks, though all of them have ended.

    That is tokens that have not lapsed, and lists of what waits: for limits, for answers and for children.
    """
    found: list[str] = []
    keys = await _keys(producer, f"{{{producer.namespace.name}:*")
    (seconds, micros), seen = await producer.gateway.pipeline([("TIME",), ("GET", producer.namespace.limits.clock)])
    stored, virtual = (float(part) for part in (seen or b"0 0").split()[:2])
    now = virtual + max(0.0, int(seconds) * 1000 + int(micros) // 1000 - stored)
    for key in keys:
        _, _, name = key.partition("}:")
        if name.partition(":")[0] in _LISTS:
            found += [key] if await producer.gateway.command("PTTL", key) == -1 else []
        elif name.startswith("holders:"):
            tokens = await producer.gateway.command("ZRANGEBYSCORE", key, f"({now:.0f}", "+inf", "WITHSCORES")
            for member, score in zip(tokens[::2], tokens[1::2], strict=True):
                found.append(f"{name} {member.decode()}, which lapses in {(float(score) - now) / 1000:.0f} s")
    return found


async def _keys(producer: Producer, pattern: str) -> list[str]:
    cursor, found = b"0", list[str]()
    while True:
        cursor, page = await producer.gateway.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        found += [key.decode() for key in page]
        if int(cursor) == 0:
            return sorted(set(found))
