"""Key-value store of an app: `app.store("threads", "user-42")`, and `ctx.store(...)` within a task.

Within a task both are fenced: once a later run of the task has used the namespace, each call of an earlier one is
refused. Within a step, the changes of a call are done once, also if the step is cut off and runs again.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, from_json

from ..queues.durations import Duration, to_seconds
from ..queues.errors import StoreError, StoreFenced
from ..queues.json_form import as_json
from ..queues.keys import Namespace
from ..queues.store.entries import (
    MAX_TTL_MS,
    NO_FENCE,
    EntryChange,
    Fence,
    Form,
    NamespaceEntries,
    StoredEntry,
    as_time,
    check_key,
    damaged_entry,
    digest_changes,
)
from ..queues.store.names import Name, StoreNames, check_parts, shown_name
from ..queues.transport.gateway import Gateway
from ..queues.transport.threadsafe_calls import blocking
from .durable.json_types import JsonType
from .durable.run import Run
from .durable.steps.current import CURRENT_RUN, Step, step_here
from .errors import first_problem
from .settings import Settings

R = TypeVar("R")


class StoreHost(NamedTuple):
    """App or run whose connection a store uses.

    Attributes:
        connect: returns the connection and the settings.
        call: runs a coroutine function from a thread; it also gets the asynchronous call for an error.
    """

    connect: Callable[[], tuple[Gateway, Settings]]
    call: Callable[[Callable[[], Coroutine[Any, Any, Any]], str], Any]


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """An entry of the key-value store.

    Attributes:
        key: its key within the namespace.
        value: JSON data or bytes; None where a list leaves out values.
        version: grows with each change; no other entry of the namespace ever has it, but for those of one batch.
        updated_at: when it was stored, by the clock of Redis.
        expires_at: when it expires; None for never.
    """

    key: str
    value: Any
    version: int
    updated_at: datetime
    expires_at: datetime | None


class StoreBatch:
    """Changes that are done together or not at all: `async with threads.batch() as batch:`.

    Conditions are compared with what is stored before the first change. The changes are sent at the end of the block; a
    block that raises sends nothing. Synchronous code writes `with threads.batch() as batch:`.

    Attributes:
        version: of the entries that the batch has put, after the block; 0 before.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shown = store._shown
        self._changes: list[EntryChange] = []
        self.version = 0

    def put(self, key: str, value: Any, *, ttl: Duration | None = None, expected: int | None = None) -> None:
        """Store an entry, see `Store.put`."""
        self._changes.append(_put(self._shown, key, value, ttl, expected))

    def delete(self, key: str, *, expected: int | None = None) -> None:
        """Delete an entry, see `Store.delete`."""
        self._changes.append(EntryChange("delete", _checked(key), _version(expected)))

    def delete_prefix(self, prefix: str) -> None:
        """Delete all entries whose keys begin with a text; all of them if it is empty."""
        self._changes.append(EntryChange("prefix", _checked(prefix) if prefix else ""))

    def require(self, key: str, expected: int) -> None:
        """Require that an entry has a version, 0 if it must not exist, without changing it."""
        self._changes.append(EntryChange("check", _checked(key), _version(expected)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.send()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._store._run_blocking(lambda _: self.send(), "async with store.batch():")

    async def send(self) -> None:
        """Do the changes now, in place of the end of the block."""
        changes, self._changes = self._changes, []
        if changes:
            self.version = await self._store._write(changes)


class Store:
    """Entries of one namespace of the key-value store. All of them share a hash slot of a cluster.

    Synchronous code calls `put_sync`, `get_sync` and so on. Calls raise `StoreFenced` if a later run of the task has
    used the namespace, and `Unavailable` if Redis does not answer.
    """

    def __init__(self, host: StoreHost, name: Name, *, run: Run | None = None) -> None:
        """Args:
        host: the app, or the run whose connection it uses.
        run: the run that uses the store; else the one that is current at each call.
        """
        self.name = name
        self._host = host
        self._run = run

    async def put(
        self, key: str, value: Any, *, ttl: Duration | None = None, expected: int | None = None
    ) -> StoreEntry:
        """Store an entry, and return it.

        Args:
            key: text of at most 1,024 bytes.
            value: bytes, or what has a JSON form.
            ttl: seconds after which it expires; None for never.
            expected: version that the entry must have, 0 if it must not exist; None for any.

        Raises:
            StoreConflict: the entry has another version; nothing was changed.
            StoreFull: the namespace has 100,000 entries.
            StoreError: the value has no JSON form.
            PayloadTooLarge: the value is over `PERDURE_LARGE_LIMIT`.
        """
        change = _put(self._shown, key, value, ttl, expected)
        version = await self._write([change])
        expires = version + change.ttl_ms if change.ttl_ms else 0
        return _shown_entry(StoredEntry(key, version, expires, change.form, change.data), self._shown)

    async def delete(self, key: str, *, expected: int | None = None) -> None:
        """Delete an entry. One that does not exist is no error. Raises `StoreConflict`."""
        await self._write([EntryChange("delete", _checked(key), _version(expected))])

    async def get(self, key: str, default: Any = None, *, type: Any = None) -> Any:
        """Return the value of an entry, or the default if it does not exist.

        Args:
            type: type as which JSON data is validated, such as a Pydantic model.

        Raises `StoreError` if the value does not fit the type.
        """
        (found,) = await self._read([key])
        return default if found is None else _value(found, self._shown, type)

    async def entry(self, key: str, *, type: Any = None) -> StoreEntry | None:
        """Return an entry with its version, None if it does not exist. type: see `get`."""
        (found,) = await self._read([key])
        return None if found is None else _shown_entry(found, self._shown, type)

    async def get_many(self, keys: Sequence[str], *, type: Any = None) -> dict[str, Any]:
        """Return the values of those of the keys that exist, as they are at one moment. type: see `get`."""
        found = await self._read(list(dict.fromkeys(keys)))
        return {one.key: _value(one, self._shown, type) for one in found if one is not None}

    async def list(
        self,
        prefix: str = "",
        *,
        after: str = "",
        reverse: bool = False,
        limit: int | None = None,
        values: bool = True,
        type: Any = None,
    ) -> AsyncIterator[StoreEntry]:
        """Yield entries, sorted by the bytes of their keys. Each page of them is of one moment.

        Args:
            prefix: what their keys begin with.
            after: key after which the list continues, in its order.
            reverse: the last key first.
            limit: most entries.
            values: with their values.
            type: see `get`.
        """
        entries, fence = await self._use()
        try:
            async for found in entries.scan(
                prefix, after=after, reverse=reverse, values=values, limit=limit, fence=fence
            ):
                yield _shown_entry(found, self._shown, type)
        except StoreFenced:
            self._end_run()
            raise

    def batch(self) -> StoreBatch:
        """Return changes that are done together or not at all: `async with threads.batch() as batch:`.

        The end of the block raises `StoreConflict`, which names the key, and what `put` raises.
        """
        return StoreBatch(self)

    async def clear(self) -> None:
        """Delete all entries."""
        await self._write([EntryChange("prefix", "")])

    def _run_blocking(self, call: Callable[[Store], Coroutine[Any, Any, R]], instead: str) -> R:
        result: R = self._host.call(lambda: call(self), instead)
        return result

    def _run_method(self, call: Callable[[Store], Coroutine[Any, Any, R]], instead: str) -> R:
        return self._run_blocking(call, f"await store.{instead}")

    put_sync = blocking(put, _run_method)
    delete_sync = blocking(delete, _run_method)
    get_sync = blocking(get, _run_method)
    entry_sync = blocking(entry, _run_method)
    get_many_sync = blocking(get_many, _run_method)
    clear_sync = blocking(clear, _run_method)

    def list_sync(
        self,
        prefix: str = "",
        *,
        after: str = "",
        reverse: bool = False,
        limit: int | None = None,
        values: bool = True,
        type: Any = None,
    ) -> Sequence[StoreEntry]:
        """Return the entries that `list` yields."""

        async def read(store: Store) -> Sequence[StoreEntry]:
            found = store.list(prefix, after=after, reverse=reverse, limit=limit, values=values, type=type)
            return [entry async for entry in found]

        return self._run_blocking(read, "async for entry in store.list():")

    @property
    def _shown(self) -> str:
        return shown_name(self.name)

    @property
    def _user(self) -> Run | None:
        return self._run or CURRENT_RUN.get()

    async def _use(self) -> tuple[NamespaceEntries, Fence]:
        """Return the entries, and the token with which the caller uses them. Refuses a run that was stopped."""
        run = self._user
        if run is not None:
            await run.check_stopped()
        gateway, settings = self._host.connect()
        entries = entries_of(gateway, settings, self.name)
        if run is None:
            return entries, NO_FENCE
        return entries, Fence(run.id, run.delivery.entry, run.delivery.count)

    async def _read(self, keys: Sequence[str]) -> Sequence[StoredEntry | None]:
        entries, fence = await self._use()
        try:
            return await entries.read(keys, fence)
        except StoreFenced:
            self._end_run()
            raise

    async def _write(self, changes: Sequence[EntryChange]) -> int:
        entries, fence = await self._use()
        step, batch, act, number = step_here(), "", "", ""
        if step is not None:  # the n-th change of these keys within the step has the same id in each run of it
            place = "\0".join((*self.name, "", *(f"{change.act} {change.key}" for change in changes)))
            done = _done.setdefault(step, Counter())
            number = f"{step.idempotency_key}\0{place}\0{done[step.attempt, place]}"
            done[step.attempt, place] += 1
            act = uuid.uuid5(_ACTS, number).hex
            batch = uuid.uuid5(_ACTS, f"{number}\0{digest_changes(changes)}").hex
        try:
            return await entries.write(changes, batch=batch, act=act, fence=fence)
        except StoreFenced:
            self._end_run()
            raise

    def _end_run(self) -> None:
        """Stop the run, which another one has followed."""
        if (run := self._user) is not None:
            run.on_lost()

    def __repr__(self) -> str:
        return f"Store({self._shown!r})"


_ACTS: Final = uuid.UUID("5a5e0d4c-6f0b-4f0e-8f0c-0d4a3b1e9c61")
"""Name space of the ids of changes within steps (RFC 9562, version 5)."""

_done: WeakKeyDictionary[Step, Counter[tuple[int, str]]] = WeakKeyDictionary()
"""Changes that running steps have made, by the number of the try."""

_names: WeakKeyDictionary[Gateway, StoreNames] = WeakKeyDictionary()
"""Names of namespaces, by the connection."""


class Stores:
    """The namespaces of an app's key-value store: `app.store("threads", "user-42")`."""

    def __init__(self, host: StoreHost) -> None:
        self._host = host

    def __call__(self, *parts: str | Sequence[str]) -> Store:
        """Return a namespace, by the parts of its name: 1 to 16 texts, or a tuple of them. Nothing is sent.

        Raises `ValueError`.
        """
        return Store(self._host, name_of(parts))

    async def namespaces(self, prefix: str | Sequence[str] = (), *, after: Sequence[str] = ()) -> AsyncIterator[Name]:
        """Yield the names of the namespaces that have entries, sorted by their parts.

        Args:
            prefix: first parts of their names.
            after: name after which the list continues.
        """
        gateway, settings = self._host.connect()
        names = names_of(gateway, Namespace(settings.namespace))
        async for name in names.list((prefix,) if isinstance(prefix, str) else prefix, after=after):
            yield name


def name_of(parts: Sequence[Any]) -> Name:
    """Return a name that is given as several parts or as one tuple. Raises `ValueError`."""
    return check_parts(parts[0] if len(parts) == 1 else parts)


def store_of(run: Run, parts: Sequence[Any]) -> Store:
    """Return a namespace that a run uses. Raises `ValueError`."""

    def call(function: Callable[[], Coroutine[Any, Any, Any]], instead: str) -> Any:
        return run.gateway.sync_caller.call(function, instead)

    return Store(StoreHost(lambda: (run.gateway, run.settings), call), name_of(parts), run=run)


def names_of(gateway: Gateway, namespace: Namespace) -> StoreNames:
    """Return the names of namespaces of a connection."""
    found = _names.get(gateway)
    if found is None:
        found = _names[gateway] = StoreNames(gateway, namespace)
    return found


def entries_of(gateway: Gateway, settings: Settings, name: Name) -> NamespaceEntries:
    """Return the entries of a namespace."""
    namespace = Namespace(settings.namespace)
    names = names_of(gateway, namespace)
    return NamespaceEntries(
        gateway, namespace, name, names, payload_limit=settings.payload_limit, limit=settings.large_limit
    )


def _put(shown: str, key: str, value: Any, ttl: Duration | None, expected: int | None) -> EntryChange:
    check_key(key)
    form: Form = "b"
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    else:
        form = "j"
        try:
            data = as_json(value)
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise StoreError(f"could not store entry {key!r} of namespace {shown!r}: {error}") from None
    milliseconds = 0 if ttl is None else round(to_seconds(ttl, "ttl") * 1000)
    if ttl is not None and not 1 <= milliseconds <= MAX_TTL_MS:
        raise ValueError(f"ttl must be 0.001 seconds to 100 years, got {ttl!r}")
    return EntryChange("put", key, _version(expected), milliseconds, form, data)


def _checked(key: str) -> str:
    check_key(key)
    return key


def _version(expected: int | None) -> int | None:
    given: object = expected
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 0):
        raise ValueError(f"expected must be the version of an entry, 0 or None, got {expected!r}")
    return expected


def _shown_entry(found: StoredEntry, shown: str, type: Any = None) -> StoreEntry:
    expires = as_time(found.expires) if found.expires else None
    return StoreEntry(found.key, _value(found, shown, type), found.version, as_time(found.version), expires)


def _value(found: StoredEntry, shown: str, type: Any) -> Any:
    if found.data is None or found.form == "b":
        return found.data
    try:
        return from_json(found.data) if type is None else _json_type(type).read(found.data)
    except ValueError as error:
        if type is None:
            raise damaged_entry(found.key, shown) from None
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise StoreError(f"entry {found.key!r} of namespace {shown!r} does not fit {type}: {problem}") from None


@lru_cache(maxsize=256)
def _json_type(declared: Any) -> JsonType:
    return JsonType(declared)
