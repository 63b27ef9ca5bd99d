"""Live state of an agent during one run, beside the reduction of its event log."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic

import orjson
from pydantic import ValidationError

from ...queues.delivery.checkpoint import Entry, History, Kind
from ...queues.envelope import check_size
from ...queues.errors import EntriesLost, LeaseLost, PayloadTooLarge
from ...queues.event_log import TaskEvent, read_last_events
from ...queues.json_form import as_json
from ...queues.keys import SNAPSHOT
from ...queues.security.hash_chain import check_events
from ...queues.transport.backoff import retry_while_unavailable
from ..durable.journal.event import Event
from ..durable.journal.event_redaction import redacted
from ..durable.journal.handoff.document import Handoff, OpenPromise
from ..durable.journal.parsing import Unreadable, parse_event
from ..durable.journal.run_events import Started
from ..durable.journal.step_record import StepRecord
from ..durable.promises import PromiseOwner
from ..durable.run import Run, RunObserver
from ..errors import BadSnapshot, StateError, StateTooLarge, first_problem
from ..log import log_wait, logger
from .agent import S
from .background import in_background
from .journal.agent_events import Archived, Changed, LogBase, Snapshot, Withdrawn
from .journal.archive import ARCHIVED, archived_field, archived_steps, remove_oldest
from .journal.history import drift
from .journal.json_patch import BadPatch, Patch, apply, diff
from .journal.reducer import LOGGED_BY_CALLS, empty_state, reduce
from .journal.snapshot import BLOB, StoredState, decode_snapshot, encode_snapshot
from .journal.state import AgentState, Commitment, Decision, Discovery, PlanStep
from .session_turn import Carried
from .state_type import StateType

_MISSING: Final = object()

_CLOSED: Final = ("done", "failed", "dropped")

_SLACK: Final = 10
"""The state keeps up to a tenth more than its policy says, so that an event archives several steps."""

_MAX_ARCHIVED: Final = 500
"""Steps and messages that one event archives at most."""

_LOGGED: Final = ("message_added", "decided", "discovered")
"""Names of the records of calls that add to the fields in `LOGGED_BY_CALLS`."""

_LARGE: Final = 64 * 1024
"""Bytes above which a growing state is logged, again each time it has doubled."""


class LiveState(PromiseOwner, Generic[S]):
    """The state of one run.

    `state` is the object that the agent works on. `logged_state` is the reduction of all events so far, as JSON. Logged
    events change both. Changes that the agent makes to `state` are in `logged_state` after the next checkpoint, whose
    event contains the difference.

    Attributes:
        number: the number of the last event in `logged_state`.
        started: whether this run or an earlier one started the agent.
        steps_done: steps of the plan that this run has completed.
        snapshot_due: set when a snapshot is due.
        gap: the numbers of the events that the restored log lacks: see `Restored`.
        carried: what earlier turns of the session left; None for a task that is no turn of a session.
    """

    def __init__(
        self,
        run: Run,
        state_type: StateType[S],
        *,
        snapshot_every: int,
        keep_steps: int | None = None,
        keep_messages: int | None = None,
        keep_events: int | None = None,
        check: bool = False,
    ) -> None:
        """Create an empty state.

        Args:
            snapshot_every: log entries between two snapshots.
            keep_steps, keep_messages: closed steps and messages that stay in the state; None: all of them.
            keep_events: entries of the log that stay; None: all of them.
            check: whether to compare state and log at each checkpoint.
        """
        self.run = run
        self.state_type = state_type
        self.logged_state: dict[str, Any] = empty_state()
        self.state: S = state_type.kind.model_construct()
        self.number = 0
        self.started = False
        self.steps_done = 0
        self.snapshot_due = asyncio.Event()
        self.gap: tuple[int, int] | None = None
        self.carried: Carried[S] | None = None
        self._every = snapshot_every
        self._keep_steps, self._keep_messages, self._keep_events = keep_steps, keep_messages, keep_events
        self._ahead: list[Entry] = []
        """Entries that are written with the next checkpoint: their events have their numbers already."""
        self._check = check
        self._since = 0
        self._blobs: set[str] = set()
        self._warn_above = _LARGE
        self._checkpointing = False
        self._recalled: frozenset[str] = frozenset()
        """Keys of the archived steps whose results `state` has, and the stored state does not."""
        self._withheld: dict[int, tuple[str, Any]] = {}
        """Fields and items that a replayed call adds again, by the numbers of their events."""
        self._former: dict[str, list[Any]] = {}
        """Fields with such items as they were before."""

    async def open(self, goal: str, inputs: dict[str, Any]) -> None:
        """Restore the state that earlier runs left, or create it from the goal.

        Ephemeral `inputs` are set in every run, stored ones in the first run only. Raises `StateError`.
        """
        run, state_type = self.run, self.state_type
        found = await restore(run, state_type.agent)
        self.logged_state, self.number, self._since = found.state, found.number, found.since
        self.gap, self.started = found.gap, found.started
        self._blobs = {key for key in run.history.saved if key.startswith(BLOB)}
        if run.redact is not None and run.redact.blind:
            raise StateError(
                f"agent {state_type.agent!r}: task {run.id} has more secrets than can be kept out of its state"
            )
        run.observe(self)
        if found.started:
            self.state = state_type.load(run.id, self.logged_state)
            for name in state_type.ephemeral & inputs.keys():
                setattr(self.state, name, inputs[name])
            return
        try:
            self.state = state_type.kind(goal=goal, **inputs)
        except ValidationError as error:
            problem = first_problem(error)
            raise StateError(f"agent {state_type.agent!r} could not start task {run.id}: {problem}") from None
        if self.carried is not None:
            self.carried.apply(self.state)
        if run.resumption is not None and run.resumption.received is not None:
            seed_from_handoff(self.state, run.resumption.received)
        turn = None if self.carried is None else self.carried.turn
        started = self._first_entries(Started(goal=goal, agent=state_type.agent, turn=turn))
        self.started = True
        await run.recorder.put(*started, wait=False)

    def _first_entries(self, event: Started) -> list[Entry]:
        """Return the entries of the start. The oldest messages of a session leave the state until it fits."""
        while True:
            try:
                return self.checkpoint(event)
            except (StateTooLarge, PayloadTooLarge):
                messages = self.state.messages if self.carried is not None else []
                stored = {**empty_state(), "messages": [one.model_dump(mode="json") for one in messages]}
                removed = remove_oldest(stored, steps=None, messages=len(messages) // 2)
                if removed is None:
                    raise
                del messages[removed.first_message : removed.first_message + removed.messages]
                messages.pop()  # the event adds the message of the turn again

    def open_promises(self) -> list[OpenPromise]:
        """Return the open commitments of the state."""
        return [
            OpenPromise(what=made.what, by=made.by, to=made.to, due=made.due, wait=made.wait)
            for made in self.state.commitments
            if not made.done
        ]

    async def recall_results(self) -> None:
        """Add the results of archived steps to those of `state`, in the order of the plan, until the next rollback.

        The stored state does not get them. Raises `DecryptionError`.
        """
        run, archive = self.run, self.state.archive
        if archive.retired:
            logger.bind(task=self.state_type.agent, id=run.id).warning(
                "finish has no results of the first {:,} steps: keep_events, {}, has retired them; collect what it "
                "needs in a field of the state, or set keep_events to None",
                archive.retired,
                self._keep_events,
            )
        if archive.steps == archive.retired:
            return
        await run.flush()
        read = partial(archived_steps, run.gateway, run.delivery.partition, run.id)
        found = await retry_while_unavailable(read, on_wait=log_wait(f"the archive of task {run.id}", run.touch))
        records = {key: orjson.loads(data) for key, data in found.items()}
        done = sorted(
            (key for key, record in records.items() if "result" in record), key=lambda key: records[key]["at"]
        )
        held = self.state.results
        complete = {key: records[key]["result"] for key in done if key not in held} | held
        self._recalled = frozenset(complete.keys() - held.keys())
        held.clear()
        held.update(complete)

    def rollback(self) -> None:
        """Undo changes since the last checkpoint, except in ephemeral fields."""
        self._recalled, self._withheld, self._former = frozenset(), {}, {}
        discarded, self.state = self.state, self.state_type.load(self.run.id, self.logged_state)
        for name in self.state_type.ephemeral:
            setattr(self.state, name, getattr(discarded, name))

    def withhold(self, scope: str) -> None:
        """Take from `state` what a method that is called again has logged, until its calls log it again.

        So the method sees the conversation, the decisions and the discoveries as they were when it was called first,
        and what others have added since.

        scope: of the method's steps.
        """
        numbers = {
            int(StepRecord.decode(record).result)
            for key, record in self.run.history.done.items()
            if key.startswith(f"{scope}/") and key.rpartition("/")[2].partition("#")[2].partition("#")[0] in _LOGGED
        }
        for name in LOGGED_BY_CALLS if numbers else ():
            held = getattr(self.state, name)
            self._former[name] = list(held)
            self._withheld |= {item.n: (name, item) for item in held if item.n in numbers}
            held[:] = [item for item in held if item.n not in numbers]

    def on_replayed(self, number: int) -> None:
        """Put back what a call has logged in an earlier run, where it was."""
        name, item = self._withheld.pop(number, ("", None))
        if item is None:
            return
        held = getattr(self.state, name)
        places = {id(other): place for place, other in enumerate(held, 1)}
        place = 0
        for former in self._former[name]:
            if former is item:
                break
            place = places.get(id(former), place)
        held.insert(place, item)

    def withdraw(self) -> list[Entry]:
        """Return the entry of the event that what is still withheld is gone; it must be written at once."""
        gone, self._withheld, self._former = tuple(sorted(self._withheld)), {}, {}
        return [self.run.next_entry(Withdrawn(numbers=gone))] if gone else []

    def has_changed(self) -> bool:
        """Return whether the agent has changed anything since the last checkpoint."""
        return bool(self._changes(self.logged_state))

    def checkpoint(self, event: Event) -> list[Entry]:
        """Return the log entry of an event that also contains the agent's changes since the last checkpoint.

        The entries have the next numbers and must be written at once. A state that is too large archives its older half
        first, as often as that helps; then the event is not the first entry. Raises `StateTooLarge`, `StateError`.
        """
        while True:
            try:
                entry = self._checkpoint(event)
            except StateTooLarge as error:
                if not self._make_room(error.size - error.limit):
                    raise
                continue
            return [*self.take_ahead(), entry]

    def take_ahead(self) -> list[Entry]:
        """Return entries whose events have numbers, and which a failed checkpoint did not return."""
        entries, self._ahead = self._ahead, []
        return entries

    def _checkpoint(self, event: Event) -> Entry:
        number = self.number + 1
        reduced = reduce(self.logged_state, event, number)
        self._apply(self.logged_state, reduced, event, number)
        stored, changed = self._changed(reduced)
        changed, read = self.state_type.read_back(self.run.id, self.state, stored, changed, self._recalled)
        event = event.model_copy(update={"changes": self._patch(reduced, changed)})
        self._checkpointing = True
        try:
            entry = self.run.next_entry(event)
        finally:
            self._checkpointing = False
        self.state_type.put(self.state, read)
        if self._check:
            self._check_drift()
        return entry

    def _check_drift(self) -> None:
        """Raise `StateError` if the state differs from the log, or from what a later run reads of it."""
        places = [str(one["path"]) for one in self._changes(self.logged_state)]
        places = places or [f"/{name}" for name in self.state_type.differing(self.run.id, self.state, self._recalled)]
        if places:
            raise drift(self.run.id, self.number, places)

    def archive(self, *, steps: int | None, messages: int | None) -> list[Entry]:
        """Return entries that move closed steps and messages out of the state, but for the latest so many of each.

        Called after a checkpoint. The entries have the next numbers and must be written at once.
        """
        entries: list[Entry] = []
        while True:
            logged, state = self.logged_state, self.state
            closed = len([1 for step in logged["plan"] if step["status"] in _CLOSED])
            count = len(logged["messages"])
            removed = remove_oldest(
                logged,
                steps=None if steps is None else max(steps, closed - _MAX_ARCHIVED),
                messages=None if messages is None else max(messages, count - _MAX_ARCHIVED),
                number=self.number + 1,
            )
            if removed is None:
                return entries
            old = slice(removed.first_message, removed.first_message + removed.messages)
            if [one.n for one in state.messages[old]] != [one.get("n") for one in logged["messages"][old]]:
                messages = None  # the agent has changed the conversation itself since the last checkpoint
                continue
            # `own` lets a worker of a version without this type apply the changes.
            changes = diff(logged, removed.state)
            event = Archived(steps=tuple(removed.steps), messages=removed.messages, changes=changes, own=True)
            self._checkpointing = True
            try:
                entries.append(self.run.next_entry(event))
            finally:
                self._checkpointing = False
            entries += [
                Entry(Kind.CHUNK, f"{ARCHIVED}{key}", self._encrypted(key, data)) for key, data in removed.steps.items()
            ]
            state.plan[:] = [step for step in state.plan if step.key not in removed.steps]
            for key in removed.steps:
                state.results.pop(key, None)
            del state.messages[old]
            self.state_type.assign(self.run.id, state, {"archive": self.logged_state["archive"]})

    def log_base(self, *, retired: int) -> list[Entry]:
        """Return the entries with which the log may start; none if the state is too large for an event.

        Called after a checkpoint. The entries have the next number and must be written at once, with a snapshot.

        Args:
            retired: number of archived steps whose records are dropped in the same write.
        """
        event = LogBase(agent=self.state_type.agent, state=self.logged_state, retired=retired)
        self._checkpointing = True
        try:
            entry = self.run.next_entry(event)
        except PayloadTooLarge as error:
            logger.bind(task=self.state_type.agent, id=self.run.id).warning("could not shorten the log: {}", error)
            return []
        finally:
            self._checkpointing = False
        self.state_type.assign(self.run.id, self.state, {"archive": self.logged_state["archive"]})
        return [*self.take_ahead(), entry._replace(kind=Kind.BASE)]

    def archive_due(self) -> list[Entry]:
        """Return the entries that apply the policy of the agent, if it is due. See `archive`."""
        logged = self.logged_state
        closed = len([1 for step in logged["plan"] if step["status"] in _CLOSED])
        steps = _if_exceeded(self._keep_steps, closed)
        messages = _if_exceeded(self._keep_messages, len(logged["messages"]))
        return [] if steps is None and messages is None else self.archive(steps=steps, messages=messages)

    def _make_room(self, surplus: int) -> bool:
        """Archive the older half of the closed steps and messages, if all of them have so many bytes of JSON."""
        logged = self.logged_state
        removed = remove_oldest(logged, steps=0, messages=0)
        if removed is None or len(orjson.dumps(logged)) - len(orjson.dumps(removed.state)) <= surplus:
            return False
        closed = len([1 for step in logged["plan"] if step["status"] in _CLOSED])
        entries = self.archive(steps=closed // 2, messages=len(logged["messages"]) // 2)
        self._ahead += entries
        return bool(entries)

    def _encrypted(self, key: str, data: bytes) -> bytes:
        run = self.run
        return run.gateway.encryptor.of(run.delivery.partition, run.id).encrypt(archived_field(key), data)

    def snapshot(self, *, more: int = 0, force: bool = False) -> list[Entry]:
        """Return the entries of a snapshot if one is due. They must be written at once, after all numbered entries.

        Args:
            more: number of log entries without a number since the last call.
            force: whether one is due in any case.
        """
        self._since += more
        if self._since < self._every and not force:
            return []
        blobs: dict[str, bytes] = {}
        number = self.number + 1
        data = encode_snapshot(self.logged_state, number, self.state_type.agent, blobs)
        self._checkpointing = True
        try:
            entries = [self.run.next_entry(Snapshot(at=number, size=len(data)))]
        finally:
            self._checkpointing = False
        entries += [Entry(Kind.SAVED, key, blob) for key, blob in blobs.items() if key not in self._blobs]
        entries.append(Entry(Kind.SAVED, SNAPSHOT, data))
        entries += [Entry(Kind.DROP, key, b"") for key in sorted(self._blobs - blobs.keys())]
        self._blobs = set(blobs)
        self._since = 0
        self.snapshot_due.clear()
        return entries

    def on_event(self, event: Event, number: int) -> None:
        """Apply an event that was numbered, by a checkpoint or by a call of the context."""
        after = reduce(self.logged_state, event, number)
        if not self._checkpointing:
            self._apply(self.logged_state, after, event, number)  # raises before the event counts
        self.logged_state, self.number = after, number
        self.steps_done += event.type == "step_completed"
        self._since += 1
        if not self._checkpointing and self._since >= self._every:
            self.snapshot_due.set()

    def _apply(self, before: dict[str, Any], after: dict[str, Any], event: Event, number: int) -> None:
        """Change `state` as an event changes `logged_state`. Changes without a checkpoint stay."""
        touched = [name for name, value in after.items() if before.get(name) is not value]
        if not event.changes:
            touched = [
                name
                for name in touched
                if not self.state_type.apply_change(self.state, name, before.get(name), after[name])
            ]
        if touched:
            data = self.state_type.dump(self.run.id, self.state, touched, recalled=self._recalled)
            current = self.state_type.parsed(self.run.id, self.state, data)
            changed = reduce({**before, **current}, event, number)
            self.state_type.assign(self.run.id, self.state, {name: changed[name] for name in touched})

    def _changed(self, stored: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return `state` as JSON, and the fields of it that a stored state has differently."""
        data = self.state_type.dump(self.run.id, self.state, recalled=self._recalled)
        self._check_size(data)
        current: dict[str, Any] = self.state_type.parsed(self.run.id, self.state, data)
        return current, {name: value for name, value in current.items() if not _same(stored.get(name, _MISSING), value)}

    def _changes(self, stored: dict[str, Any]) -> Patch:
        """Return the patch from a stored state to `state`, without secrets. Fields unknown to the class stay."""
        return self._patch(stored, self._changed(stored)[1])

    def _patch(self, stored: dict[str, Any], changed: dict[str, Any]) -> Patch:
        """Return the patch of changed fields, without secrets."""
        changes = diff(stored, {**stored, **changed})
        redact = self.run.redact
        if redact is None or not changes:
            return changes
        clean = redacted(Changed(changes=changes), redact).changes
        return changes if clean is changes else diff(stored, apply(stored, clean))

    def _check_size(self, data: bytes) -> None:
        size, limit = len(data), self.run.payload_limit
        if self.carried is not None:  # the message of the turn is the goal too, and counts once
            size -= len(self.carried.goal.encode("utf-8", "replace"))
        if size > limit:
            raise StateTooLarge(self.run.id, self.state_type.agent, size, limit, _largest(orjson.loads(data)))
        if size > self._warn_above:
            while self._warn_above < size:
                self._warn_above *= 2
            logger.bind(task=self.state_type.agent, id=self.run.id).warning(
                "state grew to {:,} bytes of at most {:,}; largest fields: {}",
                size,
                limit,
                ", ".join(f"{name} ({bytes_:,})" for name, bytes_ in _largest(orjson.loads(data))),
            )


