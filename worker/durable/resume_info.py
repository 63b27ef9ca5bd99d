"""What a run has to know before it goes on, the most pressing first; the long history only when it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

from ...queues import InboxMessage, read_inbox, walk_events
from ..journal import AgentState, Event, Handoff, parse_event
from .run import Run

__all__ = ["ResumeInfo"]

Part = tuple[str, Any]


@runtime_checkable
class _HasState(Protocol):
    """The session of an agent."""

    @property
    def state(self) -> AgentState: ...


class ResumeInfo:
    """The order in which a run takes up its work again:

    async for name, part in ctx.boot():
        ...

    1. `handoff`: what the former run left undone (`Handoff`).
    2. `messages`: those that wait in the inbox (a list of `InboxMessage`).
    3. `state`: the agent's (`AgentState`); of a function, the keys of its recorded steps.

    What there is none of is left out. Each is looked up when its turn has come, so whoever stops early reads no more.
    Nothing is used up by looking: messages stay in the inbox until `ctx.inbox()` reads them. And nothing is recorded:
    a function that goes on with its recorded steps must not choose its way by this.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __aiter__(self) -> AsyncIterator[Part]:
        if (handoff := self.handoff) is not None:
            yield "handoff", handoff
        if messages := await self.messages():
            yield "messages", messages
        if state := self.state:
            yield "state", state

    @property
    def handoff(self) -> Handoff | None:
        """What the former run left undone, by its own account or by that of the log; None for a first run."""
        resumption = self._run.resumption
        return None if resumption is None else resumption.handoff

    async def messages(self) -> list[InboxMessage]:
        """The messages that were not read yet, in order; they stay."""
        run = self._run
        return [message async for message in read_inbox(run.gateway, run.delivery.partition, run.id)]

    @property
    def state(self) -> AgentState | list[str] | None:
        """What the work has come to: an agent's state, or the keys of a function's steps that are recorded."""
        run = self._run
        if (agent := run.observer(_HasState)) is not None:  # type: ignore[type-abstract]  # a protocol is asked for
            return agent.state
        return sorted(key for key in run.history.done if not key.startswith("#"))

    async def history(self) -> AsyncIterator[Event]:
        """Everything that happened to the task, the oldest first, read page by page as it is gone through."""
        run = self._run
        async for found in walk_events(run.gateway, run.delivery.partition, run.id):
            yield parse_event(found)
