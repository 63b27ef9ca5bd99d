"""Embedder of the extra `embeddings`: a static embedding model that needs neither a network nor a GPU.

The wheel of wordllama has the weights and the tokenizer of its model `l2_supercat` with 256 dimensions. This module
reads these two files itself: the package's own loader looks for the tokenizer in another folder and then downloads it,
and its import configures the logging of the process.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...queues.errors import ConfigurationError
from .text import UNRELATED

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
