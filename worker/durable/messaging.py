"""Messages to and from a handler, recorded once, so that a resumed run sees the same ones.

A read is recorded like a step, in the act that removes the messages from the inbox. An empty read is recorded as well:
otherwise a resumed run could take another path. Reads and sends find their records by their arguments, then by order.

A question is a read that waits and says for what: `ctx.ask`, and `ctx.inbox` with `wait` and `why`. An answer fits one
question of one person: a recorded one is not taken for another question, which also withdraws an open one.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

import orjson

from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import WakeCondition, message_after
from ...queues.durations import Moment, seconds_until
from ...queues.envelope import check_size
from ...queues.errors import TaskNotFound
from ...queues.handle import TaskHandle
from ...queues.inbox import InboxMessage, Sent, last_message, read_inbox, send_message
from ...queues.inspection.views import find_task
from ...queues.json_form import encodable
from ...queues.keys import Namespace
from ...queues.records import State
from ..errors import StepDefinitionError, StepMismatch
from ..log import FirstOfEach, logger
from .journal.event import Event
from .journal.event_redaction import redacted
from .journal.run_events import MessageSent, Received, Waited, WaitStarted
from .journal.step_record import QUESTIONS, StepRecord
from .run import Run, RunObserver
from .steps.codec import arguments_text, fingerprint
from .steps.current import DEFAULT_OPTIONS, Durability, StepOptions, check_call, check_name
from .steps.keys import changed_scope, forget_steps
from .steps.matching import match_step
from .waiting import OPEN, TIMED_OUT, Condition, WaitEnd, match_wait, save_wait, saved_wait, wait_until

_INBOX: Final = "#inbox"
_SEND: Final = "#send"


class UsedMessages(set[int]):
    """Numbers of the inbox messages that a run has read."""


def used_messages(run: Run) -> UsedMessages:
    """Return the numbers of the inbox messages that this run has read."""
    return run.extras.of(UsedMessages, UsedMessages)


class InboxOwner(RunObserver):
    """Base of an observer that reads the inbox on its own, until the handler does (`ctx.inbox`, `ctx.ask`)."""

    __slots__ = ()

    def yield_inbox(self) -> list[Entry]:
        """Read the inbox no more. Return the entries that say so to later runs, for the write of the handler's read."""
        return []


class _Read(NamedTuple):
    """One call that reads the inbox.

    Attributes:
        name: Its name among the records: that of questions, or of other reads.
        digest: Hash by which its record is found.
        order: The beginning that the hash of a record must have to be found by order.
        shown: Text of a question and the person, for errors; empty for other reads.
        waiting: Event of its wait.
        new_only: Ignore messages from before the first call.
    """

    name: str
    digest: str
    order: str
    shown: str
    waiting: WaitStarted
    new_only: bool


