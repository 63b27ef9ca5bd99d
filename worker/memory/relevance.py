"""Relevance: which memories with a vector near the query's match it."""

from __future__ import annotations

from collections.abc import Sequence

from .backend import Near
from .embedders import Embedder, Vector, embed
from .text import UNRELATED


def relevant(near: Sequence[Near], floor: float) -> list[Near]:
    """Return the memories that match: above the floor, and in the upper half between it and the best similarity.

    One threshold is too low for a query with a clear answer and too high for one without, so a good result raises it.

    Args:
        near: Memories, the most similar first.
        floor: Similarity up to which a memory is unrelated. Orthogonal and opposite vectors always are.
    """
    if not near:
        return []
    floor = max(0.0, floor)
    least = (floor + near[0].similarity) / 2
    return [one for one in near if one.similarity > floor and one.similarity >= least]


async def calibrated_floor(embedder: Embedder) -> float:
    """Return the embedder's `floor`; without one, the largest similarity among 16 unrelated sentences."""
    known = getattr(embedder, "floor", None)
    if isinstance(known, int | float):
        return float(known)
    vectors = [vector for vector in await embed(embedder, list(UNRELATED)) if vector is not None]
    return max((_cosine(one, other) for at, one in enumerate(vectors) for other in vectors[:at]), default=0.0)


def _cosine(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
