"""JSON form of what JSON or UTF-8 cannot express: the numbers that are not finite, and half of a surrogate pair."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
from perdure.queues.json_form import as_json, without_surrogates
from pydantic import BaseModel

HALF = "a\ud83d"
CLEAN = "a\ufffd"


class Answer(BaseModel):
    text: str = HALF
    more: Any = None


@dataclass(frozen=True)
class Part:
    text: str


Pair = namedtuple("Pair", "one two")  # noqa: PYI024 - a plain one


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        (HALF, CLEAN),
        ({HALF: [HALF, 1]}, {CLEAN: [CLEAN, 1]}),
        ((HALF, {HALF}), (CLEAN, {CLEAN})),
        (Pair(HALF, 1), Pair(CLEAN, 1)),
        (Answer.model_construct(more=[Part(HALF)]), Answer(text=CLEAN, more=[Part(CLEAN)])),
    ],
)
def test_half_of_a_pair_is_replaced_wherever_it_is(value: Any, clean: Any) -> None:
    assert without_surrogates(value) == clean
    assert type(without_surrogates(value)) is type(clean)
    assert as_json(value) == as_json(clean)


@pytest.mark.parametrize("value", ["\U0001f600é", {"a": [1, ("b", {"c"})]}, Pair(1, 2), Part("a"), Answer(text="x"), 1.5])
def test_a_value_without_one_stays_the_same_object(value: Any) -> None:
    assert without_surrogates(value) is value


def test_numbers_that_are_not_finite_are_stored_by_name() -> None:
    assert as_json({"a": [float("nan"), float("inf"), float("-inf")]}) == b'{"a":["NaN","Infinity","-Infinity"]}'
