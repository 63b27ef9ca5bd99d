"""The JSON form of a declared type: how values of it are written and read back, and what the form loses.

A step returns the same value whether it ran or was read from its record. So a value is replaced by what its JSON is
read back as, unless its type is closed under JSON. Values are written under the names of their fields, and read by them
(`by_name` of Pydantic): aliases may differ for reading and writing.
"""

from __future__ import annotations

import operator
from base64 import b64decode, b64encode
from collections import abc
from collections.abc import Iterator, Mapping
from functools import reduce
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, EncodedBytes, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import CoreConfig, CoreSchema, PydanticSerializationError, SchemaSerializer, core_schema, to_json

from ...queues.json_form import encodable, is_encodable_otherwise, is_exact, is_too_deep
from ...queues.security.secret_arguments import contains_mask, unwrap_secrets


class JsonType:
    """The JSON form of a type. Raises `PydanticUserError` if Pydantic has no schema for it.

    Attributes:
        declared: the type.
        adapter: its Pydantic adapter.
        closed: whether values are read back from their JSON as they are, but for those that `is_exact` excludes.
        problem: why no value of the type can be read back, None if it can.
        unions: whether a value may be read back as another member of a union.
        has_models: whether its values may have models or dataclasses, whose JSON may lack some of their attributes.
    """

    def __init__(self, declared: Any) -> None:
        self.declared = declared
        self.adapter: TypeAdapter[Any] = _adapter(storable(declared))
        schema = self.adapter.core_schema
        kinds = {part["type"] for part in _parts(schema, of_functions=True)}
        is_open = not kinds.isdisjoint(("any", "json")) or _allows_extra(schema)
        self.problem = unreadable_part(schema)
        self.unions = "union" in kinds and not is_open
        self.has_models = has_models(schema)
        self.closed = is_closed(schema)
        self._has_numbers = not kinds.isdisjoint(_WITH_CONFIG) and (is_open or "float" in kinds)
        self.validate: Final = self.adapter.validator.validate_python
        self._read: Final = self.adapter.validator.validate_json
        self._write: Final = self.adapter.serializer.to_json

    def is_closed(self, data: bytes) -> bool:
        """Return whether the validated value of this JSON is what the JSON is read back as."""
        return self.closed and is_exact(data)

    def write(self, checked: Any, *, secrets: bool = False) -> bytes:
        """Return a validated value as JSON. secrets: in clear; else Pydantic masks them.

        Raises `PydanticSerializationError`, `ValueError`, `RecursionError`.
        """
        try:
            data = self._write(checked, by_alias=False, round_trip=True)
        except PydanticSerializationError as error:
            if not is_encodable_otherwise(error):
                raise
            data = self._write(encodable(checked), by_alias=False, round_trip=True)
        if self._has_numbers and b"null" in data:  # as which a model writes NaN, whatever the configuration around it
            data = self._write_numbers(encodable(checked))
        if secrets and contains_mask(data):
            whole, _ = unwrap_secrets(checked, self.plain(checked))
            data = to_json(whole, inf_nan_mode="strings")
        return data

    def read_back(self, data: bytes, checked: Any, *, secrets: bool = False) -> tuple[bytes, Any]:
        """Return the JSON of a value and what it is read back as. The JSON differs if it was nested too deeply.

        Raises `pydantic.ValidationError`.
        """
        try:
            return data, self.read(data)
        except ValidationError as error:
            if not is_too_deep(error):
                raise
        data = self.write(encodable(checked), secrets=secrets)
        return data, self.read(data)

    def read(self, data: bytes, *, by_alias: bool = False) -> Any:
        """Return a value from JSON. by_alias: of other programs, too. Raises `pydantic.ValidationError`."""
        return self._read(data, by_alias=by_alias, by_name=True)

    def plain(self, checked: Any) -> Any:
        """Return a validated value as plain data."""
        return self.adapter.serializer.to_python(checked, mode="json", by_alias=False, round_trip=True)

    def _write_numbers(self, checked: Any) -> bytes:
        values = self.adapter.serializer.to_python(checked, by_alias=False, round_trip=True)
        return to_json(_with_numbers(self.plain(checked), values), inf_nan_mode="strings")

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of what is written; None for a type without one."""
        try:
            return self.adapter.json_schema(mode="serialization", by_alias=False)
        except PydanticUserError:
            return None


def _with_numbers(plain: Any, value: Any) -> Any:
    """Return plain data with the NaN and infinities that became null in it."""
    if plain is None and isinstance(value, float):
        return value
    if isinstance(plain, dict) and isinstance(value, dict):
        return {key: _with_numbers(*both) for key, *both in zip(plain, plain.values(), value.values(), strict=False)}
    if isinstance(plain, list) and isinstance(value, list | tuple):
        return list(map(_with_numbers, plain, value))
    return plain


def type_problem(declared: Any, error: PydanticUserError) -> str:
    """Return why pydantic refuses a type, with the remedy."""
    if error.code != "schema-for-unknown-type":
        return error.message
    return f"{type_name(declared)} has no JSON form; use a dataclass, a pydantic model or plain data"


def type_name(declared: Any) -> str:
    """Return a type as error texts name it."""
    return declared.__name__ if isinstance(declared, type) else str(declared).replace("typing.", "")


def _adapter(declared: Any) -> TypeAdapter[Any]:
    """Return the adapter of a type. It stores infinities and NaN as strings, unless the type has a configuration."""
    config: CoreConfig | None = {"ser_json_inf_nan": "strings"}
    try:
        adapter = TypeAdapter(declared, config=ConfigDict(ser_json_inf_nan="strings"))
    except PydanticUserError:
        adapter, config = TypeAdapter(declared), None
    if _leave_out_computed(adapter.core_schema):
        adapter.serializer = SchemaSerializer(adapter.core_schema, config)
    return adapter


def storable(declared: Any) -> Any:
    """Return a type with its lazy iterators as lists, which can be read twice, and with any bytes, not UTF-8 only."""
    if declared is bytes or declared in _LAZY:
        return _BYTES if declared is bytes else list
    origin, args = get_origin(declared), get_args(declared)
    if origin in _LAZY:
        return list[storable(args[0])]  # type: ignore[misc]  # mypy takes it for an annotation
    if origin is Annotated:
        is_text = any(isinstance(part, EncodedBytes) for part in args[1:])  # such as Base64Bytes
        return declared if is_text else Annotated[storable(args[0]), *args[1:]]
    if origin is None or origin in (Literal, abc.Callable):
        return declared
    stored = tuple([storable(arg) for arg in args])
    if all(new is old for new, old in zip(stored, args, strict=True)):
        return declared
    return reduce(operator.or_, stored) if origin in (Union, UnionType) else origin[stored]


_LAZY: Final = frozenset(
    (abc.Iterable, abc.Iterator, abc.Generator, abc.AsyncIterable, abc.AsyncIterator, abc.AsyncGenerator)
)


def _read_bytes(value: Any) -> Any:
    match value:
        case {"base64": str(text), **rest} if not rest:
            return b64decode(text)
    return value


def _write_bytes(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


class _AnyBytes:
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        python = handler(source)
        json = core_schema.no_info_before_validator_function(_read_bytes, python)
        write = core_schema.plain_serializer_function_ser_schema(_write_bytes, when_used="json")
        return core_schema.json_or_python_schema(json, python, serialization=write)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "format": "binary"}


_BYTES: Final = Annotated[bytes, _AnyBytes]
"""Any bytes: text as a JSON string, others as `{"base64": ...}`."""

_PLAIN: Final = frozenset({"str", "int", "float", "bool", "none"})
"""Schemas of plain values. NaN and infinities are stored by name, and a declared float reads them back."""

_NEUTRAL: Final = frozenset({"type", "metadata", "ref", "strict"})
"""Keys of a schema that change no value and refuse none that was stored."""

_NO_KEY: Final = {
    "tuple": "a tuple",
    "list": "a list",
    "set": "a set",
    "frozenset": "a frozenset",
    "dict": "a dict",
    "model": "a model",
    "dataclass": "a dataclass",
    "typed-dict": "a TypedDict",
}
"""Types of keys that are text in JSON, and that their validators do not read from text."""

_WITH_CONFIG: Final = ("model", "dataclass", "typed-dict")
"""Types with a configuration of their own, which may make null of NaN and infinities."""

_FUNCTIONS: Final = ("function-before", "function-wrap", "function-plain")


def is_closed(schema: CoreSchema) -> bool:
    """Return whether each value of a type is equal to what its JSON decodes to, and whether that always fits the type.

    Models are not closed: a value of a subclass is read back as the declared class. Neither is a type with constraints:
    the fields of a state are not checked when they are set.
    """
    return _is_closed(schema)


def _is_closed(schema: Mapping[str, Any]) -> bool:  # noqa: PLR0911 - one for each kind of schema
    kind = schema["type"]
    if kind in _PLAIN:
        return schema.keys() <= _NEUTRAL
    if kind in ("nullable", "default"):
        return "serialization" not in schema and not schema.get("validate_default") and _is_closed(schema["schema"])
    if kind == "definitions":
        return not schema["definitions"] and _is_closed(schema["schema"])
    if kind == "typed-dict":
        shape = schema.keys() <= _NEUTRAL | {"fields", "cls", "config", "computed_fields", "extra_behavior", "total"}
        return shape and all(_is_closed(field["schema"]) for field in schema["fields"].values())
    if kind == "list":
        return schema.keys() <= _NEUTRAL | {"items_schema"} and _is_closed(schema.get("items_schema", _ANY))
    if kind == "dict":
        return (
            schema.keys() <= _NEUTRAL | {"keys_schema", "values_schema"}
            and schema.get("keys_schema", _ANY)["type"] == "str"
            and _is_closed(schema["keys_schema"])
            and _is_closed(schema.get("values_schema", _ANY))
        )
    if kind == "literal":
        return schema.keys() <= _NEUTRAL | {"expected"} and all(
            type(value) in (str, int, bool) for value in schema["expected"]
        )
    return False


_ANY: Final[Mapping[str, Any]] = {"type": "any"}


def _allows_extra(schema: CoreSchema) -> bool:
    """Return whether models in a type take fields that they do not declare."""
    return any(
        part.get("config", {}).get("extra_fields_behavior") == "allow" for part in _parts(schema, of_functions=True)
    )


def has_functions(schema: CoreSchema) -> bool:
    """Return whether functions of the program check or change values of a type, or parts of them."""
    return any(part["type"].startswith("function-") for part in _parts(schema, of_functions=True))


def has_models(schema: CoreSchema) -> bool:
    """Return whether values of a type have models or dataclasses in them."""
    return any(part["type"] in ("model", "dataclass") for part in _parts(schema, of_functions=True))


def unreadable_part(schema: CoreSchema) -> str | None:
    """Return which part of a type is certainly not read back from its JSON, and the remedy; None if all may be."""
    return next((problem for part in _parts(schema) if (problem := _problem(part)) is not None), None)


def _problem(schema: Mapping[str, Any]) -> str | None:
    kind = schema["type"]
    if kind == "dict":
        key = _inner(schema.get("keys_schema", _ANY))["type"]
        return (
            None if key not in _NO_KEY else f"a key of a JSON object is text, and not {_NO_KEY[key]}; use text as keys"
        )
    fields: Mapping[str, Any] | list[Any] = schema.get("fields", ())
    if kind == "model-fields" and isinstance(fields, Mapping):
        excluded = [name for name, field in fields.items() if _is_lost(field)]
        owner = schema.get("model_name", "")
    elif kind == "dataclass-args" and isinstance(fields, list):
        excluded = [field["name"] for field in fields if _is_lost(field)]
        owner = schema.get("dataclass_name", "")
    else:
        return None
    if not excluded:
        return None
    return f"field {excluded[0]!r} of {owner} is excluded from what is stored and has no default; give it one"


def _leave_out_computed(schema: CoreSchema) -> bool:
    """Exclude fields of dataclasses that `__init__` does not take from what is written; return whether there are any.

    A dataclass below a type that forbids other keys does not read them.
    """
    computed = list(_computed(schema))
    for field in computed:
        field["serialization_exclude"] = True
    return bool(computed)


def has_computed(schema: CoreSchema) -> bool:
    """Return whether a type has dataclasses with fields that `__init__` does not take."""
    return any(True for _ in _computed(schema))


def _computed(schema: CoreSchema) -> Iterator[Any]:
    for part in _parts(schema, of_functions=True):
        if part["type"] == "dataclass-args":
            yield from [field for field in part["fields"] if not field.get("init", True)]


def _is_lost(field: Mapping[str, Any]) -> bool:
    """Return whether a field is never written, and cannot be missing."""
    return bool(field.get("serialization_exclude")) and field.get("init", True) and field["schema"]["type"] != "default"


def _inner(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema below wrappers."""
    while schema["type"] in ("nullable", "default"):
        schema = schema["schema"]
    return schema


def _parts(schema: object, *, of_functions: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas in it.

    of_functions: also those of values that a function of the program serialises or reads.
    """
    if isinstance(schema, Mapping):
        if isinstance(schema.get("type"), str):
            if not of_functions and ("serialization" in schema or schema["type"] in _FUNCTIONS):
                return
            yield schema
        for name, part in schema.items():
            if name not in ("metadata", "serialization", "default", "expected", "config", "cls"):
                yield from _parts(part, of_functions=of_functions)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _parts(part, of_functions=of_functions)
