"""Parents and children of the run. A child knows its spot, the parent's id and its place there, and returns it.

A parent that does not fail itself has one child per spot in all its runs.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

from perdure import App, ChildFailed, Context, SyncContext

from .instrumentation import JOURNAL, logged, logged_plain, options_of, replays, running, stepped, work

__all__ = ["Grown", "joined", "register_children"]


Grown: TypeAlias = dict[str, str]
"""Result of a child: its spot, and the token of its step."""


def spot_of(ctx: Context | SyncContext, name: str) -> str:
    return f"{ctx.task_id}/{name}"


def _born(ctx: Context, spot: str) -> None:
    JOURNAL.write("child", task=ctx.task_id, run=running(), spot=spot)


def joined(ctx: Context | SyncContext, spot: str, grown: Any) -> str:
    """Log a child's result that its parent was given, and return the token."""
    JOURNAL.write("joined", task=ctx.task_id, run=running(), spot=spot, grown=grown)
    return str(grown["token"])


def spawned(kind: str, handle: Any, since: int) -> Any:
    """Log a child that is stored. since: time of the call, in whose middle Redis may have lost the child."""
    place = {"queue": handle.partition.queue, "partition": handle.partition.index}
    JOURNAL.write("acknowledged", task=handle.id, kind=kind, key=None, since=since, **place)
    return handle


async def spawn(ctx: Context, task: Any, call: dict[str, Any]) -> Any:
    """Spawn a child, and log it."""
    since = time.monotonic_ns()
    return spawned(task.name, await ctx.spawn(task, **call), since)


def _abandons(ctx: Context) -> None:
    """Log that the children which have not ended are cancelled."""
    JOURNAL.write("abandons", task=ctx.task_id, run=running())


def _call(ctx: Context | SyncContext, name: str, pause: float) -> dict[str, Any]:
    return {"spot": spot_of(ctx, name), "pause": pause}


