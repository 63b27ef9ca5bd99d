"""The saver: checkpoints of LangGraph's threads in the key-value store.

A thread is one namespace of the store, so what a call writes is one atomic batch, and one round trip. Inside a task the
store fences what is written: a worker that lost the task cannot change a thread that its successor has read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    get_checkpoint_id,
    get_serializable_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from ....queues.errors import StoreConflict
from ....queues.keys import check_name
from ...app import App
from .checkpoints import (
    CHECKPOINTS,
    RUNS,
    VALUES,
    StoredCheckpoint,
    checkpoint_key,
    decode_value,
    encode_value,
    encode_writes,
    in_order,
    is_plain,
    pack_writes,
    part,
    unpack_writes,
    usual_key,
    value_key,
    with_values,
    writes_prefix,
)
from .store_calls import call_blocking, check_fence, iterate

if TYPE_CHECKING:
    from ...store import Store

_AT_ONCE: Final = 20
"""Checkpoints whose values are read at once."""

_BATCH: Final = 500
"""Entries of a batch that deletes or copies many."""


class PerdureSaver(BaseCheckpointSaver[str]):
    """A saver for LangGraph: `builder.compile(checkpointer=PerdureSaver(app))`.

    It needs an open app (`async with app:`, or a worker), and no module of Redis. Inside a task of Perdure its writes
    are fenced by the task. Outside they are not, which it logs once at WARNING. The synchronous methods are for threads
    without an event loop.
    """

    def __init__(
        self,
        app: App,
        *,
        name: str = "langgraph",
        require_task: bool = False,
        serde: SerializerProtocol | None = None,
    ) -> None:
        """Create a saver of an app.

        Args:
            name: of the threads in the store, whose namespaces are `(name, thread_id)`. Savers of other names have
                other threads.
            require_task: refuse writes outside a task.
            serde: LangGraph's serializer, such as its `EncryptedSerializer`.
        """
        super().__init__(serde=serde)
        self._app = app
        self._name = check_name("name of a saver", name)
        self._require_task = require_task
        self._runs: dict[tuple[str, str], None] = {}

    # reads

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return a checkpoint with its values and writes: the one that the config names, else the newest of it."""
        thread, ns = _place(config)
        store = self._thread(thread)
        stored = await self._read(store, ns, get_checkpoint_id(config))
        return None if stored is None else await self._load(store, thread, stored)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Yield the checkpoints of a thread, or of all threads, the newest of a thread first."""
        if limit is not None and limit <= 0:
            return
        left = limit
        async for thread in self._threads(config):
            store = self._thread(thread)
            found: list[StoredCheckpoint] = []
            async for stored in self._stored(store, config, before):
                metadata: Mapping[str, Any] = stored.metadata
                if filter and any(metadata.get(name) != value for name, value in filter.items()):
                    continue
                found.append(stored)
                if len(found) == (_AT_ONCE if left is None else min(left, _AT_ONCE)):
                    for item in await self._load_all(store, thread, found):
                        yield item
                    left = None if left is None else left - len(found)
                    found = []
                    if left == 0:
                        return
            for item in await self._load_all(store, thread, found):
                yield item
            left = None if left is None else left - len(found)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes of the checkpoints before one, back to the nearest stored value, by channel."""
        thread, ns = _place(config)
        store = self._thread(thread)
        writes: dict[str, list[PendingWrite]] = {channel: [] for channel in channels}
        seeds: dict[str, Any] = {}
        stored = await self._read(store, ns, get_checkpoint_id(config)) if channels else None
        seen: set[str] = set()
        while stored is not None and stored.parent is not None and len(seeds) < len(writes):
            seen.add(stored.id)
            stored = None if stored.parent in seen else await self._read(store, ns, stored.parent)
            if stored is None:
                break
            left = [channel for channel in writes if channel not in seeds]
            values, made = await asyncio.gather(self._values(store, stored, left), self._writes(store, stored))
            for write in reversed(made):
                if write[1] in left:
                    writes[write[1]].append(write)
            seeds |= values
        history: dict[str, DeltaChannelHistory] = {}
        for channel, found in writes.items():
            history[channel] = {"writes": found[::-1]}
            if channel in seeds:
                history[channel]["seed"] = seeds[channel]
        return history

    # writes

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint and the values that are new with it, in one batch."""
        self._check_task()
        thread, ns = _place(config)
        values = checkpoint["channel_values"]
        plain = {name: value for name, value in values.items() if is_plain(value)}
        stored = StoredCheckpoint(
            ns,
            get_checkpoint_id(config),
            {**checkpoint, "channel_values": plain},
            get_serializable_checkpoint_metadata(config, metadata),
        )
        run_id = stored.metadata.get("run_id")
        if run_id is not None:
            await self._note_run(thread, run_id)
        async with self._thread(thread).batch() as batch:
            for name, version in new_versions.items():
                if name in values and name not in plain:
                    batch.put(value_key(ns, name, version), encode_value(values[name], self.serde))
            if run_id is not None:
                batch.put(RUNS + part(run_id), b"")
            batch.put(checkpoint_key(ns, stored.id), stored.encode(self.serde))
        return _config(thread, ns, stored.id)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task of the graph. Its first writes stay; special ones are replaced."""
        if not writes:
            return
        self._check_task()
        thread, ns = _place(config)
        store = self._thread(thread)
        prefix = writes_prefix(ns, config["configurable"]["checkpoint_id"])
        usual, special = encode_writes(prefix, writes, task_id, task_path, self.serde)
        key, version = usual_key(prefix, task_id), 0
        while True:
            try:
                async with store.batch() as batch:
                    for name, data in special.items():
                        batch.put(name, data)
                    if usual:
                        batch.put(key, pack_writes(usual), expected=version)
                return
            except StoreConflict:
                entry = await store.entry(key)
                version = 0 if entry is None else entry.version
                known = [] if entry is None else unpack_writes(entry.value)
                taken = {write.index for write in known}
                added = [write for write in usual if write.index not in taken]
                if not added and not special:
                    return
                usual = [*known, *added] if added else []

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete a thread."""
        self._check_task()
        store = self._thread(thread_id)
        runs = [entry.key.removeprefix(RUNS) async for entry in store.list(prefix=RUNS, values=False)]
        await store.clear()
        await self._drop_runs(runs, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, with their writes, in all threads."""
        self._check_task()
        index = self._run_index()
        for run_id in run_ids:
            prefix = f"{part(run_id)}/"
            threads = {await index.get(entry.key) async for entry in index.list(prefix=prefix)}
            for thread in threads:
                store = self._thread(thread)
                await self._keep(store, lambda stored, run=run_id: stored.metadata.get("run_id") != run)
                await store.delete(RUNS + part(run_id))
                await self._drop_runs([part(run_id)], thread)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints of a thread to another one."""
        self._check_task()
        source, target = self._thread(source_thread_id), self._thread(target_thread_id)
        async for entry in source.list(prefix=RUNS):
            await self._run_index().put(f"{entry.key.removeprefix(RUNS)}/{part(target_thread_id)}", target_thread_id)
        copied = [(entry.key, entry.value) async for entry in source.list()]
        for entries in _chunks(copied):
            async with target.batch() as batch:
                for key, value in entries:
                    batch.put(key, value)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete the checkpoints of threads, all but the latest of each namespace unless `strategy` is `delete`.

        Earlier checkpoints of which the latest one has channels that only their writes tell (`DeltaChannel`) stay.

        Raises `ValueError` for another strategy.
        """
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(f"strategy must be 'keep_latest' or 'delete', got {strategy!r}")
        self._check_task()
        for thread in thread_ids:
            if strategy == "delete":
                await self.adelete_thread(thread)
                continue
            store = self._thread(thread)
            kept = await self._latest(store)
            await self._keep(store, lambda stored, kept=kept: (stored.ns, stored.id) in kept)

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Return the version of a channel that follows: sorted as texts, and its own in each fork."""
        number = 0 if current is None else int(str(current).partition(".")[0])
        return f"{number + 1:032}.{random.random():016}"  # noqa: S311 - no secret

    # synchronous forms

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `aget_tuple`."""
        return call_blocking(self._app, lambda: self.aget_tuple(config), "await saver.aget_tuple(...)")

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """See `alist`."""
        found = self.alist(config, filter=filter, before=before, limit=limit)
        return iterate(self._app, found, "async for item in saver.alist(...)")

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """See `aget_delta_channel_history`."""
        return call_blocking(
            self._app,
            lambda: self.aget_delta_channel_history(config=config, channels=channels),
            "await saver.aget_delta_channel_history(...)",
        )

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `aput`."""
        return call_blocking(
            self._app, lambda: self.aput(config, checkpoint, metadata, new_versions), "await saver.aput(...)"
        )

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See `aput_writes`."""
        call_blocking(
            self._app, lambda: self.aput_writes(config, writes, task_id, task_path), "await saver.aput_writes(...)"
        )

    def delete_thread(self, thread_id: str) -> None:
        """See `adelete_thread`."""
        call_blocking(self._app, lambda: self.adelete_thread(thread_id), "await saver.adelete_thread(...)")

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `adelete_for_runs`."""
        call_blocking(self._app, lambda: self.adelete_for_runs(run_ids), "await saver.adelete_for_runs(...)")

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """See `acopy_thread`."""
        call_blocking(
            self._app, lambda: self.acopy_thread(source_thread_id, target_thread_id), "await saver.acopy_thread(...)"
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `aprune`."""
        call_blocking(self._app, lambda: self.aprune(thread_ids, strategy=strategy), "await saver.aprune(...)")

    # parts of a thread

    def _thread(self, thread: str) -> Store:
        return self._app.store(self._name, str(thread))

    def _check_task(self) -> None:
        check_fence(f"checkpoints of threads {self._name!r}", require=self._require_task)

    async def _threads(self, config: RunnableConfig | None) -> AsyncIterator[str]:
        if config is not None:
            yield str(config["configurable"]["thread_id"])
            return
        async for namespace in self._app.store.namespaces(prefix=(self._name,)):
            yield namespace[1]

    async def _read(self, store: Store, ns: str, checkpoint_id: str | None) -> StoredCheckpoint | None:
        """Return a checkpoint of a namespace, the newest one without an id."""
        if checkpoint_id:  # an empty one names none
            data = await store.get(checkpoint_key(ns, checkpoint_id))
            return None if data is None else StoredCheckpoint.decode(data, self.serde)
        async for entry in store.list(prefix=f"{CHECKPOINTS}{part(ns)}/", reverse=True, limit=1):
            return StoredCheckpoint.decode(entry.value, self.serde)
        return None

    async def _stored(
        self, store: Store, config: RunnableConfig | None, before: RunnableConfig | None
    ) -> AsyncIterator[StoredCheckpoint]:
        """Yield the checkpoints of a thread, the newest first, without their values and writes."""
        ns = None if config is None else config["configurable"].get("checkpoint_ns")
        only = None if config is None else get_checkpoint_id(config)
        end = None if before is None else get_checkpoint_id(before)
        if ns is not None and only is not None:
            stored = await self._read(store, ns, only)
            if stored is not None and (end is None or stored.id < end):
                yield stored
        elif ns is not None:
            after = "" if end is None else checkpoint_key(ns, end)
            async for entry in store.list(prefix=f"{CHECKPOINTS}{part(ns)}/", after=after, reverse=True):
                yield StoredCheckpoint.decode(entry.value, self.serde)
        else:
            keys = [entry.key async for entry in store.list(prefix=CHECKPOINTS, values=False)]
            keys.sort(key=lambda key: key.rpartition("/")[2], reverse=True)
            for some in _chunks(keys, _AT_ONCE):
                found = await store.get_many(some)
                for key in some:
                    if (data := found.get(key)) is not None:
                        stored = StoredCheckpoint.decode(data, self.serde)
                        if (only is None or stored.id == only) and (end is None or stored.id < end):
                            yield stored

    async def _load(self, store: Store, thread: str, stored: StoredCheckpoint) -> CheckpointTuple:
        """Return a checkpoint with its values and writes, which are read in one round trip."""
        values, writes = await asyncio.gather(self._values(store, stored), self._writes(store, stored))
        parent = None if stored.parent is None else _config(thread, stored.ns, stored.parent)
        return CheckpointTuple(
            _config(thread, stored.ns, stored.id),
            with_values(stored.checkpoint, values),
            stored.metadata,
            parent,
            writes,
        )

    async def _load_all(
        self, store: Store, thread: str, stored: Sequence[StoredCheckpoint]
    ) -> Sequence[CheckpointTuple]:
        return await asyncio.gather(*(self._load(store, thread, one) for one in stored))

    async def _values(
        self, store: Store, stored: StoredCheckpoint, channels: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Return the values of channels that a checkpoint has, with entries of their own unless channels are named."""
        keys, found = stored.value_keys, {}
        if channels is not None:
            plain = stored.checkpoint["channel_values"]
            found = {name: plain[name] for name in channels if name in plain}
            keys = {name: keys[name] for name in channels if name in keys}
        if keys:
            data = await store.get_many(list(keys.values()))
            found |= {name: decode_value(data[key], self.serde) for name, key in keys.items() if key in data}
        return found

    async def _writes(self, store: Store, stored: StoredCheckpoint) -> Sequence[PendingWrite]:
        prefix = writes_prefix(stored.ns, stored.id)
        writes = in_order([entry.value async for entry in store.list(prefix=prefix)])
        return [write.pending(self.serde) for write in writes]

    # deletion

    async def _all(self, store: Store) -> Sequence[StoredCheckpoint]:
        return [StoredCheckpoint.decode(entry.value, self.serde) async for entry in store.list(prefix=CHECKPOINTS)]

    async def _latest(self, store: Store) -> set[tuple[str, str]]:
        """Return the latest checkpoints of the namespaces, and those from which their delta channels are built."""
        known = {(stored.ns, stored.id): stored for stored in await self._all(store)}
        latest = {ns: max(id for other, id in known if other == ns) for ns, _ in known}
        kept = set(latest.items())
        for place in list(kept):
            stored = known[place]
            left = stored.delta_channels
            while left and stored.parent is not None and (parent := known.get((stored.ns, stored.parent))):
                stored = parent
                kept.add((stored.ns, stored.id))
                left = left - set(await self._values(store, stored, left))
        return kept

    async def _keep(self, store: Store, keep: Any) -> None:
        """Delete the checkpoints of a thread that are not to be kept, their writes, and values that no other has."""
        kept: set[str] = set()
        dropped: list[str] = []
        prefixes: list[str] = []
        for stored in await self._all(store):
            if keep(stored):
                kept.update(stored.value_keys.values())
            else:
                dropped.append(checkpoint_key(stored.ns, stored.id))
                prefixes.append(writes_prefix(stored.ns, stored.id))
        if not dropped:
            return
        values = [entry.key async for entry in store.list(prefix=VALUES, values=False)]
        dropped += [key for key in values if key not in kept]
        for prefix in prefixes:
            dropped += [entry.key async for entry in store.list(prefix=prefix, values=False)]
        for keys in _chunks(dropped):
            async with store.batch() as batch:
                for key in keys:
                    batch.delete(key)

    # runs

    def _run_index(self) -> Store:
        """Threads by the runs that have checkpoints in them."""
        return self._app.store(f"{self._name}-runs")

    async def _note_run(self, thread: str, run_id: str) -> None:
        """Note that a run has checkpoints in a thread, before they are stored."""
        if (run_id, thread) not in self._runs:
            await self._run_index().put(f"{part(run_id)}/{part(thread)}", thread)
            if len(self._runs) >= _BATCH:
                self._runs.pop(next(iter(self._runs)))
            self._runs[run_id, thread] = None

    async def _drop_runs(self, runs: Iterable[str], thread: str) -> None:
        for some in _chunks(list(runs)):
            async with self._run_index().batch() as batch:
                for run in some:
                    batch.delete(f"{run}/{part(thread)}")
        self._runs.clear()


def _place(config: RunnableConfig) -> tuple[str, str]:
    """Return the thread and the checkpoint namespace of a config."""
    configurable = config["configurable"]
    return str(configurable["thread_id"]), configurable.get("checkpoint_ns", "")


def _config(thread: str, ns: str, checkpoint_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}}


def _chunks(items: Sequence[Any], size: int = _BATCH) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
