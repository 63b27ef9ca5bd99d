"""Waits: tasks that sleep and ask, the sender of their answers, and the checks of both.

The sender lives as long as the run. It answers each open wait, so a task that still waits at the end could have run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, Final

import anyio
from perdure import Context, State
from perdure.queues import QueueError, TaskHandle, Unavailable
from pydantic import BaseModel

if TYPE_CHECKING:
    from perdure import Producer

    from ..app import Entry
    from ..plan import TaskPlan
    from ..world import World
    from .kit import TaskKit

__all__ = ["ASKING", "WAITING", "attend", "check_waits", "register_waits"]

WAITING: Final = ("naps", "asks", "early", "orders", "expects", "splits", "races")
"""Kinds of tasks that wait."""

ASKING: Final = frozenset(WAITING) - {"naps"}
"""Those that are answered."""

_REST: Final = 2.0
"""Seconds between two looks at a task that has ended."""

_ENDED: Final = frozenset({State.SUCCEEDED, State.DEAD, State.CANCELLED})


class Reply(BaseModel):
    """An answer. nonce: unique among all answers."""

    nonce: str


def _token(task: str) -> str:
    return f"order:{task}"


def register_waits(kit: TaskKit) -> None:
    """Register the tasks that wait."""
    app, journal, stepped = kit.app, kit.journal, kit.stepped

    def used(ctx: Context, wait: str, reply: Any) -> str:
        nonce = "" if reply is None else Reply.model_validate(reply).nonce
        journal.write("used", ctx.task_id, wait, nonce)
        return nonce

    @app.task(**kit.options)
    async def naps(ctx: Context, steps: int, pause: float) -> list[str]:
        """Sleeps between its steps, parked or in memory."""
        found: list[str] = []
        for number in range(min(steps, 3)):
            seconds = 0.3 + pause if number % 2 else 1.2 + 2 * pause
            found.append(await stepped(ctx, f"step-{number}", list(found), pause))
            journal.write("sleeps", ctx.task_id, str(number), seconds)
            await ctx.sleep(seconds)
            journal.write("wakes", ctx.task_id, str(number), seconds)
        return found

    @app.task(**kit.options)
    async def asks(ctx: Context, steps: int, pause: float) -> list[str]:
        """Asks twice by one name, and once by another."""
        await stepped(ctx, "step-0", [], pause)
        found = [used(ctx, "approval", await ctx.wait_for("approval", Reply))]
        await stepped(ctx, "step-1", [], pause)
        found.append(used(ctx, "approval#2", await ctx.wait_for("approval", Reply)))
        found.append(used(ctx, "page", await ctx.wait_for("page", Reply, who="ada", why="which page?")))
        return found

    @app.task(**kit.options)
    async def early(ctx: Context, steps: int, pause: float) -> list[str]:
        """Waits for an answer that may have come before."""
        await stepped(ctx, "step-0", [], pause)
        return [used(ctx, "early", await ctx.wait_for("early", Reply))]

    @app.task(**kit.options)
    async def orders(ctx: Context, steps: int, pause: float) -> list[str]:
        """Opens a wait with a token, works, and waits."""
        wait = await ctx.open_wait("order", Reply, shows={"id": ctx.task_id}, token=_token(ctx.task_id))
        await stepped(ctx, "notify", [], pause)
        return [used(ctx, "order", await wait)]

    @app.task(**kit.options)
    async def expects(ctx: Context, steps: int, pause: float) -> list[str]:
        """Asks questions whose time may pass."""
        found: list[str] = []
        for number in range(min(steps, 3)):
            name = f"offer-{number}"
            found.append(used(ctx, name, await ctx.wait_for(name, Reply, timeout=0.2 + pause, default=None)))
        return found

    @app.task(**kit.options)
    async def splits(ctx: Context, steps: int, pause: float) -> list[str]:
        """Waits in branches, for an answer, the time and a message, while another one works."""

        async def asked() -> str:
            return used(ctx, "approval", await ctx.wait_for("approval", Reply))

        async def rested() -> str:
            await ctx.sleep(1.5 + pause)
            return await stepped(ctx, "rested", [], pause)

        async def heard() -> str:
            await ctx.inbox(wait=2.0 + pause, limit=1)
            return "heard"

        async def worked() -> str:
            return await stepped(ctx, "worked", [], 2 * pause)

        return [*await asyncio.gather(asked(), rested(), heard(), worked())]

    @app.task(**kit.options)
    async def races(ctx: Context, steps: int, pause: float) -> list[str]:
        """Takes what comes first."""
        first = await ctx.first(answer=ctx.wait_for("approval", Reply), time=ctx.sleep(0.5 + pause))
        nonce = used(ctx, "first/answer/approval", first.value) if first.name == "answer" else ""
        return [first.name, nonce, await stepped(ctx, "step-0", [], pause)]


# the sender of answers


async def attend(world: World, producer: Producer, task: TaskPlan) -> None:
    """Answer what a task asks, for as long as the run lasts: the server may lose the end of a task."""
    sender = _Sender(world, producer, task.id, task.kind)
    if task.kind == "early":
        await sender.answer("name", "early")
    pause = 0.05
    while True:
        await anyio.sleep(pause)
        pause = sender.dice.choice((0.05, 0.3, 0.7))
        try:
            if await sender.handle.status() in _ENDED:
                pause = _REST
                continue
            waits = [wait for wait in await sender.handle.waits() if not wait.answered]
        except QueueError:
            pause = _REST
            continue
        for wait in waits:
            await sender.attend(wait.id, wait.name)


class _Sender:
    """Sends answers, some of them twice."""

    def __init__(self, world: World, producer: Producer, task: str, kind: str) -> None:
        self.dice = Random(f"answers {world.plan.seed} {task}")
        self._world = world
        self._producer = producer
        self._task = task
        self._kind = kind
        self._count = 0

    @property
    def handle(self) -> TaskHandle[Any]:
        """The task, in the partition in which it was stored last."""
        return self._world.handles[self._task]

    async def attend(self, wait: str, name: str) -> None:
        """Answer an open wait. An impatient sender sends another answer, by name."""
        if self._kind == "orders":
            await self.answer("token", _token(self._task))
        elif self.dice.random() < 0.5:
            await self.answer("id", wait)
        else:
            await self.answer("name", name)
        if self.dice.random() < 0.4:
            await self.answer("name", name)

    async def answer(self, by: str, to: str) -> None:
        """Send one answer until the reply is known, sometimes once more."""
        self._count += 1
        nonce, again = f"{self._task} answer {self._count}", self.dice.random() < 0.2
        call: Callable[..., Coroutine[Any, Any, Any]] = self._producer.answer if by == "token" else self.handle.answer
        self._world.journal.write("answers", self._task, f"{by} {to}", nonce)
        while True:
            try:
                await call(to, {"nonce": nonce}, by="producer", answer_id=nonce)
            except Unavailable:
                self._world.journal.write("unsure", self._task, to, nonce)
                await anyio.sleep(0.2)
            except QueueError as error:
                self._world.tell(f"answering {to} of {self._task}: {error}")
                self._world.journal.write("refused", self._task, to, nonce)
                return
            else:
                self._world.journal.write("stored", self._task, to, nonce)
                if not again:
                    return
                again = False


# checks


def check_waits(world: World) -> None:
    """Check at the end that sleeps were long enough, and that each answer was used once and for its question."""
    entries = world.journal.entries
    _check_sleeps(world, entries)
    sent = {entry.value: entry for entry in entries if entry.what == "answers"}
    noted: dict[str, set[str]] = {}
    for entry in entries:
        if entry.what in ("stored", "refused", "unsure"):
            noted.setdefault(entry.value, set()).add(entry.what)
    places: dict[str, set[tuple[str, str]]] = {}
    for entry in entries:
        if entry.what == "used" and entry.value:
            places.setdefault(entry.value, set()).add((entry.task, entry.step))
    for nonce, found in places.items():
        if len(found) > 1:
            world.checks.add("answer used twice", f"{nonce} for {sorted(found)}")
        for task, wait in found:
            if nonce not in sent or sent[nonce].task != task or not _is_for(sent[nonce].step, wait):
                world.checks.add("other question", f"{nonce} was used for {wait} of {task}")
        if noted.get(nonce) == {"refused"}:
            world.checks.add("refused answer", f"{nonce} was refused, and used for {sorted(found)}")
    _check_lost(world, sent, noted, places)
    _check_changed(world, entries)


def _check_sleeps(world: World, entries: list[Entry]) -> None:
    if any(fault.kind == "step clock back" for fault in world.plan.faults):
        return
    steps = sum(fault.size for fault in world.plan.faults if fault.kind == "step clock")
    began: dict[tuple[str, str], float] = {}
    for entry in entries:
        if entry.what == "sleeps":
            began.setdefault((entry.task, entry.step), entry.at)
        elif entry.what == "wakes" and entry.at + steps < began[entry.task, entry.step] + entry.value - _ROUNDED:
            world.checks.add("early", f"sleep {entry.step} of {entry.task} lasted less than {entry.value} s")


_ROUNDED: Final = 0.002
"""Seconds by which times in milliseconds differ."""


def _is_for(target: str, wait: str) -> bool:
    by, _, to = target.partition(" ")
    if by == "token":
        return wait == "order"
    return to == (wait if by == "id" else wait.rpartition("/")[2].partition("#")[0])


def _check_lost(
    world: World, sent: dict[str, Entry], noted: dict[str, set[str]], places: dict[str, set[tuple[str, str]]]
) -> None:
    """Check that each answer which was stored was used, if its task has succeeded.

    One may come too late for a race, or in the time in which the server had lost the use of another one.
    """
    kinds = {task.id: task.kind for task in world.plan.tasks}
    set_back = any(fault.kind == "step clock back" for fault in world.plan.faults)
    lost = {task for nonce, found in places.items() if world.checks.lost(nonce) for task, _ in found}
    for nonce, entry in sent.items():
        kind = kinds.get(entry.task, "")
        if "stored" not in noted.get(nonce, ()) or nonce in places or world.checks.lost(nonce) or entry.task in lost:
            continue
        if kind == "races" or (kind == "expects" and set_back):
            continue
        if world.checks.state(entry.task) == "succeeded":
            world.checks.add("answer lost", f"{nonce} to {entry.step} was stored, and not used")


def _check_changed(world: World, entries: list[Entry]) -> None:
    last: dict[tuple[str, str], str] = {}
    for entry in entries:
        if entry.what == "fresh":
            last = {place: nonce for place, nonce in last.items() if place[0] != entry.task}
        elif entry.what == "used":
            former = last.setdefault((entry.task, entry.step), entry.value)
            if former != entry.value and not _lost_use(world, former):
                world.checks.add("other answer", f"{entry.task}, {entry.step}: {former!r}, then {entry.value!r}")
            last[entry.task, entry.step] = entry.value


def _lost_use(world: World, nonce: str) -> bool:
    """Return whether the server may have lost the record of an answer; that of a default has no nonce."""
    return bool(world.server.lost) if not nonce else world.checks.lost(nonce)
