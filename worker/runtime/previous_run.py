"""Going on where a former run stopped: why it did, how long ago, and what is found again.

Nothing of this is done for a task that is run for the first time. Of one that was, the last events of its log are read
together with its checkpoint, and tell how the former run ended: those that stop a run say so themselves, and where the
newest is of a run that worked, that run was cut off.

Opening what a delivery brought: its arguments, and what earlier runs left; and hearing of the secrets among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from ...queues import (
    MARK,
    Gateway,
    History,
    Redaction,
    ServerFull,
    TaskEvent,
    Unavailable,
    arguments_field,
    read_log_tail,
    retry_while_unavailable,
    secret_values,
    write_entries,
)
from ..durable import Run, StopReason
from ..errors import BadHandoff
from ..journal import HANDOFF, After, Handoff, Resumption, handoff_of
from ..journal.handoff import RECEIVED, Why
from ..journal.run_events import Resumed
from ..log import log_wait, logger
from ..registry import Task

__all__ = ["open_arguments", "open_history", "resume"]

_ENDS: Final[Mapping[str, After]] = {
    "handed_off": "hand_off",
    "attempt_failed": "failure",
    "snoozed": "wait",
    "waiting": "wait",
    "crashed": "crash",
    "crash_backoff": "crash",
    "replayed": "replay",
    "forked": "fork",
}
"""What stops a run, or stands for its stop, and writes an event that says so."""

_TOLD_AS: Final[Mapping[After, Why]] = {
    "hand_off": "shutdown",
    "failure": "failure",
    "wait": "waiting",
    "crash": "crash",
    "replay": "burial",
    "fork": "asked",
}

_AT_ITS_END: Final[frozenset[After]] = frozenset({"failure", "wait", "replay", "fork"})
"""After these the task has a new message: where that one was delivered before, a run of it was cut off since."""


async def resume(gateway: Gateway, run: Run) -> None:
    """Find out what the run goes on from, and tell of it: in its log, and in the worker's."""
    received, left = (_stored(run, RECEIVED), _stored(run, HANDOFF)) if run.history.saved else (None, None)
    if left is not None and left.events != run.history.events:
        left = None  # something has happened since
    found = _stopped(run, received, left)
    if found is None:
        return
    after, at = found
    first = received is not None and not run.history.events
    handoff = received if first else left or await _drawn_up(gateway, run, after)
    run.resumption = resumption = Resumption(
        after=after,
        gap=None if at is None else max(0.0, (run.history.read_at - at) / 1000),
        restored=_restored(run.history, handoff),
        handoff=handoff,
        received=received,
    )
    if not (resumption.interrupted or resumption.restored):
        return  # it failed or waited before it had done anything, which its log says already
    summary = resumption.summary()
    level = "INFO" if resumption.interrupted else "DEBUG"
    logger.bind(task=run.envelope.task, id=run.id).log(level, "goes on: {}", summary)
    await _tell(gateway, run, Resumed(after=after, gap=resumption.gap, restored=resumption.restored, summary=summary))


async def _tell(gateway: Gateway, run: Run, event: Resumed) -> None:
    """Put the event into the log, at once and without keeping the run from its work.

    A full server refuses it for certain: then it is not told, or a task that needs no memory to end would wait for
    some. Where Redis is away, nobody knows whether it is there: it goes out again, under the same number, until it is.
    """
    before = run.events
    entry = run.next_entry(event)
    sealed = entry.encrypted(gateway.encryptor.of(run.delivery.partition, run.id))
    try:
        if await write_entries(gateway, run.delivery, run.id, [sealed]):
            run.cancel(StopReason.CANCELLED)
    except ServerFull:
        run.events = before
    except Unavailable:
        await run.recorder.put(entry, wait=True)


