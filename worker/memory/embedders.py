"""Embedders: functions from texts to vectors that are close if the texts have similar meanings.

`HashingEmbedder` needs no model; it compares spellings, not meanings.

Embedder of the extra `embeddings`: a static embedding model that needs neither a network nor a GPU.

The wheel of wordllama has the weights and the tokenizer of its model `l2_supercat` with 256 dimensions. This module
reads these two files itself: the package's own loader looks for the tokenizer in another folder and then downloads it,
and its import configures the logging of the process.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Awaitable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import anyio.to_thread

from ...deadletter.error_text import error_text
from ...queues.errors import ConfigurationError
from ..errors import EmbedderFailed
from .text import UNRELATED, content_words, words

Vector = list[float]
"""Vector of length 1, so that a dot product is a cosine."""


@runtime_checkable
class Embedder(Protocol):
    """Function from texts to vectors.

    `embed` may be async; if it is not, it runs in a thread, which is abandoned when the run that called it ends.

    Attributes:
        name: Identifies the embedder, such as the model's name with its version. Vectors of two embedders cannot be
            compared.
        dimension: Length of a vector.

    An attribute `floor` sets the similarity from which a memory matches a query. Without one it is calibrated, see
    hybrid.py.
    """

    @property
    def name(self) -> str:
        """Name of the model: memories are compared only with vectors of the same one."""
        ...

    @property
    def dimension(self) -> int:
        """Number of components of a vector."""
        ...

    def embed(self, texts: list[str], /) -> Sequence[Sequence[float]] | Awaitable[Sequence[Sequence[float]]]:
        """Return one vector per text, in the same order."""
        ...


def _embed(embedder: Embedder, texts: list[str]) -> Any:
    """Call `embed` in a thread."""
    try:
        return embedder.embed(texts)
    except GeneratorExit as error:  # thrown into a coroutine, it would close it
        raise RuntimeError("it raised GeneratorExit, which only the close() of a generator may raise") from error


async def embed(embedder: Embedder, texts: list[str]) -> list[Vector | None]:
    """Return one vector of length 1 per text; None if the embedder returned a vector of zeros.

    Raises `EmbedderFailed` if the embedder raises or returns anything else.
    """
    try:
        if inspect.iscoroutinefunction(embedder.embed):
            found: Any = await embedder.embed(texts)
        else:
            found = await anyio.to_thread.run_sync(_embed, embedder, texts, abandon_on_cancel=True)
            if inspect.isawaitable(found):
                found = await found
        vectors = [[float(number) for number in vector] for vector in found]
    except Exception as error:  # a user's embedder may raise anything
        raise EmbedderFailed(embedder.name, f"{type(error).__name__}: {error_text(error)}") from error
    if len(vectors) != len(texts):
        raise EmbedderFailed(embedder.name, f"returned {len(vectors)} vectors for {len(texts)} texts")
    return [_unit(embedder, vector) for vector in vectors]


def _unit(embedder: Embedder, vector: Vector) -> Vector | None:
    if len(vector) != embedder.dimension:
        raise EmbedderFailed(
            embedder.name, f"returned a vector with {len(vector)} dimensions instead of {embedder.dimension}"
        )
    length = math.hypot(*vector)
    if not math.isfinite(length):
        raise EmbedderFailed(embedder.name, "returned a vector with an infinite number or NaN")
    return [number / length for number in vector] if length else None


def load_embedder(target: str) -> Embedder:
    """Return the embedder that `module:attribute` names: an object, or a function without arguments that returns one.

    `wordllama` names the model of the extra `embeddings`. Modules in the working directory can be imported too. Raises
    `ConfigurationError`.
    """
    if target == "wordllama":
        return WordLlamaEmbedder()
    module, colon, attribute = target.partition(":")
    if not module or not colon or not attribute:
        raise ConfigurationError(f"PERDURE_EMBEDDER must be wordllama or module:attribute, got {target!r}")
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
        raise ConfigurationError(f"PERDURE_EMBEDDER {target}: it must have a name, a dimension and embed(texts)")
    return found


_GRAM: Final = 3


class HashingEmbedder:
    """Embedder that hashes words and their trigrams into a vector (Weinberger et al., "Feature Hashing", ICML 2009).

    It is deterministic, fast and has no dependencies. It finds inflections, misspellings and rewordings that share
    words. Finding the same meaning in other words needs an embedding model.
    """

    floor = 0.2

    def __init__(self, dimension: int = 512) -> None:
        self.dimension = dimension
        self.name = "perdure-hashing-2"

    def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text, in the same order."""
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> list[float]:
        vector = [0.0] * self.dimension
        for word in content_words(text) or words(text):
            edged = f"<{word}>"
            grams = [edged[at : at + _GRAM] for at in range(len(edged) - _GRAM + 1)]
            share = 1 / max(1, len(grams))
            for feature, weight in ((edged, 1.0), *((gram, share) for gram in grams)):
                hashed = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")
                vector[(hashed >> 1) % self.dimension] += weight if hashed & 1 else -weight
        return vector


_WEIGHTS: Final = "weights/l2_supercat_256.safetensors"
_TOKENIZER: Final = "tokenizers/l2_supercat_tokenizer_config.json"


class WordLlamaEmbedder:
    """Static embeddings of wordllama: a text's vector is the mean of those of its tokens, in lower case.

    It finds related words, and ignores their order. The direction that all texts have in common is removed, so that
    unrelated texts are orthogonal (S. Arora, Y. Liang, T. Ma, "A Simple but Tough-to-Beat Baseline for Sentence
    Embeddings", ICLR 2017). `floor` was measured, see tests/evaluation/test_memory_recall.py.
    """

    name = "wordllama-l2-supercat-256-2"
    dimension = 256
    floor = 0.24

    def __init__(self) -> None:
        """Load the model. Raises `ConfigurationError` if the extra is not installed, or lacks the files."""
        spec = find_spec("wordllama")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigurationError("embeddings need the package wordllama: pip install 'perdure[embeddings]'")
        folder = Path(spec.submodule_search_locations[0])
        for file in (_WEIGHTS, _TOKENIZER):
            if not (folder / file).is_file():
                raise ConfigurationError(
                    f"the installed wordllama has no file {file}: pip install --force-reinstall 'perdure[embeddings]'"
                )
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / _TOKENIZER))
        self._tokenizer.no_truncation()
        self._rows: Any = load_file(folder / _WEIGHTS)["embedding.weight"]

        self._common = self._mean("")
        for text in UNRELATED:
            self._common += self._mean(text)
        self._common /= (self._common @ self._common) ** 0.5

    def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text, in the same order."""
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> list[float]:
        mean = self._mean(text)
        vector: list[float] = (mean - (mean @ self._common) * self._common).tolist()
        return vector

    def _mean(self, text: str) -> Any:
        """Return the mean of the vectors of a text's tokens, with length 1, or zeros if it has none."""
        tokens = self._tokenizer.encode(text.casefold(), add_special_tokens=False).ids
        mean = self._rows[tokens].sum(axis=0, dtype="float32")
        length = float(mean @ mean) ** 0.5
        return mean / length if length else mean
