"""Conditions on arguments: names, fields, texts and JSON values."""

import pytest
from perdure.queues.argument_conditions import MAX_CONDITION, ArgumentCondition, all_match


@pytest.mark.parametrize(
    ("condition", "arguments", "expected"),
    [
        ("tenant=acme", {"tenant": "acme"}, True),
        ("tenant=acme", {"tenant": "Acme"}, False),
        ("tenant=acme", {}, False),
        ("tenant=42", {"tenant": "42"}, True),
        ("tenant=42", {"tenant": 42}, True),
        ("tenant=42.0", {"tenant": 42}, True),
        ('tenant="42"', {"tenant": 42}, False),
        ('tenant="42"', {"tenant": "42"}, True),
        ("urgent=true", {"urgent": True}, True),
        ("urgent=1", {"urgent": True}, False),
        ("urgent=null", {"urgent": None}, True),
        ("query=a=b", {"query": "a=b"}, True),
        ("query=", {"query": ""}, True),
        ("options.depth=3", {"options": {"depth": 3}}, True),
        ("options.depth=3", {"options": 3}, False),
        ("options.depth=3", {"options": [3]}, False),
        ("tags=[1, 2]", {"tags": [1, 2]}, True),
    ],
)
def test_a_condition_compares_a_text_or_a_json_value(
    condition: str, arguments: dict[str, object], expected: bool
) -> None:
    assert ArgumentCondition.parse(condition).matches(arguments) is expected


@pytest.mark.parametrize("given", ["", "tenant", "=acme", "options.=3", "." * 3, "a=" + "x" * MAX_CONDITION])
def test_what_is_no_condition_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="must"):
        ArgumentCondition.parse(given)


def test_all_conditions_must_be_fulfilled() -> None:
    conditions = [ArgumentCondition.parse("tenant=acme"), ArgumentCondition.parse("depth=3")]
    assert all_match(conditions, {"tenant": "acme", "depth": 3})
    assert not all_match(conditions, {"tenant": "acme", "depth": 4})
    assert str(conditions[0]) == "tenant=acme"