def register_children(app: App) -> None:
    """Register the tasks with an app."""

    @app.task(**options_of("leaf"))
    @logged
    async def leaf(ctx: Context, spot: str, pause: float) -> Grown:
        """Sleeps, and has one effect."""
        _born(ctx, spot)
        await ctx.sleep(pause)
        return {"spot": spot, "token": await stepped(ctx, "step-0", work, [], pause)}

    @app.task(**options_of("curious"))
    @logged
    async def curious(ctx: Context, spot: str, pause: float) -> Grown:
        """Has one effect, and asks a question."""
        _born(ctx, spot)
        token = await stepped(ctx, "step-0", work, [], pause)
        answer = await ctx.wait_for("approval", dict[str, str])
        JOURNAL.write("used", task=ctx.task_id, run=running(), wait="approval", nonce=answer["nonce"])
        return {"spot": spot, "token": token}

    @app.task(**options_of("branch"))
    @logged
    async def branch(ctx: Context, spot: str, pause: float) -> Grown:
        """Has children itself."""
        _born(ctx, spot)
        calls = [_call(ctx, str(number), pause) for number in range(3)]
        for call, grown in zip(calls, await ctx.gather(leaf, calls, limit=2), strict=True):
            joined(ctx, call["spot"], grown)
        return {"spot": spot, "token": await stepped(ctx, "step-0", work, [], pause)}

    @app.task(**options_of("mortal"))
    @logged
    async def mortal(ctx: Context, spot: str, pause: float) -> Grown:
        """Fails for good."""
        _born(ctx, spot)
        await stepped(ctx, "step-0", work, [], pause)
        raise ValueError("as it always does")

    @app.task(**options_of("lapsing"))
    @logged
    async def lapsing(ctx: Context, spot: str, pause: float) -> Grown:
        """Fails until its dead letter is replayed."""
        _born(ctx, spot)
        token = await stepped(ctx, "step-0", work, [], pause)
        if not replays():
            raise ValueError("until it is replayed")
        return {"spot": spot, "token": token}

    @app.task(**options_of("mute"))
    @logged
    async def mute(ctx: Context, spot: str, pause: float) -> Grown:
        """Waits for an answer that does not come. why: the parent, which is cancelled for that."""
        _born(ctx, spot)
        await ctx.wait_for("never", why=spot.partition("/")[0])
        raise AssertionError("it was not answered")

    @app.task(**options_of("family"))
    @logged
    async def family(ctx: Context, steps: int, pause: float) -> list[str]:
        """Spawns children one by one, works meanwhile, and joins them."""
        handles = []
        for number in range(steps):
            kind = curious if number == 1 else leaf
            call = _call(ctx, str(number), pause)
            handles.append((call["spot"], await spawn(ctx, kind, call)))
        found = [await stepped(ctx, "step-0", work, [], pause)]
        for spot, handle in reversed(handles):
            found.append(joined(ctx, spot, await ctx.join(handle)))
        return found

    @app.task(**options_of("crowd"))
    @logged
    async def crowd(ctx: Context, steps: int, pause: float) -> list[str]:
        """Gathers more children than may run at once, then takes others as they end."""
        calls = [_call(ctx, str(number), pause / 4) for number in range(3 * steps)]
        grown = await ctx.gather(leaf, calls, limit=3)
        found = [joined(ctx, call["spot"], one) for call, one in zip(calls, grown, strict=True)]
        others = [_call(ctx, f"later-{number}", pause / 4) for number in range(steps)]
        found += [joined(ctx, one["spot"], one) async for one in ctx.as_completed(leaf, others, limit=2)]
        return [*found, await stepped(ctx, "step-0", work, [], pause)]

    @app.task(**options_of("clan"))
    @logged
    async def clan(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has grandchildren."""
        calls = [_call(ctx, str(number), pause / 2) for number in range(2)]
        grown = await ctx.gather(branch, calls)
        return [joined(ctx, call["spot"], one) for call, one in zip(calls, grown, strict=True)]

    @app.task(**options_of("mourns"))
    @logged
    async def mourns(ctx: Context, steps: int, pause: float) -> list[str]:
        """Catches the failure of a child, keeps that of another as a value, and goes to a third one."""
        calls = [_call(ctx, f"raised-{number}", pause / 2) for number in range(3)]
        try:
            await ctx.gather(mortal, calls)
        except ChildFailed:
            _abandons(ctx)
        else:
            raise AssertionError("the failure of a child was not raised")
        kept = await ctx.gather(mortal, [_call(ctx, "kept", pause / 2)], errors="keep")
        assert isinstance(kept[0], ChildFailed), kept
        call = _call(ctx, "instead", pause)
        return [joined(ctx, call["spot"], await ctx.join(await spawn(ctx, leaf, call)))]

    @app.task(**options_of("relapses"))
    @logged
    async def relapses(ctx: Context, steps: int, pause: float) -> list[str]:
        """Fails after it has spawned children, and does not repeat those that it has joined."""
        gathered = [_call(ctx, f"gathered-{number}", pause / 2) for number in range(2)]
        grown = await ctx.gather(leaf, gathered)
        found = [joined(ctx, call["spot"], one) for call, one in zip(gathered, grown, strict=True)]
        call = _call(ctx, "spawned", pause)
        handle = await spawn(ctx, leaf, call)
        if ctx.attempt < 3:
            raise ValueError(f"attempt {ctx.attempt} fails")
        return [*found, joined(ctx, call["spot"], await ctx.join(handle))]

    @app.task(**options_of("patient"))
    @logged
    async def patient(ctx: Context, steps: int, pause: float) -> list[str]:
        """Waits until a dead child is replayed."""
        calls = [_call(ctx, str(number), pause / 2) for number in range(2)]
        grown = await ctx.gather(lapsing, calls, errors="wait")
        return [joined(ctx, call["spot"], one) for call, one in zip(calls, grown, strict=True)]

    @app.task(**options_of("awaits"))
    @logged
    async def awaits(ctx: Context, steps: int, pause: float) -> list[str]:
        """Awaits a task that it did not spawn."""
        call = _call(ctx, "other", pause)
        since = time.monotonic_ns()
        handle = spawned("leaf", await leaf.enqueue(**call), since)
        return [joined(ctx, call["spot"], await handle.result())]

    @app.task(**options_of("hopeless"))
    @logged
    async def hopeless(ctx: Context, steps: int, pause: float) -> list[str]:
        """Has a child that waits for ever, until it is cancelled, and the child with it."""
        handle = await spawn(ctx, mute, _call(ctx, "mute", pause))
        await ctx.join(handle)
        raise AssertionError("the child ended")

    @app.task(**options_of("elder"))
    @logged_plain
    def elder(ctx: SyncContext, steps: int, pause: float) -> list[str]:
        """A plain function that sleeps, and has children."""
        ctx.sleep(pause)
        calls = [_call(ctx, str(number), pause / 2) for number in range(steps)]
        found = [joined(ctx, call["spot"], one) for call, one in zip(calls, ctx.gather(leaf, calls), strict=True)]
        call = _call(ctx, "spawned", pause)
        since = time.monotonic_ns()
        handle = spawned("leaf", ctx.spawn(leaf, **call), since)
        return [*found, joined(ctx, call["spot"], ctx.join(handle))]
