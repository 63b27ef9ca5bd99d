"""Long-term memories of the running task: `ctx.memory`.

The ids of the memories that a task has stored, found or had in a prompt are in its checkpoint (`#memories:N`), so an
export of the task can include these memories. A field has up to 64 ids, and only the latest field is written again.
The fields form a ring: the latest 960 to 1,024 ids are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.errors import ConfigurationError, NotOpen
from ...queues.keys import owner_of_tenant
from ..durable.journal.event_redaction import redacted
from ..durable.run import Run
from ..durable.steps.current import CURRENT_RUN, DEFAULT_OPTIONS, Durability, Step, current_step
from ..durable.steps.execution import run_step
from ..errors import InvalidMemory, MemoryStoreError, MemoryStoreUnavailable, StepOutsideTask
from ..log import logger
from .factory import LazyMemoryStore
from .memory import (
    MAX_SOURCE_LENGTH,
    MAX_TEXT_LENGTH,
    FoundMemory,
    Memory,
    MemoryLink,
    NewMemory,
    new_memory,
)

if TYPE_CHECKING:
    from .hybrid import HybridStore


class TaskMemory:
    """Long-term memories of this task's agent, whose name (or the task's) owns them.

    Within a step, each write has an idempotency key made of the step's key and a number (`task_id@enqueued:step_key:2`
    is the second write of a step), so a step that runs again stores nothing twice, even with other words. Outside
    steps, each call is a durable step: the checkpoint records its result. Secrets among the task's arguments are
    masked.

    All methods raise `MemoryStoreError` and, outside steps, the errors of `ctx.step`.
    """

    def __init__(self, run: Run, durability: Durability) -> None:
        self._run = run
        self._durability: Durability = durability

    @property
    def owner(self) -> str:
        """Name of the agent or task that owns the memories, with the tenant in front if the task has one."""
        return owner_of(self._run)

    async def add(
        self,
        text: str,
        *,
        type: str = "fact",
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        source: str = "",
        subject: str = "",
        importance: float = 0.5,
        links: Sequence[MemoryLink] = (),
    ) -> Memory:
        """Store a memory, or update an equal one. For the fields see `NewMemory`. Raises `InvalidMemory`.

        Args:
            source: Origin; empty for this task.
            subject: Whom the memory is about, such as `user:42`; empty for the agent's own.
            links: Memories that this one supersedes or conflicts with, such as `MemoryLink("supersedes", old.id)`.
        """
        fields = {"type": type, "tags": tuple(tags), "metadata": dict(metadata or {}), "importance": importance}
        fields["links"] = tuple(links)
        memory = new_memory(text, source=source or _source(self._run), subject=subject, **fields)
        if self._run.redact is not None:
            memory = redacted(memory, self._run.redact)
        found: Memory = await self._do("memory.add", self._add, memory)
        return found

    async def search(
        self,
        query: str,
        *,
        type: str | Collection[str] | None = None,
        tags: Collection[str] = (),
        limit: int = 10,
        everyone: bool = False,
        touch: bool = False,
        subject: str | Collection[str] | None = "",
        floor: float | None = None,
    ) -> list[FoundMemory]:
        """Return the memories that match best; nothing if none matches.

        Args:
            subject: Search the profile of this subject; "" for the agent's own memories, None for both.
            floor: Similarity from which memories match by meaning; None for the embedder's own.
            everyone: Search the memories of all owners; of a task with a tenant, all of this tenant.
            touch: Count the results as used, so that they stay strong.
        """
        types = type if type is None or isinstance(type, str) else sorted(type)
        subjects = subject if subject is None or isinstance(subject, str) else sorted(subject)
        asked = (query, types, sorted(tags), limit, everyone, touch, subjects, floor)
        found: list[FoundMemory] = await self._do("memory.search", self._search, *asked)
        return found

    async def profile(self, subject: str, *, limit: int = 50, everyone: bool = False) -> list[FoundMemory]:
        """Return what is known about a subject, the most important first, see `HybridStore.profile`.

        Args:
            everyone: Include what other agents know.
        """
        found: list[FoundMemory] = await self._do("memory.profile", self._profile, subject, limit, everyone)
        return found

    async def touch(self, *memories: Memory | str) -> int:
        """Count memories, given themselves or by id, as used. Return how many of them exist."""
        ids = [one if isinstance(one, str) else one.id for one in memories]
        return int(await self._do("memory.touch", self._touch, ids))

    async def forget(self, *memories: Memory | str) -> int:
        """Remove memories of this agent permanently. Return how many existed."""
        ids = [one if isinstance(one, str) else one.id for one in memories]
        return int(await self._do("memory.forget", self._forget, ids))

    async def store(self) -> HybridStore:
        """Return the open store, for calls that are not steps. Raises `MemoryStoreError`, `ConfigurationError`."""
        return await _store_of(self._run).get()

    async def _do(self, name: str, act: Callable[..., Any], *args: Any) -> Any:
        if _step_of(self._run) is not None:
            await self._run.check_stopped()
            return await act(*args)
        return await run_step(self._run, name, act, args, {}, DEFAULT_OPTIONS[self._durability])

    # Take the next key. It must be taken before the first await, so that the order of the calls decides.

    async def _add(self, memory: NewMemory) -> Memory:
        key = self._next_key()
        stored = await (await self.store()).add(memory, owner=self.owner, key=key)
        await cite_memories(self._run, [stored])
        return stored

    async def _search(
        self,
        query: str,
        types: str | list[str] | None,
        tags: list[str],
        limit: int,
        everyone: bool,
        touch: bool,
        subjects: str | list[str] | None,
        floor: float | None,
    ) -> list[FoundMemory]:
        key = self._next_key() if touch else None
        store = await self.store()
        found = await store.search(
            query, **self._owners(everyone), type=types, tags=tags, subject=subjects, limit=limit, floor=floor
        )
        if key is not None and found:
            await store.touch([one.memory.id for one in found], key=key, **self._owners(everyone))
        await cite_memories(self._run, found)
        return found

    async def _profile(self, subject: str, limit: int, everyone: bool) -> list[FoundMemory]:
        found = await (await self.store()).profile(subject, **self._owners(everyone), limit=limit)
        await cite_memories(self._run, found)
        return found

    async def _touch(self, ids: list[str]) -> int:
        key = self._next_key()
        await cite_memories(self._run, ids)
        return await (await self.store()).touch(ids, key=key, **self._owners(everyone=True))

    async def _forget(self, ids: list[str]) -> int:
        key = self._next_key()
        return await (await self.store()).forget(ids, owner=self.owner, key=key)

    def _owners(self, everyone: bool) -> dict[str, Any]:
        """Return the filter of the memories that this task reaches: its own, or those of all owners of its tenant."""
        return {"tenant": self._run.envelope.tenant} if everyone else {"owner": self.owner}

    def _next_key(self) -> str:
        """Return the idempotency key of a write.

        The task's id is not enough: a restarted goal has the same id, and must store what it finds.
        """
        step = current_step()
        step.remembered += 1
        return _key(self._run, step.key, step.remembered)


def owner_of(run: Run, name: str | None = None) -> str:
    """Return the owner of what a run stores: its task's name, or another one, of the run's tenant."""
    return owner_of_tenant(run.envelope.tenant, run.envelope.task if name is None else name)


def _source(run: Run) -> str:
    """Return the source of what this task found out itself."""
    return f"task:{run.id}"


def _key(run: Run, what: str, number: int) -> str:
    enqueued = run.history.enqueued
    at = run.delivery.entry.partition(b"-")[0].decode() if enqueued is None else enqueued
    return f"{run.id}@{at}:{what}" if number == 1 else f"{run.id}@{at}:{what}:{number}"


def memory_store(run: Run) -> LazyMemoryStore | None:
    """Return the memory store that the runs of a worker share; None without a worker.

    Raises `MemoryStoreUnavailable` after the worker has ended.
    """
    extras = run.host.extras
    try:
        return None if extras is None else extras.of(LazyMemoryStore, lambda: LazyMemoryStore(run.settings))
    except NotOpen as error:
        raise MemoryStoreUnavailable("of this worker", f"it is closed: {error}") from None


def _store_of(run: Run) -> LazyMemoryStore:
    if (store := memory_store(run)) is None:
        raise ConfigurationError("this run has no memory store: only a worker opens one")
    return store


async def store_discoveries(run: Run, discoveries: Sequence[tuple[int, str, str]]) -> None:
    """Store what an agent found out that does not say what to remember, as `store_findings` does.

    Nothing asked for it, so it ends no task: a store that cannot be used is logged. Nothing is stored where tasks are
    encrypted, since the store is not. In a session, the memories are about its id: what was found out for one user is
    not in the prompts of others.

    Args:
        discoveries: Number of the event (0 for one of a former task or turn), fact and source.
    """
    session = run.envelope.session
    memories = [
        NewMemory(text=text, type="finding", source=source.replace("\0", "")[:MAX_SOURCE_LENGTH], subject=session)
        for number, fact, source in discoveries
        if (text := fact.replace("\0", "")[:MAX_TEXT_LENGTH].strip()) and (number or not session)
    ]
    if not memories or memory_store(run) is None or run.gateway.encryptor.active:
        return
    try:
        await store_findings(run, memories)
    except (MemoryStoreError, InvalidMemory, ConfigurationError) as error:
        logger.bind(task=run.envelope.task, id=run.id).warning("its discoveries could not be remembered: {}", error)


async def store_findings(run: Run, memories: Sequence[NewMemory | str]) -> None:
    """Store the findings of an agent at its end. Repeated after a crash, it stores nothing twice.

    The keys are `task_id@enqueued:remember`, `task_id@enqueued:remember:2` and so on.

    Raises `MemoryStoreError`, `InvalidMemory`.
    """
    stored: list[Memory] = []
    try:
        for number, one in enumerate(memories, 1):
            memory = new_memory(one) if isinstance(one, str) else one
            if not isinstance(memory, NewMemory):
                raise TypeError(f"remember must return texts or NewMemory, got {one!r}")
            store = _store_of(run)
            if not memory.source:
                memory = memory.model_copy(update={"source": _source(run)})
            if run.redact is not None:
                memory = redacted(memory, run.redact)
            key = _key(run, "remember", number)
            stored.append(await (await store.get()).add(memory, owner=owner_of(run), key=key))
            run.touch()
    finally:
        await cite_memories(run, stored)  # at once: the record of the end is written with it


def _step_of(run: Run) -> Step | None:
    """Return the step of this run that is running here."""
    if CURRENT_RUN.get() is not run:
        return None
    try:
        return current_step()
    except StepOutsideTask:
        return None


CITED_MEMORIES: Final = "#memories:"
"""Beginning of the checkpoint keys."""

_PER_FIELD: Final = 64

_FIELDS: Final = tuple(f"{CITED_MEMORIES}{number}" for number in range(16))


async def cite_memories(run: Run, memories: Iterable[object]) -> None:
    """Note the ids of memories, given themselves, as results of a search, or as ids, in the checkpoint of the task.

    The next write of the checkpoint has them: the record of a step never precedes the ids that it depends on. Other
    objects are ignored.
    """
    ids = list(dict.fromkeys(one for memory in memories for one in _ids(memory)))
    if not ids:
        return
    saved = run.history.saved
    await run.history.read_unfinished(*_FIELDS)
    numbers = _numbers(saved)
    known = set(cited_memories(saved))
    changed: dict[str, bytes] = {}
    for one in ids:
        if one not in known:
            field, first, held = _latest(saved, numbers)
            data = orjson.dumps({"first": first, "ids": [*held, one]})
            saved[field] = changed[field] = data
            numbers[field] = first
    if changed:
        await run.recorder.put(*(Entry(Kind.SAVED, field, data) for field, data in changed.items()), wait=False)


def cited_memories(saved: Mapping[str, bytes]) -> list[str]:
    """Return the ids that the fields of a checkpoint have, in the order of their first use."""
    numbers = _numbers(saved)
    fields = sorted(numbers, key=lambda field: numbers[field])
    return [str(one) for field in fields for one in orjson.loads(saved[field])["ids"]]


def _numbers(saved: Mapping[str, bytes]) -> dict[str, int]:
    """Return, for each field, the number of its first id."""
    return {field: int(orjson.loads(saved[field])["first"]) for field in _FIELDS if field in saved}


def _latest(saved: Mapping[str, bytes], numbers: Mapping[str, int]) -> tuple[str, int, list[str]]:
    """Return the field that takes the next id, the number of its first id, and its ids."""
    if not numbers:
        return _FIELDS[0], 1, []
    field = max(numbers, key=lambda one: numbers[one])
    held = orjson.loads(saved[field])["ids"]
    if len(held) < _PER_FIELD:
        return field, numbers[field], held
    return _FIELDS[(_FIELDS.index(field) + 1) % len(_FIELDS)], numbers[field] + len(held), []


def _ids(memory: object) -> list[str]:
    if isinstance(memory, FoundMemory):
        return [memory.memory.id, *(one.id for one in memory.related)]
    if isinstance(memory, Memory):
        return [memory.id]
    return [memory] if isinstance(memory, str) else []
