"""Pages of lists that are read as a whole: those of registries, which are bounded."""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import Field

from .operation import MAX_LIMIT, Inputs
from .problems import Problem

T = TypeVar("T")


class PageInputs(Inputs):
    """Inputs of an operation that returns a page."""

    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Most items of the page.")
    cursor: str | None = Field(None, max_length=2000, description="Cursor of the page before, its `next`.")


def page_of(items: Sequence[T], name_of: Callable[[T], str], given: PageInputs) -> tuple[list[T], str | None]:
    """Return the items of a page, and the cursor of the next one. items: sorted by name.

    Items that come or go between two pages neither repeat nor hide others: the cursor is the last name.

    Raises:
        Problem: The cursor is not one of this list.
    """
    after = None if given.cursor is None else _name(given.cursor)
    left = [item for item in items if after is None or name_of(item) > after]
    shown = left[: given.limit]
    return shown, _cursor(name_of(shown[-1])) if len(left) > len(shown) else None


def _cursor(name: str) -> str:
    return urlsafe_b64encode(name.encode("utf-8", "surrogatepass")).decode()


def _name(cursor: str) -> str:
    try:
        return b64decode(cursor.encode(), b"-_", validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        raise Problem(422, "invalid-cursor", f"cursor must be the `next` of a page, got {cursor[:80]!r}") from None
