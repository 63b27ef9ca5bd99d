"""Floor of relevance: the similarity from which a vector counts as a match, calibrated per embedder."""

from __future__ import annotations

from typing import Final

from .embedders import Embedder, Vector, embed

__all__ = ["calibrated_floor"]

_UNRELATED: Final = (
    "The invoice of March was paid by bank transfer",
    "Whales breathe air at the surface of the sea",
    "Restart the web server after changing its certificate",
    "She plays the violin in a small orchestra",
    "The bridge is closed to trucks because of repairs",
    "Add two eggs and a cup of flour to the dough",
    "Our football team lost the final in overtime",
    "The patient takes one tablet before breakfast",
    "Volcanic soil is good for growing wine",
    "A passport is needed to enter the country",
    "The battery of the old phone lasts four hours",
    "Children under six travel free on the train",
    "The court rejected the appeal of the tenant",
    "Paint the wall only when the plaster is dry",
    "Quantum states collapse when they are measured",
    "The shop sells handmade leather shoes",
)


async def calibrated_floor(embedder: Embedder) -> float:
    """Return the embedder's `floor`; without one, the largest similarity among 16 unrelated sentences."""
    known = getattr(embedder, "floor", None)
    if isinstance(known, int | float):
        return float(known)
    vectors = [vector for vector in await embed(embedder, list(_UNRELATED)) if vector is not None]
    return max((_cosine(one, other) for at, one in enumerate(vectors) for other in vectors[:at]), default=0.0)


def _cosine(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
