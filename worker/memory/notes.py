"""Notes of search results: of memories that are linked or have equal texts, the newest stands for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from .memory import FoundMemory, Memory, RelatedMemory
from .text import normal

_MOST: Final = 5
"""Largest number of older memories in the note of a result."""


def with_notes(found: Sequence[FoundMemory], known: Mapping[str, Memory]) -> list[FoundMemory]:
    """Replace linked results by the newest memory of their group, with the others as its note.

    Args:
        found: Results, the best first.
        known: Memories of the results and of their links, by id. Links to other memories are ignored.
    """
    groups = _groups(known.values())
    results: dict[str, FoundMemory] = {}
    shown: set[int] = set()
    for one in found:
        group = groups[one.memory.id]
        if id(group) not in shown:
            shown.add(id(group))
            newest = max(group, key=lambda memory: (memory.updated, memory.created, memory.id))
            rest = sorted((memory for memory in group if memory.id != newest.id), key=lambda memory: -memory.updated)
            related = tuple(_related(newest, memory) for memory in rest[:_MOST])
            results[newest.id] = one.model_copy(update={"memory": newest, "related": related})
    return list(results.values())


def _groups(memories: Iterable[Memory]) -> dict[str, list[Memory]]:
    """Return, for each id, the memories that are linked to it directly or by others, itself among them.

    Imported memories may have links to memories of another scope. They are ignored.
    """
    groups: dict[str, list[Memory]] = {}
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    every = list(memories)
    for memory in every:
        groups[memory.id] = [memory]
        same[*memory.scope, normal(memory.text)].append(memory.id)
    pairs = [(memory.id, link.id) for memory in every for link in memory.links]
    pairs += [(ids[0], other) for ids in same.values() for other in ids[1:]]
    for one, other in pairs:
        if other in groups and groups[one] is not groups[other] and groups[one][0].scope == groups[other][0].scope:
            # the smaller group joins the larger one, so that no memory moves more often than the logarithm of all
            smaller, larger = sorted((groups[one], groups[other]), key=len)
            larger += smaller
            groups.update((memory.id, larger) for memory in smaller)
    return groups


def _related(newest: Memory, other: Memory) -> RelatedMemory:
    how: Literal["supersedes", "conflicts", "same"] = "supersedes"  # also if the two are linked by others only
    links = [link.relation for link in newest.links if link.id == other.id]
    links += [link.relation for link in other.links if link.id == newest.id]
    if normal(other.text) == normal(newest.text) or "same" in links:
        how = "same"
    elif "conflicts" in links:
        how = "conflicts"
    return RelatedMemory(relation=how, id=other.id, text=other.text, source=other.source, updated=other.updated)
