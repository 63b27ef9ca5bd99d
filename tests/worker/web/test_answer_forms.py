"""Forms of answers: fields from schemas of pydantic models, and the answers of submitted forms."""

from __future__ import annotations

import datetime
import decimal
import enum
from typing import Annotated, Any, Literal

import pytest
from perdure.worker.durable.spending import BudgetDecision
from perdure.worker.web.answer_forms import InvalidForm, make_form, read_answer
from pydantic import BaseModel, Field, TypeAdapter


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    z: int


class Everything(BaseModel):
    approved: bool
    note: str = ""
    amount: int | None = None
    price: float = Field(1.5, ge=0, le=10, description="Price of one.")
    colour: Colour = Colour.RED
    size: Literal["s", "m"]
    day: datetime.date
    exact: decimal.Decimal
    code: Annotated[str, Field(max_length=3)]
    inner: Inner


def form_of(kind: Any) -> Any:
    return make_form(TypeAdapter(kind).json_schema())


def test_fields_follow_the_types_of_a_flat_model() -> None:
    form = form_of(Everything)
    assert [(one.property, one.kind, one.required) for one in form.fields] == [
        ("approved", "boolean", True),
        ("note", "long_text", False),
        ("amount", "integer", False),
        ("price", "number", False),
        ("colour", "choice", False),
        ("size", "choice", True),
        ("day", "date", True),
        ("exact", "text", True),
        ("code", "text", True),
        ("inner", "json", True),
    ]
    price, colour = form.fields[3], form.fields[4]
    assert (price.label, price.help, price.value) == ("Price", "Price of one.", "1.5")
    assert price.hint == "A number, with a point before decimals. At least 0, at most 10."
    assert [(one.value, one.label) for one in colour.options] == [('"red"', "red"), ('"blue"', "blue")]


GIVEN = {
    "f0": "true",
    "f1": "",
    "f2": "",
    "f3": "2",
    "f4": '"blue"',
    "f5": '"m"',
    "f6": "2026-11-27",
    "f7": "0.10",
    "f8": "abc",
    "f9": '{"z": 1}',
}


def test_a_submitted_form_is_an_answer_of_the_model() -> None:
    answer = read_answer(form_of(Everything), GIVEN)
    assert answer == {
        "approved": True,
        "price": 2,
        "colour": "blue",
        "size": "m",
        "day": "2026-11-27",
        "exact": "0.10",
        "code": "abc",
        "inner": {"z": 1},
    }
    assert Everything.model_validate(answer).exact == decimal.Decimal("0.10")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("f0", "", "choose one"),
        ("f0", "perhaps", "must be one of the values of the list"),
        ("f2", "1.5", "must be a whole number, got '1.5'"),
        ("f3", "eleven", "must be a number such as 1.50, got 'eleven'"),
        ("f3", "1e999", "must be a number below 1e308, got '1e999'"),
        ("f3", "11", "the value does not fit 'maximum': 10"),
        ("f6", "27.11.2026", "must be a date such as 2026-11-27, got '27.11.2026'"),
        ("f8", "abcd", "the value does not fit 'maxLength': 3"),
        ("f9", "{", "must be JSON: EOF"),
        ("f9", '{"z": "x"}', 'z: the value is not of type "integer"'),
        ("f9", "NaN", "must be JSON"),
    ],
)
def test_a_problem_is_beside_its_field(name: str, text: str, problem: str) -> None:
    with pytest.raises(InvalidForm) as refused:
        read_answer(form_of(Everything), GIVEN | {name: text})
    wrong = {one.name: one.problem for one in refused.value.form.fields if one.problem}
    assert list(wrong) == [name]
    assert wrong[name].startswith(problem)
    assert refused.value.form.problems == ()
    kept = {one.name: one.value for one in refused.value.form.fields}
    assert kept == GIVEN | {name: text}, "nothing that was typed is lost"


def test_yes_and_no_are_buttons() -> None:
    form = form_of(bool)
    assert (form.fields, [one.label for one in form.buttons]) == ((), ["Yes", "No"])
    assert read_answer(form, {"chosen": "false"}) is False
    with pytest.raises(InvalidForm) as refused:
        read_answer(form, {"chosen": "1"})
    assert refused.value.form.problems == ("choose Yes or No",)


def test_a_constant_beside_a_model_is_a_button() -> None:
    """As in a question about a used-up budget."""
    form = form_of(BudgetDecision)
    assert [one.property for one in form.fields] == ["tokens", "usd", "steps", "seconds"]
    assert [one.label for one in form.buttons] == ["deny"]
    assert read_answer(form, {"chosen": '"deny"'}) == "deny"
    assert read_answer(form, {"f0": "", "f1": "2.5", "f2": "", "f3": ""}) == {"usd": 2.5}
    with pytest.raises(InvalidForm) as refused:
        read_answer(form, {"f0": "", "f1": "", "f2": "", "f3": ""})
    assert refused.value.form.problems


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (str, "", ""),
        (str, " a\n", " a\n"),
        (int, "12345678901234567890123", 12345678901234567890123),
        (int | None, "", None),
        (list[str], '["a"]', ["a"]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (int | list[int], "[1]", [1]),
    ],
)
def test_one_value_is_one_field(kind: Any, text: str, answer: Any) -> None:
    [known] = form_of(kind).fields
    assert (known.name, known.property) == ("f0", None)
    assert read_answer(form_of(kind), {"f0": text} if answer is not None else {"chosen": "null"}) == answer


def test_a_question_without_a_schema_takes_any_json() -> None:
    form = make_form(None)
    assert [one.kind for one in form.fields] == ["json"]
    assert read_answer(form, {"f0": "[1, null]"}) == [1, None]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$ref": 1},
        {"type": "object", "properties": 3},
        {"type": "object", "properties": {"a": 3}},
        {"type": "object", "properties": {str(number): {} for number in range(500)}},
        {"anyOf": 7},
        {"anyOf": [1, None]},
        {"enum": []},
        {"enum": [[1], {"a": None}]},
        {"type": ["string", "null"], "title": 5, "description": [], "maxLength": "x"},
        {"required": {"a": 1}, "type": "object", "properties": {"a": {"type": "string", "default": {}}}},
    ],
)
def test_a_schema_of_another_form_still_has_a_form(schema: dict[str, Any]) -> None:
    """Schemas are read from Redis, where any program may have written."""
    form = make_form(schema)
    assert form.fields or form.buttons
    try:
        read_answer(form, {"f0": "1"})
    except InvalidForm as error:
        assert error.form.invalid
