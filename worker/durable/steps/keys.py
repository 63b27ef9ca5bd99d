"""Keys of a run's steps: their scopes, their numbers, and the records that they are matched to.

A handler that calls one step after the other does so in the same order in every run. Of concurrent branches, another
one may come first in a resumed run. So the calls of one name in one scope are matched to the records by the digest of
their arguments, and equal calls by order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TypeAlias
from weakref import ref

import orjson

from ....queues.delivery.checkpoint import Entry, History, Kind
from ....queues.transport.large_values import LargeValue
from ...errors import StepDefinitionError
from ..journal.step_record import StepRecord

_SCOPE: ContextVar[str] = ContextVar("perdure_scope", default="")

Match: TypeAlias = tuple[str, bytes | None, bytes | None]
"""The key of a called step, its recorded result as JSON, or else its record with other arguments."""


class StepKeys:
    """Keys that one run has given out. within: key of the step of an agent's plan that encloses those called now."""

    __slots__ = ("_ahead", "_callers", "_counts", "_matched", "_names", "_skipped", "within")

    def __init__(self) -> None:
        self.within: str | None = None
        self._names: dict[str, int] = {}
        self._ahead: set[str] = set()
        """Keys that were given out before one with a lower number."""
        self._matched: set[str] = set()
        """Names of which no record is left."""
        self._skipped: tuple[str, ...] = ()
        """Scopes whose steps need not be called."""
        self._callers: dict[str, ref[asyncio.Task[object]] | None] = {}
        """The asyncio task that has entered a scope; None for several."""
        self._counts: dict[str, int] = {}
        """Numbers of calls that are counted and have no keys of their own, by name."""

    @property
    def scope(self) -> str:
        """Prefix of the keys of the steps that are called here."""
        return _SCOPE.get()

    def next(self, name: str) -> str:
        """Return the key of the next step of this name: `read`, `read#2`, `read#3`, in the order of the calls."""
        name = self.scope + name
        number = self._names.get(name, 0) + 1
        key = name if number == 1 else f"{name}#{number}"
        if key in self._ahead:
            number, key = self._lowest(name)
        self._names[name] = number
        return key

    def count(self, name: str) -> tuple[str, int]:
        """Return the key under which calls of this name are counted in the scope here, and the number of this one."""
        key = self.scope + name
        self._counts[key] = number = self._counts.get(key, 0) + 1
        return key, number

    @contextmanager
    def within_step(self, outer: str, scope: str) -> Iterator[None]:
        """Put the keys of the block under the key of a step. scope: the scope in which that step was called."""
        token = _SCOPE.set(f"{outer}/{self.scope.removeprefix(scope)}")
        try:
            yield
        finally:
            _SCOPE.reset(token)

    def restart(self, scope: str) -> None:
        """Number the steps in a scope from 1 again."""
        self._names = {name: count for name, count in self._names.items() if not name.startswith(scope)}
        self._counts = {name: count for name, count in self._counts.items() if not name.startswith(scope)}
        self._ahead = {key for key in self._ahead if not key.startswith(scope)}
        self._matched = {name for name in self._matched if not name.startswith(scope)}
        self._callers = {name: task for name, task in self._callers.items() if not name.startswith(scope)}

    async def find(self, name: str, step_id: str, digests: tuple[str, ...], history: History) -> Match:
        """Return the match of a step with an id. Raises `StepDefinitionError` if this run has called it already."""
        key = f"{self.scope}{name}#:{step_id}"
        if key in self._ahead:
            raise StepDefinitionError(f"step {name!r} must have a unique step_id in its scope, got {step_id!r} twice")
        self._ahead.add(key)
        record = await history.read_record(key)
        if record is not None and (result := _result(record, digests)) is not None:
            return key, result, None
        return key, None, record

    async def read(self, name: str, digests: tuple[str, ...], history: History, *, next_only: bool = False) -> None:
        """Read the records of a large checkpoint that `match_any` needs. Raises `DecryptionError`.

        next_only: read the next record; others count only if they are known already.
        """
        name = self.scope + name
        while (lowest := self._lowest(name)[1]) not in history.done:
            if await history.read_record(lowest) is None and self._lowest(name)[1] == lowest:
                break
        record = history.done.get(lowest)
        decided = name in self._matched if record is None else _result(record, digests) is not None
        if decided or next_only:  # as nearly always: what follows looks at every known record
            return
        left = self._unmatched(name, history.done)
        if left and not any(_result(record, digests) is not None for record in left.values()):
            await history.read_all()

    def match_next(self, name: str, digest: str, history: History) -> tuple[str, bytes] | None:
        """Return the next key and its result if its record is known and fits, as it nearly always does."""
        name = self.scope + name
        number = self._names.get(name, 0) + 1
        key = name if number == 1 else f"{name}#{number}"
        if key in self._ahead:
            number, key = self._lowest(name)
        record = history.done.get(key)
        if record is None or (result := StepRecord.result_of(record, digest)) is None:
            return None
        self._names[name] = number
        if history.pages is not None:
            history.pages.take(key, None)
        return key, result

    def next_digest(self, name: str, done: Mapping[str, bytes], started: Mapping[str, bytes]) -> str:
        """Return the digest of the call that the next record, or what an earlier run stored before it, is of."""
        key = self._lowest(self.scope + name)[1]
        if (record := done.get(key)) is not None:
            return StepRecord.decode(record).digest
        return str(orjson.loads(started[key]).get("h", "")) if key in started else ""

    def match_any(
        self,
        name: str,
        digests: tuple[str, ...],
        history: History,
        handler: asyncio.Task[object] | None,
        *,
        rerun: bool = False,
        started: Mapping[str, bytes] | None = None,
    ) -> Match:
        """Return the key of a called step, and the record that fits; the next one does not (`match_next`).

        If none fits, an earlier run made the call and did not record it, or it is new, or its arguments have changed.
        The handler's own asyncio task calls steps in one order, so the next record must fit. In another task, a call
        that fits it may still come.

        Args:
            digests: Hashes of the arguments, of which a record has one; the first that any record has decides. "" is
                for records without a hash.
            handler: The handler's asyncio task.
            rerun: Take the next record if none fits.
            started: What earlier runs stored of such calls before they were recorded, in place of the intents.
        """
        name = self.scope + name
        number, key = self._lowest(name)
        if started is None:
            started = history.intents
        if name in self._matched or not (history.records or started):
            self._names[name] = number
            return key, None, history.done.get(key)
        return self._match_later(name, digests, history, started, in_order=rerun or asyncio.current_task() is handler)

    def _match_later(
        self, name: str, digests: tuple[str, ...], history: History, started: Mapping[str, bytes], *, in_order: bool
    ) -> Match:
        records, intents = self._unmatched(name, history.done), self._unmatched(name, started)
        if not records and not intents:
            self._matched.add(name)
        for digest in digests:
            for key, record in records.items():
                if (result := StepRecord.result_of(record, digest)) is not None:
                    self._ahead.add(key)
                    history.take_known(key)
                    return key, result, None
        for key, intent in intents.items():
            if orjson.loads(intent).get("h") in digests:
                self._ahead.add(key)
                return key, None, None
        number, key = self._lowest(name)
        while not in_order and (key in records or key in intents):
            number, key = self._lowest(name, number)
        self._ahead.add(key)
        return key, None, records.get(key)

    def _lowest(self, name: str, after: int = 0) -> tuple[int, str]:
        """Return the lowest number after this one that is not given out, and its key."""
        number = max(after, self._names.get(name, 0)) + 1
        key = name if number == 1 else f"{name}#{number}"
        while key in self._ahead:
            number += 1
            key = f"{name}#{number}"
        return number, key

    def _unmatched(self, name: str, fields: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the fields of the steps of this name that are not matched, by key, in the order of their numbers."""
        found: dict[int, str] = {}
        given = self._names.get(name, 0)
        for key in fields:
            head, mark, tail = key.partition(f"{name}#")
            if key == name:
                number = 1
            elif mark and not head and tail.isdigit():
                number = int(tail)
            else:
                continue
            if number > given and key not in self._ahead:
                found[number] = key
        return {found[number]: fields[found[number]] for number in sorted(found)}

    def unasked(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of steps that were not given out. Names that start with `#` are not steps."""
        return [
            key
            for key in keys
            if not key.startswith(("#", *self._skipped)) and "/#" not in key and not self.is_given(key)
        ]

    def skip(self, scopes: Iterable[str]) -> None:
        """Do not expect the recorded steps of these scopes: the run ends their branches."""
        self._skipped += tuple(scopes)

    def is_given(self, key: str) -> bool:
        """Return whether this run has called the step with this key."""
        name, _, number = key.rpartition("#")
        given = self._names.get(name, 0) >= int(number) if number.isdigit() else self._names.get(key, 0) > 0
        return given or key in self._ahead

    def enter_scope(self, name: str) -> Token[str]:
        """Put the steps that are called from now on into a scope. Return what `leave_scope` needs."""
        return _SCOPE.set(f"{_SCOPE.get()}{name}/")

    def leave_scope(self, token: Token[str]) -> None:
        _SCOPE.reset(token)

    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """Put the steps that are called in the block, and in asyncio tasks that it starts, into a scope."""
        token = self.enter_scope(name)
        self.note_caller(self.scope, asyncio.current_task())
        try:
            yield
        finally:
            self.leave_scope(token)

    def note_caller(self, scope: str, task: asyncio.Task[object] | None) -> None:
        """Note the asyncio task that calls in a scope: in the same order in each run, as the handler's own does."""
        known = self._callers.get(scope)
        if task is not None and scope not in self._callers:
            self._callers[scope] = ref(task)
        elif known is not None and known() is not task:
            self._callers[scope] = None

    def caller(self) -> asyncio.Task[object] | None:
        """Return the asyncio task that makes the calls of the scope here; None if several do, or it is not known."""
        known = self._callers.get(self.scope)
        return None if known is None else known()

    @contextmanager
    def inside(self, step: str) -> Iterator[None]:
        """Nest the steps that are called in the block in a step of the plan, numbered from 1."""
        self.restart(f"{step}/")
        outer, self.within = self.within, step
        try:
            with self.scoped(step):
                yield
        finally:
            self.within = outer

    @contextmanager
    def keep_scope(self) -> Iterator[None]:
        """Restore the scope after the block, where scopes may be entered and not left."""
        token = _SCOPE.set(_SCOPE.get())
        try:
            yield
        finally:
            _SCOPE.reset(token)

    def under(self, scope: str, history: History) -> list[str]:
        """Return the keys of all steps in a scope that this run has called or that earlier runs have recorded."""
        called = [
            name if number == 1 else f"{name}#{number}"
            for name, count in self._names.items()
            if name.startswith(scope)
            for number in range(1, count + 1)
        ]
        found = [
            key
            for records in (history.done, history.intents, history.saved)
            for key in records
            if key.startswith(scope)
        ]
        called += [key for key in self._ahead if key.startswith(scope)]
        return list(dict.fromkeys(found + called))


class StrictStepKeys(StepKeys):
    """Keys of a run whose new steps must come after the recorded ones of their scope."""

    __slots__ = ("_complete",)

    def __init__(self) -> None:
        super().__init__()
        self._complete: set[str] = set()
        """Scopes of which all recorded steps have been called."""

    @property
    def complete(self) -> bool:
        """Whether all recorded steps of the scope here have been called."""
        return self.scope in self._complete

    def restart(self, scope: str) -> None:
        super().restart(scope)
        self._complete = {name for name in self._complete if not name.startswith(scope)}

    def missed(self, recorded: Iterable[str]) -> list[str]:
        """Return which of the recorded steps are of the scope here and have not been called. A `/` ends a scope."""
        scope = self.scope
        left = [key for key in recorded if key.startswith(scope) and "/" not in key[len(scope) :]]
        found = self.unasked(left)
        if not found:
            self._complete.add(scope)
        return found


def _result(record: bytes, digests: tuple[str, ...]) -> bytes | None:
    """Return the result in a record of a call with these arguments, None for other arguments."""
    for digest in digests:
        if (result := StepRecord.result_of(record, digest)) is not None:
            return result
    return None


def changed_scope(within: str | None) -> str:
    """Return the key of the mark that messages have come since the inner steps of a step of the plan were recorded.

    What such a step asks for may follow from the messages, so inner steps with other arguments run again.
    """
    return f"{within}/#changed"


def forget_steps(keys: Iterable[str], history: History) -> list[Entry]:
    """Remove the records of steps from the history, and return the entries that drop them from the checkpoint."""
    dropped = {key: history.done.get(key) for key in sorted(keys)}
    for key in dropped:
        for records in (history.done, history.intents, history.saved):
            records.pop(key, None)
    return [Entry(Kind.DROP, key, b"" if record is None else _chunks(record)) for key, record in dropped.items()]


def _chunks(record: bytes) -> bytes:
    """Return what an entry that drops a record must name: digest and number of its chunks; nothing without chunks."""
    value = LargeValue.decode(StepRecord.decode(record).result)
    return b"" if value is None else f"{value.digest} {value.chunks}".encode()
