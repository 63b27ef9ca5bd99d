"""Tasks of the run that wait: for time, for answers, for messages, in their handler and in branches."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import App, Context
from pydantic import BaseModel

from .instrumentation import JOURNAL, logged, options_of, running, stepped, work

__all__ = ["Reply", "register_waiting", "token_of_order"]


class Reply(BaseModel):
    """An answer. nonce: unique among all answers."""

    nonce: str


def token_of_order(task_id: str) -> str:
    """Return the token of the wait of a task of the kind `orders`."""
    return f"order:{task_id}"


def used(ctx: Context, wait: str, reply: Any) -> None:
    """Log that an answer was used for a wait. reply: None for the default after the time-out."""
    nonce = None if reply is None else Reply.model_validate(reply).nonce
    JOURNAL.write("used", task=ctx.task_id, run=running(), wait=wait, nonce=nonce)


def register_waiting(app: App) -> None:
    """Register the tasks with an app."""

    @app.task(**options_of("sleeps"))
    @logged
    async def sleeps(ctx: Context, steps: int, pause: float) -> list[str]:
        """Sleeps between its steps, in memory or parked."""
        found: list[str] = []
        for number in range(steps):
            found.append(await stepped(ctx, f"step-{number}", work, list(found), pause))
            await ctx.sleep(pause * (0.5 if number % 2 else 6))
        return found

    @app.task(**options_of("asks"))
    @logged
    async def asks(ctx: Context, steps: int, pause: float) -> list[str]:
        """Asks several questions of one name, and one of another."""
        found: list[str] = []
        for number in range(2):
            found.append(await stepped(ctx, f"step-{number}", work, list(found), pause))
            used(ctx, "approval" if number == 0 else f"approval#{number + 1}", await ctx.wait_for("approval", Reply))
        used(ctx, "page", await ctx.wait_for("page", Reply, who="ada", why="which page?"))
        return found

    @app.task(**options_of("early"))
    @logged
    async def early(ctx: Context, steps: int, pause: float) -> list[str]:
        """Waits for an answer that may be there already."""
        found = [await stepped(ctx, "step-0", work, [], 2 * pause)]
        used(ctx, "early", await ctx.wait_for("early", Reply))
        used(ctx, "approval", await ctx.wait_for("approval", Reply))
        return [*found, await stepped(ctx, "step-1", work, list(found), pause)]

    @app.task(**options_of("orders"))
    @logged
    async def orders(ctx: Context, steps: int, pause: float) -> list[str]:
        """Opens a wait with a token, notifies people, and waits."""
        wait = await ctx.open_wait("order", Reply, shows={"id": ctx.task_id}, token=token_of_order(ctx.task_id))
        found = [await stepped(ctx, "notify", work, [], pause)]
        used(ctx, "order", await wait)
        return [*found, await stepped(ctx, "step-1", work, list(found), pause)]

    @app.task(**options_of("branches"))
    @logged
    async def branches(ctx: Context, steps: int, pause: float) -> list[str]:
        """Waits in branches, for a message, an answer and the time, while another one works."""
        found: dict[str, str] = {}

        async def asked() -> None:
            used(ctx, "approval", await ctx.wait_for("approval", Reply))
            found["asked"] = await stepped(ctx, "asked", work, [], pause)

        async def heard() -> None:
            await ctx.inbox(wait=20 * pause, limit=1)
            found["heard"] = await stepped(ctx, "heard", work, [], pause)

        async def rested() -> None:
            await ctx.sleep(4 * pause)
            found["rested"] = await stepped(ctx, "rested", work, [], pause)

        await asyncio.gather(asked(), heard(), rested())
        return [found[name] for name in ("asked", "heard", "rested")]

    @app.task(**options_of("races"))
    @logged
    async def races(ctx: Context, steps: int, pause: float) -> list[str]:
        """Takes what comes first, and then asks again by the name that may have lost."""
        first = await ctx.first(answer=ctx.wait_for("approval", Reply), time=ctx.sleep(4 * pause))
        JOURNAL.write("first", task=ctx.task_id, run=running(), name=first.name)
        if first.name == "answer":
            used(ctx, "first/answer/approval", first.value)
        return [await stepped(ctx, "step-0", work, [], pause)]

    @app.task(**options_of("expires"))
    @logged
    async def expires(ctx: Context, steps: int, pause: float) -> list[str]:
        """Asks questions whose time may pass before their answers come."""
        found: list[str] = []
        for number in range(steps):
            name = f"offer-{number}"
            used(ctx, name, await ctx.wait_for(name, Reply, timeout=max(0.1, 3 * pause), default=None))
            found.append(await stepped(ctx, f"step-{number}", work, list(found), pause))
        return found
