"""Corrections of an agent's state by a person, applied between two steps, each once.

A correction is a message of its own kind in the inbox. The event that applies it, or says why it cannot be applied, and
the removal from the inbox are one write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.errors import PayloadTooLarge
from ...queues.inbox import CORRECTION, InboxMessage
from ...queues.transport.backoff import retry_while_unavailable
from ..durable.messaging import next_entries, unread_messages
from ..errors import StateMismatch
from ..journal.agent_events import Corrected, CorrectionRefused, MessageAdded
from ..journal.chat import FROM_INBOX, Message
from ..journal.correction import CannotCorrect, corrected
from ..journal.event import Event
from ..journal.json_patch import diff
from ..journal.quoting import quoted_block, quoted_name
from ..log import log_wait
from .incoming import Incoming
from .live_state import LiveState

_LONGEST: Final = 2_000
"""Characters of a correction in the conversation, and of the reason for a refusal."""


class Corrections:
    """Corrections to the state of one run."""

    __slots__ = ("_incoming", "_live", "_replicated", "_seen")

    def __init__(self, live: LiveState[Any], incoming: Incoming, *, replicated: bool) -> None:
        """Create it when the whole checkpoint is read. replicated: whether replicas must have the write."""
        self._live = live
        self._incoming = incoming
        self._replicated = replicated
        self._seen = 0

    async def pending(self) -> list[InboxMessage]:
        """Return the corrections in the inbox; it is read only if the run knows of a message since the last time."""
        run = self._live.run
        known = max(run.recorder.mail, run.history.mail)
        if known <= self._seen:
            return []

        async def read() -> list[InboxMessage]:
            found = [message async for message in unread_messages(run) if message.kind == CORRECTION]
            return [message for message in found if message.number not in run.used_messages]

        found = await retry_while_unavailable(read, on_wait=log_wait(f"the inbox of task {run.id}", run.touch))
        if not found:
            self._seen = known
        return found

    async def apply(self, also: Callable[[], Sequence[Entry]]) -> None:
        """Apply the corrections in the inbox. The agent must have no unstored changes.

        The conversation mentions each one that was applied, unless the agent reads its inbox itself.

        Args:
            also: returns entries for the same write.
        """
        for message in await self.pending():
            await self._apply(message, also)

    async def _apply(self, message: InboxMessage, also: Callable[[], Sequence[Entry]]) -> None:
        run, number = self._live.run, message.number
        run.used_messages.add(number)
        entries = [Entry(Kind.CONSUMED, str(number), b"")]
        wanted = message.content if isinstance(message.content, dict) else {}
        try:
            if wanted:  # else it only confirms that the agent may continue
                events = (self._event(wanted, message.sender), *self._turn(wanted, message.sender))
                entries += next_entries(run, *events)
        except Exception as error:  # noqa: BLE001 - a validator of the state class may raise anything
            entries.append(self._refusal(wanted, message.sender, error))
        else:
            entries += also() if wanted else ()
        await run.recorder.put(*entries, wait=True, replicated=self._replicated, progress=True)
        run.touch()
        run.progressed()

    def _event(self, wanted: dict[str, Any], by: str) -> Event:
        """Return the event that applies a correction, with the values as the class of the state stores them."""
        live = self._live
        after = corrected(live.logged_state, wanted)
        state_type, task_id = live.state_type, live.run.id
        changed = [name for name, value in after.items() if live.logged_state.get(name) is not value]
        unknown = [name for name in changed if name not in state_type.fields or name in state_type.ephemeral]
        if unknown:
            raise CannotCorrect(f"{state_type.kind.__name__} does not store {', '.join(unknown)}")
        stored = state_type.dump(task_id, state_type.load(task_id, after), changed)
        after.update(orjson.loads(stored))
        size, limit = len(orjson.dumps(after)), live.run.payload_limit
        if size > limit:
            raise CannotCorrect(f"the state would have {size:,} bytes, more than PERDURE_PAYLOAD_LIMIT, {limit:,}")
        # `own` lets a worker of a version without this type apply the changes.
        return Corrected(paths=tuple(wanted), by=by, changes=diff(live.logged_state, after), own=True)

    def _turn(self, wanted: dict[str, Any], sender: str) -> list[Event]:
        """Return the event that mentions a correction in the conversation, if the agent does not read its inbox."""
        if self._incoming.owned:
            return []
        text = quoted_block(orjson.dumps(wanted, option=orjson.OPT_INDENT_2).decode(), _LONGEST)
        by = f" by {quoted_name(sender)}" if sender else ""
        return [
            MessageAdded(message=Message(role="user", content=f"The state was corrected{by}:\n{text}", name=FROM_INBOX))
        ]

    def _refusal(self, wanted: dict[str, Any], by: str, error: Exception) -> Entry:
        why = error.problem if isinstance(error, StateMismatch) else str(error) or type(error).__name__
        refused = CorrectionRefused(wanted=wanted, by=by, why=why[:_LONGEST])
        try:
            return self._live.run.next_entry(refused)
        except PayloadTooLarge:
            return self._live.run.next_entry(refused.model_copy(update={"wanted": {}, "by": by[:_LONGEST]}))
