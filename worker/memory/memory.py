"""A memory: one thing that is worth knowing beyond the task in which it was learned.

How much a memory counts now: less as it is left alone, more the more often it was used.

Two memories that are the same become one.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from .errors import InvalidMemory
from .text import normal

__all__ = ["LONGEST_TEXT", "FoundMemory", "Memory", "NewMemory", "merged", "new_memory", "strength"]

LONGEST_TEXT = 32_768
"""Characters of a memory. What is longer is a document: keep it as an artifact, and remember where it is."""

_LABEL = 200
_METADATA_LIMIT = 64


def _without_null(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a null character, which no database takes")
    return text


Line = Annotated[str, StringConstraints(max_length=_LABEL), AfterValidator(_without_null)]
Label = Annotated[Line, StringConstraints(min_length=1)]
Text = Annotated[
    str,
    StringConstraints(min_length=1, max_length=LONGEST_TEXT, strip_whitespace=True),
    AfterValidator(_without_null),
]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class NewMemory(BaseModel):
    """Something to remember.

    type: of what kind, such as `fact`, `preference` or `lesson`; what is alike is found within one type. tags: to ask
    for it by. metadata: JSON data that nobody searches. source: where it is from: a URL, a file, a task. importance:
    from 0 to 1; what counts for nothing is never found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: Text
    type: Label = "fact"
    tags: Annotated[tuple[Label, ...], Field(max_length=64)] = ()
    metadata: Annotated[dict[Line, JsonValue], Field(max_length=_METADATA_LIMIT)] = {}
    source: Annotated[str, StringConstraints(max_length=2_000), AfterValidator(_without_null)] = ""
    importance: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5


class Memory(NewMemory):
    """What is remembered.

    owner: whose it is: an agent's name; empty for what belongs to nobody in particular. key: the idempotency key it
    was first written with. created, accessed, updated: seconds since 1970. accesses: how often it was used since.
    former: its earlier wordings, the last five, oldest first.
    """

    id: Label
    owner: Line = ""
    key: str | None = None
    created: Time
    accessed: Time
    updated: Time
    accesses: Annotated[int, Field(ge=0)] = 0
    former: tuple[str, ...] = ()


class FoundMemory(BaseModel):
    """A memory that a search found.

    score: what it was ranked by. text_rank, vector_rank: its place among those found by words and by meaning, from 1;
    None where it was not among them. similarity: of its embedding to the query's (cosine).
    """

    model_config = ConfigDict(frozen=True)

    memory: Memory
    score: float
    text_rank: int | None = None
    vector_rank: int | None = None
    similarity: float | None = None


def new_memory(text: str, **fields: Any) -> NewMemory:
    """Raises `InvalidMemory`, which names the field and what is wrong with it."""
    try:
        return NewMemory.model_validate({"text": text, **fields})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidMemory(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


_DECAY: Final = 0.01
"""Per day since it was last used: half the strength is left after 69.3 days."""

_GAIN: Final = 0.1
_DAY: Final = 86_400.0


def strength(memory: Memory, now: float) -> float:
    """importance x (1 + 0.1 ln(1 + accesses)) x exp(-0.01 x days since it was used). now: seconds since 1970.

    A clock that went back makes nothing stronger.
    """
    days = max(0.0, now - memory.accessed) / _DAY
    return memory.importance * (1 + _GAIN * math.log1p(memory.accesses)) * math.exp(-_DECAY * days)


_KEPT: Final = 5


def merged(old: Memory, new: Memory) -> Memory:
    """The old one as the new one tells it: told again, it was of use once more.

    The new wording stands, and the old one is kept among the former; the larger importance counts; tags and metadata
    of both.
    """
    former = (
        old.former
        if normal(new.text) == normal(old.text)
        else (*(one for one in old.former if one != new.text), old.text)
    )
    return old.model_copy(
        update={
            "text": new.text,
            "former": former[-_KEPT:],
            "tags": tuple(dict.fromkeys((*old.tags, *new.tags))),
            "metadata": {**old.metadata, **new.metadata},
            "source": new.source or old.source,
            "importance": max(old.importance, new.importance),
            "accesses": old.accesses + 1,
            "accessed": max(old.accessed, new.created),
            "updated": max(old.updated, new.created),
        }
    )
