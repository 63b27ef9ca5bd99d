"""Promises of a task: what it has promised others and has not kept, and what it is owed.

The open promises of a function are one value of its checkpoint, stored in the act that logs the change. Those of an
agent are commitments of its state, which the same events change. An answer that the task waits for is owed by the
person who is asked, until the wait has ended. A successor begins with the open promises of the task that it continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import anyio
import orjson
from pydantic import ValidationError

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.errors import QueueError
from ...queues.handle import TaskHandle
from ...queues.wording import counted, listed, shortened, shown_time
from ..errors import BadHandoff, StepDefinitionError
from ..log import logger
from .event_calls import log_once
from .journal.handoff.document import RECEIVED, Handoff, OpenPromise
from .journal.quoting import quoted_line
from .journal.run_events import LeftPromises, Promised, PromiseKept
from .run import Run, RunObserver

PROMISES: Final = "#promises"
"""Checkpoint key of the open promises of a function."""

ME: Final = "me"
"""Name of the task itself among the parties."""

MAX_PROMISES: Final = 100
"""Open promises that a function keeps: the latest ones. The log has all of them."""

_NAME: Final = 200
_TEXT: Final = 1000
"""Most characters of the name of a party, and of what is promised."""

_LISTED: Final = 20
"""Promises of an event `left_promises`."""

_SHOWN: Final = 3
"""Promises that a warning names."""

_LEFT_SECONDS: Final = 2.0
"""Seconds for which the event of a cancelled task may delay its outcome."""


class PromiseOwner(RunObserver):
    """Base of an observer whose state has the promises of the run, in place of the checkpoint."""

    __slots__ = ()

    def open_promises(self) -> list[OpenPromise]:
        """Return the open promises."""
        raise NotImplementedError


def open_promises(run: Run) -> list[OpenPromise]:
    """Return the open promises of a run, the oldest first."""
    owner = run.observer(PromiseOwner)
    return _stored(run) if owner is None else owner.open_promises()


def _saved(data: bytes | None) -> list[OpenPromise] | None:
    """Return the open promises that a checkpoint has; None if it has none or they cannot be read."""
    try:
        found = None if data is None else orjson.loads(data)
        return None if found is None else [OpenPromise.model_validate(promise) for promise in found]
    except (orjson.JSONDecodeError, ValidationError, TypeError):
        return None


def stored_promises(task_id: str, saved: Mapping[str, bytes]) -> list[OpenPromise] | None:
    """Return the open promises of a function from what is saved of it: before its first one, those that it received."""
    found = _saved(saved.get(PROMISES))
    if found is not None or (received := saved.get(RECEIVED)) is None:
        return found
    try:
        return [*Handoff.from_json(task_id, received).promises]
    except BadHandoff:
        return None


def _stored(run: Run) -> list[OpenPromise]:
    return stored_promises(run.id, run.history.saved) or []


def _saving(run: Run, promises: Sequence[OpenPromise]) -> list[Entry]:
    """Return the entry that stores the open promises. It must be put at once. An agent stores them with its state."""
    if run.observer(PromiseOwner) is not None:
        return []
    data = run.history.saved[PROMISES] = encode_promises(promises)
    return [Entry(Kind.SAVED, PROMISES, data)]


def encode_promises(promises: Sequence[OpenPromise]) -> bytes:
    """Return the stored form of the open promises of a function."""
    kept = promises[-MAX_PROMISES:]
    return orjson.dumps([promise.model_dump(mode="json", exclude_defaults=True) for promise in kept])


def made_promise(run: Run, to: object, what: object, due: object, by: object = ME) -> OpenPromise:
    """Return a promise without secrets. Raises `StepDefinitionError` if an argument is not valid."""
    to = to.id if isinstance(to, TaskHandle) else to
    for name, value in (("to", to), ("by", by)):
        if not isinstance(value, str) or not value.strip() or len(value) > _NAME:
            raise StepDefinitionError(
                f"{name} of a promise must be the name of a person or a task, 1 to {_NAME} characters, "
                f"got {shortened(repr(value), _NAME)}"
            )
    if to == by:
        raise StepDefinitionError(f"a promise must have two parties, got {by!r} and {to!r}")
    if not isinstance(what, str) or not what.strip() or len(what) > _TEXT:
        raise StepDefinitionError(
            f"what is promised must be a text of 1 to {_TEXT:,} characters, got {shortened(repr(what), _NAME)}"
        )
    if due is not None and (not isinstance(due, datetime) or due.tzinfo is None):
        raise StepDefinitionError(f"due of a promise must be a datetime with a time zone, got {due!r}")
    return OpenPromise(what=what if run.redact is None else run.redact(what), by=str(by), to=str(to), due=due)


async def promise(run: Run, to: object, what: object, *, due: object, by: object) -> None:
    """Record a promise. See `Context.promise`."""
    made = made_promise(run, to, what, due, by)
    await log_once(run, event_of(made), also=lambda _: saving_more(run, made))


def event_of(made: OpenPromise) -> Promised:
    """Return the event of a promise."""
    return Promised(what=made.what, by=made.by, to=made.to, due=made.due)


def saving_more(run: Run, made: OpenPromise) -> list[Entry]:
    """Return the entry that stores another promise. It must be put at once, with its event."""
    return [] if run.observer(PromiseOwner) is not None else _saving(run, [*_stored(run), made])


async def keep(run: Run, to: object, what: object, *, by: object) -> None:
    """Record that a promise was kept. See `Context.keep`."""
    made = made_promise(run, to, what, None, by)
    kept = PromiseKept(what=made.what, by=made.by, to=made.to)
    await log_once(run, kept, check=partial(_check_open, run, made), also=lambda _: _saving(run, _without(run, made)))


def _same(one: OpenPromise, other: OpenPromise) -> bool:
    return (one.by, one.to, one.what) == (other.by, other.to, other.what)


def _check_open(run: Run, made: OpenPromise) -> None:
    """Raise `StepDefinitionError` if a promise is not open. One of very many may have made room for others."""
    held = open_promises(run)
    if len(held) < MAX_PROMISES and not any(_same(promise, made) for promise in held):
        others = listed([promise_text(promise) for promise in held], _SHOWN) if held else "none"
        raise StepDefinitionError(f"could not keep promise {promise_text(made)!r}: it is not open; open are: {others}")


def _without(run: Run, made: OpenPromise) -> list[OpenPromise]:
    held = _stored(run)
    first = next((number for number, promise in enumerate(held) if _same(promise, made)), None)
    return held if first is None else [*held[:first], *held[first + 1 :]]


def save_owed(run: Run, who: str, what: str, until: int | None, wait: str) -> list[Entry]:
    """Return the entry that stores the answer which a person owes. It must be put at once, with the wait.

    until: Time in milliseconds.
    """
    if not who or run.observer(PromiseOwner) is not None:
        return []
    held = [promise for promise in _stored(run) if promise.wait != wait]
    return _saving(run, [*held, owed(who, what, until, wait)])


def owed(who: str, what: str, until: int | None, wait: str) -> OpenPromise:
    """Return the answer to a wait as a promise of the person who is asked."""
    due = None if until is None else datetime.fromtimestamp(until / 1000, UTC)
    return OpenPromise(what=shortened(what, _TEXT), by=shortened(who, _NAME), due=due, wait=wait)


def drop_owed(run: Run, wait: str) -> list[Entry]:
    """Return the entry that removes what was owed by a wait that ends; none without it. It must be put at once."""
    if PROMISES not in run.history.saved:
        return []
    held = _stored(run)
    left = [promise for promise in held if promise.wait != wait]
    return [] if len(left) == len(held) else _saving(run, left)


# the end of a task


def left_promises(promises: Sequence[OpenPromise]) -> LeftPromises:
    """Return the event of promises that a task leaves open at its end."""
    shown = tuple(promise.model_copy(update={"wait": ""}) for promise in promises[:_LISTED])
    return LeftPromises(count=len(promises), promises=shown)


def warn_of_left(run: Run, promises: Sequence[OpenPromise]) -> None:
    """Warn that a task ends with open promises."""
    logger.bind(task=run.envelope.task, id=run.id).warning(
        "task {} ends with {}: {}",
        run.id,
        counted(len(promises), "open promise", "open promises"),
        listed([promise_text(promise) for promise in promises], _SHOWN),
    )


async def log_left(run: Run) -> None:
    """Log the open promises of a function that returns, and warn of them. Raises `LeaseLost`."""
    if run.observer(PromiseOwner) is None and (promises := _stored(run)):
        warn_of_left(run, promises)
        await run.log_event(left_promises(promises))


async def log_left_cancelled(run: Run) -> None:
    """Log the open promises of a task that is cancelled, unless that would delay its outcome, and warn of them."""
    if not (run.history.saved or run.has_written) or not (promises := open_promises(run)):
        return
    warn_of_left(run, promises)
    entry = run.next_entry(left_promises(promises))
    try:
        with anyio.move_on_after(_LEFT_SECONDS):
            await run.recorder.put_or_drop(entry)
    except QueueError as error:
        bound = logger.bind(task=run.envelope.task, id=run.id)
        bound.warning("could not log the open promises of the task: {}", error)


def promise_text(made: OpenPromise) -> str:
    """Return what is promised, by or to whom, and until when, as one line."""
    text = quoted_line(made.what, _TEXT)
    text = text if made.by == ME else f"{quoted_line(made.by)}: {text}"
    text = f"{text} (to {quoted_line(made.to)})" if made.to not in (ME, "") else text
    return text if made.due is None else f"{text}, due {shown_time(made.due.timestamp() * 1000)}"


def as_commitments(promises: Iterable[OpenPromise]) -> list[dict[str, Any]]:
    """Return open promises as the commitments of a state have them, as JSON data."""
    return [promise.model_dump(mode="json") | {"done": False} for promise in promises]
