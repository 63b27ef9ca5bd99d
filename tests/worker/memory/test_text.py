"""Normal form of texts, by which memories are merged, and their words."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure.worker.memory.text import contradict, has_words, normal

PAIRS = Path(__file__).parent / "pairs"


@pytest.mark.parametrize("name", ["tuning", "held_out"])
def test_no_pair_of_different_statements_is_merged(name: str) -> None:
    """Few pairs with the same statement are merged. The others lose nothing: the store keeps both."""
    lines = (PAIRS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" | ") for line in lines if not line.startswith("#")]
    assert len(pairs) > 60
    merged = [label for label, old, new in pairs if normal(old) == normal(new)]
    assert merged == ["same"] * 5


@pytest.mark.parametrize(("name", "number"), [("tuning", 21), ("held_out", 18)])
def test_only_opposite_statements_contradict_each_other(name: str, number: int) -> None:
    """About two thirds of the opposite pairs are found, and none of the others."""
    lines = (PAIRS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" | ") for line in lines if not line.startswith("#")]
    found = [label for label, one, other in pairs if contradict(one, other)]
    assert found == [label for label, one, other in pairs if contradict(other, one)]
    assert found == ["opposite"] * number


@pytest.mark.parametrize(
    ("one", "other", "opposite"),
    [
        ("The customer wants EU data", "The customer doesn\u2019t want EU data", True),
        ("You can't deploy", "You can deploy", True),
        ("It won't work", "It will work", True),
        ("It does not work", "It doesn't work", False),
        ("None never answered", "None answered", True),
        ("It runs on C#", "It does not run on C", False),
        ("not", "never", False),
        ("", "not", False),
        ("a" * 1001, "not " + "a" * 1001, False),
    ],
)
def test_a_negation_makes_a_statement_the_opposite(one: str, other: str, opposite: bool) -> None:
    assert contradict(one, other) is opposite


@pytest.mark.parametrize(
    ("asked", "found"),
    [(["eu", "data"], True), (["data"], True), (["eu", "data", "centre"], False), (["eur"], False), ([], False)],
)
def test_a_text_has_the_words_that_were_asked_for(asked: list[str], found: bool) -> None:
    assert has_words("EU: data", asked) is found
