"""Tasks of the run that emit items, from their body, in steps, in scopes and in threads, with keys and without.

The items of a step have the token of its execution, and their number in it from 0; those of the body of a handler have
their number in its scope and stream from 1.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import anyio
from perdure import App, Context, Retry, SyncContext, current_step

from .instrumentation import JOURNAL, began, effect, got, logged, logged_plain, made, options_of, running, stepped

__all__ = ["register_streaming"]


def _said(ctx: Context | SyncContext, scope: str, stream: str, number: int) -> None:
    JOURNAL.write("emits", task=ctx.task_id, run=running(), scope=scope, stream=stream, number=number)


class Body:
    """Items of the body of a handler."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._counts = Counter[tuple[str, str]]()

    async def say(self, stream: str = "output", scope: str = "") -> None:
        self._counts[scope, stream] += 1
        number = self._counts[scope, stream]
        _said(self._ctx, scope, stream, number)
        await self._ctx.emit({"body": number}, stream)


async def tell(inputs: list[str], pause: float, failures: int = 0) -> str:
    """Emit three items into one stream, one into another, and two with keys."""
    token = began(inputs)
    step = current_step()
    for number in range(3):
        await step.emit({"token": token, "number": number}, "tokens")
        await anyio.sleep(pause / 3)
    await step.emit({"token": token, "number": 0}, "output")
    await step.emit({"key": "title"}, "facts", key="title")
    await step.emit({"key": step.key}, "facts", key=step.key)
    if step.attempt <= failures:
        effect(token, "raised")
        raise ValueError("a step that fails, and is tried again within its run")
    return made(token)


def tell_plainly(inputs: list[str], pause: float) -> str:
    """Do the same in a thread."""
    token = began(inputs)
    ctx = SyncContext.current()
    for number in range(3):
        ctx.emit({"token": token, "number": number}, "tokens")
    ctx.emit({"token": token, "number": 0}, "output")
    ctx.emit({"key": "title"}, "facts", key="title")
    ctx.emit({"key": current_step().key}, "facts", key=current_step().key)
    return made(token)


def register_streaming(app: App) -> None:
    """Register the tasks with an app."""

    @app.task(**options_of("talks"))
    @logged
    async def talks(ctx: Context, steps: int, pause: float) -> list[str]:
        """Emits between its steps and in them."""
        body, found = Body(ctx), list[str]()
        for number in range(steps):
            await body.say()
            found.append(await stepped(ctx, f"step-{number}", tell, list(found), pause))
            await body.say("tokens")
        await body.say()
        return found

    @app.task(**options_of("blurts"))
    @logged
    async def blurts(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has steps that are recorded in the background."""
        body, found = Body(ctx), list[str]()
        for number in range(steps):
            durability = "sync" if number % 3 == 2 else "async"
            found.append(await stepped(ctx, f"step-{number}", tell, list(found), pause, durability=durability))
            await body.say()
        return found

    @app.task(**options_of("repeats"))
    @logged
    async def repeats(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has steps that fail after they have emitted, and attempts that fail."""
        body, found = Body(ctx), list[str]()
        again = Retry(max_attempts=3, base=0.05)
        for number in range(steps):
            await body.say()
            found.append(await stepped(ctx, f"step-{number}", tell, list(found), pause, number % 3, retry=again))
            if number < ctx.attempt < 3:
                raise ValueError(f"attempt {ctx.attempt} fails")
        return found

    @app.task(**options_of("choir"))
    @logged
    async def choir(ctx: Context, steps: int, pause: float) -> list[str]:
        """Emits in scopes at the same time."""
        body = Body(ctx)

        async def sing(name: str) -> str:
            with ctx.scope(name):
                await body.say(scope=f"{name}/")
                value: str = await ctx.step("part", tell, [], pause * (1 + len(name) / 5))
                await body.say(scope=f"{name}/")
            return got(ctx, f"{name}/part", value, "sync")

        await body.say()
        found = [*await asyncio.gather(sing("left"), sing("right"))]
        await body.say()
        return found

    @app.task(**options_of("recites"))
    @logged_plain
    def recites(ctx: SyncContext, steps: int, pause: float) -> list[str]:
        """A plain function, with steps of both kinds."""
        found: list[str] = []
        for number in range(steps):
            _said(ctx, "", "output", number + 1)
            ctx.emit({"body": number + 1})
            call: Any = tell if number % 2 else tell_plainly
            value: str = ctx.step(f"step-{number}", call, list(found), pause)
            found.append(got(ctx, f"step-{number}", value, "sync"))
        return found
