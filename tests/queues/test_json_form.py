"""JSON form of what JSON or UTF-8 cannot express."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from perdure.queues.json_form import as_json, encodable
from pydantic import BaseModel

HALF = "a\ud83d"
CLEAN = "a\ufffd"


class Answer(BaseModel):
    text: str = HALF
    more: Any = None


@dataclass(frozen=True)
class Part:
    text: str


Pair = namedtuple("Pair", "one two")


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
    assert encodable(value) == clean
    assert type(encodable(value)) is type(clean)
    assert as_json(value) == as_json(clean)


@pytest.mark.parametrize(
    "value", ["\U0001f600é", {"a": [1, ("b", {"c"})]}, Pair(1, 2), Part("a"), Answer(text="x"), 1.5]
)
def test_a_value_without_one_stays_the_same_object(value: Any) -> None:
    assert encodable(value) is value


def test_numbers_that_are_not_finite_are_stored_by_name() -> None:
    assert as_json({"a": [float("nan"), float("inf"), float("-inf")]}) == b'{"a":["NaN","Infinity","-Infinity"]}'


def nested(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = {"a": [inner]} if levels % 2 else {"a": inner}
    return inner


@pytest.mark.parametrize("levels", [300, 901, 5_000])
def test_a_part_that_is_nested_too_deeply_is_text(levels: int) -> None:
    value = nested(levels, HALF)
    data = as_json({"kept": HALF, "deep": value})
    kept = orjson.loads(data)
    assert kept["kept"] == CLEAN
    depth, part = 0, kept["deep"]
    while not isinstance(part, str):
        part = part["a"] if isinstance(part, dict) else part[0]
        depth += 1
    assert depth == 199
    assert part == "(nested too deeply)" or CLEAN in part
    assert encodable(nested(100)) == nested(100)
