"""Several rankings of the same things made into one.

Reciprocal rank fusion: G. V. Cormack, C. L. A. Clarke, S. Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and
individual Rank Learning Methods", SIGIR 2009. It needs ranks only, so that a bm25 and a cosine, which have no common
scale, can be put together; k = 60 is the authors' constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["RANK_CONSTANT", "fuse"]

RANK_CONSTANT: Final = 60


def fuse(rankings: Iterable[Sequence[str]]) -> dict[str, float]:
    """The score of each id: the sum of 1 / (60 + rank) over the rankings that it is in, ranks from 1."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, one in enumerate(ranking, 1):
            scores[one] = scores.get(one, 0.0) + 1 / (RANK_CONSTANT + rank)
    return scores
