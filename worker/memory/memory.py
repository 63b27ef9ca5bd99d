"""Memory: its fields, its strength, the merge of two equal ones, and links between different ones.

The strength falls while a memory is not used and grows with the number of uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from ..errors import InvalidMemory, first_problem

MAX_TEXT_LENGTH = 32_768
"""Largest length of a memory in characters. Store longer texts as artifacts and remember where they are."""

MAX_SOURCE_LENGTH: Final = 2_000

_LABEL = 200
_METADATA_LIMIT = 64


def _without_null(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a null character, which databases refuse")
    return text


Line = Annotated[str, StringConstraints(max_length=_LABEL), AfterValidator(_without_null)]
Subject = Annotated[str, StringConstraints(max_length=256), AfterValidator(_without_null)]  # as long as a session id
Label = Annotated[Line, StringConstraints(min_length=1)]
Text = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_TEXT_LENGTH, strip_whitespace=True),
    AfterValidator(_without_null),
]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


Relation = Literal["supersedes", "superseded_by", "conflicts", "same"]


class MemoryLink(NamedTuple):
    """Relation of a memory to another one, given by id."""

    relation: Relation
    id: Label


_MAX_LINKS: Final = 8


class NewMemory(BaseModel):
    """Memory that is not stored yet.

    Attributes:
        type: Kind, such as `fact`, `preference` or `lesson`; equal memories are merged within one type.
        tags: Labels to filter by.
        metadata: JSON data that is not searched.
        source: Origin: a URL, a file, a task. Memories of different sources are never merged.
        subject: Person or thing that it is the profile of, such as `user:42`; empty for the agent's own memories.
        importance: From 0 to 1; a memory of importance 0 is never found.
        links: Relations to stored memories that the caller knows of: this one `supersedes` another, or `conflicts` with
            it. A link to a memory of another owner, subject or type has no effect.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: Text
    type: Label = "fact"
    tags: Annotated[tuple[Label, ...], Field(max_length=64)] = ()
    metadata: Annotated[dict[Line, JsonValue], Field(max_length=_METADATA_LIMIT)] = {}
    source: Annotated[str, StringConstraints(max_length=MAX_SOURCE_LENGTH), AfterValidator(_without_null)] = ""
    subject: Subject = ""
    importance: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    links: Annotated[tuple[MemoryLink, ...], Field(max_length=_MAX_LINKS)] = ()


class Memory(NewMemory):
    """Stored memory.

    Attributes:
        owner: Name of the agent that owns it; empty if it is shared.
        key: Idempotency key of its first write.
        created: Seconds since 1970, as are `accessed` and `updated`.
        accesses: Number of uses.
        former: Earlier texts, the last five, the oldest first.
        links: Relations to other memories, the last eight, which may have been removed since.
    """

    id: Label
    owner: Line = ""
    key: str | None = None
    created: Time
    accessed: Time
    updated: Time
    accesses: Annotated[int, Field(ge=0)] = 0
    former: tuple[str, ...] = ()

    @property
    def scope(self) -> tuple[str, str, str]:
        """Owner, subject and type. Memories of two scopes are never merged, linked or shown for each other."""
        return self.owner, self.subject, self.type


RELATIONS: Final = {"supersedes": "it supersedes", "conflicts": "it conflicts with", "same": "the same text"}
"""Phrase for each relation of a memory to an older one, which follows it."""


class RelatedMemory(BaseModel):
    """Older memory in the note of a newer one that a search found.

    Attributes:
        relation: Relation of the found memory to this one: it `supersedes` it, `conflicts` with it, or is the `same`
            text from another source.
    """

    model_config = ConfigDict(frozen=True)

    relation: Literal["supersedes", "conflicts", "same"]
    id: str
    text: str
    source: str = ""
    updated: float


class FoundMemory(BaseModel):
    """Memory that a search found.

    Attributes:
        score: Value by which the results are ordered.
        text_rank: Rank among the results by words, from 1; None if it was not among them.
        vector_rank: The same for the results by vectors.
        similarity: Cosine of its vector and the query's.
        related: Older memories that this one stands for, the latest first; a prompt shows them as a note.
    """

    model_config = ConfigDict(frozen=True)

    memory: Memory
    score: float
    text_rank: int | None = None
    vector_rank: int | None = None
    similarity: float | None = None
    related: tuple[RelatedMemory, ...] = ()


def new_memory(text: str, **fields: Any) -> NewMemory:
    """Return a validated memory. Raises `InvalidMemory`, which names the field and its problem."""
    try:
        return NewMemory.model_validate({"text": text, **fields})
    except ValidationError as error:
        raise InvalidMemory(first_problem(error)) from None


_DECAY: Final = 0.01
"""Decay per day since the last use: half the strength is left after 69.3 days."""

_GAIN: Final = 0.1
_DAY: Final = 86_400.0


def strength(memory: Memory, now: float) -> float:
    """Return importance x (1 + 0.1 ln(1 + accesses)) x exp(-0.01 x days since the last use). now: seconds since 1970.

    A clock that went back never increases the strength.
    """
    days = max(0.0, now - memory.accessed) / _DAY
    return memory.importance * (1 + _GAIN * math.log1p(memory.accesses)) * math.exp(-_DECAY * days)


_MAX_FORMER: Final = 5


def merged(old: Memory, new: Memory) -> Memory:
    """Merge a new memory into an equal old one, which counts as a use of it.

    The new text replaces the old one, which is added to `former`. The larger importance and the tags and metadata of
    both are kept. What had superseded the old memory is now superseded by it: its statement was made again.
    """
    former = [text for text in (*old.former, old.text) if text != new.text]
    kept = (MemoryLink("supersedes", link.id) if link.relation == "superseded_by" else link for link in old.links)
    return linked(old, [*kept, *(link for link in new.links if link.id != old.id)]).model_copy(
        update={
            "text": new.text,
            "former": tuple(former[-_MAX_FORMER:]),
            "tags": tuple(dict.fromkeys((*old.tags, *new.tags))),
            "metadata": {**old.metadata, **new.metadata},
            "importance": max(old.importance, new.importance),
            "accesses": old.accesses + 1,
            "accessed": max(old.accessed, new.created),
            "updated": max(old.updated, new.created),
        }
    )


def linked(memory: Memory, links: Sequence[MemoryLink]) -> Memory:
    """Return the memory with these links; of several to one memory, the last one counts."""
    latest: dict[str, MemoryLink] = {}
    for link in (*memory.links, *links):
        latest.pop(link.id, None)
        latest[link.id] = link
    return memory.model_copy(update={"links": tuple(latest.values())[-_MAX_LINKS:]})
