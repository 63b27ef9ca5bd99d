"""Limits: tasks that hold tokens, by their declaration and in their handlers and steps.

What runs in a limit is journalled from its first line to its last. limit_checks.py has the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
from perdure import Context, Rate, current_context, current_step

if TYPE_CHECKING:
    from perdure import App, Limit

    from ..plan import TaskPlan
    from .kit import TaskKit

__all__ = [
    "BOUNDS",
    "DROPPED",
    "LIMITED",
    "Bound",
    "arguments_of",
    "declare_limits",
    "limits_of",
    "queue_of",
    "register_limits",
    "tenant_of",
]

LIMITED: Final = (
    *("pooled", "pooled", "rents", "rents", "doubles", "queues", "queues", "halts", "halts", "paced", "spends"),
    *("keeps", "borrows", "borrows", "dips", "spreads", "yields", "latest", "lone"),
)
"""Kinds of tasks that hold tokens, as often as they are drawn."""

DROPPED: Final = frozenset({"latest", "lone"})
"""Kinds of which a task may be cancelled in favour of another one."""

_TENANTS: Final = 2
_REST: Final = 1.2
"""Seconds of a sleep that parks, at least."""


@dataclass(frozen=True)
class Bound:
    """What a limit allows.

    Attributes:
        total: Tokens at once; running: of one key; None for any number.
        every: Seconds between two starts of a key, on average; burst: starts at once.
        ordered: Whether tasks of a key run in the order in which they were stored.
    """

    total: int | None = None
    running: int | None = None
    every: float = 0.0
    burst: int = 1
    ordered: bool = False


BOUNDS: Final[Mapping[str, Bound]] = {
    "pool": Bound(total=2),
    "tenants": Bound(total=3, running=1),
    "orders": Bound(running=1, ordered=True),
    "pace": Bound(every=0.5, burst=2),
    "spend": Bound(every=0.01, burst=100),
    "seat": Bound(running=1),
    "desk": Bound(total=1),
    "latest": Bound(running=1),
    "lone": Bound(total=1),
}
"""Limits by name. What a start uses of "spend" is its cost."""

COST: Final = 60
"""Cost that is reserved for a call, of which it uses a half."""

_LIMITS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "pooled": ("pool",),
    "rents": ("tenants",),
    "doubles": ("pool", "tenants"),
    "queues": ("orders",),
    "halts": ("orders",),
    "paced": ("pace",),
    "keeps": ("seat",),
    "yields": ("pool",),
    "latest": ("latest",),
    "lone": ("lone",),
}
"""Limits that a kind of task declares."""


def tenant_of(task: str) -> str:
    """Return the tenant of a task of the plan, from its id."""
    return f"tenant-{sum(task.encode()) % _TENANTS}"


def limits_of(kind: str) -> tuple[str, ...]:
    """Return the names of the limits that tasks of a kind declare."""
    return _LIMITS_OF.get(kind, ())


def declare_limits(app: App) -> dict[str, Limit]:
    """Declare the limits of the simulation, and return them by name."""
    return {
        "pool": app.limit("pool", total=2),
        "tenants": app.limit("tenants", total=3, running=1, by="tenant"),
        "orders": app.limit("orders", running=1, by="tenant", ordered=True),
        "pace": app.limit("pace", by="tenant", rate=Rate(2, per=1, burst=2)),
        "spend": app.limit("spend", by="tenant", cost=Rate(100, per=1, burst=100)),
        "seat": app.limit("seat", running=1, by="tenant", while_parked=True),
        "desk": app.limit("desk", total=1),
        "latest": app.limit("latest", running=1, by="tenant", over="replace"),
        "lone": app.limit("lone", total=1, over="drop"),
    }


def register_limits(kit: TaskKit) -> None:
    """Register the tasks that hold tokens."""
    app, journal, stepped = kit.app, kit.journal, kit.stepped
    limits = declare_limits(app)

    def options(kind: str) -> dict[str, Any]:
        return {**kit.options, "limits": [limits[name] for name in limits_of(kind)]}

    @contextmanager
    def holding(task: str, name: str, key: str, used: int = 1, step: str = "") -> Iterator[None]:
        """Note that the code in the block runs with a token of a limit. step: which took it; empty for the task."""
        journal.write("holds", task, name, (key, used, step))
        try:
            yield
        finally:
            journal.write("frees", task, name, (key, used, step))

    @contextmanager
    def running(ctx: Context, tenant: str) -> Iterator[None]:
        """Note that a handler runs with the tokens of its task."""
        with ExitStack() as stack:
            for name in limits_of(ctx.task):
                stack.enter_context(holding(ctx.task_id, name, _key(name, tenant)))
            yield

    async def worked(ctx: Context, steps: int, pause: float) -> list[str]:
        found: list[str] = []
        for number in range(min(steps, 3)):
            found.append(await stepped(ctx, f"step-{number}", list(found), pause))
        return found

    @app.task(**options("pooled"))
    async def pooled(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has one of the tokens of all."""
        with running(ctx, tenant):
            return await worked(ctx, steps, pause)

    @app.task(**options("rents"))
    async def rents(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has the one token of its tenant."""
        with running(ctx, tenant):
            return await worked(ctx, steps, pause)

    @app.task(**options("doubles"))
    async def doubles(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has tokens of two limits."""
        with running(ctx, tenant):
            return await worked(ctx, steps, pause)

    @app.task(**options("queues"))
    async def queues(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Runs in its turn."""
        with running(ctx, tenant):
            return await worked(ctx, steps, pause)

    @app.task(**options("halts"))
    async def halts(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Keeps its turn while it is parked, and until its last attempt."""
        with running(ctx, tenant):
            found = [await stepped(ctx, "step-0", [], pause)]
            await ctx.sleep(_REST + pause)
            if ctx.attempt < min(steps, 3):
                raise ValueError(f"attempt {ctx.attempt} fails")
            return [*found, await stepped(ctx, "step-1", found, pause)]

    @app.task(**options("paced"))
    async def paced(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Starts at the pace of its tenant."""
        with running(ctx, tenant):
            return [await stepped(ctx, "step-0", [], pause / 4)]

    @app.task(**options("keeps"))
    async def keeps(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Keeps its token while it is parked."""
        with running(ctx, tenant):
            found = [await stepped(ctx, "step-0", [], pause)]
            journal.write("rests", ctx.task_id, "seat", (tenant, 1))
            await ctx.sleep(_REST + pause)
            journal.write("stirs", ctx.task_id, "seat", (tenant, 1))
            return [*found, await stepped(ctx, "step-1", found, pause)]

    @app.task(**options("yields"))
    async def yields(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Has no token while it is parked, and another one after."""
        with running(ctx, tenant):
            found = [await stepped(ctx, "step-0", [], pause)]
            await ctx.sleep(_REST + pause)
            return [*found, await stepped(ctx, "step-1", found, pause)]

    @app.task(**options("latest"))
    async def latest(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Takes the place of those of its tenant that wait."""
        with running(ctx, tenant):
            return await worked(ctx, steps, pause)

    @app.task(**options("lone"))
    async def lone(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Waits for nothing."""
        with running(ctx, tenant):
            return await worked(ctx, steps, pause)

    async def held(limit: tuple[str, str, int], inputs: list[str], pause: float) -> str:
        """Work with a token of a limit: its name, the key, and what is used of it. A recorded step needs none."""
        task, _, key = current_step().idempotency_key.partition(":")
        token = journal.token()
        journal.write("effect", task, key, token)
        with holding(task, *limit, step=key):
            await anyio.sleep(pause)
        return token

    async def within(ctx: Context, limit: tuple[str, str, int], name: str, inputs: list[str], pause: float) -> str:
        token: str = await ctx.step(name, held, limit, inputs, pause)
        journal.write("got", ctx.task_id, value=token)
        return token

    @app.task(**kit.options)
    async def borrows(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Takes a token for some of its steps."""
        found = [await stepped(ctx, "step-0", [], pause)]
        async with ctx.limit("desk"):
            for number in range(1, min(steps, 3) + 1):
                found.append(await within(ctx, ("desk", "", 1), f"step-{number}", list(found), pause))
        return [*found, await stepped(ctx, "last", found, pause)]

    async def served(inputs: list[str], pause: float) -> str:
        """Wait for the desk, in a step."""
        async with current_context().limit("desk"):
            return await held(("desk", "", 1), inputs, pause)

    @app.task(**kit.options)
    async def dips(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Takes a token in each step."""
        found: list[str] = []
        for number in range(min(steps, 3)):
            token: str = await ctx.step(f"step-{number}", served, list(found), pause)
            journal.write("got", ctx.task_id, value=token)
            found.append(token)
        return found

    @app.task(**kit.options)
    async def spends(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Reserves a cost, and uses the half of it."""
        found: list[str] = []
        for number in range(min(steps, 3)):
            async with ctx.limit("spend", key=tenant, cost=COST) as use:
                used = ("spend", tenant, COST // 2)
                found.append(await within(ctx, used, f"step-{number}", list(found), pause / 4))
                use.cost = COST // 2
        return found

    @app.task(**kit.options)
    async def spreads(ctx: Context, steps: int, pause: float, tenant: str) -> list[list[str]]:
        """Has limited children."""
        calls = [{"steps": 1, "pause": pause / 4, "tenant": tenant} for _ in range(min(steps, 4))]
        return [*await ctx.gather(rents, calls, limit=3)]


def _key(name: str, tenant: str) -> str:
    bound = BOUNDS[name]
    return tenant if bound.running is not None or bound.every else ""


def queue_of(task: TaskPlan) -> str | None:
    """Return the queue that a producer names; None for a task whose limits it learns from the catalog.

    Else the worker that is handed the task puts it into its list: nothing is said about the order then, nor are others
    replaced.
    """
    limits = limits_of(task.kind)
    by_catalog = BOUNDS[limits[0]].ordered or task.kind in DROPPED or sum(task.id.encode()) % 3 if limits else False
    return None if by_catalog else "sim"


def arguments_of(task: TaskPlan) -> dict[str, Any]:
    """Return the arguments that a task has besides those of every task."""
    return {"tenant": tenant_of(task.id)} if task.kind in LIMITED else {}