async def receive(
    run: Run,
    *,
    wait: Moment | None,
    limit: int | None,
    sender: str | None,
    why: str,
    key: str | None,
    options: StepOptions,
) -> list[InboxMessage]:
    """Read messages from the inbox. See `Context.inbox`."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more messages, got {limit}")
    waiting = WaitStarted(what="message", on=sender or "", why=why)
    seconds = seconds_until(wait, "wait") if wait else None
    if seconds is not None and (why or key is not None):
        return await _receive(run, seconds, limit, sender, _question(run, waiting, key, new_only=False), options)
    whose = f"{fingerprint((sender,), {})[0]}:"
    read = _Read(_INBOX, f"{whose}{limit or ''}", whose, "", waiting, new_only=False)
    return await _receive(run, seconds, limit, sender, read, options)


async def ask(
    run: Run, who: str, question: str, *, wait: Moment, key: str | None, options: StepOptions
) -> InboxMessage | None:
    """Wait for an answer. See `Context.ask`."""
    wait = seconds_until(wait, "wait")
    if not wait > 0:
        raise ValueError(f"wait must be more than 0 seconds, got {wait}")
    waiting = WaitStarted(what="approval", on=who, why=question)
    found = await _receive(run, wait, 1, who, _question(run, waiting, key, new_only=True), options)
    return found[0] if found else None


def _question(run: Run, waiting: WaitStarted, key: str | None, *, new_only: bool) -> _Read:
    digest, asked = fingerprint((waiting.on, waiting.why), {})
    if key is not None:
        check_name("key", key)
        digest, _ = fingerprint((waiting.on,), {"key": key})
        _, asked = fingerprint((waiting.on, waiting.why), {"key": key})
    return _Read(QUESTIONS, digest, "", arguments_text(asked, run.redact), waiting, new_only)


async def _receive(
    run: Run, wait: float | None, limit: int | None, sender: str | None, read: _Read, options: StepOptions
) -> list[InboxMessage]:
    """Read messages, or park the task until one arrives."""
    await check_call(run, read.name, own=True)
    _check_wait(wait)
    _check_options(options)
    key, recorded, former = await match_wait(run, read.name, read.digest, order=read.order)
    if former is not None:
        recorded = None if read.shown else StepRecord.decode(former).result
    if recorded is not None:
        run.touch()
        return [InboxMessage(**one) for one in orjson.loads(recorded)]
    if run.stopping:
        await run.boundary()
    owner = run.observer(InboxOwner)
    also = [] if owner is None else owner.yield_inbox()
    if wait is None:
        found = await _unread(run, limit, sender, 0)
        await _record(run, key, read, found, also, waited=False, durability=options.durability)
        return found
    # A message that arrives between this call and the read may be missed; parking compares with this position again.
    last, now = await last_message(run.gateway, run.delivery.partition, run.id)
    started = saved_wait(run, key)
    withdrawn = _withdrawn(run, key, read, former, started, options)
    if withdrawn is not None:
        started = _wait(read, wait, now, last)
        last = await _ask_instead(run, key, read, withdrawn, started, also)
        also = []
    else:
        after = started["after"] if started is not None else last if read.new_only else 0
        found = await _unread(run, limit, sender, after)
        if found or (started is not None and started["until"] is not None and now >= started["until"]):
            await _record(run, key, read, found, also, waited=started is not None, durability=options.durability)
            return found
        if started is None:
            started = _wait(read, wait, now, after)
            left = forget_steps(_left_open(run), run.history) if read.shown else []
            await run.recorder.put(*left, _saved(run, key, started), run.next_entry(read.waiting), *also, wait=True)
            also = []
    message = _NewMessage(run, key, read.waiting.what, started, limit, sender, last)
    ended = await wait_until(run, message, looked=now)
    found = [] if ended is TIMED_OUT else ended
    await _record(run, key, read, found, also, waited=True, durability=options.durability)
    return found


class _NewMessage(Condition):
    """The condition that the inbox has messages which a call takes."""

    __slots__ = ("_after", "_last", "_limit", "_run", "_sender")

    def __init__(
        self, run: Run, key: str, what: str, started: dict[str, Any], limit: int | None, sender: str | None, last: int
    ) -> None:
        """last: number of the last message as of the last look."""
        super().__init__(key, what, started["until"])
        self._run = run
        self._after = started["after"]
        self._limit = limit
        self._sender = sender
        self._last = last

    @property
    def parked(self) -> WakeCondition:
        return message_after(self._last)

    async def look(self) -> list[InboxMessage] | WaitEnd:
        run = self._run
        last, _ = await last_message(run.gateway, run.delivery.partition, run.id)
        found = await _unread(run, self._limit, self._sender, self._after)
        self._last = last
        return found or OPEN

    def withdraw(self, value: Any) -> None:
        if value is not TIMED_OUT:
            used_messages(self._run).difference_update([message.number for message in value])


def _check_options(options: StepOptions) -> None:
    plain = DEFAULT_OPTIONS[options.durability]
    if options is not plain and options not in (plain, StepOptions(durability=plain.durability, on_mismatch="rerun")):
        raise StepDefinitionError(
            "options of inbox() and ask() must be durability and on_mismatch; a time-out is their wait, an id their key"
        )


def _withdrawn(
    run: Run, key: str, read: _Read, former: bytes | None, started: dict[str, Any] | None, options: StepOptions
) -> str | None:
    """Return the text of the question that this one replaces, None if it replaces none.

    It replaces an open question, and an answered one where a step with other arguments would run again. Raises
    `StepMismatch`.
    """
    if not read.shown:
        return None
    if former is not None:
        asked = StepRecord.decode(former).arguments
        if options.on_mismatch != "rerun" and changed_scope(run.keys.within) not in run.history.saved:
            raise StepMismatch(key, asked, read.shown, after_new=run.steps_recorded > 0, question=True)
        return asked
    return None if started is None or started["h"] == read.digest else started["a"]


async def _ask_instead(
    run: Run, key: str, read: _Read, former: str, started: dict[str, Any], also: Sequence[Entry]
) -> int:
    """Store that a question replaces another one. Return the number of the last message, which does not answer it."""
    logger.bind(id=run.id).warning(
        "question {} was withdrawn, the handler asks {} now: messages from before do not answer it. A question whose "
        "text differs in each run needs a key: ctx.ask(..., key=...)",
        former,
        read.shown,
    )
    dropped = forget_steps([key, *_left_open(run)], run.history)
    event = run.next_entry(read.waiting.model_copy(update={"withdrawn": former}))
    await run.recorder.put(*dropped, _saved(run, key, started), event, *also, wait=True)
    if run.recorder.mail > started["after"]:  # it came before the question was stored, so it answers the former one
        started["after"] = run.recorder.mail
        await run.recorder.put(_saved(run, key, started), wait=True)
    return int(started["after"])


def _left_open(run: Run) -> list[str]:
    """Return the keys of questions that an earlier run asked later in the handler. This run asks them again there."""
    return [key for key in run.history.saved if key.rpartition("/")[2].startswith(QUESTIONS)]


def _wait(read: _Read, seconds: float, now: int, after: int) -> dict[str, Any]:
    """Return what is stored of a wait: its end, the message to start after, its digest and its question."""
    until = None if seconds > MAX_SECONDS else now + round(seconds * 1000)
    return {"until": until, "after": after, "h": read.digest, "a": read.shown}


def _saved(run: Run, key: str, started: dict[str, Any]) -> Entry:
    return save_wait(run, key, "inbox", started)


def _check_wait(wait: float | None) -> None:
    if wait is not None and (math.isnan(wait) or wait < 0):
        raise ValueError(f"wait must be 0 or more seconds, got {wait}")


async def _unread(run: Run, limit: int | None, sender: str | None, after: int) -> list[InboxMessage]:
    """Return unread messages: as many as fit into a record, but at least one.

    A message belongs to this read from the moment it is seen, although nothing is stored yet: a concurrent read of the
    same run does not return it.
    """
    used = used_messages(run)
    found: list[InboxMessage] = []
    size = 0
    try:
        async for message in unread_messages(run):
            if message.number <= after or message.number in used or message.kind:
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

    broken: Yield those that cannot be read as well.
    """
    async for message in read_inbox(run.gateway, run.delivery.partition, run.id, largest=run.payload_limit):
        if message.problem is not None:
            report_unreadable(run, message, message.problem)
        if message.problem is None or (broken and message.number):
            yield message


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
    record = StepRecord(orjson.dumps([message.summary() for message in found]), read.digest, read.shown)
    entries = [Entry(Kind.DONE_WITH_EVENT, key, record.encode())]
    for message in found:
        entries += consumed(run, message)
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
    run: Run, to: str | TaskHandle[Any], content: Any, *, sender: str | None, durability: Durability
) -> Sent:
    """Send a message to another task. See `Context.send`.

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
        namespace = Namespace(run.delivery.partition.namespace)
        partition = await find_task(run.gateway, namespace, task_id)
        if partition is None:
            raise TaskNotFound(task_id, f"any queue of namespace {namespace.name!r} on {run.gateway.address.shown}")
        sent = await send_message(
            run.gateway,
            partition,
            task_id,
            content,
            sender=run.id if sender is None else sender,
            message_id=f"{run.id}:{message}",
            limit=run.payload_limit,
        )
        value = StepRecord(orjson.dumps([sent.task_id, sent.number, sent.state]), digest, shown).encode()
        event = run.next_entry(MessageSent(to=sent.task_id, number=sent.number, content=content))
        stored = durability != "async"
        entries = (Entry(Kind.DONE_WITH_EVENT, key, value), event)
        await run.recorder.put(*entries, wait=stored, replicated=durability == "replicated", progress=True)
        run.touch()
        run.step_recorded(stored=stored)
    finally:
        run.step_ended(key)
    return sent
