"""Schemas that another process published: data within bounds, whatever they contain."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from perdure.queues.schemas import UnusableSchema, check_schema, find_problems

OUTSIDE = ["http://127.0.0.1:9/x", "file:///etc/hostname", "other.json", "//host/x", "urn:example:x", 5]


@pytest.mark.parametrize("reference", OUTSIDE)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef", "$recursiveRef", "$id", "$schema"])
def test_nothing_leads_out_of_the_document(keyword: str, reference: object) -> None:
    schemas: list[dict[str, Any]] = [
        {keyword: reference},
        {"properties": {"x": {keyword: reference}}},
        {"$defs": {"x": {"items": {"anyOf": [{keyword: reference}]}}}},
        {"contentSchema": {keyword: reference}},
        {"patternProperties": {"^a": {"not": {keyword: reference}}}},
    ]
    for schema in schemas:
        with pytest.raises(UnusableSchema, match=r"leaves the document|no address of its own|the dialect must be"):
            check_schema(schema)


def test_a_reference_leads_to_a_schema_and_not_to_data() -> None:
    for reference in ("#/default", "#/nowhere", "#/$defs", "#missing", "#/properties/x/enum/0"):
        schema: dict[str, Any] = {"$ref": reference, "properties": {"x": {"enum": [{}]}}}
        schema["default"] = {"$ref": "file:///etc/hostname"}
        with pytest.raises(UnusableSchema, match="leads to no schema of the document"):
            check_schema(schema)


def test_references_within_the_document_are_followed() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {
            "a/b c": {"type": "string"},
            "named": {"$anchor": "text", "type": "string"},
            "node": {"properties": {"next": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}},
        },
        "properties": {
            "pointer": {"$ref": "#/$defs/a~1b%20c"},
            "anchor": {"$ref": "#text"},
            "dynamic": {"$dynamicRef": "#text"},
            "list": {"$ref": "#/$defs/node"},
        },
    }
    arguments: dict[str, Any] = {"pointer": 1, "anchor": 1, "dynamic": 1, "list": {"next": {"next": {"value": "x"}}}}
    assert {problem.partition(":")[0] for problem in find_problems(schema, orjson.dumps(arguments))} == {
        "pointer",
        "anchor",
        "dynamic",
        "list.next.next.value",
    }


def doubled(levels: int) -> dict[str, Any]:
    """A schema each of whose definitions applies the next one twice."""
    definitions: dict[str, Any] = {
        f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(levels)
    }
    return {"$defs": definitions | {f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"$ref": "#"}, id="a reference to itself"),
        pytest.param({"allOf": [{"$ref": "#"}]}, id="a circle for one value"),
        pytest.param(doubled(60), id="2 to the power of 60 evaluations"),
        pytest.param({"description": "x" * 20_000}, id="too many bytes"),
        pytest.param({"anyOf": [{}] * 3_000}, id="too many schemas"),
        pytest.param({"properties": {"x": {"pattern": "x" * 2_000}}}, id="a long pattern"),
        pytest.param({"pattern": "(?=.*a)b"}, id="a pattern that needs backtracking"),
        pytest.param({"pattern": "((a{1,100}){1,100}){1,100}"}, id="a pattern that is large when compiled"),
        pytest.param({"allOf": [{"pattern": "a"}] * 60}, id="too many patterns"),
        pytest.param({"required": 5}, id="no valid schema"),
        pytest.param({"properties": {"x": 5}}, id="a number in the place of a schema"),
        pytest.param([], id="a list"),
    ],
)
def test_a_schema_out_of_bounds_is_not_used(schema: object) -> None:
    with pytest.raises(UnusableSchema):
        check_schema(schema)


def test_deep_schemas_are_not_used() -> None:
    nested: dict[str, Any] = {}
    data: Any = 0
    for _ in range(100):
        nested = {"not": nested}
    for _ in range(400):
        data = [data]
    for schema in (nested, {"default": data}):
        with pytest.raises(UnusableSchema):
            check_schema(schema)


def test_a_pattern_takes_linear_time() -> None:
    arguments = orjson.dumps({"x": "a" * 100_000 + "!"})
    (problem,) = find_problems({"properties": {"x": {"pattern": "(a+)+$"}}}, arguments)
    assert problem == "x: the value does not fit 'pattern' of the schema"


def test_arguments_for_which_a_schema_multiplies_are_left_to_the_worker() -> None:
    branch = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["missing"]}
    schema = {"anyOf": [branch, branch]}
    value: dict[str, Any] = {}
    assert find_problems(schema, orjson.dumps({"n": value}))
    for _ in range(100):
        value = {"n": value}
    assert find_problems(schema, orjson.dumps(value)) == []  # else 2 to the power of 100 evaluations


def test_problems_hold_no_values() -> None:
    schema = {
        "properties": {
            "const": {"const": "SECRET-OF-SCHEMA"},
            "enum": {"enum": ["SECRET-OF-SCHEMA", 1]},
            "pattern": {"pattern": "SECRET-OF-SCHEMA"},
            "number": {"maximum": 5},
            "any": {"anyOf": [{"const": "SECRET-OF-SCHEMA"}, {"type": "integer"}]},
            "names": {"propertyNames": {"maxLength": 3}},
            "false": False,
        },
        "required": ["more"],
    }
    names = ("const", "enum", "pattern", "any", "false")
    arguments = dict.fromkeys(names, "SECRET-OF-CALLER") | {"number": 777, "names": {"SECRET-OF-CALLER": 1}}
    problems = find_problems(schema, orjson.dumps(arguments))
    assert len(problems) == 8
    assert not any("SECRET" in problem or "777" in problem for problem in problems)
    assert '"more" is a required property' in problems


def test_names_in_problems_are_short_and_printable() -> None:
    arguments = orjson.dumps({"\x1b[31m" + "x" * 1_000: 1})
    (problem,) = find_problems({"additionalProperties": False}, arguments)
    assert len(problem) < 300
    assert "\x1b" not in problem