def _stopped(run: Run, received: Handoff | None, left: Handoff | None) -> tuple[After, int | None] | None:
    """Why the former run stopped, and when; None where there was none. left: the handoff of just that run."""
    history, again = run.history, run.delivery.count > 1
    for event in history.latest:
        after = _ENDS.get(event.type)
        if after is None and not _of_a_run(event):
            continue  # of neither a run nor its end
        if after is None and not again and (parked := _parked(left)) is not None:
            return parked
        if after is None or (again and after in _AT_ITS_END):
            return "crash", max(event.at, history.alive_at or 0)
        since = _buried_at(history.latest) if after == "replay" else None
        return after, since or event.at
    if again:
        return "crash", history.alive_at
    if received is not None:
        return "hand_off", received.at
    return None


def _parked(left: Handoff | None) -> tuple[After, int | None] | None:
    """A run that was parked from outside of its handler, which writes no event of its own."""
    return ("wait", left.at) if left is not None and left.why == "waiting" else None


def _of_a_run(event: TaskEvent) -> bool:
    """Whether a run that worked has written the event."""
    return event.number is not None or event.type == "step_completed"


def _buried_at(latest: Sequence[TaskEvent]) -> int | None:
    return next((event.at for event in latest if event.type == "buried"), None)


def _stored(run: Run, key: str) -> Handoff | None:
    data = run.history.saved.get(key)
    if data is None:
        return None
    try:
        return Handoff.from_json(run.id, data)
    except BadHandoff as error:
        logger.bind(task=run.envelope.task, id=run.id).warning("{}", error)
        return None


async def _drawn_up(gateway: Gateway, run: Run, after: After) -> Handoff | None:
    """What the log tells of the former run, which left nothing of what is so now."""
    history = run.history
    if not (history.done or history.saved or history.intents or _told(history)):
        return None
    trail = await retry_while_unavailable(
        partial(read_log_tail, gateway, run.delivery.partition, run.id), on_wait=log_wait(f"task {run.id}")
    )
    return handoff_of(
        trail,
        task=run.envelope.task,
        session=run.id,
        why=_TOLD_AS[after],
        in_flight=() if (step := history.crash.get("step")) is None else (str(step),),
    )


def _told(history: History) -> int:
    """How many events the task's runs have told; none where it was put back for a fresh start since, which has none."""
    for event in history.latest:
        if event.number is not None:
            break
        if event.starts_afresh:
            return 0
    return history.events


def _restored(history: History, handoff: Handoff | None) -> dict[str, int]:
    """What was found again, counted; an agent's decisions and discoveries are in its state."""
    told = [key.rpartition("/")[2].partition("#")[::2] for key in history.done]
    kinds = Counter(rest.partition("#")[0] for name, rest in told if not name)
    counts = {
        "steps": sum(bool(name) for name, _ in told),
        "events": _told(history),
        "decisions": max(kinds["decided"], _known(handoff, "decisions")),
        "discoveries": max(kinds["discovered"], _known(handoff, "discoveries")),
        "messages": kinds["message_added"],
        "progress": sum(not key.startswith("#") for key in history.saved),
    }
    return {name: count for name, count in counts.items() if count}


def _known(handoff: Handoff | None, kind: str) -> int:
    return 0 if handoff is None else len(getattr(handoff, kind)) + handoff.left_out.get(kind, 0)


def open_history(run: Run) -> None:
    """Open the records of earlier runs. Raises `DecryptionError`."""
    run.history.decrypt(run.gateway.encryptor.of(run.delivery.partition, run.id))


def open_arguments(run: Run, task: Task[Any, Any]) -> dict[str, Any]:
    """The arguments by name; from now on the run keeps their secrets out of what it tells.

    Raises `DecryptionError`, `InvalidArguments`.
    """
    data = run.delivery.fields.get(b"args", b"{}")
    sealer = run.gateway.encryptor
    if data[:1] == MARK or sealer.required:
        data = sealer.of(run.delivery.partition, run.id).decrypt(arguments_field(task.name), data)
    marks, known = run.envelope.secrets, task.arguments
    if marks:
        run.redact = Redaction(secret_values(data, marks))
    arguments = known.decode(data)
    if known.has_secrets and not marks:  # its producer did not know
        run.redact = Redaction(known.secret_values(arguments))
    return arguments
