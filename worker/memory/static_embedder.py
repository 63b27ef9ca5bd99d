"""Embedder of the extra `embeddings`: a static embedding model that needs neither a network nor a GPU.

The wheel of wordllama has the weights and the tokenizer of its model `l2_supercat` with 256 dimensions. This module
reads these two files itself: the package's own loader looks for the tokenizer in another folder and then downloads it,
and its import configures the logging of the process.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigurationError

__all__ = ["WordLlamaEmbedder"]

_WEIGHTS: Final = "weights/l2_supercat_256.safetensors"
_TOKENIZER: Final = "tokenizers/l2_supercat_tokenizer_config.json"


class WordLlamaEmbedder:
    """Static embeddings of wordllama: a text's vector is the mean of those of its tokens.

    It finds related words, and ignores their order. `floor` was measured, see tests/evaluation/test_memory_recall.py.
    """

    name = "wordllama-l2-supercat-256"
    dimension = 256
    floor = 0.2

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

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> list[float]:
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not tokens:
            return [0.0] * self.dimension
        mean: list[float] = self._rows[tokens].mean(axis=0, dtype="float32").tolist()
        return mean
