"""Tasks of the run that schedules enqueue: light ones, and one that has all that a night has."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from perdure import App, Context, Cron, Every, Limit, Producer
from perdure.queues import QueueError
from perdure.queues.pauses import PauseStore, load_pauses
from perdure.queues.schedules.definition import task_id_of
from perdure.queues.schedules.store import ScheduleStore

from .children import joined
from .instrumentation import logged, options_of, stepped, work
from .journal import JournalWriter
from .streaming import Body, tell
from .waiting import Reply, used

__all__ = [
    "MIXES",
    "PLANS",
    "Planned",
    "end_pauses",
    "end_schedules",
    "note_schedules",
    "planned_by",
    "register_schedules",
]

MIXES: Final = ("all", "mixed")
"""Mixes of a run that has schedules."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule. every: seconds between two planned times. all: whether none of them may be missed."""

    every: int
    all: bool = False


PLANS: Final = {"beats": Planned(8, all=True), "pulse": Planned(3), "nights": Planned(20)}
"""Schedules by name, which is the kind of their tasks.

A step of Redis' clock passes at most 75 times of `beats`, and a firing makes up for the last 100.
"""

_ID: Final = re.compile(r"(beats|pulse|nights)-(\d{8}T\d{6}Z)")


def planned_by(task_id: str) -> tuple[str, int] | None:
    """Return the schedule and the planned time (ms) of a task that was fired; None of one that was run by hand."""
    found = _ID.fullmatch(task_id)
    if found is None:
        return None
    planned = round(datetime.strptime(found[2], "%Y%m%dT%H%M%S%z").timestamp() * 1000)
    assert task_id_of(found[1], planned) == task_id
    return found[1], planned


def register_schedules(app: App, pool: Limit, holding: Callable[..., Any], lodger: Any) -> None:
    """Register the tasks with an app, and their schedules if the run has any.

    Args:
        pool: a limit. holding: logs that a block holds a token of one. lodger: a child that holds a token.
    """

    @app.task(**options_of("beats"))
    @logged
    async def beats(ctx: Context, steps: int, pause: float) -> list[str]:
        """Runs for each planned time."""
        return [await stepped(ctx, "step-0", work, [], pause)]

    @app.task(**options_of("pulse"))
    @logged
    async def pulse(ctx: Context, steps: int, pause: float) -> list[str]:
        """Runs for the last one of missed times."""
        return [await stepped(ctx, "step-0", work, [], pause)]

    @app.task(**options_of("nights"), limits=[pool], priority="high")
    @logged
    async def nights(ctx: Context, steps: int, pause: float, tenant: str) -> list[str]:
        """Holds a token, emits, has limited children, asks and sleeps."""
        body = Body(ctx)
        async with holding(ctx.task_id, "pool"):
            await body.say()
            found = [await stepped(ctx, "step-0", tell, [], pause)]
            spots = [f"{ctx.task_id}/{number}" for number in range(steps)]
            calls = [{"spot": spot, "pause": pause, "tenant": tenant} for spot in spots]
            for spot, grown in zip(spots, await ctx.gather(lodger, calls, limit=2), strict=True):
                found.append(joined(ctx, spot, grown))
            await body.say("tokens")
            used(ctx, "approval", await ctx.wait_for("approval", Reply))
            await ctx.sleep(4 * pause)
            found.append(await stepped(ctx, "step-1", tell, list(found), pause))
            await body.say()
        return found

    if os.environ.get("CHAOS_MIX") in MIXES:
        light: dict[str, Any] = {"steps": 1, "pause": 0.05}
        app.schedule("beats", beats, Every(PLANS["beats"].every), args=light, missed="all")
        app.schedule("pulse", pulse, Every(PLANS["pulse"].every), args=light, missed="once", jitter=1)
        tenant = {"steps": 4, "pause": 0.1, "tenant": "nights"}
        app.schedule("nights", nights, Cron("*/20 * * * * *", tz="Europe/Berlin"), args=tenant, missed="once")


async def end_schedules(producer: Producer) -> None:
    """Pause all schedules, so that the last task of the run can end."""
    store = ScheduleStore(producer.gateway, producer.namespace)
    for schedule in await store.read_all():
        await store.pause(schedule.name, by="the run", why="it ends")


async def end_pauses(producer: Producer) -> None:
    """End all pauses. Workers find the tasks that they have parked."""
    store = PauseStore(producer.gateway, producer.namespace)
    for rule in (await load_pauses(producer.gateway, producer.namespace)).rules:
        await store.remove(rule)


async def note_schedules(producer: Producer, journal: JournalWriter) -> None:
    """Write one line per schedule."""
    try:
        found = await ScheduleStore(producer.gateway, producer.namespace).read_all()
    except QueueError as error:
        journal.write("blind", error=str(error)[:200])
        return
    for read in found:
        journal.write("schedule", name=read.name, epoch=read.epoch, last=read.last, now=read.now, firing=read.firing)
