"""Sessions of the OpenAI Agents SDK in the key-value store of an app.

An item of the conversation is an entry `i/NUMBER`; the entry `head` has the next number. Items are appended by
compare-and-set of the head, so concurrent runs do not mix up their batches.

In a task each call is a step. A resumed run sees the conversation that the run before it saw, and adds nothing again:
a change leaves a mark with the idempotency key of its step, in one act with the change, so that a step which was cut
off finds out that it was done. The store refuses a worker that another one has followed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

from agents.memory import SessionABC, SessionSettings
from agents.memory.session_settings import coerce_session_settings, resolve_session_limit

from ...queues.durations import Duration, to_seconds
from ...queues.errors import StoreConflict, StoreError
from ..app import App
from ..durable.steps.current import Step, step_here
from ..store import Store, StoreEntry
from .agent_calls import durable_context

_HEAD: Final = "head"
_ITEMS: Final = "i/"
_MARKS: Final = "done/"
_MARK_DAYS: Final = 7
"""Days after which the mark of a change expires."""

_BATCH: Final = 500
"""Items of a batch."""

_ATTEMPTS: Final = 100
"""Attempts to change a session that other runs change meanwhile."""

_NONE: Final = object()

_calls: WeakKeyDictionary[Step, tuple[int, int]] = WeakKeyDictionary()
"""The try of a running step, and the number of changes that it has made."""


class PerdureSession(SessionABC):
    """Conversation in the store of an app: `Runner.run(agent, "...", session=PerdureSession(app, "user-42"))`."""

    def __init__(
        self,
        app: App,
        session_id: str,
        *,
        ttl: Duration | None = None,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        """Create a session. Nothing is sent.

        Args:
            app: an open app.
            session_id: text of at most 256 characters.
            ttl: seconds or a timedelta after the last change until the session expires; None for never.
            session_settings: such as the number of items that a run reads.
        """
        self.session_id = session_id
        self.session_settings = (
            SessionSettings() if session_settings is None else coerce_session_settings(session_settings)
        )
        self._ttl = None if ttl is None else to_seconds(ttl, "ttl")
        self._store: Store = app.store("openai-agents", session_id)

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """Return the latest items, oldest first; all of them without a limit."""
        most = resolve_session_limit(limit, self.session_settings)

        async def get(session_id: str, limit: int | None) -> list[Any]:
            return [value for _, _, value in await self._latest(limit)]

        items: list[Any] = await self._step("get", get, most)
        return items

    async def add_items(self, items: Sequence[Any]) -> None:
        """Append items."""
        if not items:
            return

        async def add(session_id: str, items: Sequence[Any]) -> None:
            for start in range(0, len(items), _BATCH):
                await self._add(items[start : start + _BATCH])

        await self._step("add", add, list(items))

    async def pop_item(self) -> Any:
        """Remove the latest item, and return it; None without one."""

        async def pop(session_id: str) -> Any:
            return await self._pop()

        return await self._step("pop", pop)

    async def clear_session(self) -> None:
        """Remove all items."""

        async def clear(session_id: str) -> None:
            mark = _mark()
            if await self._done(mark) is _NONE:
                async with self._store.batch() as batch:
                    batch.delete_prefix(_ITEMS)
                    self._leave(batch, mark, None)

        await self._step("clear", clear)

    async def _step(self, name: str, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        ctx = durable_context()
        if ctx is None:
            return await call(self.session_id, *args)
        with ctx.scope("session"):
            return await ctx.step(name, call, self.session_id, *args)

    async def _latest(self, limit: int | None) -> list[tuple[str, int, Any]]:
        """Return key, version and value of the latest items, oldest first."""
        if limit is not None and limit <= 0:
            return []
        if self._ttl is not None and await self._store.entry(_HEAD) is None:  # expired
            return []
        found = self._store.list(_ITEMS, reverse=True, limit=limit)
        return [(entry.key, entry.version, entry.value) async for entry in found][::-1]

    async def _add(self, items: Sequence[Any]) -> None:
        mark, store = _mark(), self._store
        if await self._done(mark) is not _NONE:
            return
        for _ in range(_ATTEMPTS):
            head = await store.entry(_HEAD)
            number = 0 if head is None else head.value["next"]
            try:
                if head is None:  # what has expired, and is not removed yet
                    async with store.batch() as batch:
                        batch.require(_HEAD, 0)
                        batch.delete_prefix(_ITEMS)
                changed = {"next": number + len(items), "since": await self._refresh(head)}
                async with store.batch() as batch:
                    for place, item in enumerate(items, number):
                        batch.put(f"{_ITEMS}{place:012d}", item, ttl=self._item_ttl)
                    batch.put(_HEAD, changed, ttl=self._ttl, expected=0 if head is None else head.version)
                    self._leave(batch, mark, None)
            except StoreConflict:
                continue
            return
        raise self._busy()

    async def _refresh(self, head: StoreEntry | None) -> str | None:
        """Store the items again if they would expire before the head; return a time since which they are stored.

        Items live for three times the time of the head. The times compared are those of former changes, so none of a
        clock of this process: an item is then at most twice that time old.
        """
        if head is None or self._ttl is None:
            return None
        since: str = head.value["since"] or head.updated_at.isoformat()
        if (head.updated_at - datetime.fromisoformat(since)).total_seconds() <= self._ttl:
            return since
        found = await self._latest(None)
        for start in range(0, len(found), _BATCH):
            async with self._store.batch() as batch:
                for key, version, value in found[start : start + _BATCH]:
                    batch.put(key, value, ttl=self._item_ttl, expected=version)
        return head.updated_at.isoformat()

    async def _pop(self) -> Any:
        mark = _mark()
        if (done := await self._done(mark)) is not _NONE:
            return done
        for _ in range(_ATTEMPTS):
            found = await self._latest(1)
            key, version, value = found[0] if found else ("", 0, None)
            try:
                async with self._store.batch() as batch:
                    if found:
                        batch.delete(key, expected=version)
                    self._leave(batch, mark, value)
            except StoreConflict:
                continue
            return value
        raise self._busy()

    async def _done(self, mark: str | None) -> Any:
        """Return the result of a change that a former try of its step has made; `_NONE` without one."""
        if mark is None:
            return _NONE
        found = await self._store.entry(mark)
        return _NONE if found is None else found.value

    def _leave(self, batch: Any, mark: str | None, result: Any) -> None:
        if mark is not None:
            batch.put(mark, result, ttl=timedelta(days=_MARK_DAYS))

    @property
    def _item_ttl(self) -> float | None:
        return None if self._ttl is None else 3 * self._ttl

    def _busy(self) -> StoreError:
        return StoreError(f"could not change session {self.session_id!r}: other runs changed it {_ATTEMPTS} times")


def _mark() -> str | None:
    """Return the key of the mark of a change, the same in each run of its step; None outside a step."""
    step = step_here()
    if step is None:
        return None
    attempt, number = _calls.get(step, (step.attempt, 0))
    number = number + 1 if attempt == step.attempt else 1
    _calls[step] = (step.attempt, number)
    digest = hashlib.blake2b(f"{step.idempotency_key}:{number}".encode(), digest_size=16).hexdigest()
    return f"{_MARKS}{digest}"
