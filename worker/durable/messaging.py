"""Messages, as a handler reads and sends them: both recorded once, so that a run that goes on has the same ones.

What was read is recorded like a step, in the act that takes the messages out of the inbox. That nothing was there is
recorded as well, or a later run of the same handler would take another way.
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
    Namespace,
    Sent,
    State,
    TaskHandle,
    TaskNotFound,
    UnreadableMessage,
    find_task,
    last_message,
    read_inbox,
    send_message,
)
from ..errors import StepMismatch, StepOutsideTask
from ..journal.run_events import MessageSent, Received, Waited, WaitStarted
from ..journal.step_record import StepRecord
from .codec import fingerprint
from .run import Run
from .step import Durability, check_place
from .stop_reasons import ParkReason

__all__ = ["ask", "receive", "send"]

_INBOX: Final = "#inbox"
_SEND: Final = "#send"


async def receive(
    run: Run,
    *,
    wait: float | None,
    limit: int | None,
    sender: str | None,
    why: str,
    durability: Durability,
) -> list[InboxMessage]:
    """See `Context.inbox`."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit is a number of messages, 1 or more, not {limit}")
    waiting = WaitStarted(what="message", on=sender or "", why=why)
    return await _receive(run, wait or None, limit, sender, waiting, durability, new_only=False)


async def ask(run: Run, who: str, question: str, *, wait: float, durability: Durability) -> InboxMessage | None:
    """See `Context.ask`."""
    if not wait > 0:
        raise ValueError(f"to ask is to wait for more than 0 seconds, not {wait}")
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
    """new_only: no message that was there when this was called first."""
    check_place(run, _INBOX, own=True)
    _check_wait(run, wait)
    key = run.keys.next(_INBOX)
    recorded = run.history.done.get(key)
    if recorded is not None:
        run.touch()
        return [InboxMessage(**one) for one in orjson.loads(StepRecord.decode(recorded).result)]
    if run.stopping:
        await run.boundary()
    if wait is None:
        found = await _unused(run, limit, sender, 0)
        await _record(run, key, found, waited=False, durability=durability)
        return found
    # A message that comes after this look may be missed by the read that follows; parking asks for what came after it.
    last, now = await last_message(run.gateway, run.delivery.partition, run.id)
    begun = _begun(run, key)
    after = begun["after"] if begun is not None else last if new_only else 0
    found = await _unused(run, limit, sender, after)
    if found or (begun is not None and begun["until"] is not None and now >= begun["until"]):
        await _record(run, key, found, waited=begun is not None, durability=durability)
        return found
    if begun is None:
        begun = {"until": None if wait > LONGEST else now + round(wait * 1000), "after": after}
        run.history.saved[key] = orjson.dumps(begun)
        await run.recorder.put(Entry(Kind.SAVED, key, run.history.saved[key]), run.next_entry(waiting), wait=True)
    delay = LONGEST if begun["until"] is None else (begun["until"] - now) / 1000
    await run.park(ParkReason(delay, waiting.what, last))
    raise AssertionError("a parked run continues")


def _check_wait(run: Run, wait: float | None) -> None:
    if wait is None:
        return
    if math.isnan(wait) or wait < 0:
        raise ValueError(f"wait is a number of seconds, 0 or more, not {wait}")
    if asyncio.current_task() is not run.task:
        raise StepOutsideTask(
            "waiting for a message parks the whole task, which gives its slot away: await it in the handler itself, "
            "not in an asyncio task beside it (there, read with ctx.inbox() without wait)"
        )


def _begun(run: Run, key: str) -> dict[str, Any] | None:
    """The wait that a former run, or this one, began here: until when, and after which message."""
    saved = run.history.saved.get(key)
    return None if saved is None else orjson.loads(saved)


async def _unused(run: Run, limit: int | None, sender: str | None, after: int) -> list[InboxMessage]:
    """Messages that nobody has used, as many as a record may have bytes, but one in any case.

    Each is this read's from when it is met, though nothing is stored yet: another one of the same run, which goes on at
    the same time, does not get it.
    """
    used = run.used_messages
    found: list[InboxMessage] = []
    size = 0
    try:
        async for message in read_inbox(run.gateway, run.delivery.partition, run.id):
            if message.number <= after or message.number in used:
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
                problem = f"it has {size:,} bytes, and this worker takes {run.payload_limit:,} (payload_limit)"
                raise UnreadableMessage(run.id, message.number, problem)
            found.append(message)
            used.add(message.number)
            if len(found) == limit:
                break
    except BaseException:
        used.difference_update([message.number for message in found])
        raise
    return found


async def _record(run: Run, key: str, found: Sequence[InboxMessage], *, waited: bool, durability: Durability) -> None:
    """What was read, that it was used, and that the log tells of it, in one act; of nothing soon, else now."""
    record = StepRecord(orjson.dumps([message.summary() for message in found]))
    entries = [Entry(Kind.DONE_WITH_EVENT, key, record.encode())]
    for message in found:
        told = Received(number=message.number, sender=message.sender, content=message.content)
        entries += (run.next_entry(told), Entry(Kind.CONSUMED, str(message.number), b""))
    if waited and not found:
        entries.append(run.next_entry(Waited()))
    stored = bool(entries[1:])
    await run.recorder.put(*entries, wait=stored, replicated=stored and durability == "replicated")
    run.touch()
    if stored:
        run.progressed()


async def send(
    run: Run, to: str | TaskHandle[Any], content: Any, *, sender: str | None, durability: Durability
) -> Sent:
    """See `Context.send`."""
    check_place(run, _SEND, own=True)
    key = run.keys.next(_SEND)
    task_id = to if isinstance(to, str) else to.id
    digest, shown = fingerprint((task_id, content), {}, run.redact)
    recorded = run.history.done.get(key)
    if recorded is not None:
        former = StepRecord.decode(recorded)
        if former.digest != digest:
            raise StepMismatch(key, former.arguments, shown)
        run.touch()
        known, number, state = orjson.loads(former.result)
        return Sent(known, number, State(state))
    if run.stopping:
        await run.boundary()
    run.step_began(key)
    try:
        namespace = Namespace(run.delivery.partition.namespace)
        partition = await find_task(run.gateway, namespace, task_id)
        if partition is None:
            raise TaskNotFound(task_id, f"any queue of namespace {namespace.name!r}")
        own = {"sender": run.id if sender is None else sender, "message_id": f"{run.id}:{key}"}
        sent = await send_message(run.gateway, partition, task_id, content, **own, limit=run.payload_limit)
        value = StepRecord(orjson.dumps(list(sent)), digest, shown).encode()
        told = run.next_entry(MessageSent(to=sent.task_id, number=sent.number, content=content))
        stored = durability != "async"
        await run.recorder.put(
            Entry(Kind.DONE_WITH_EVENT, key, value), told, wait=stored, replicated=durability == "replicated"
        )
        run.touch()
        run.step_recorded(stored=stored)
    finally:
        run.step_ended(key)
    return sent