def _if_exceeded(keep: int | None, count: int) -> int | None:
    """Return a limit if it is exceeded by more than the slack."""
    return keep if keep is not None and count > keep + keep // _SLACK else None


def _same(stored: Any, current: Any) -> bool:
    """Return whether two values are the same JSON, which is much cheaper than a diff."""
    if stored is _MISSING:
        return False
    return orjson.dumps(stored, option=orjson.OPT_SORT_KEYS) == orjson.dumps(current, option=orjson.OPT_SORT_KEYS)


def _largest(state: dict[str, Any]) -> list[tuple[str, int]]:
    sizes = {name: len(orjson.dumps(value)) for name, value in state.items()}
    return sorted(sizes.items(), key=lambda one: -one[1])[:3]


def seed_from_handoff(state: AgentState, received: Handoff) -> None:
    """Add decisions, discoveries and open promises of a handoff document, as number 0: their events are elsewhere."""
    decisions = [
        Decision(n=0, choice=one.choice, reasoning=one.reasoning, alternatives=list(one.alternatives))
        for one in received.decisions
    ]
    discoveries = [Discovery(n=0, fact=one.fact, source=one.source) for one in received.discoveries]
    state.decisions = [*decisions, *state.decisions]
    state.discoveries = [*discoveries, *state.discoveries]
    promises = [Commitment(what=one.what, by=one.by, to=one.to, due=one.due) for one in received.promises]
    state.commitments = [*promises, *state.commitments]


