"""Burial of a task: one script replaces its message by a dead letter with evidence of the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import orjson

from ..queues.delivery.leases import Delivery, check_accepted
from ..queues.delivery.settlement import NOTICE_STORED, Counters, OnWatched
from ..queues.envelope import TaskMessage
from ..queues.partitions.route import registered_retention
from ..queues.security.encryption import ERROR
from ..queues.security.redaction import Redaction
from ..queues.transport.gateway import Gateway
from ..queues.transport.pipelining import Argument
from ..queues.transport.scripts import load_script
from ..queues.wording import listed
from .error_text import error_text, traceback_text
from .policy import Reason, members_of

_MESSAGE_LIMIT = 4_000
_TRACEBACK_LIMIT = 16_000

_MEMBERS = 5
"""Members of an exception group that its message names."""

_SCANNED = 64_000
"""Characters. A longer text is searched for secrets only at both ends, of which the evidence consists."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """An error as text: type, message and traceback, each of bounded length."""

    error: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, redact: Redaction | None = None) -> Evidence:
        """Return the evidence of an error. redact: removes secrets from message and traceback."""
        return replace(cls.brief(error, redact), traceback=_cut(traceback_text(error), _TRACEBACK_LIMIT, redact))

    @classmethod
    def brief(cls, error: BaseException, redact: Redaction | None = None) -> Evidence:
        """Return the evidence without a traceback."""
        return cls(_name_of(error), _cut(_message_of(error), _MESSAGE_LIMIT, redact))

    def fields(self) -> dict[str, object]:
        """Return the evidence as plain data."""
        return {"error": self.error, "message": self.message, "traceback": self.traceback}


def _name_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _message_of(error: BaseException) -> str:
    """Return the text of an error; that of a group names the first of its members."""
    if isinstance(error, BaseExceptionGroup):
        members = members_of(error)
        texts = [f"{_name_of(member)}: {_message_of(member)}" for member in members[:_MEMBERS]]
        return f"{error.message} ({listed(texts, _MEMBERS, '; ', total=len(members))})"
    return error_text(error)


def _cut(text: str, limit: int, redact: Redaction | None) -> str:
    """Return a text without secrets, cut in the middle if it is too long."""
    if redact is not None and len(text) <= _SCANNED:
        text, redact = redact(text), None
    if len(text) > limit:
        head, tail = limit // 3, limit - limit // 3
        first = text[:head] if redact is None else redact.head(text, head)
        last = text[-tail:] if redact is None else redact.tail(text, tail)
        text = f"{first}\n... {len(text) - limit:,} characters left out ...\n{last}"
    return text.encode("utf-8", "replace").decode("utf-8")


DEFAULT_RETENTION: Final = 30 * 24 * 3600.0
"""Seconds for which a dead letter and its checkpoint are kept by default."""

_CANCELLED = 2

_BURY = load_script(Path(__file__).parent / "lua" / "bury.lua")


def unreadable_id(delivery: Delivery) -> str:
    """Return the id for a message without a task id."""
    return f"unreadable-{delivery.entry.decode()}"


async def bury(
    gateway: Gateway,
    delivery: Delivery,
    task_id: str,
    *,
    task: str,
    reason: Reason,
    evidence: Evidence,
    counters: Counters,
    retention: float = DEFAULT_RETENTION,
    entries: int = 0,
    raw: bool | None = None,
    changes: Sequence[Argument] = (),
    cleanup: TaskMessage | None = None,
    on_watched: OnWatched | None = None,
) -> bool:
    """Turn the task into a dead letter and acknowledge its message.

    Return False if nothing was done because the cancellation of the task was requested.

    Args:
        retention: Seconds.
        entries: Number of the run's last entry, without which the outcome is not stored; 0 if it needs none.
        raw: Keep the fields of the message as they are, because it is not an envelope. By default, if it is unreadable.
        changes: Fields of the checkpoint and their values for a replay; an empty value deletes the field.
        cleanup: The clean-up task, encrypted, which is enqueued in the same act; see `cleanup_id`.
        on_watched: Called if the notice for tasks that wait for this one is in the outbox now.

    Raises:
        LeaseLost: The lease has passed to another worker.
        EntriesLost: Redis lacks entries of the run.
    """
    partition = delivery.partition
    keys = [
        partition.ready,
        partition.record(task_id),
        partition.steps(task_id),
        partition.log(task_id),
        partition.dead,
        partition.inbox(task_id),
        partition.control(task_id),
        partition.retentions,
        partition.timeline,
        partition.outbox,
    ]
    letter = (
        task_id,
        task,
        str(reason),
        gateway.encryptor.of(partition, task_id).encrypt(ERROR, orjson.dumps(evidence.fields())),
        counters.attempts,
        counters.crashes,
    )
    kept_raw = int(reason is Reason.UNREADABLE if raw is None else raw)
    kept = (round(retention * 1000), registered_retention(retention))
    then: tuple[Argument, ...] = ("", "", "")
    if cleanup is not None:
        keys.append(partition.record(cleanup.id))
        then = (cleanup.id, cleanup.envelope, cleanup.arguments)
    answer = await gateway.run(_BURY, keys, [*delivery.fence, entries, *letter, *kept, kept_raw, *then, *changes])
    check_accepted(answer, task_id, "burial")
    if answer == NOTICE_STORED and on_watched is not None:
        on_watched(partition, task_id)
    return bool(answer != _CANCELLED)
