"""Named values: tasks that read and set them, a page that changes them, and the checks of both.

Each change has a nonce: that of a handler names its run and counts the calls of the task, that of a page its number.
What is stored is looked at after each write, so that each change is seen that was ever stored.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

import anyio
import orjson
from perdure import Context, Producer
from perdure.queues import QueueError, Unavailable

if TYPE_CHECKING:
    from ..plan import TaskPlan
    from ..world import World
    from .kit import TaskKit

__all__ = ["STEERED", "ValueChecks", "register_values", "steer"]

STEERED: Final = ("steers", "adjusts")
"""Kinds of tasks with values."""

_UPDATES: Final = 6
"""Changes of a page to a task at most."""

_SHARED: Final = "pace"
"""Value that both the handler and a page set."""


def register_values(kit: TaskKit) -> None:
    """Register the tasks with values."""
    app, journal, stepped, options = kit.app, kit.journal, kit.stepped, kit.options

    class Body:
        """Calls of the body of a handler, counted from 1."""

        def __init__(self, ctx: Context) -> None:
            self.ctx = ctx
            self.sets = self.reads = 0

        async def set(self) -> None:
            self.sets += 1
            nonce = f"{self.ctx.task_id} set {self.sets} of run {journal.run}"
            journal.write("sets", self.ctx.task_id, "", nonce)
            await self.ctx.values.set(_SHARED, nonce)

        async def read(self) -> str:
            self.reads += 1
            found: str = await self.ctx.values.get(_SHARED, "")
            journal.write("reads", self.ctx.task_id, f"read {self.reads}", found)
            return found

    @app.task(**options)
    async def steers(ctx: Context, steps: int, pause: float) -> list[str]:
        """Sets a value between its steps, reads what it is, and has a plan that is recorded once."""
        body, found = Body(ctx), []
        names = await ctx.plan([f"step-{number}" for number in range(steps)] + [f"rest {journal.token()}"])
        journal.write("reads", ctx.task_id, "plan", " ".join(names))
        for number in range(steps):
            await body.set()
            found.append(await stepped(ctx, f"step-{number}", [], pause))
            found.append(await body.read())
        await body.set()
        return found

    @app.task(**options)
    async def adjusts(ctx: Context, steps: int, pause: float) -> list[str]:
        """Sets a value several times in a row, and fails at first."""
        body, found = Body(ctx), []
        for number in range(steps):
            await body.set()
            await body.set()
            found.append(await body.read())
            found.append(await stepped(ctx, f"step-{number}", [], pause))
            if number < ctx.attempt < 3:
                raise ValueError(f"attempt {ctx.attempt} fails")
        return found


async def steer(world: World, producer: Producer, task: TaskPlan) -> None:
    """Change the value of a task some times, as a page does, each until its reply is known."""
    dice = Random(f"values {world.plan.seed} {task.id}")
    for number in range(_UPDATES):
        await anyio.sleep(dice.choice((0.05, 0.3, 0.7)) + dice.choice((0.0, task.pause)))
        nonce = f"{task.id} update {number}"
        while True:
            try:
                await world.handles[task.id].update(_SHARED, nonce, by="page")
            except Unavailable:
                await anyio.sleep(0.2)
                continue
            except QueueError as error:  # it has ended, or the server has lost it
                world.tell(f"updating {task.id}: {error}")
                return
            world.journal.write("updated", task.id, "", nonce)
            break


class ValueChecks:
    """Checks of the values of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[str, list[str]] = {}
        self._tasks = {task.id for task in world.plan.tasks if task.kind in STEERED}

    def check_write(self, fields: list[bytes]) -> None:
        """Note the value of each task whose inbox a command names."""
        for field in fields if self._tasks else ():
            _, mark, task = field.partition(b":inbox:")
            if mark and task.decode("utf-8", "replace") in self._tasks:
                item = self._world.server.items.get(field)
                stored = None if item is None else item.value._values.get(b"v:" + _SHARED.encode())
                if stored is not None:
                    seen, nonce = self._seen.setdefault(task.decode(), []), _nonce(stored)
                    if not seen or seen[-1] != nonce:
                        seen.append(nonce)

    def finish(self) -> None:
        """Check that no change is stored again or lost, and that each run reads the same."""
        journal = self._world.journal.entries
        for task, seen in self._seen.items():
            kept = [nonce for nonce in seen if not self._world.checks.lost(nonce)]
            # after a loss, the value before is there again
            self._check_once(task, [nonce for at, nonce in enumerate(kept) if at == 0 or kept[at - 1] != nonce])
        for entry in journal:
            if entry.what == "updated" and entry.value not in self._seen.get(entry.task, ()):
                self._world.checks.add("update lost", f"{entry.value} was acknowledged, and never stored")
        self._check_reads()

    def _check_once(self, task: str, seen: list[str]) -> None:
        """Check changes that the server has kept, in the order in which they were stored."""
        for kind in ("set", "update"):
            numbers = [int(nonce.removeprefix(task).split()[1]) for nonce in seen if f" {kind} " in nonce]
            if numbers != sorted(set(numbers)):
                self._world.checks.add("stored again", f"{task} has the changes {seen}")
        if self._world.checks.state(task) == "succeeded" and seen and not self._world.server.lost:
            sets = [
                int(entry.value.removeprefix(task).split()[1])
                for entry in self._world.journal.entries
                if entry.what == "sets" and entry.task == task
            ]
            stored = [int(nonce.removeprefix(task).split()[1]) for nonce in seen if " set " in nonce]
            if max(sets) != max(stored, default=0):
                self._world.checks.add("set lost", f"{task} has set {max(sets)} values, and stored {seen}")

    def _check_reads(self) -> None:
        """Check that each run reads what an earlier one has read."""
        world = self._world
        read: dict[tuple[str, str], str] = {}
        for entry in world.journal.entries:
            if entry.what == "fresh":
                read = {place: value for place, value in read.items() if place[0] != entry.task}
            elif entry.what == "reads":
                former = read.setdefault((entry.task, entry.step), entry.value)
                if former != entry.value and not world.server.lost:
                    world.checks.add("other value", f"{entry.task}, {entry.step}: {former!r}, then {entry.value!r}")


def _nonce(stored: bytes) -> str:
    found: Any = orjson.loads(stored.partition(b" ")[2])
    return str(found["value"])
