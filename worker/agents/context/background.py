"""The background of a task: profile, memories for its goal, the note of the task that it continues.

It is chosen once per task and stored in the checkpoint (`#background`), because a memory store changes while the task
runs and a prompt should start with the same text each time, also in a resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from ....deadletter.error_text import error_text
from ....queues.delivery.checkpoint import Entry, Kind
from ...context import Context
from ...durable.journal.quoting import quoted_line, quoted_name
from ...durable.run import Run
from ...log import logger
from ...memory.memory import RELATIONS
from ...memory.task_memory import cite_memories, memory_store, owner_of
from ..journal.state import AgentState

BACKGROUND: Final = "#background"
"""Checkpoint key of the background."""

_TEXT: Final = 1000
"""Most characters of a memory in a prompt."""


class SearchesMemory(Protocol):
    """Protocol of memory stores such as `HybridStore`. Results are texts or have a `text`, the best first."""

    async def search(self, query: str, *, limit: int) -> Sequence[Any]: ...


Recall = Callable[[str, int], Awaitable[Sequence[Any]]]
"""A function in place of a store: returns at most so many memories for a goal."""


@dataclass(frozen=True, slots=True)
class Background:
    """Quoted lines about the user, and of memories for the goal; the number of memories that did not fit."""

    profile: Sequence[str] = ()
    memories: Sequence[str] = ()
    left_out: int = 0


NO_BACKGROUND: Final = Background()


def read_background(run: Run, goal: str) -> Background | None:
    """Return what was chosen for this goal, if anything was."""
    data = run.history.saved.get(BACKGROUND)
    if data is None:
        return None
    found = orjson.loads(data)
    if found.pop("goal", None) != _digest(goal):
        return None
    return Background(**found)


def stored_background(saved: Mapping[str, bytes]) -> Background | None:
    """Return what is in the fields of a checkpoint, for people; None if there is nothing that can be read."""
    try:
        found = orjson.loads(saved.get(BACKGROUND, b"null"))
    except ValueError:
        return None
    match found:
        case {"profile": list(profile), "memories": list(memories), "left_out": int(left_out)}:
            return Background([*map(str, profile)], [*map(str, memories)], left_out)
    return None


async def store_background(run: Run, goal: str, chosen: Background) -> None:
    """Store what was chosen, with the next write of the checkpoint: the record of an answer never precedes it."""
    data = orjson.dumps(
        {
            "goal": _digest(goal),
            "profile": list(chosen.profile),
            "memories": list(chosen.memories),
            "left_out": chosen.left_out,
        }
    )
    await run.recorder.put(Entry(Kind.SAVED, BACKGROUND, data), wait=False)
    run.history.saved[BACKGROUND] = data


def _digest(goal: str) -> str:
    return hashlib.blake2b(goal.encode("utf-8", "replace"), digest_size=8).hexdigest()


def session_profile(run: Run, state: AgentState) -> Callable[[Context], Awaitable[Sequence[Any]]] | None:
    """Return a function that finds what the memory knows about the session of a run; None if it has none.

    What the state has among its discoveries is left out: the brief shows it.
    """
    session, store = run.envelope.session, memory_store(run)
    if not session or store is None or not store.exists():
        return None
    known = {one.fact for one in state.discoveries}

    async def profile(ctx: Context) -> Sequence[Any]:
        found = await (await store.get()).profile(session, owner=[owner_of(run), owner_of(run, "")])
        return [one for one in found if one.memory.text not in known]

    return profile


def has_memory(run: Run, memory: SearchesMemory | Recall | bool) -> bool:
    """Return whether there is anything to search."""
    if isinstance(memory, bool):
        return memory and (store := memory_store(run)) is not None and store.exists()
    return True


async def search(
    run: Run, memory: SearchesMemory | Recall | bool, query: str, limit: int, *, known: Collection[str] = ()
) -> tuple[list[str], str]:
    """Return memories as quoted lines, the best first, without known ones; and the error if the search failed.

    A prompt without memories is better than none: a failing store is logged, and the brief says that it failed.

    Args:
        memory: True for the task's own store, if it has one.
    """
    if memory is False or limit < 1 or not query.strip():
        return [], ""
    try:
        found = list(await _search(run, memory, query, limit))
        lines = [line for line in dict.fromkeys(map(_line, found)) if line not in known]
    except Exception as error:  # noqa: BLE001 - a store of the user may raise anything
        problem = f"{type(error).__name__}: {error_text(error)}"
        logger.bind(task=run.envelope.task, id=run.id).warning("memories could not be searched: {}", problem)
        return [], problem
    await cite_memories(run, (one for one in found if not isinstance(one, str)))
    return lines, ""


async def _search(run: Run, memory: SearchesMemory | Recall | bool, query: str, limit: int) -> Iterable[Any]:
    if isinstance(memory, bool):
        store = memory_store(run)
        if store is None or not store.exists():
            return ()
        return await (await store.get()).search(query, owner=owner_of(run), limit=limit)
    return await (memory(query, limit) if callable(memory) else memory.search(query, limit=limit))


def _line(found: Any) -> str:
    """Return a memory as a line: a text, an object with `text`, or a search result with `memory`."""
    if isinstance(found, str):
        return f"- {quoted_line(found, _TEXT)}"
    memory = getattr(found, "memory", found)
    line = f"- {quoted_line(str(memory.text), _TEXT)}"
    if source := getattr(memory, "source", ""):
        line += f" (source: {quoted_name(source)})"
    for other in getattr(found, "related", ()):
        relation = RELATIONS.get(other.relation) or quoted_line(str(other.relation), _TEXT)
        line += f"; {relation}: {quoted_line(str(other.text), _TEXT)}"
        line += f" (source: {quoted_name(other.source)})" if getattr(other, "source", "") else ""
    return line
