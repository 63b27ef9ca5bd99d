"""Streams: tasks that emit items. pages.py has their readers, stream_checks.py the checks of both.

Each try of a step has a token, and puts it into its items. A step that is recorded has the token as its result, so its
items are those of this try. What the body of a handler emits is numbered from 1 in its scope and stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
from perdure import Agent, AgentState, Context, PlanStep, Retry, current_context, current_step
from perdure.worker.durable.steps.current import CURRENT_RUN

if TYPE_CHECKING:
    from .kit import TaskKit

__all__ = ["GOALS", "HANDED_OVER", "IN_ORDER", "LIMITS", "STREAMING", "STREAMS", "register_streams"]

STREAMING: Final = (
    *("narrates", "narrates", "retells", "recounts", "nests", "chorus", "hurries", "forgets", "laments", "speaks"),
    *("forwards", "floods"),
)
"""Kinds of tasks that emit."""

GOALS: Final = frozenset({"speaks"})
"""Those that are goals of an agent."""

HANDED_OVER: Final = frozenset({"forwards"})
"""Those whose result is that of another task."""

IN_ORDER: Final = frozenset({"narrates", "retells", "recounts", "hurries", "laments", "floods"})
"""Kinds of tasks whose items have the order of their handler: they do one thing after the other."""

STREAMS: Final = ("output", "tokens", "facts")
"""Streams of such a task at most."""

_FLOOD: Final = 40
"""Items of a step of a task that emits more than a stream keeps; see `LIMITS`."""

LIMITS: Final = {"STREAM_ITEMS": 60, "MIN_STREAM_ITEMS": 20}
"""Numbers of items that a stream of the simulation keeps."""


def register_streams(kit: TaskKit) -> None:
    """Register the tasks that emit."""
    app, journal, options = kit.app, kit.journal, kit.options

    class Body:
        """What the body of a handler emits, with its number in its scope and stream."""

        def __init__(self, ctx: Context) -> None:
            self.ctx = ctx
            self.counts = Counter[tuple[str, str]]()

        async def say(self, stream: str = "output", scope: str = "") -> None:
            self.counts[scope, stream] += 1
            number = self.counts[scope, stream]
            journal.write("says", self.ctx.task_id, scope, [stream, number])
            await self.ctx.emit({"body": number}, stream)

        async def note(self, key: str) -> None:
            journal.write("notes", self.ctx.task_id, "", key)
            await self.ctx.emit({"key": key}, "facts", key=key)

        async def step(self, name: str, pause: float, *, durability: Any = "sync", **more: Any) -> str:
            """Call a step that emits."""
            retry = more.pop("retry", None)
            caller = self.ctx.options(durability=durability, **({} if retry is None else {"retry": retry}))
            token: str = await caller.step(name, tell, pause, **more)
            if durability == "sync":
                journal.write("got", self.ctx.task_id, value=token)
            journal.write("heard", self.ctx.task_id, name, token)
            return token

    async def emit_all(token: str, counts: dict[str, int], keys: Sequence[str], pause: float) -> None:
        emit = current_step().emit
        for number in range(max(counts.values(), default=0)):
            for stream, count in counts.items():
                if number < count:
                    await emit({"token": token, "number": number, "run": journal.run}, stream)
            await anyio.sleep(pause / 3)
        for key in keys:
            await emit({"key": key}, "facts", key=key)

    async def tell(
        pause: float,
        tokens: int = 3,
        output: int = 0,
        keys: Sequence[str] = (),
        failures: int = 0,
        inner: int = 0,
        attempts: int = 0,
    ) -> str:
        step = current_step()
        task, _, key = step.idempotency_key.partition(":")
        token = journal.token()
        journal.write("effect", task, key, token)
        counts = {"tokens": tokens, "output": output}
        await emit_all(token, counts, keys, pause)
        for number in range(inner):
            await current_context().step(f"inner-{number}", tell, pause / 2)
        journal.write("emitted", task, key, {"token": token, "counts": counts, "keys": list(keys)})
        if step.attempt <= failures:
            raise ValueError(f"try {step.attempt} fails")
        if current_context().attempt <= attempts:
            raise ValueError("the attempt fails in a step")
        return token

    @app.task(**options)
    async def narrates(ctx: Context, steps: int, pause: float) -> list[str]:
        """Emits between its steps and in them, into several streams, with keys and without."""
        body, found = Body(ctx), []
        for number in range(steps):
            await body.say()
            await body.note(f"page {number}")
            found.append(await body.step(f"step-{number}", pause, output=number % 2, keys=("title", f"fact {number}")))
        await body.say("tokens")
        await body.say()
        return found

    @app.task(**options)
    async def retells(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has steps that fail after they have emitted, and are tried again in the run."""
        body, found = Body(ctx), []
        again = Retry(max_attempts=4, base=0.05)
        for number in range(min(steps, 3)):
            found.append(await body.step(f"step-{number}", pause, retry=again, failures=number % 3, keys=("title",)))
            await body.say()
        return found

    @app.task(**options)
    async def recounts(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has attempts that fail between steps, and in one."""
        body, found = Body(ctx), []
        for number in range(steps):
            await body.say()
            found.append(await body.step(f"step-{number}", pause, attempts=2 * int(number == 1)))
            if number < ctx.attempt < 2:
                raise ValueError(f"attempt {ctx.attempt} fails")
        return found

    @app.task(**options)
    async def nests(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has steps in a step."""
        body = Body(ctx)
        await body.say()
        caller = ctx.options(nested="record", durability="sync")
        found = [await caller.step("outer", tell, pause, inner=2)]
        await body.say()
        return found

    @app.task(**options)
    async def chorus(ctx: Context, steps: int, pause: float) -> list[str]:
        """Emits in scopes, at the same time."""
        body = Body(ctx)

        async def branch(name: str) -> str:
            with ctx.scope(name):
                await body.say(scope=f"{name}/")
                token: str = await ctx.step("part", tell, pause * (1 + len(name) / 5), keys=("title",))
                await body.say(scope=f"{name}/")
                return token

        await body.say()
        found = list(await asyncio.gather(branch("left"), branch("right")))
        await body.say()
        return found

    @app.task(**options)
    async def hurries(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has steps that are recorded in the background."""
        body, found = Body(ctx), []
        for number in range(steps):
            durability = "sync" if number % 3 == 2 else "async"
            found.append(await body.step(f"step-{number}", pause, durability=durability, output=1))
            await body.say()
        return found

    @app.task(**options)
    async def forgets(ctx: Context, steps: int, pause: float) -> list[str]:
        """Forgets a step in an attempt that fails."""
        body = Body(ctx)
        await body.say()
        found = [await ctx.step("kept", tell, pause), await ctx.step("again", tell, pause)]
        await body.say("tokens")
        if ctx.attempt < 2:
            await ctx.forget("again")
            raise ValueError(f"attempt {ctx.attempt} fails")
        await body.say()
        return found

    @app.task(**options)
    async def laments(ctx: Context, steps: int, pause: float) -> list[str]:
        """Fails until its dead letter is replayed."""
        body = Body(ctx)
        await body.say()
        found = [await body.step("step-0", pause, keys=("title",))]
        await body.say()
        run = CURRENT_RUN.get()
        assert run is not None
        if not run.history.replays:
            raise ValueError("until it is replayed")
        await body.say()
        return found

    @app.task(**options)
    async def forwards(ctx: Context, steps: int, pause: float) -> None:
        """Hands its work to another task that emits."""
        body = Body(ctx)
        await body.say()
        await body.step("step-0", pause)
        await ctx.continue_as(narrates, why="the rest", arguments={"steps": min(steps, 2), "pause": pause})

    @app.task(**options)
    async def floods(ctx: Context, steps: int, pause: float) -> list[str]:
        """Emits more than its streams keep."""
        body = Body(ctx)
        found = [await body.step(f"step-{number}", pause / 8, tokens=_FLOOD) for number in range(3)]
        await body.say("tokens")
        return found

    class Progress(AgentState):
        steps: int = 0
        pause: float = 0.0

    @app.agent(name="speaks", **options)
    class Speaker(Agent[Progress]):
        """Agent that emits in its plan, in its steps and at its end."""

        async def plan(self, ctx: Context, state: Progress) -> list[PlanStep]:
            await self._emit(ctx, "#plan", state.pause)
            return [PlanStep(key=f"part-{number}", title=f"part {number}") for number in range(min(state.steps, 3))]

        async def act(self, ctx: Context, state: Progress, step: PlanStep) -> str:
            token = await self._emit(ctx, step.key, state.pause)
            await ctx.step("work", tell, state.pause, tokens=2)
            return token

        async def finish(self, ctx: Context, state: Progress) -> list[str]:
            await self._emit(ctx, "#finish", state.pause)
            return list(state.results.values())

        async def _emit(self, ctx: Context, unit: str, pause: float) -> str:
            token = journal.token()
            for number in range(2):
                await ctx.emit({"token": token, "number": number, "run": journal.run})
                await anyio.sleep(pause / 4)
            journal.write("emitted", ctx.task_id, unit, {"token": token, "counts": {"output": 2}, "keys": []})
            return token
