"""Run observers: objects that a run notifies of what happens in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..journal.event import Event


class RunObserver:
    """Base class of objects registered with `Run.observe`. Every method does nothing until it is overridden.

    Observers are notified in the order in which they were registered, in the event loop of the run.
    """

    __slots__ = ()

    def on_step(self, key: str) -> None:
        """A step begins."""

    def on_event(self, event: Event, number: int) -> None:
        """An event got its number and is not stored yet: without secrets, its data as JSON.

        An exception withdraws the event; observers that were registered later are not notified.
        """

    def on_recorded(self) -> None:
        """A result or progress was stored that no earlier run had stored."""

    async def on_checkpoint(self) -> None:
        """The handler asked to store what is not stored yet."""

    async def on_boundary(self) -> None:
        """An agent is between two steps of its plan. May stop the run."""
