"""Words: what makes two texts the same, and what of a query is looked for."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Final

__all__ = ["digest", "normal", "words"]

_MOST_WORDS: Final = 64
"""Of a query. More say nothing more, and a long text given as query stays cheap."""

_WORD = re.compile(r"[^\W_]+")

# What ends and wraps words, where it does so: "C#", "1.5", "-5", ".5" and "don't" keep theirs, and a question is no
# statement.
_AROUND = re.compile(r"""(?!(?<=\w).(?=\w))(?![.,]\d)[.,;:!"'`´()\[\]{}«»„“”‘’…]""")  # noqa: RUF001 - quotation marks
_SPACE = re.compile(r"\s+")


def normal(text: str) -> str:
    """The text without what does not change its meaning: form of characters (NFKC), case, spaces, end marks."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    bare = _SPACE.sub(" ", _AROUND.sub(" ", folded)).strip()
    return bare or folded.strip()


def digest(text: str) -> str:
    """By which two texts are known to be the same."""
    return hashlib.blake2b(normal(text).encode(), digest_size=16).hexdigest()


def words(query: str) -> list[str]:
    """The words of a query, each once, as letters and digits only: no operator of any query language is among them."""
    folded = unicodedata.normalize("NFKC", query).casefold()
    return list(dict.fromkeys(_WORD.findall(folded)))[:_MOST_WORDS]
