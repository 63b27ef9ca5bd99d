"""Equal calls of a step by concurrent asyncio tasks, whose results a resumed run may swap."""

from __future__ import annotations

import asyncio
import weakref
from typing import Final

from ...resume_warning import warn_once

_KEPT: Final = 1_000
"""Calls from which those of ended tasks are forgotten."""


class EqualCalls:
    """Asyncio tasks beside the handler's in which steps were called, by name with scope and digest.

    In a resumed run, recorded steps return at once, so concurrent tasks call theirs in another order. A task that has
    ended before the next one calls is not concurrent: `asyncio.wait_for` makes one for each call.
    """

    __slots__ = ("_callers",)

    def __init__(self) -> None:
        self._callers: dict[tuple[str, str], weakref.ref[asyncio.Task[object]]] = {}

    def add(self, key: str, digest: str, task: asyncio.Task[object], own: tuple[str, str]) -> None:
        """Note a call in a task beside the handler's. Warn if another task has made an equal one.

        own: key and digest of the step that the handler's task waits for; empty without one.
        """
        name = _numberless(key)
        former = self._callers.get((name, digest))
        self._callers[name, digest] = weakref.ref(task)
        other = None if former is None else former()
        if (other is not None and other is not task and not other.done()) or (_numberless(own[0]), own[1]) == (
            name,
            digest,
        ):
            _warn(name)
        if len(self._callers) > _KEPT:
            self._callers = {place: caller for place, caller in self._callers.items() if _is_alive(caller)}

    def check(self, key: str, digest: str) -> None:
        """Warn if a call of the handler's task is equal to one of a task beside it, which has not ended."""
        name = _numberless(key)
        caller = self._callers.get((name, digest))
        if caller is not None and _is_alive(caller):
            _warn(name)


def _is_alive(caller: weakref.ref[asyncio.Task[object]]) -> bool:
    task = caller()
    return task is not None and not task.done()


def _numberless(key: str) -> str:
    head, mark, tail = key.rpartition("#")
    return head if mark and tail.isdigit() else key


def _warn(name: str) -> None:
    step = name.rpartition("/")[2]
    warn_once(
        f"step {step!r} is called with equal arguments by concurrent asyncio tasks; a resumed run may swap their "
        "results: call it in a scope of its own in each task (with ctx.scope(...)), or with a step_id"
    )
