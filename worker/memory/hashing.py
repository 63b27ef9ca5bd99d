"""An embedder that needs no model: it knows spellings, not meanings."""

from __future__ import annotations

import hashlib
from typing import Final

from .wording import words

__all__ = ["HashingEmbedder"]

_GRAM: Final = 3


class HashingEmbedder:
    """Words and their three-letter parts, hashed into a vector (Weinberger et al., "Feature Hashing", ICML 2009).

    Deterministic, fast and without any dependency. It finds inflections, misspellings and rewordings that share their
    words, and nothing that is said in other words: for that, an embedding model is needed.
    """

    def __init__(self, dimension: int = 512) -> None:
        self.dimension = dimension
        self.name = "perdure-hashing-1"

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> list[float]:
        vector = [0.0] * self.dimension
        for word in words(text):
            edged = f"<{word}>"
            grams = [edged[at : at + _GRAM] for at in range(len(edged) - _GRAM + 1)]
            share = 1 / max(1, len(grams))
            for feature, weight in ((edged, 1.0), *((gram, share) for gram in grams)):
                hashed = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")
                vector[(hashed >> 1) % self.dimension] += weight if hashed & 1 else -weight
        return vector
