"""Messages to and from a handler, recorded once, so that a resumed run sees the same ones.

A read is recorded like a step, in the act that removes the messages from the inbox. An empty read is recorded as well:
otherwise a resumed run could take another path. Reads and sends find their records by their arguments, then by order.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final

import orjson

from ...queues import (
    LONGEST,
    Entry,
    InboxMessage,
    Kind,
    Moment,
    Namespace,
    Sent,
    State,
    TaskHandle,
    TaskNotFound,
    UnreadableMessage,
    check_size,
    find_task,
    last_message,
    read_inbox,
    seconds_until,
    send_message,
)
from ..errors import StepMismatch, StepOutsideTask
from ..journal import Event, StepRecord, redacted
from ..journal.run_events import MessageSent, Received, Waited, WaitStarted
from .observer import RunObserver
from .run import Run
from .steps.codec import arguments_text, fingerprint
from .steps.current import check_place
from .steps.matching import match_call, match_step
from .steps.options import Durability
from .stop_reasons import ParkReason

__all__ = ["InboxOwner", "ask", "consumed", "next_entries", "receive", "send"]

_INBOX: Final = "#inbox"
_SEND: Final = "#send"


class InboxOwner(RunObserver):
    """Base of an observer that reads the inbox on its own, until the handler does (`ctx.inbox`, `ctx.ask`)."""

    __slots__ = ()

    def yield_inbox(self) -> list[Entry]:
        """Read the inbox no more. Return the entries that say so to later runs, for the write of the handler's read."""
        return []


