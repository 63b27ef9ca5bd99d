"""The JSON form of a declared type: how values of it are written and read back, and what the form loses.

A step returns the same value whether it ran or was read from its record. So a value is replaced by what its JSON is
read back as, unless its type is closed under JSON. Values are written under the names of their fields, and read by them
(`by_name` of Pydantic): aliases may differ for reading and writing.
"""

from __future__ import annotations

import operator
from base64 import b64decode, b64encode
from collections import abc
from collections.abc import Iterator
from functools import reduce
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import CoreSchema, PydanticSerializationError, core_schema, to_json

from ...queues import contains_mask, unwrap_secrets
from ...queues.plain_json import encodable, is_exact

__all__ = ["JsonType", "storable", "type_name", "type_problem"]


class JsonType:
    """The JSON form of a type. Raises `PydanticUserError` if Pydantic has no schema for it.

    Attributes:
        declared: the type.
        adapter: its Pydantic adapter.
        problem: why no value of the type can be read back, None if it can.
        unions: whether a value may be read back as another member of a union.
        has_models: whether its values may have models or dataclasses, whose JSON may lack some of their attributes.
    """

    def __init__(self, declared: Any) -> None:
        self.declared = declared
        self.adapter: TypeAdapter[Any] = _adapter(storable(declared))
        schema = _Schema(self.adapter.core_schema)
        self.problem = schema.problem
        self.unions = schema.unions and not schema.open
        self.has_models = schema.models
        self._closed = schema.closed
        self._has_numbers = schema.shapes and (schema.floats or schema.open)
        self.validate: Final = self.adapter.validator.validate_python
        self._read: Final = self.adapter.validator.validate_json
        self._write: Final = self.adapter.serializer.to_json

    def is_closed(self, data: bytes) -> bool:
        """Return whether the validated value of this JSON is what the JSON is read back as."""
        return self._closed and is_exact(data)

    def write(self, checked: Any, *, secrets: bool = False) -> bytes:
        """Return a validated value as JSON. secrets: in clear; else Pydantic masks them.

        Raises `PydanticSerializationError`, `ValueError`, `RecursionError`.
        """
        try:
            data = self._write(checked, by_alias=False, round_trip=True)
        except PydanticSerializationError:
            return self._write_text(checked)
        if self._has_numbers and b"null" in data:  # as which a model writes NaN, whatever the configuration around it
            data = self._write_text(checked)
        if secrets and contains_mask(data):
            whole, _ = unwrap_secrets(checked, self.plain(checked))
            data = to_json(whole, inf_nan_mode="strings")
        return data

    def read(self, data: bytes, *, by_alias: bool = False) -> Any:
        """Return a value from JSON. by_alias: of other programs, too. Raises `pydantic.ValidationError`."""
        return self._read(data, by_alias=by_alias, by_name=True)

    def plain(self, checked: Any) -> Any:
        """Return a validated value as plain data."""
        return self.adapter.serializer.to_python(checked, mode="json", by_alias=False, round_trip=True)

    def _write_text(self, checked: Any) -> bytes:
        values = self.adapter.serializer.to_python(checked, by_alias=False, round_trip=True)
        return to_json(encodable(_with_numbers(self.plain(checked), values)), inf_nan_mode="strings")

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
    try:
        return TypeAdapter(declared, config=ConfigDict(ser_json_inf_nan="strings"))
    except PydanticUserError:
        return TypeAdapter(declared)


def storable(declared: Any) -> Any:
    """Return a type with its lazy iterators as lists, which can be read twice, and with any bytes, not UTF-8 only."""
    if declared is bytes or declared in _LAZY:
        return _BYTES if declared is bytes else list
    origin, args = get_origin(declared), get_args(declared)
    if origin in _LAZY:
        return list[storable(args[0])]  # type: ignore[misc]  # mypy takes it for an annotation
    if origin is Annotated:
        return Annotated[storable(args[0]), *args[1:]]
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

_CLOSED: Final = frozenset(
    ("str", "int", "float", "bool", "none", "list", "dict", "nullable", "typed-dict", "typed-dict-field")
)
_TEXT_KEYS: Final = frozenset(("tuple", "list", "set", "frozenset", "dict", "model", "dataclass", "typed-dict"))
_OTHER: Final = frozenset(("metadata", "config", "default", "expected", "serialization", "computed_fields", "cls"))
"""Parts of a core schema that have no schemas of values."""


class _Schema:
    """The properties of a Pydantic core schema that decide how its values survive JSON."""

    def __init__(self, schema: Any) -> None:
        self.problem: str | None = None
        self.unions = self.open = self.models = self.shapes = self.floats = False
        self.closed = True
        self._visit(schema)

    def _visit(self, schema: Any) -> None:
        for part in _parts(schema):
            kind = part["type"]
            self.closed = self.closed and kind in _CLOSED and "serialization" not in part
            self.open = self.open or kind in ("any", "json") or "extras_schema" in part
            self.unions = self.unions or kind == "union"
            self.models = self.models or kind in ("model", "dataclass")
            self.shapes = self.shapes or self.models or kind == "typed-dict"
            self.floats = self.floats or kind == "float"
            if kind in ("list", "dict"):
                items = ("items_schema",) if kind == "list" else ("keys_schema", "values_schema")
                self.closed = self.closed and all(name in part for name in items)
            if kind == "dict":
                keys = part.get("keys_schema", {}).get("type", "str")
                self.closed = self.closed and keys == "str"
                if keys in _TEXT_KEYS:
                    self._refuse(f"JSON has no object with a key of type {keys}; use a list of pairs or a text key")
            if kind == "model":
                extra = part.get("config", {}).get("extra_fields_behavior")
                self.open = self.open or extra == "allow"
            for name, field in _fields(part):
                if field.get("serialization_exclude") is True and _is_required(field):
                    self._refuse(f"field {name!r} has exclude=True and no default, so its value cannot be read back")

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a core schema and all schemas in it."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for name, value in schema.items():
            if name not in _OTHER and isinstance(value, dict | list | tuple):
                yield from _parts(value)
    elif isinstance(schema, list | tuple):
        for item in schema:
            if isinstance(item, dict | list | tuple):
                yield from _parts(item)


def _fields(part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    fields = part.get("fields")
    if isinstance(fields, dict):
        return list(fields.items())
    return [(field["name"], field) for field in fields or () if isinstance(field, dict)]


def _is_required(field: dict[str, Any]) -> bool:
    has_default = field.get("schema", {}).get("type") == "default"
    return not has_default and bool(field.get("required", True)) and bool(field.get("init", True))
