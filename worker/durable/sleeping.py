"""Durable sleep: a wait that only its time ends, without a slot and without a lease."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.durations import Duration, parse_duration, to_seconds
from ..errors import StepOutsideTask
from .journal.run_events import Waited, WaitStarted
from .journal.step_record import StepRecord
from .run import Run
from .steps.codec import arguments_text, fingerprint
from .steps.current import CURRENT_STEP, Durability, check_call, check_place
from .waiting import TimePassed, WaitBoard, match_wait, redis_time, save_wait, saved_wait, wait_until

_SLEEP: Final = "#sleep"
_DAYS: Final = MAX_SECONDS / 86_400
_LAST: Final = datetime.fromtimestamp(MAX_SECONDS, UTC)


async def sleep(run: Run, duration: Duration | str, durability: Durability) -> None:
    """Sleep for a time. See `Context.sleep`."""
    milliseconds = check_sleep(run, duration)
    with run.calling():
        await _sleep(run, milliseconds, lambda now: now + milliseconds, durability)


async def sleep_until(run: Run, moment: datetime, durability: Durability) -> None:
    """Sleep until a point in time. See `Context.sleep_until`."""
    until = check_sleep_until(run, moment)
    with run.calling():
        await _sleep(run, f"until {until}", lambda _: until, durability)


def check_sleep(run: Run, duration: Duration | str) -> int:
    """Return the milliseconds to sleep. Raises `TypeError`, `ValueError`, `StepOutsideTask`."""
    _check_place(run)
    given: object = duration
    if isinstance(given, bool) or not isinstance(given, (int, float, timedelta, str)):
        remedy = "; use ctx.sleep_until for a datetime" if isinstance(given, datetime) else ""
        raise TypeError(f"duration must be seconds, a timedelta or a text such as '1h', got {given!r}{remedy}")
    if isinstance(given, str):
        try:
            seconds = parse_duration(given)
        except ValueError as error:
            raise ValueError(f"duration {error}") from None
    else:
        seconds = to_seconds(given, "duration")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"duration must be more than 0 seconds, and at most {_DAYS:,.0f} days, got {given!r}")
    return math.ceil(seconds * 1000)


def check_sleep_until(run: Run, moment: datetime) -> int:
    """Return a point in time in milliseconds since the epoch. Raises `TypeError`, `ValueError`, `StepOutsideTask`."""
    _check_place(run)
    given: object = moment
    if not isinstance(given, datetime):
        raise TypeError(f"moment must be a datetime, got {given!r}; use ctx.sleep for a duration")
    if given.utcoffset() is None:
        raise ValueError(f"moment must have a time zone, got {given}: use datetime.now(UTC)")
    if given > _LAST:
        raise ValueError(f"moment must be before {_LAST:%Y-%m-%d}, got {given}")
    return math.ceil(given.timestamp() * 1000)


def _check_place(run: Run) -> None:
    if (step := CURRENT_STEP.get()) is not None:
        raise StepOutsideTask(
            f"ctx.sleep was called inside step {step.key!r}: a step cannot park the task, use asyncio.sleep in it"
        )
    check_place(run, _SLEEP, own=True)


async def _sleep(run: Run, called_with: object, end: Callable[[int], int], durability: Durability) -> None:
    """Sleep until the time that `end` returns for the present one, in milliseconds of Redis' clock.

    A recorded sleep is over. One that an earlier run began keeps its end. A sleep in memory is only recorded when it is
    over: a run that is cut off meanwhile repeats less than a second.
    """
    await check_call(run, _SLEEP, own=True)
    digest, called = fingerprint((called_with,), {})
    key, recorded, former = await match_wait(run, _SLEEP, digest)
    if recorded is not None or former is not None:
        run.touch()
        return
    if run.stopping:
        await run.boundary()
    now = await redis_time(run)
    opened = saved_wait(run, key)
    until = end(now) if opened is None else int(opened["until"])
    if opened is None and until - now >= WaitBoard.park_after * 1000:
        opened = {"h": digest, "until": until}
        started = run.next_entry(WaitStarted(what="time", until=until))
        await run.recorder.put(save_wait(run, key, "sleep", opened), started, wait=True)
    if until > now:
        await wait_until(run, TimePassed(key, until), looked=now)
    record = StepRecord(b"null", digest, arguments_text(called, run.redact)).encode()
    ended = [] if opened is None else [run.next_entry(Waited())]
    stored, replicated = durability != "async", durability == "replicated"
    entry = Entry(Kind.DONE_WITH_EVENT, key, record)
    await run.recorder.put(entry, *ended, wait=stored, replicated=replicated, progress=True)
    run.history.saved.pop(key, None)
    run.touch()
    if stored:
        run.progressed()
