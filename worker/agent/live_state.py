"""An agent's state during one run: as the agent has it, as its log has it, and what of it is to be stored.

What an agent begins with that goes on where another task has handed on.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Generic

import orjson
from pydantic import ValidationError

from ...queues import Entry, Kind
from ..durable import Run, RunObserver
from ..errors import StateDrift, StateError, StateTooLarge
from ..journal import (
    BLOB,
    SNAPSHOT,
    AgentState,
    Decision,
    Discovery,
    Event,
    Handoff,
    Patch,
    apply,
    diff,
    empty_state,
    encode_snapshot,
    reduce,
)
from ..journal.agent_events import Changed, Snapshot
from ..journal.event_redaction import redacted
from ..journal.run_events import Started
from ..log import logger
from .agent import S
from .restoration import restore
from .state_type import StateType, problem_of

__all__ = ["LiveState", "seed_from_handoff"]


def seed_from_handoff(state: AgentState, received: Handoff) -> None:
    """Take over what the other has decided and found out. The numbers of its events are those of another log."""
    decisions = [
        Decision(n=0, choice=one.choice, reasoning=one.reasoning, alternatives=list(one.alternatives))
        for one in received.decisions
    ]
    discoveries = [Discovery(n=0, fact=one.fact, source=one.source) for one in received.discoveries]
    state.decisions = [*decisions, *state.decisions]
    state.discoveries = [*discoveries, *state.discoveries]


_LARGE: Final = 64 * 1024
"""Bytes of a state from which on its growing is warned of, each time that it has doubled."""


class LiveState(RunObserver, Generic[S]):
    """The state of one run.

    `state` is what the agent works on. `mirror` is what the log comes to, as JSON: the reduction of all events so far.
    Events that are told change both. What the agent itself changes in `state` is there alone until a checkpoint is
    taken: then the difference goes into the event of that checkpoint, so that the log tells of it.

    number: of the last event in the mirror. wanted: set when a snapshot is due.
    """

    def __init__(self, run: Run, form: StateType[S], *, snapshot_every: int, check: bool = False) -> None:
        """snapshot_every: entries of the log between two snapshots. check: compare state and log at each checkpoint."""
        self.run = run
        self.form = form
        self.logged_state: dict[str, Any] = empty_state()
        self.state: S = form.kind.model_construct()
        self.number = 0
        self.wanted = asyncio.Event()
        self._every = snapshot_every
        self._check = check
        self._since = 0
        self._blobs: set[str] = set()
        self._warn_above = _LARGE
        self._checkpointing = False

    async def open(self, goal: str, inputs: dict[str, Any]) -> None:
        """Begin with what former runs left, or else with the goal. inputs: the agent's, by name; those that are stored
        count only at the beginning. Raises `StateError`.
        """
        run, form = self.run, self.form
        found = await restore(run, form.agent)
        self.logged_state, self.number, self._since = found.state, found.number, found.since
        self._blobs = {key for key in run.history.saved if key.startswith(BLOB)}
        if run.redact is not None and run.redact.blind:
            raise StateError(f"agent {form.agent!r}: task {run.id} has too many secrets to keep them out of its state")
        run.observe(self)
        if found.begun:
            self.state = form.load(run.id, self.logged_state)
            for name in form.ephemeral & inputs.keys():
                setattr(self.state, name, inputs[name])
            return
        try:
            self.state = form.kind(goal=goal, **inputs)
        except ValidationError as error:
            problem = problem_of(error)
            raise StateError(f"agent {form.agent!r} cannot begin task {run.id} with these inputs: {problem}") from None
        if run.resumption is not None and run.resumption.received is not None:
            seed_from_handoff(self.state, run.resumption.received)
        await run.recorder.put(self.checkpoint(Started(goal=goal, agent=form.agent)), wait=False)

    def rollback(self) -> None:
        """Undo what was changed since the last checkpoint, but in ephemeral fields."""
        former, self.state = self.state, self.form.load(self.run.id, self.logged_state)
        for name in self.form.ephemeral:
            setattr(self.state, name, getattr(former, name))

    def has_changed(self) -> bool:
        """Whether the agent has changed anything since the last checkpoint."""
        return bool(self._changes(self.logged_state))

    # what is stored of it

    def checkpoint(self, event: Event) -> Entry:
        """An event's entry for the log, which tells besides of all that the agent has changed since the last one.

        It must be put at once, for it has the next number. Raises `StateTooLarge`, `StateUnstorable`.
        """
        number = self.number + 1
        ruled = reduce(self.logged_state, event, number)
        self._apply(self.logged_state, ruled, event, number)
        event = event.model_copy(update={"changes": self._changes(ruled)})
        self._checkpointing = True
        try:
            entry = self.run.next_entry(event)
        finally:
            self._checkpointing = False
        if self._check and (changes := self._changes(self.logged_state)):
            raise StateDrift(self.run.id, self.number, [str(one["path"]) for one in changes[:10]])
        return entry

    def snapshot(self, *, more: int = 0) -> list[Entry]:
        """The entries of a snapshot, where one is due; they must be put at once, with all that was numbered before.

        more: entries that the log has got besides the numbered ones.
        """
        self._since += more
        if self._since < self._every:
            return []
        blobs: dict[str, bytes] = {}
        number = self.number + 1
        data = encode_snapshot(self.logged_state, number, self.form.agent, blobs)
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
        self.wanted.clear()
        return entries

    # what is heard of it

    def on_event(self, event: Event, number: int) -> None:
        """An event was numbered, by a checkpoint of ours or by whoever tells something."""
        after = reduce(self.logged_state, event, number)
        if not self._checkpointing:
            self._apply(self.logged_state, after, event, number)  # where it cannot, there is no such event
        self.logged_state, self.number = after, number
        self._since += 1
        if not self._checkpointing and self._since >= self._every:
            self.wanted.set()

    def _apply(self, before: dict[str, Any], after: dict[str, Any], event: Event, number: int) -> None:
        """Do to the agent's own state what an event does to the mirror; what it has not stored yet stays."""
        touched = [name for name, value in after.items() if before.get(name) is not value]
        if not event.changes:
            touched = [
                name for name in touched if not self.form.follow(self.state, name, before.get(name), after[name])
            ]
        if touched:
            own = orjson.loads(self.form.dump(self.run.id, self.state, touched))
            changed = reduce({**before, **own}, event, number)
            self.form.assign(self.run.id, self.state, {name: changed[name] for name in touched})

    # its size and its soundness

    def _changes(self, stored: dict[str, Any]) -> Patch:
        """What makes the agent's own state of a stored one, without secrets. What its class does not know stays."""
        data = self.form.dump(self.run.id, self.state)
        self._check_size(data)
        own = {
            name: value for name, value in orjson.loads(data).items() if not _same(stored.get(name, _MISSING), value)
        }
        changes = diff(stored, {**stored, **own})
        redact = self.run.redact
        if redact is None or not changes:
            return changes
        shown = redacted(Changed(changes=changes), redact).changes
        return changes if shown is changes else diff(stored, apply(stored, shown))

    def _check_size(self, data: bytes) -> None:
        size, limit = len(data), self.run.payload_limit
        if size > limit:
            raise StateTooLarge(self.run.id, self.form.agent, size, limit, _largest(orjson.loads(data)))
        if size > self._warn_above:
            while self._warn_above < size:
                self._warn_above *= 2
            logger.bind(task=self.form.agent, id=self.run.id).warning(
                "the state of agent {} has {:,} bytes, and {:,} is the limit; its largest fields: {}",
                self.form.agent,
                size,
                limit,
                ", ".join(f"{name} ({bytes_:,})" for name, bytes_ in _largest(orjson.loads(data))),
            )


_MISSING: Final = object()


def _same(stored: Any, own: Any) -> bool:
    """Whether two stored forms are the same JSON, which takes far less than finding out where they differ."""
    if stored is _MISSING:
        return False
    return orjson.dumps(stored, option=orjson.OPT_SORT_KEYS) == orjson.dumps(own, option=orjson.OPT_SORT_KEYS)


def _largest(state: dict[str, Any]) -> list[tuple[str, int]]:
    sizes = {name: len(orjson.dumps(value)) for name, value in state.items()}
    return sorted(sizes.items(), key=lambda one: -one[1])[:3]
