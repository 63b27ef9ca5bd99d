"""Messages to and from a handler, recorded once, so that a resumed run sees the same ones.

A read is recorded like a step, in the act that removes the messages from the inbox. An empty read is recorded as well:
otherwise a resumed run could take another path. Reads and sends find their records by their arguments, then by order.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Container, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import WakeCondition, message_after
from ...queues.durations import Moment, seconds_until
from ...queues.envelope import check_size
from ...queues.errors import TaskNotFound
from ...queues.handle import TaskHandle
from ...queues.inbox import MAX_MESSAGES, InboxMessage, Sent, last_message, read_inbox, send_message
from ...queues.inspection.views import find_task
from ...queues.json_form import encodable
from ...queues.keys import Namespace, with_tenant
from ...queues.records import State
from ..errors import StepDefinitionError, StepMismatch
from ..log import FirstOfEach, logger
from .journal.event import Event
from .journal.event_redaction import redacted
from .journal.handoff.document import OpenPromise
from .journal.run_events import MessageSent, Received, Waited, WaitStarted
from .journal.step_record import StepRecord
from .promises import event_of, saving_more
from .run import Run, RunObserver
from .steps.codec import arguments_text, fingerprint
from .steps.current import DEFAULT_OPTIONS, Durability, StepOptions, check_call
from .steps.matching import match_step
from .waiting import (
    OPEN,
    TIMED_OUT,
    Condition,
    WaitEnd,
    match_wait,
    note_taken,
    save_wait,
    saved_wait,
    taking,
    wait_until,
)

_INBOX: Final = "#inbox"
_SEND: Final = "#send"


_USED: Final = "#used"
"""Checkpoint key of the last number that the task has used, and of the numbers before it that it has left."""


class UsedMessages(set[int]):
    """Numbers of the inbox messages that a run has read, and what is known of those that earlier runs have used.

    A message is encrypted for its number, and numbers grow. So the last number that was used, with the numbers before
    it that were unread then, says of any message whether the task has used it, also if another program puts a copy
    back into the inbox. Both are stored by the write that records the use, if the task's data is encrypted: a run that
    dies before it has used nothing, and one after it finds both. An unread message that is hidden from a full read
    while others are used is refused later.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._loaded = False
        self._last = 0
        self._left: set[int] = set()
        """Numbers up to the last one that were unread when it was used."""
        self._listed: set[int] = set()
        """Numbers after the last one that this run has found in the inbox."""

    async def load(self) -> None:
        """Read what earlier runs have stored, once. Raises `DecryptionError`."""
        if not self._loaded:
            await self._run.history.read_unfinished(_USED)
            self._restore()

    def _restore(self) -> None:
        """Restore what is stored, unless another call of this run has done so, and has used messages since."""
        if not self._loaded and (data := self._run.history.saved.get(_USED)) is not None:
            self._last, *left = orjson.loads(data)
            self._left = set(left)
        self._loaded = True

    def may_take(self, number: int) -> bool:
        """Return whether the task has not used a message with this number yet, as far as is stored."""
        return number > self._last or number in self._left

    def note(self, number: int) -> None:
        """Note that the inbox has a message with this number, which may be taken."""
        if number > self._last:
            self._listed.add(number)

    def keep(self, numbers: Container[int]) -> None:
        """Forget the numbers that were left and are not in the inbox any more. numbers: all that are in it."""
        self._left = {number for number in self._left if number in numbers}

    def use(self, numbers: Collection[int]) -> list[Entry]:
        """Note that messages are used. Return the entry that stores it, for the write that records their use."""
        if not numbers or not self._run.gateway.encryptor.active:
            return []
        self._last = max(self._last, *numbers)
        left = (self._left | {number for number in self._listed if number <= self._last}).difference(numbers)
        self._left = set(sorted(left)[-MAX_MESSAGES:])
        self._listed = {number for number in self._listed if number > self._last}
        data = self._run.history.saved[_USED] = orjson.dumps([self._last, *sorted(self._left)])
        return [Entry(Kind.SAVED, _USED, data)]


def used_messages(run: Run) -> UsedMessages:
    """Return the numbers of the inbox messages that this run has read, and what earlier runs have used."""
    return run.extras.of(UsedMessages, partial(UsedMessages, run))


class InboxOwner(RunObserver):
    """Base of an observer that reads the inbox on its own, until the handler does (`ctx.inbox`)."""

    __slots__ = ()

    def yield_inbox(self) -> list[Entry]:
        """Read the inbox no more. Return the entries that say so to later runs, for the write of the handler's read."""
        return []


class _Read(NamedTuple):
    """One call that reads the inbox.

    Attributes:
        digest: Hash by which its record is found.
        order: The beginning that the hash of a record must have to be found by order.
        waiting: Event of its wait.
    """

    digest: str
    order: str
    waiting: WaitStarted


