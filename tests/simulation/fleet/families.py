"""Families: parents with children, and the checks that no child is lost or doubled.

A child knows its spot, the id of its parent and its place there, and returns it. A spot has one child, and another one
for each attempt of the parent that has failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import orjson
from perdure import ChildFailed, Context, State
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import QueueError
from perdure.queues.inspection.views import queue_partitions
from perdure.worker.durable.steps.current import CURRENT_RUN

from .waits import WAITING

if TYPE_CHECKING:
    from perdure import Producer

    from ..app import Entry
    from ..plan import TaskPlan
    from ..world import World
    from .kit import TaskKit

__all__ = ["PARENTS", "check_families", "left_behind", "register_families", "see_to"]

PARENTS: Final = ("family", "gathers", "streams", "clan", "grieves", "relapses", "patient", "awaits", "hopeless")
"""Kinds of tasks that have children."""

_SOUND: Final = frozenset({*WAITING, *PARENTS, "leaf", "drowsy", "branch", "mute"}) - {"relapses"}
"""Kinds of tasks no attempt of which fails."""

_ENDED: Final = frozenset({State.SUCCEEDED, State.DEAD, State.CANCELLED})
_JOIN: Final = re.compile(rb"\{sim:sim:\d+\}:(?:join|open|todo):(.+):[^:]+")


def register_families(kit: TaskKit) -> None:
    """Register parents and children."""
    app, journal, stepped, options = kit.app, kit.journal, kit.stepped, kit.options

    def call(ctx: Context, name: object, pause: float) -> dict[str, Any]:
        return {"spot": f"{ctx.task_id}/{name}", "pause": pause}

    def joined(ctx: Context, spot: str, grown: list[str]) -> list[str]:
        journal.write("joined", ctx.task_id, spot, grown)
        return grown

    async def born(ctx: Context, spot: str, pause: float) -> list[str]:
        journal.write("child", ctx.task_id, spot)
        return [spot, await stepped(ctx, "step-0", [], pause)]

    @app.task(**options)
    async def leaf(ctx: Context, spot: str, pause: float) -> list[str]:
        """Has one effect."""
        return await born(ctx, spot, pause)

    @app.task(**options)
    async def drowsy(ctx: Context, spot: str, pause: float) -> list[str]:
        """Sleeps, and has one effect."""
        await ctx.sleep(1.1)
        return await born(ctx, spot, pause)

    @app.task(**options)
    async def branch(ctx: Context, spot: str, pause: float) -> list[str]:
        """Has children itself."""
        calls = [call(ctx, number, pause) for number in range(2)]
        for one, grown in zip(calls, await ctx.gather(leaf, calls), strict=True):
            joined(ctx, one["spot"], grown)
        return await born(ctx, spot, pause)

    @app.task(**options)
    async def mortal(ctx: Context, spot: str, pause: float) -> list[str]:
        """Fails in each attempt."""
        await born(ctx, spot, pause)
        raise ValueError("as it always does")

    @app.task(**options)
    async def lapsing(ctx: Context, spot: str, pause: float) -> list[str]:
        """Fails until its dead letter is replayed."""
        grown = await born(ctx, spot, pause)
        run = CURRENT_RUN.get()
        assert run is not None
        if not run.history.replays:
            raise ValueError("until it is replayed")
        return grown

    @app.task(**options)
    async def mute(ctx: Context, spot: str, pause: float) -> None:
        """Waits for an answer that never comes."""
        journal.write("child", ctx.task_id, spot)
        await ctx.wait_for("never")

    @app.task(**options)
    async def family(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Spawns children one by one, works, and joins them."""
        handles = []
        for number in range(min(steps, 3)):
            given = call(ctx, number, pause)
            handles.append((given["spot"], await ctx.spawn(drowsy if number == 1 else leaf, **given)))
        await stepped(ctx, "step-0", [], pause)
        return [joined(ctx, spot, await ctx.join(handle)) for spot, handle in reversed(handles)]

    @app.task(**options)
    async def gathers(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Gathers more children than may be open at once."""
        calls = [call(ctx, number, pause / 4) for number in range(steps + 1)]
        grown = await ctx.gather(leaf, calls, limit=2)
        return [joined(ctx, one["spot"], each) for one, each in zip(calls, grown, strict=True)]

    @app.task(**options)
    async def streams(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Takes the results of children as they arrive."""
        calls = [call(ctx, number, pause / 4) for number in range(steps)]
        return [joined(ctx, grown[0], grown) async for grown in ctx.as_completed(leaf, calls, limit=2)]

    @app.task(**options)
    async def clan(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Has grandchildren."""
        calls = [call(ctx, number, pause / 4) for number in range(2)]
        grown = await ctx.gather(branch, calls)
        return [joined(ctx, one["spot"], each) for one, each in zip(calls, grown, strict=True)]

    @app.task(**options)
    async def grieves(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Catches the failure of a child, keeps that of another one, and has a third one."""
        with suppress(ChildFailed):
            await ctx.gather(mortal, [call(ctx, f"raised-{number}", pause / 2) for number in range(2)])
            raise AssertionError("the failure of a child was not raised")
        given = call(ctx, "instead", pause)
        found = [joined(ctx, given["spot"], await ctx.join(await ctx.spawn(leaf, **given)))]
        kept = await ctx.gather(mortal, [call(ctx, "kept", pause / 2)], errors="keep")
        assert isinstance(kept[0], ChildFailed), kept
        return found

    @app.task(**options)
    async def relapses(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Fails with an open child, and keeps the results that it has."""
        calls = [call(ctx, number, pause / 4) for number in range(2)]
        grown = await ctx.gather(leaf, calls)
        found = [joined(ctx, one["spot"], each) for one, each in zip(calls, grown, strict=True)]
        given = call(ctx, "spawned", pause)
        handle = await ctx.spawn(leaf, **given)
        if ctx.attempt < 3:
            raise ValueError(f"attempt {ctx.attempt} fails")
        return [*found, joined(ctx, given["spot"], await ctx.join(handle))]

    @app.task(**options)
    async def patient(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Waits until a dead child is replayed."""
        calls = [call(ctx, number, pause / 4) for number in range(2)]
        grown = await ctx.gather(lapsing, calls, errors="wait")
        return [joined(ctx, one["spot"], each) for one, each in zip(calls, grown, strict=True)]

    @app.task(**options)
    async def awaits(ctx: Context, steps: int, pause: float) -> list[list[str]]:
        """Awaits a task that it did not spawn."""
        given = call(ctx, "other", pause)
        handle = await leaf.enqueue(**given)
        return [joined(ctx, given["spot"], await handle.result())]

    @app.task(**options)
    async def hopeless(ctx: Context, steps: int, pause: float) -> None:
        """Has a child that waits for ever, until it is cancelled."""
        await ctx.join(await ctx.spawn(mute, **call(ctx, "mute", pause)))


# people


async def see_to(world: World, producer: Producer, task: TaskPlan) -> None:
    """Cancel the parent of a child that waits for ever, and replay the dead children that a parent waits for."""
    while task.kind in ("hopeless", "patient"):
        await anyio.sleep(1.3)
        handle = world.handles[task.id]
        try:
            if await handle.status() in _ENDED:
                continue  # the server may lose the end
            if task.kind == "patient":
                partitions = await queue_partitions(producer.gateway, producer.namespace, "sim")
                async for letter in list_letters(producer.gateway, partitions, Filter(task="lapsing")):
                    await replay(producer.gateway, letter, Replay())
            else:
                world.cancelled.add(task.id)
                await handle.cancel()
        except QueueError as error:
            world.tell(f"seeing to {task.id}: {error}")


# checks


def left_behind(world: World) -> list[str]:
    """Return what a join or a notice has left, and the janitor deletes."""
    found = []
    for key, item in world.server.items.items():
        if key.endswith(b":outbox"):
            found += [f"{key.decode()} {member.decode()}" for member in item.value]
        elif (join := _JOIN.fullmatch(key)) and item.expireat is None and not _lives(world, join[1].decode()):
            found.append(key.decode())
    return found


def _lives(world: World, task: str) -> bool:
    return world.checks.state(task) in ("queued", "scheduled")


def check_families(world: World) -> None:
    """Check at the end that no child is doubled, and that each parent has the results of its children."""
    children: dict[str, list[str]] = {}
    made: dict[str, str] = {}
    for entry in world.journal.entries:
        if entry.what == "child" and entry.task not in children.setdefault(entry.step, []):
            children[entry.step].append(entry.task)
        elif entry.what == "effect":
            made[entry.value] = entry.task
    for spot, ids in children.items():
        failed = _failures(world, spot.rpartition("/")[0])
        kept = [child for child in ids if not world.checks.lost(child)]
        if len(kept) > 1 + failed:
            world.checks.add("child doubled", f"{spot} has {kept}, and {failed} attempts of its parent have failed")
    for task, spot, grown in _joined(world):
        if grown[0] != spot or made.get(grown[1]) not in children.get(spot, ()):
            world.checks.add("other child", f"{task} has {grown} for {spot}, whose children are {children.get(spot)}")
    _check_results(world, children)
    for name in left_behind(world):
        world.checks.add("leak", f"{name} is left")
    for entry in world.journal.entries:
        if entry.what == "failed" and entry.step in _SOUND and not _excused(world, entry):
            world.checks.add("failed", f"{entry.task} ({entry.step}): {entry.value}")


def _excused(world: World, entry: Entry) -> bool:
    """Return whether an error is that of a run without its lease, or of a task or a join that the server has lost."""
    lost = entry.value.startswith("TaskNotFound") or "is a dead letter (lost)" in entry.value
    # the cancellation of the parent, before that of the child was sent
    lost = lost or ("was cancelled" in entry.value and entry.task in world.cancelled)
    return entry.value.startswith("LeaseLost") or (lost and bool(world.server.lost))


def _failures(world: World, parent: str) -> int:
    """Return how many attempts of a parent have failed, perhaps one more than are stored."""
    return sum(entry.what == "failed" and entry.task == parent for entry in world.journal.entries)


def _joined(world: World) -> Iterator[tuple[str, str, list[str]]]:
    for entry in world.journal.entries:
        if entry.what == "joined":
            yield entry.task, entry.step, entry.value


def _check_results(world: World, children: dict[str, list[str]]) -> None:
    """Check that the results of a parent that has succeeded are those of children that have."""
    for task in world.plan.tasks:
        if task.kind not in PARENTS or world.checks.state(task.id) != "succeeded" or world.server.lost:
            continue
        result = _result(world, task.id) or ()
        if len({spot for spot, _ in result}) < len(result):
            world.checks.add("other child", f"{task.id} has the result of a child twice: {result}")
        for spot, token in result:
            known = [_result(world, child) for child in children.get(spot, ())]
            if [spot, token] not in known:
                world.checks.add("other child", f"{task.id} has {token} for {spot}, whose children have {known}")


def _result(world: World, task: str) -> Any:
    for key, item in world.server.items.items():
        if key.endswith(b":record:" + task.encode()) and b"result" in item.value._values:
            return orjson.loads(item.value._values[b"result"])
    return None
