"""Texts: their normal form, by which two are equal, and the words of a query."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Final

__all__ = ["digest", "normal", "words"]

_MOST_WORDS: Final = 64
"""Largest number of words in a query; more do not improve it, and a long text as a query stays cheap."""

_WORD = re.compile(r"[^\W_]+")

# Punctuation around words. "C#", "1.5", "-5", ".5" and "don't" keep theirs, and a question differs from a
# statement.
_AROUND = re.compile(r"""(?!(?<=\w).(?=\w))(?![.,]\d)[.,;:!"'`´()\[\]{}«»„“”‘’…]""")  # noqa: RUF001 - quotation marks
_SPACE = re.compile(r"\s+")


def normal(text: str) -> str:
    """Return the text without parts that do not change its meaning: character forms (NFKC), case, spaces, end marks."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    bare = _SPACE.sub(" ", _AROUND.sub(" ", folded)).strip()
    return bare or folded.strip()


def digest(text: str) -> str:
    """Return the hash by which equal texts are found."""
    return hashlib.blake2b(normal(text).encode(), digest_size=16).hexdigest()


def words(query: str) -> list[str]:
    """Return the distinct words of a query: letters and digits only, so none is an operator of a query language."""
    folded = unicodedata.normalize("NFKC", query).casefold()
    return list(dict.fromkeys(_WORD.findall(folded)))[:_MOST_WORDS]