_CHUNK: Final = 200
"""Most log entries read at once."""

_UNNUMBERED: Final = 10
"""Log entries without a number that a read allows for."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The state of an agent after its last event, as JSON.

    Attributes:
        number: the number of that event.
        since: how many events were applied to the snapshot.
        started: whether an earlier run started the agent.
        gap: the first and the last number of the events that are missing, or follow from missing ones; None if the log
            is complete.
    """

    state: dict[str, Any]
    number: int
    since: int
    started: bool
    gap: tuple[int, int] | None = None


async def restore(run: Run, agent: str) -> Restored:
    """Return the state that earlier runs left. The cost is bounded by the events since the last snapshot.

    If an event after the snapshot is missing, it is the state before that event: Redis has lost data, or an entry of
    the log was deleted. Where there is a key, the hash chain tells whether one is missing or was changed.

    Raises `BadSnapshot` if the snapshot or an event after it cannot be read, and `ChangedCheckpoint` if they are not
    what the agent has written; nothing is changed then.
    """
    snapshot = _snapshot(run.history, run.id, agent)
    state, number, started = (empty_state(), 0, False) if snapshot is None else (snapshot.state, snapshot.number, True)
    chain = run.history.chain
    if snapshot is None and chain is not None:
        number = chain.links.start.number
    last, missing, found = -1, 0, list[TaskEvent]()
    while last != (latest := max(run.events, run.history.events)):  # an event may be logged during the read
        await run.flush()
        last, (found, missing) = latest, await _events_after(run, number, latest)
    for event in found:
        typed = parse_event(event)
        if isinstance(typed, Unreadable):
            raise BadSnapshot(run.id, str(typed))
        try:
            state = reduce(state, typed, event.number or 0)
        except BadPatch as error:
            raise BadSnapshot(run.id, str(error)) from None
        started = started or typed.type == "started"
    if chain is not None:
        events = [(event.number, event.type, event.content) for event in found]
        check_events(run.id, chain.links, None if snapshot is None else number, events)
    return Restored(state, last, len(found), started, (missing, last) if missing <= last else None)


