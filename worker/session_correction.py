"""Corrections of the state of a session by a person, with or without a turn that runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import orjson
from pydantic_core import to_json

from ..queues.envelope import new_task_id
from ..queues.errors import TaskEnded
from ..queues.inbox import Sent, check_changes
from ..queues.producer import Producer
from ..queues.records import State
from ..queues.sessions.address import TurnId
from ..queues.sessions.corrections import store_correction
from ..queues.sessions.errors import SessionError, SessionIdle
from ..queues.sessions.record import SessionCorrection, SessionRecord
from ..queues.sessions.turns import enqueue_turn
from .journal.snapshot import decode_snapshot

_TRIES: Final = 20
"""Reads of a session, each followed by a change of it that comes before the write, after which a correction fails."""


def stored_state(record: SessionRecord) -> dict[str, Any] | None:
    """Return the state that the last turn left, as JSON, None before the first one; without corrections that wait.

    Raises `DecryptionError`, `BadSnapshot`.
    """
    data = record.opened_state()
    return None if data is None else decode_snapshot(f"session {record.id}", data, owner=record.agent).state


async def correct_session(
    producer: Producer,
    read: Callable[[], Awaitable[SessionRecord]],
    changes: Mapping[str, Any],
    check: Callable[[SessionRecord], None],
    *,
    by: str = "",
    message_id: str | None = None,
    confirm: bool = False,
) -> Sent:
    """Correct the state of a session. See `Session.correct`.

    Args:
        read: returns the record.
        check: raises if the changes do not fit the state in a record.
    """
    message_id = message_id or new_task_id()
    for _ in range(_TRIES):
        record = await read()
        turn = TurnId(record.address.digest, str(record.born), record.turn)
        if record.status == "running" or (confirm and not changes and record.status == "failed"):
            await enqueue_turn(producer.gateway, record.address, turn)  # in case that its sender has not stored it yet
            if (handle := await producer.find(str(turn))) is not None:
                with suppress(TaskEnded):  # after the read
                    return await handle.correct(changes, by=by, message_id=message_id, confirm=confirm)
        elif confirm and not changes:
            raise SessionIdle(record.name)
        else:
            check_changes(changes)
            check(record)
            data = orjson.loads(to_json(dict(changes), inf_nan_mode="strings"))
            correction, limit = SessionCorrection(message_id, by, data), producer.payload_limit
            if await store_correction(producer.gateway, record, correction, limit=limit) == "stored":
                if record.status == "failed":
                    return Sent(str(turn), 0, State.DEAD)
                return Sent(record.task_id(record.turn + 1), 0, State.WAITING)
    raise SessionError("could not correct the session: its turns begin and end at the same time; try again")
