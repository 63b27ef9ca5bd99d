"""Shortening of a handoff document to a number of tokens. The least important parts go first and are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from .document import Handoff

Counter = Callable[[str], int]
"""Function that returns the number of tokens of a text."""

HANDOFF_TOKENS: Final = 1500
"""Default limit of a handoff document in tokens."""


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text: one per four ASCII characters, and one per other character.

    For most languages the estimate is slightly too high.
    """
    plain = len(text.encode("ascii", "ignore"))
    return -(-plain // 4) + len(text) - plain


def fitted(
    handoff: Handoff,
    budget: int = HANDOFF_TOKENS,
    *,
    count: Counter = estimated_tokens,
    form: Callable[[Handoff], str] = Handoff.to_markdown,
) -> Handoff:
    """Return the handoff with as little removed as makes its form fit into the budget.

    Args:
        budget: Largest number of tokens.
        count: Counts the tokens of a text.
        form: Form that has to fit.

    Returns:
        The longest version that fits; if none does, the shortest one, whose JSON has at most 2,400 characters.
    """
    if count(form(handoff)) <= budget:
        return handoff
    limits = list(_limits(handoff))
    low, high = 0, len(limits) - 1  # the last one is the barest; each leaves out more than the one before it
    while low < high:
        middle = (low + high) // 2
        if count(form(_cut(handoff, limits[middle]))) <= budget:
            high = middle
        else:
            low = middle + 1
    return _cut(handoff, limits[low])


def fitted_text(
    handoff: Handoff,
    budget: int = HANDOFF_TOKENS,
    *,
    count: Counter = estimated_tokens,
    form: Callable[[Handoff], str] = Handoff.to_markdown,
) -> str:
    """Return the handoff in a form, by default Markdown, with at most `budget` tokens."""
    return clipped(form(fitted(handoff, budget, count=count, form=form)), budget, count)


def clipped(text: str, budget: int, count: Counter = estimated_tokens) -> str:
    """Return the text, or as much of its beginning as fits."""
    if count(text) <= budget:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[:middle]) <= budget:
            low = middle
        else:
            high = middle - 1
    return text[:low]


_TEXT: Final = "text"
"""Limit of the length of any text in the document, in characters."""

_TIERS: Final[tuple[tuple[str, int], ...]] = (
    (_TEXT, 1000),
    ("completed", 30),
    ("later", 3),
    ("files", 20),
    ("artifacts", 10),
    ("discoveries", 20),
    ("alternatives", 0),
    ("decisions", 15),
    ("tools", 10),
    (_TEXT, 300),
    ("completed", 12),
    ("inbox", 8),
    ("later", 0),
    ("questions", 8),
    ("constraints", 8),
    ("promises", 10),
    ("files", 5),
    ("discoveries", 8),
    ("pending", 5),
    ("decisions", 6),
    ("artifacts", 0),
    ("tools", 0),
    (_TEXT, 120),
    ("files", 0),
    ("constraints", 3),
    ("inbox", 3),
    ("replaced", 3),
    ("discoveries", 2),
    ("attention", 5),
    ("in_progress", 3),
    ("in_flight", 3),
    ("in_doubt", 3),
    ("decisions", 2),
    ("promises", 3),
    ("pending", 1),
    (_TEXT, 60),
    ("completed", 0),
    ("questions", 0),
    ("discoveries", 0),
    ("constraints", 1),
    ("inbox", 1),
    ("waiting_on", 1),
    ("decisions", 0),
    ("attention", 1),
    ("in_progress", 1),
    ("in_flight", 1),
    ("in_doubt", 1),
    ("promises", 1),
    ("pending", 0),
    ("promises", 0),
    ("waiting_on", 0),
    ("replaced", 0),
    ("constraints", 0),
    ("inbox", 0),
    ("attention", 0),
    (_TEXT, 24),
    ("in_flight", 0),
    ("in_doubt", 0),
    ("in_progress", 0),
)
"""Limits in the order of their application, the least important kind first. The latest items of a kind stay longest."""

_FIRST: Final = frozenset(
    {"later", "pending", "attention", "in_progress", "in_flight", "in_doubt", "waiting_on", "promises", "tools"}
)
"""Kinds whose first items matter most; of the other kinds the latest items do."""

_NESTED: Final = frozenset({"tools", "in_flight", "in_doubt"})

_WHOLE: Final = frozenset({"session", "to", "why", "left_out"})
_WHOLE_OF_PARTS: Final = frozenset({"key", "idempotency_key", "wait"})
"""Fields of a document and of its parts that are never shortened."""


def _limits(handoff: Handoff) -> Iterator[Mapping[str, int]]:
    """Yield ever stricter limits, by kind. Each has one for the length of texts."""
    current: dict[str, int] = {}
    for kind, target in _TIERS:
        if kind in (_TEXT, "alternatives"):
            current[kind] = target
            yield dict(current)
            continue
        had = current.get(kind, len(_items(handoff, kind)))
        for left in range(had - 1, target - 1, -1):
            current[kind] = left
            yield dict(current)


def _items(handoff: Handoff, kind: str) -> tuple[Any, ...]:
    found: tuple[Any, ...] = getattr(handoff.dependencies if kind in _NESTED else handoff, kind)
    return found


def _cut(handoff: Handoff, limits: Mapping[str, int]) -> Handoff:
    left_out = dict(handoff.left_out)
    data = handoff.model_dump()
    for kind, most in limits.items():
        if kind in (_TEXT, "alternatives"):
            continue
        place = data["dependencies"] if kind in _NESTED else data
        items = place[kind]
        if len(items) > most:
            left_out[kind] = left_out.get(kind, 0) + len(items) - most
            place[kind] = items[:most] if kind in _FIRST else items[len(items) - most :]
    if "alternatives" in limits:
        for made in data["decisions"]:
            gone = len(made["alternatives"])
            left_out["alternatives"] = left_out.get("alternatives", 0) + gone
            made["alternatives"] = ()
    data = {name: value if name in _WHOLE else _shortened(value, limits[_TEXT]) for name, value in data.items()}
    return Handoff.model_validate({**data, "left_out": {kind: count for kind, count in left_out.items() if count}})


def _shortened(value: Any, most: int) -> Any:
    """Return the same data with every text cut to a length."""
    match value:
        case str():
            return value if len(value) <= most else value[: most - 1] + "…"
        case dict():
            return {name: one if name in _WHOLE_OF_PARTS else _shortened(one, most) for name, one in value.items()}
        case list() | tuple():
            return tuple(_shortened(one, most) for one in value)
    return value