def _snapshot(history: History, task_id: str, agent: str) -> StoredState | None:
    data = history.saved.get(SNAPSHOT)
    if data is None:
        return None
    blobs = {key: value for key, value in history.saved.items() if key.startswith(BLOB)}
    return decode_snapshot(task_id, data, blobs, owner=agent)


async def _events_after(run: Run, number: int, last: int) -> tuple[list[TaskEvent], int]:
    """Return the events from `number + 1` on in order, without those before a fresh replay, and the next number."""
    wanted: list[TaskEvent] = []
    before: str | None = None
    above = sys.maxsize
    while last > number:
        most = min(_CHUNK, last - number - len(wanted) + _UNNUMBERED)
        chunk = await read_last_events(run.gateway, run.delivery.partition, run.id, most, before=before)
        for event in chunk:
            if event.number is not None:
                if event.number >= above:
                    raise BadSnapshot(run.id, f"event {above} comes after event {event.number} in its log")
                above = event.number
            if event.number is not None and event.number > last:
                continue  # logged after this read started
            if event.number is not None and event.number > number:
                wanted.append(event)
            elif event.number is not None:
                return _in_order(wanted, number + 1)
            elif number == 0 and event.restarts:  # a task that was replayed so has no snapshot
                return _in_order(wanted, wanted[-1].number or 0 if wanted else last + 1)
        if len(chunk) < most:
            break
        before = chunk[-1].id
    return _in_order(wanted, number + 1)