async def receive(
    run: Run, *, wait: Moment | None, limit: int | None, sender: str | None, why: str, options: StepOptions
) -> list[InboxMessage]:
    """Read messages from the inbox, or wait until one arrives. See `Context.inbox`."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more messages, got {limit}")
    seconds = seconds_until(wait, "wait") if wait else None
    whose = f"{fingerprint((sender,), {})[0]}:"
    read = _Read(f"{whose}{limit or ''}", whose, WaitStarted(what="message", on=sender or "", why=why))
    with run.calling():
        return await _receive(run, seconds, limit, sender, read, options)


async def _receive(
    run: Run, seconds: float | None, limit: int | None, sender: str | None, read: _Read, options: StepOptions
) -> list[InboxMessage]:
    await check_call(run, _INBOX, own=True)
    _check_wait(seconds)
    _check_options(options)
    key, recorded, former = await match_wait(run, _INBOX, read.digest, order=read.order)
    if former is not None:
        recorded = StepRecord.decode(former).result
    if recorded is not None:
        run.touch()
        if read_before := [InboxMessage(**message) for message in orjson.loads(recorded)]:
            note_taken()
        return read_before
    if run.stopping:
        await run.boundary()
    owner = run.observer(InboxOwner)
    also = [] if owner is None else owner.yield_inbox()
    if seconds is None:
        found = await _unread(run, limit, sender)
        await _record(run, key, read, found, also, waited=False, durability=options.durability)
        return found
    # A message that arrives between this call and the read may be missed; parking compares with this position again.
    last, now = await last_message(run.gateway, run.delivery.partition, run.id)
    started = saved_wait(run, key)
    found = await _unread(run, limit, sender)
    if found or (started is not None and started["until"] is not None and now >= started["until"]):
        await _record(run, key, read, found, also, waited=started is not None, durability=options.durability)
        return found
    if started is None:
        started = {"until": None if seconds > MAX_SECONDS else now + round(seconds * 1000), "h": read.digest}
        await run.recorder.put(_saved(run, key, started), run.next_entry(read.waiting), *also, wait=True)
        also = []
    message = _NewMessage(run, key, started["until"], limit, sender, last)
    ended = await wait_until(run, message, looked=now)
    found = [] if ended is TIMED_OUT else ended
    await _record(run, key, read, found, also, waited=True, durability=options.durability)
    return found


class _NewMessage(Condition):
    """The condition that the inbox has messages which a call takes."""

    __slots__ = ("_last", "_limit", "_run", "_sender")

    def __init__(self, run: Run, key: str, until: int | None, limit: int | None, sender: str | None, last: int) -> None:
        """last: number of the last message as of the last look."""
        super().__init__(key, "message", until)
        self._run = run
        self._limit = limit
        self._sender = sender
        self._last = last

    @property
    def parked(self) -> WakeCondition:
        return message_after(self._last)

    async def look(self) -> list[InboxMessage] | WaitEnd:
        run = self._run
        last, _ = await last_message(run.gateway, run.delivery.partition, run.id)
        found = await _unread(run, self._limit, self._sender)
        self._last = last
        return found or OPEN

    def withdraw(self, value: Any) -> None:
        used_messages(self._run).difference_update([message.number for message in value])


def _check_options(options: StepOptions) -> None:
    plain = DEFAULT_OPTIONS[options.durability]
    if options is not plain and options not in (plain, StepOptions(durability=plain.durability, on_mismatch="rerun")):
        raise StepDefinitionError("options of inbox() must be durability and on_mismatch; its time-out is its wait")


def _saved(run: Run, key: str, started: dict[str, Any]) -> Entry:
    return save_wait(run, key, "inbox", started)


def _check_wait(wait: float | None) -> None:
    if wait is not None and (math.isnan(wait) or wait < 0):
        raise ValueError(f"wait must be 0 or more seconds, got {wait}")


async def _unread(run: Run, limit: int | None, sender: str | None) -> list[InboxMessage]:
    """Return unread messages: as many as fit into a record, but at least one.

    A message belongs to this read from the moment it is seen, although nothing is stored yet: a concurrent read of the
    same run does not return it.
    """
    used = used_messages(run)
    found: list[InboxMessage] = []
    size = 0
    try:
        async for message in unread_messages(run):
            if message.number in used or message.kind:
                continue
            if sender not in (None, message.sender):
                continue
            size += len(orjson.dumps(message.summary()))
            if size > run.payload_limit:
                if found:
                    break
                problem = f"it has {size:,} bytes, more than the payload_limit of this worker, {run.payload_limit:,}"
                report_unreadable(run, message, problem)
                size = 0
                continue
            found.append(message)
            used.add(message.number)
            if len(found) == limit:
                break
    except BaseException:
        used.difference_update([message.number for message in found])
        raise
    return found


async def unread_messages(run: Run, *, broken: bool = False) -> AsyncIterator[InboxMessage]:
    """Yield the messages in the inbox that can be read, in order. Another one stays there, and is reported once.

    A message that this worker cannot decrypt may be for a worker that has the key. It must not end the task, for any
    process with the right to send can store such a message.

    A message that the task has used is not read again: a copy of it was put back.

    broken: Yield those that cannot be read as well.
    """
    used, numbers = used_messages(run), set[int]()
    await used.load()
    async for message in read_inbox(run.gateway, run.delivery.partition, run.id, largest=run.payload_limit):
        numbers.add(message.number)
        if message.number and not used.may_take(message.number):
            if message.number not in used:  # else this run has used it since the page was read
                report_unreadable(run, message, "it is a copy of a message that the task has used")
            continue
        used.note(message.number)
        if message.problem is not None:
            report_unreadable(run, message, message.problem)
        if message.problem is None or (broken and message.number):
            yield message
    used.keep(numbers)


def report_unreadable(run: Run, message: InboxMessage, problem: str) -> None:
    """Log once in this process that a message cannot be read, and why."""
    log = logger.bind(task=run.envelope.task, id=run.id)
    first = _reported.is_first(run.id, str(message.number), problem)
    if not message.number:
        log.log("WARNING" if first else "DEBUG", "the inbox of task {} is damaged: {}", run.id, problem)
        return
    sender = f" from {message.sender!r}" if message.sender else ""
    log.log(
        "WARNING" if first else "DEBUG",
        "message {}{} in the inbox of task {} could not be read: {}; it stays there and answers nothing; to remove it: "
        "perdure task inbox {} --drop {}",
        message.number,
        sender,
        run.id,
        problem,
        run.id,
        message.number,
    )


_reported: Final = FirstOfEach()


def consumed(run: Run, message: InboxMessage, *following: Event) -> list[Entry]:
    """Return the entries that log a message, and remove it from the inbox. They must be put at once.

    In the same write, `UsedMessages.use` is stored for it.

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
    read: _Read,
    found: Sequence[InboxMessage],
    also: Sequence[Entry],
    *,
    waited: bool,
    durability: Durability,
) -> None:
    """Record messages, remove them from the inbox and log them, in one act; an empty read is stored in background.

    also: further entries of the act.
    """
    if not found:
        await _put(run, key, read, found, also, waited=waited, durability=durability)
        return
    may_take = False
    try:
        async with taking():
            may_take = True
            await _put(run, key, read, found, also, waited=waited, durability=durability)
    except BaseException:
        if not may_take:
            used_messages(run).difference_update([message.number for message in found])
        raise


