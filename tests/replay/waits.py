"""Handlers of the replay suite that sleep, wait in branches, and take the first of several branches."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
from perdure import App, Context, SyncContext
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, handler
from tests.replay.journal import Journal


async def _echo(value: Any) -> Any:
    return value


@handler(expects=["one", "two", "three"])
def sleeps_between_steps(app: App, world: Journal) -> Task[Any, Any]:
    """Sleeps that park the task, and one that passes in memory."""

    async def act(name: str) -> str:
        world.call(name)
        return name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        done = [await ctx.step("act", act, "one")]
        await ctx.sleep(0.15)
        done.append(await ctx.step("act", act, "two"))
        await ctx.sleep(0.01)
        await ctx.sleep_until(datetime.now(UTC) + timedelta(seconds=0.1))
        return [*done, await ctx.step("act", act, "three")]

    return work


@handler(expects=["one", "two"])
def sleeps_in_a_thread(app: App, world: Journal) -> Task[Any, Any]:
    def act(name: str) -> str:
        world.call(name)
        return name

    @app.task(retry=RETRY)
    def work(ctx: SyncContext) -> list[str]:
        done = [ctx.step("act", act, "one")]
        ctx.sleep(0.15)
        ctx.sleep(timedelta(milliseconds=5))
        return [*done, ctx.step("act", act, "two")]

    return work


@handler(expects=["long", "short", "slow"])
def branches_that_sleep_beside_a_step(app: App, world: Journal) -> Task[Any, Any]:
    async def act(name: str) -> str:
        world.call(name)
        return name

    async def slow() -> str:
        world.call("slow")
        await anyio.sleep(0.1)
        return "slow"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        async def nap(name: str, seconds: float) -> str:
            await ctx.sleep(seconds)
            return await ctx.step("act", act, name)

        return list(await asyncio.gather(nap("long", 0.3), nap("short", 0.15), ctx.step("slow", slow)))

    return work


@handler(answers=[("bob", "from bob"), ("ada", "from ada")], expects=[["from ada"], ["from bob"], "slow"])
def branches_that_wait_for_messages(app: App, world: Journal) -> Task[Any, Any]:
    async def slow() -> str:
        world.call("slow")
        await anyio.sleep(0.05)
        return "slow"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        async def read(sender: str) -> list[Any]:
            found = [message.content for message in await ctx.inbox(wait=3600, sender=sender)]
            return await ctx.step("take", _echo, found)

        return list(await asyncio.gather(read("ada"), read("bob"), ctx.step("slow", slow)))

    return work


@handler(races=True, answers=[("ada", "yes")], expects=["mail", "yes", "booked"])
def message_before_the_time(app: App, world: Journal) -> Task[Any, Any]:
    """The branch that sleeps must not act, whatever stops the task."""

    async def book(name: str) -> str:
        world.call(name)
        return name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        async def mail() -> str:
            [message] = await ctx.inbox(wait=7200, limit=1)
            return await ctx.step("take", _echo, message.content)

        async def remind() -> str:
            await ctx.step("prepare", _echo, "reminder")
            await ctx.sleep(3600)
            return await ctx.step("remind", book, "reminded")

        found = await ctx.first(late=remind(), mail=mail())
        return [*found, await ctx.step("book", book, "booked")]

    return work


@handler(races=True, expects=["late", "reminded", []])
def time_before_the_message(app: App, world: Journal) -> Task[Any, Any]:
    """The wait of the other branch is closed, so that the next read is a new one."""

    async def remind() -> str:
        world.call("reminded")
        return "reminded"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[Any]:
        async def late() -> str:
            await ctx.sleep(0.15)
            return await ctx.step("remind", remind)

        found = await ctx.first(mail=ctx.inbox(wait=3600), late=late())
        return [*found, [message.content for message in await ctx.inbox()]]

    return work


@handler(races=True, answers=[("ada", "yes")], expects=["mail", "yes"])
def message_before_the_time_in_threads(app: App, world: Journal) -> Task[Any, Any]:
    @app.task(retry=RETRY)
    def work(ctx: SyncContext) -> list[Any]:
        def mail() -> str:
            [message] = ctx.inbox(wait=7200, limit=1)
            return str(ctx.step("take", _echo, message.content))

        return list(ctx.first(late=lambda: ctx.sleep(3600), mail=mail))

    return work


def _settled_for_one(effects: Counter[str]) -> str:
    settled = [name for name in effects if name.startswith("settle ")]
    return "" if len(settled) == 1 else f"settled for {settled}"


@handler(races=True, flaky=True, allowed=_settled_for_one)
def first_of_two_services(app: App, world: Journal) -> Task[Any, Any]:
    """Either may answer first. What follows from the answer is the same in every run."""

    async def query(name: str) -> str:
        world.call(f"query {name}")
        await anyio.sleep(0.01)
        return name

    async def settle(name: str) -> str:
        world.call(f"settle {name}")
        return name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        async def ask(name: str) -> str:
            answer = await ctx.step("query", query, name)
            return await ctx.step("check", _echo, answer)

        found = await ctx.first(north=ask("north"), south=ask("south"))
        return [found.name, await ctx.step("settle", settle, found.value)]

    return work


@handler(races=True, retried=False, expects="gave up: the branch failed")
def error_of_the_branch_that_ends_first(app: App, world: Journal) -> Task[Any, Any]:
    async def look() -> str:
        world.call("look")
        raise LookupError("the branch failed")

    async def give_up(why: str) -> str:
        world.call("give up")
        return f"gave up: {why}"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            return str((await ctx.first(look=ctx.step("look", look), late=ctx.sleep(3600))).value)
        except LookupError as error:
            return await ctx.step("give up", give_up, str(error))

    return work
