"""Information for a resumed run, the most urgent first; the full history only on request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ...queues.event_log import walk_events
from ...queues.inbox import InboxMessage
from ..durable.journal.event import Event
from ..durable.journal.handoff.document import CompletedStep, Handoff
from ..durable.journal.parsing import parse_event
from ..durable.messaging import unread_messages
from ..durable.run import Run
from .journal import agent_events as _agent_events  # noqa: F401 - the log may have them
from .journal.state import AgentState
from .recall import HasState

Part = tuple[str, Any]


class ResumeInfo:
    """Information about the work so far, in the order in which a resumed run needs it.

        async for name, part in ctx.resume_info():
            ...

    1. `handoff`: the open work of the previous run (`Handoff`).
    2. `messages`: the unread messages in the inbox (a list of `InboxMessage`).
    3. `state`: the agent's state (`AgentState`); for a function, its completed steps with their results.

    Missing parts are left out. Each part is read when the iteration reaches it. Nothing is consumed: messages stay in
    the inbox until `ctx.inbox()` reads them. Nothing is recorded either, so a function with recorded steps must not
    branch on this.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __aiter__(self) -> AsyncIterator[Part]:
        if (handoff := self.handoff) is not None:
            yield "handoff", handoff
        if messages := await self.messages():
            yield "messages", messages
        if state := await self.state():
            yield "state", state

    @property
    def handoff(self) -> Handoff | None:
        """Handoff document of the previous run, or one drafted from the log; None in a first run."""
        resumption = self._run.resumption
        return None if resumption is None else resumption.handoff

    async def messages(self) -> list[InboxMessage]:
        """Return the unread messages, in order; they stay in the inbox."""
        return [message async for message in unread_messages(self._run)]

    async def state(self) -> AgentState | tuple[CompletedStep, ...]:
        """Return the result of the work so far: an agent's state, or the latest steps that a function has completed."""
        if (agent := self._run.observer(HasState)) is not None:  # type: ignore[type-abstract]  # a protocol
            return agent.state
        return () if self.handoff is None else self.handoff.completed

    async def history(self) -> AsyncIterator[Event]:
        """Yield all events of the task, the oldest first, read in pages."""
        run = self._run
        async for found in walk_events(run.gateway, run.delivery.partition, run.id):
            yield parse_event(found)
