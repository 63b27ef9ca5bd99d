"""Comparison of texts: which are merged, and how similar ones are related."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from perdure.worker.memory.comparison import relation
from perdure.worker.memory.text import has_words, normal

PAIRS = Path(__file__).parent / "pairs"
LABELS = ("same", "opposite", "value", "other")


@pytest.mark.parametrize(
    ("old", "new", "related"),
    [
        ("The customer does want EU data", "The customer does not want EU data", "conflicts"),
        ("The user likes mail", "The user dislikes mail", "conflicts"),
        ("Feature flags are enabled", "Feature flags are disabled", "conflicts"),
        ("The firewall allows port 22", "The firewall denies port 22", "conflicts"),
        ("Der Dienst ist erreichbar", "Der Dienst ist nicht erreichbar", "conflicts"),
        ("use redis, not kafka", "use kafka, not redis", "conflicts"),
        ("The limit is 10", "The limit is 12", "supersedes"),
        ("The timeout is 10 ms", "The timeout is 10 s", "supersedes"),
        ("It retries three times", "It retries four times", "supersedes"),
        ("The seat costs 5 €", "The seat costs 5 $", "supersedes"),
        ("Deploys are frozen on Fridays", "Deploys are frozen on Mondays", "supersedes"),
        ("Deadline: 2026-01-01", "Deadline: 2026-02-01", "supersedes"),
        ("The CEO is Alice", "The CEO is Bob", "supersedes"),
        ("The service runs on C#", "The service runs on C++", "supersedes"),
        # about different things, or nothing that is recognised
        ("Alice prefers tea", "Bob prefers tea", None),
        ("Alice reports to Bob", "Bob reports to Alice", None),
        ("Order 17 is paid", "Order 18 is paid", None),
        ("The limit is ten", "The limit is 10", None),
        ("cats sleep", "felines doze", None),
        ("She sent it today", "She sent unit today", None),  # what follows a prefix must be a word
    ],
)
def test_relation_of_similar_texts(old: str, new: str, related: str | None) -> None:
    assert relation(old, new) == related


def judged(name: str) -> Counter[tuple[str, str]]:
    """Return how often pairs of each label were merged, linked, or kept without a link."""
    found: Counter[tuple[str, str]] = Counter()
    for line in (PAIRS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            label, old, new = line.split(" | ")
            assert label in LABELS
            result = "merged" if normal(old) == normal(new) else relation(old, new) or "kept"
            found[label, result] += 1
    assert found.total() > 60
    return found


@pytest.mark.parametrize(("name", "linked", "wrongly"), [("tuning", 38, 0), ("held_out", 40, 3)])
def test_no_pair_of_different_statements_is_merged(name: str, linked: int, wrongly: int) -> None:
    """Few pairs with the same statement are merged. An unrecognised pair loses nothing: the store keeps both."""
    found = judged(name)
    assert {label for label, result in found if result == "merged"} == {"same"}
    assert found["same", "merged"] == 5
    right = found["opposite", "conflicts"] + found["value", "supersedes"]
    assert right == linked
    assert found.total() - right - found["same", "merged"] - sum(found[one, "kept"] for one in LABELS) == wrongly


@pytest.mark.parametrize(
    ("asked", "found"),
    [(["eu", "data"], True), (["data"], True), (["eu", "data", "centre"], False), (["eur"], False), ([], False)],
)
def test_a_text_has_the_words_that_were_asked_for(asked: list[str], found: bool) -> None:
    assert has_words("EU: data", asked) is found
