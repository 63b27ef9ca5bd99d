"""Embedders: what turns texts into vectors that lie close together where their meanings do.

An embedder that needs no model: it knows spellings, not meanings.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import anyio.to_thread

from ..errors import ConfigurationError
from .errors import EmbedderFailed
from .text import words

__all__ = ["Embedder", "HashingEmbedder", "Vector", "embed", "load_embedder"]

Vector = list[float]
"""Of length 1, so that a product is a cosine."""


@runtime_checkable
class Embedder(Protocol):
    """Turns texts into vectors. `embed` may be async; where it is not, it is called in a thread, which nobody waits for
    once the run that asked has ended.

    name: tells this embedder from others, such as the model's name with its version; vectors of two embedders cannot
    be compared. dimension: numbers in a vector.
    """

    @property
    def name(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    def embed(self, texts: list[str], /) -> Sequence[Sequence[float]] | Awaitable[Sequence[Sequence[float]]]:
        """One vector for each text, in their order."""
        ...


async def embed(embedder: Embedder, texts: list[str]) -> list[Vector | None]:
    """One vector of length 1 for each text; None where the embedder sees nothing in it (a vector of zeros).

    Raises `EmbedderFailed` where it raises, or returns anything else.
    """
    try:
        if inspect.iscoroutinefunction(embedder.embed):
            found: Any = await embedder.embed(texts)
        else:
            found = await anyio.to_thread.run_sync(embedder.embed, texts, abandon_on_cancel=True)
            if inspect.isawaitable(found):
                found = await found
        vectors = [[float(number) for number in vector] for vector in found]
    except Exception as error:  # it is the user's, and may raise anything
        raise EmbedderFailed(embedder.name, f"{type(error).__name__}: {error}") from error
    if len(vectors) != len(texts):
        raise EmbedderFailed(embedder.name, f"returned {len(vectors)} vectors for {len(texts)} texts")
    return [_unit(embedder, vector) for vector in vectors]


def _unit(embedder: Embedder, vector: Vector) -> Vector | None:
    if len(vector) != embedder.dimension:
        raise EmbedderFailed(
            embedder.name, f"returned a vector of {len(vector)} dimensions, and says it has {embedder.dimension}"
        )
    length = math.hypot(*vector)
    if not math.isfinite(length):
        raise EmbedderFailed(embedder.name, "returned a vector with a number that is infinite or none")
    return [number / length for number in vector] if length else None


def load_embedder(target: str) -> Embedder:
    """The embedder that `module:attribute` names: an object, or what makes one when it is called without arguments.

    Modules of the working directory count too. Raises `ConfigurationError`.
    """
    module, colon, attribute = target.partition(":")
    if not module or not colon or not attribute:
        raise ConfigurationError(f"PERDURE_EMBEDDER is module:attribute, not {target!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any
    try:
        found = getattr(importlib.import_module(module), attribute)
        if inspect.isclass(found) or not isinstance(found, Embedder):
            found = found()
    except Exception as error:
        raise ConfigurationError(f"PERDURE_EMBEDDER {target}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Embedder) or found.dimension < 1:
        raise ConfigurationError(f"PERDURE_EMBEDDER {target}: an embedder has a name, a dimension and embed(texts)")
    return found


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