def _in_order(found: list[TaskEvent], first: int) -> tuple[list[TaskEvent], int]:
    """Return events that were read newest first in their order, up to the first missing one, and its number."""
    found.reverse()
    complete = [event for number, event in enumerate(found, first) if event.number == number]
    return complete, first + len(complete)


class Autosave(RunObserver):
    """Saver of one step's progress, which starts with the progress that an earlier run saved."""

    def __init__(self, live: LiveState[Any], step: PlanStep, every: float) -> None:
        """Load the saved progress. `every` is the number of seconds between two saves."""
        self._run = live.run
        self._live = live
        self._step = step
        self._every = every
        self._saved = self._run.history.saved.get(step.key, b"{}")
        step.progress.clear()
        step.progress.update(orjson.loads(self._saved))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Save at intervals and at each checkpoint of the run during the block."""
        self._run.observe(self)
        try:
            async with in_background(self._save_periodically()):
                yield
        finally:
            self._run.unobserve(self)

    async def on_checkpoint(self) -> None:
        """Save the step's progress if it has changed. Raises `PayloadTooLarge`, `LeaseLost`, `ValueError`."""
        data = as_json(self._step.progress)
        if data == self._saved:
            return
        check_size(f"the progress of step {self._step.key!r}", len(data), self._run.payload_limit)
        await self._run.recorder.put(Entry(Kind.SAVED, self._step.key, data), wait=True, progress=True)
        self._saved = self._run.history.saved[self._step.key] = data
        self._run.touch()
        self._run.progressed()

    async def _save_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.on_checkpoint()
            except (LeaseLost, EntriesLost):
                return  # the run is cancelled
            except (PayloadTooLarge, ValueError) as error:
                logger.bind(id=self._run.id).warning(
                    "could not save the progress of step {}: {}", self._step.key, error
                )


@asynccontextmanager
async def snapshots(live: LiveState[Any]) -> AsyncIterator[None]:
    """Store snapshots when they are due, during the block."""
    async with in_background(_snapshot_when_due(live)):
        yield


async def _snapshot_when_due(live: LiveState[Any]) -> None:
    while True:
        await live.snapshot_due.wait()
        if entries := live.snapshot():
            await live.run.recorder.put(*entries, wait=False)