async def receive(
    run: Run,
    *,
    wait: Moment | None,
    limit: int | None,
    sender: str | None,
    why: str,
    durability: Durability,
) -> list[InboxMessage]:
    """Read messages from the inbox. See `Context.inbox`."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more messages, got {limit}")
    waiting = WaitStarted(what="message", on=sender or "", why=why)
    seconds = seconds_until(wait, "wait") if wait else None
    return await _receive(run, seconds, limit, sender, waiting, durability, new_only=False)


async def ask(run: Run, who: str, question: str, *, wait: Moment, durability: Durability) -> InboxMessage | None:
    """Wait for an answer. See `Context.ask`."""
    wait = seconds_until(wait, "wait")
    if not wait > 0:
        raise ValueError(f"wait must be more than 0 seconds, got {wait}")
    waiting = WaitStarted(what="approval", on=who, why=question)
    found = await _receive(run, wait, 1, who, waiting, durability, new_only=True)
    return found[0] if found else None


async def _receive(
    run: Run,
    wait: float | None,
    limit: int | None,
    sender: str | None,
    waiting: WaitStarted,
    durability: Durability,
    *,
    new_only: bool,
) -> list[InboxMessage]:
    """Read messages, or park the task until one arrives. new_only: ignore messages from before the first call."""
    check_place(run, _INBOX, own=True)
    _check_wait(run, wait)
    digest, _ = fingerprint((sender, limit, waiting.why if new_only else None), {})
    key, recorded, _ = await match_call(run, _INBOX, digest, started=run.history.saved)
    if recorded is not None:
        run.touch()
        return [InboxMessage(**one) for one in orjson.loads(recorded)]
    if run.stopping:
        await run.boundary()
    owner = run.observer(InboxOwner)
    also = [] if owner is None else owner.yield_inbox()
    if wait is None:
        found = await _unread(run, limit, sender, 0)
        await _record(run, key, digest, found, also, waited=False, durability=durability)
        return found
    # A message that arrives between this call and the read may be missed; parking compares with this position again.
    last, now = await last_message(run.gateway, run.delivery.partition, run.id)
    started = _started_wait(run, key)
    after = started["after"] if started is not None else last if new_only else 0
    found = await _unread(run, limit, sender, after)
    if found or (started is not None and started["until"] is not None and now >= started["until"]):
        await _record(run, key, digest, found, also, waited=started is not None, durability=durability)
        return found
    if started is None:
        started = {"until": None if wait > LONGEST else now + round(wait * 1000), "after": after, "h": digest}
        run.history.saved[key] = orjson.dumps(started)
        saved = Entry(Kind.SAVED, key, run.history.saved[key])
        await run.recorder.put(saved, run.next_entry(waiting), *also, wait=True)
    delay = LONGEST if started["until"] is None else (started["until"] - now) / 1000
    await run.park(ParkReason(delay, waiting.what, last))
    raise AssertionError("a parked run continues")


def _check_wait(run: Run, wait: float | None) -> None:
    if wait is None:
        return
    if math.isnan(wait) or wait < 0:
        raise ValueError(f"wait must be 0 or more seconds, got {wait}")
    if asyncio.current_task() is not run.task:
        raise StepOutsideTask(
            "waiting for a message parks the whole task; await it in the handler itself, "
            "not in another asyncio task (call ctx.inbox() without wait there)"
        )


def _started_wait(run: Run, key: str) -> dict[str, Any] | None:
    """Return the wait that this run or an earlier one started at this call: its end, and the message to start after."""
    saved = run.history.saved.get(key)
    return None if saved is None else orjson.loads(saved)


async def _unread(run: Run, limit: int | None, sender: str | None, after: int) -> list[InboxMessage]:
    """Return unread messages: as many as fit into a record, but at least one.

    A message belongs to this read from the moment it is seen, although nothing is stored yet: a concurrent read of the
    same run does not return it.
    """
    used = run.used_messages
    found: list[InboxMessage] = []
    size = 0
    try:
        async for message in read_inbox(run.gateway, run.delivery.partition, run.id):
            if message.number <= after or message.number in used or message.kind:
                continue
            if message.problem is not None:
                if found:
                    break
                raise UnreadableMessage(run.id, message.number, message.problem)
            if sender not in (None, message.sender):
                continue
            size += len(orjson.dumps(message.summary()))
            if size > run.payload_limit:
                if found:
                    break
                problem = f"it has {size:,} bytes, more than the payload_limit of this worker, {run.payload_limit:,}"
                raise UnreadableMessage(run.id, message.number, problem)
            found.append(message)
            used.add(message.number)
            if len(found) == limit:
                break
    except BaseException:
        used.difference_update([message.number for message in found])
        raise
    return found


def consumed(run: Run, message: InboxMessage, *following: Event) -> list[Entry]:
    """Return the entries that log a message, and remove it from the inbox. They must be put at once.

    following: events to log after that of the message. Raises as `next_entries`.
    """
    event = Received(number=message.number, sender=message.sender, content=message.content)
    return [*next_entries(run, event, *following), Entry(Kind.CONSUMED, str(message.number), b"")]


def next_entries(run: Run, first: Event, *following: Event) -> list[Entry]:
    """Return the log entries of events that belong together. They must be put at once.

    Raises `PayloadTooLarge`, and what an observer raises. If an event is too large, none of them has a number: the
    number of an event that is not stored would be a gap in the log.
    """
    for event in following:
        clean = event if run.redact is None or event.masked else redacted(event, run.redact)
        check_size(f"event {event.type!r} of task {run.id}", len(clean.to_json()), run.payload_limit)
    return [run.next_entry(event) for event in (first, *following)]


async def _record(
    run: Run,
    key: str,
    digest: str,
    found: Sequence[InboxMessage],
    also: Sequence[Entry],
    *,
    waited: bool,
    durability: Durability,
) -> None:
    """Record messages, remove them from the inbox and log them, in one act; an empty read is stored in background.

    also: further entries of the act.
    """
    record = StepRecord(orjson.dumps([message.summary() for message in found]), digest)
    entries = [Entry(Kind.DONE_WITH_EVENT, key, record.encode())]
    for message in found:
        entries += consumed(run, message)
    if waited and not found:
        entries.append(run.next_entry(Waited()))
    stored = bool(entries[1:])
    replicated = stored and durability == "replicated"
    await run.recorder.put(*entries, *also, wait=stored, replicated=replicated, progress=stored)
    run.touch()
    if stored:
        run.progressed()


async def send(
    run: Run, to: str | TaskHandle[Any], content: Any, *, sender: str | None, durability: Durability
) -> Sent:
    """Send a message to another task. See `Context.send`.

    The id of a message has the digest of its content, and a number among equal sends. So a send that was cut off is
    repeated under the same id, whatever the order of the branches.
    """
    check_place(run, _SEND, own=True)
    task_id = to if isinstance(to, str) else to.id
    digest, called_with = fingerprint((task_id, content), {})
    shown = arguments_text(called_with, run.redact)
    message = run.keys.next(f"{_SEND}:{digest}")
    key, recorded, former = (
        await match_step(run, _SEND, (digest,)) if run.history.records else (run.keys.next(_SEND), None, None)
    )
    if former is not None:
        raise StepMismatch(key, StepRecord.decode(former).arguments, shown, after_new=run.steps_recorded > 0)
    if recorded is not None:
        run.touch()
        known, number, state = orjson.loads(recorded)
        return Sent(known, number, State(state))
    if run.stopping:
        await run.boundary()
    run.step_began(key)
    try:
        namespace = Namespace(run.delivery.partition.namespace)
        partition = await find_task(run.gateway, namespace, task_id)
        if partition is None:
            raise TaskNotFound(task_id, f"any queue of namespace {namespace.name!r}")
        own = {"sender": run.id if sender is None else sender, "message_id": f"{run.id}:{message}"}
        sent = await send_message(run.gateway, partition, task_id, content, **own, limit=run.payload_limit)
        value = StepRecord(orjson.dumps(list(sent)), digest, shown).encode()
        event = run.next_entry(MessageSent(to=sent.task_id, number=sent.number, content=content))
        stored = durability != "async"
        entries = (Entry(Kind.DONE_WITH_EVENT, key, value), event)
        await run.recorder.put(*entries, wait=stored, replicated=durability == "replicated", progress=True)
        run.touch()
        run.step_recorded(stored=stored)
    finally:
        run.step_ended(key)
    return sent
