"""Two memories that are the same become one."""

from __future__ import annotations

from typing import Final

from .memory import Memory
from .wording import normal

__all__ = ["merged"]

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
