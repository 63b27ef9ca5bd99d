"""Killing workers at moments that nobody chose."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import anyio

from ..failures import Failed
from .journal import Journal
from .replicas import Kill, Replicas

__all__ = ["FILES_PER_KILL", "Killer", "Moment", "draw"]

FILES_PER_KILL: Final = 10
"""With fewer, a quick task could be done before the last kill."""

_LATEST: Final = 0.8
_LOOK: Final = 0.002
_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a task: when its `step`-th step (from 1) begins, plus a `share` (0 to 1) of a step's usual time."""

    step: int
    share: float


def draw(seed: int, kills: int, steps: int) -> list[Moment]:
    """Moments for so many kills, spread at random over the first four fifths of the steps; the seed repeats them."""
    chance = random.Random(seed)  # noqa: S311 - a lot, not a secret
    drawn = sorted(chance.sample(range(1, max(kills, int(steps * _LATEST)) + 1), kills))
    return [Moment(step, chance.random()) for step in drawn]


class Killer:
    """Follows a task in the journal, and kills the worker that runs it when a moment has come."""

    def __init__(self, journal: Journal, replicas: Replicas, on_kill: Callable[[Kill], None]) -> None:
        self._journal = journal
        self._replicas = replicas
        self._on_kill = on_kill

    async def run(self, task: str, moments: list[Moment]) -> None:
        """Kill at each moment, start another worker in place of the one killed, and go on watching.

        Raises `ReplicaEnded`, and `Failed` when no step begins for a long time. Does not return.
        """
        for moment in moments:
            pid = await self._reach(task, moment.step)
            await anyio.sleep(moment.share * self._usual(task))
            self._journal.refresh()
            pid = self._runner(task) or pid
            kill = self._replicas.kill(pid)
            self._replicas.start()
            self._on_kill(kill)
        await self._reach(task, None)

    async def _reach(self, task: str, step: int | None) -> int:
        """Wait until so many steps have begun and a living worker runs the task; returns its process id."""
        moved, begun, pid = time.monotonic(), self._begun(task), self._runner(task)
        while step is None or begun < step or pid is None:
            self._replicas.check()
            if time.monotonic() > moved + _PATIENCE:
                raise Failed(f"no step has begun for {_PATIENCE:.0f} s; {begun} had before")
            await anyio.sleep(_LOOK)
            if self._journal.refresh():
                moved, begun, pid = time.monotonic(), self._begun(task), self._runner(task)
        return pid

    def _begun(self, task: str) -> int:
        return len({line.step for line in self._journal.of(task)})

    def _runner(self, task: str) -> int | None:
        lines = self._journal.of(task)
        return lines[-1].pid if lines and lines[-1].pid in self._replicas.pids else None

    def _usual(self, task: str) -> float:
        """Seconds that a step took on average, takeovers left out."""
        lines = self._journal.of(task)
        gaps = [after.at - before.at for before, after in pairwise(lines) if before.pid == after.pid]
        return sum(gaps) / len(gaps) if gaps else 0.0