async def _put(
    run: Run,
    key: str,
    read: _Read,
    found: Sequence[InboxMessage],
    also: Sequence[Entry],
    *,
    waited: bool,
    durability: Durability,
) -> None:
    """See `_record`."""
    record = StepRecord(orjson.dumps([message.summary() for message in found]), read.digest)
    entries = [Entry(Kind.DONE_WITH_EVENT, key, record.encode())]
    for message in found:
        entries += consumed(run, message)
    entries += used_messages(run).use([message.number for message in found])
    if waited and not found:
        entries.append(run.next_entry(Waited()))
    stored = bool(entries[1:])
    replicated = stored and durability == "replicated"
    await run.recorder.put(*entries, *also, wait=stored, replicated=replicated, progress=stored)
    run.history.saved.pop(key, None)
    run.touch()
    if stored:
        run.progressed()


async def send(
    run: Run,
    to: str | TaskHandle[Any],
    content: Any,
    *,
    promised: OpenPromise | None = None,
    durability: Durability,
) -> Sent:
    """Send a message to another task. See `Context.send`.

    promised: what is promised to the receiver, recorded in the same act.

    The id of a message has the digest of its content, and a number among equal sends. So a send that was cut off is
    repeated under the same id, whatever the order of the branches.
    """
    await check_call(run, _SEND, own=True)
    task_id, content = to if isinstance(to, str) else to.id, encodable(content)
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
        namespace = Namespace(run.delivery.partition.namespace, run.envelope.tenant)
        partition = await find_task(run.gateway, namespace, task_id)
        if partition is None:
            raise TaskNotFound(task_id, f"any queue of namespace {namespace.name!r} on {run.gateway.address.shown}")
        sent = await send_message(
            run.gateway,
            partition,
            with_tenant(run.envelope.tenant, task_id),
            content,
            sender=run.id,
            message_id=f"{run.id}:{message}",
            limit=run.payload_limit,
        )
        value = StepRecord(orjson.dumps([sent.task_id, sent.number, sent.state]), digest, shown).encode()
        message_sent = MessageSent(to=sent.task_id, number=sent.number, content=content)
        stored = durability != "async"
        following = [] if promised is None else [event_of(promised)]
        entries = [Entry(Kind.DONE_WITH_EVENT, key, value), *next_entries(run, message_sent, *following)]
        entries += [] if promised is None else saving_more(run, promised)
        await run.recorder.put(*entries, wait=stored, replicated=durability == "replicated", progress=True)
        run.touch()
        run.step_recorded(stored=stored)
    finally:
        run.step_ended(key)
    return sent
