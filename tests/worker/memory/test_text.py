"""Normal form of texts, by which memories are merged, and their words."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure.worker.memory.text import has_words, normal

PAIRS = Path(__file__).parent / "pairs"


@pytest.mark.parametrize("name", ["tuning", "held_out"])
def test_no_pair_of_different_statements_is_merged(name: str) -> None:
    """Few pairs with the same statement are merged. The others lose nothing: the store keeps both."""
    lines = (PAIRS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" | ") for line in lines if not line.startswith("#")]
    assert len(pairs) > 60
    merged = [label for label, old, new in pairs if normal(old) == normal(new)]
    assert merged == ["same"] * 5


@pytest.mark.parametrize(
    ("asked", "found"),
    [(["eu", "data"], True), (["data"], True), (["eu", "data", "centre"], False), (["eur"], False), ([], False)],
)
def test_a_text_has_the_words_that_were_asked_for(asked: list[str], found: bool) -> None:
    assert has_words("EU: data", asked) is found
