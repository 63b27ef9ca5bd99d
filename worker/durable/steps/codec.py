"""Codec of step results: to JSON and back to their declared type.

A step must return the same value whether it ran or was read from its record. So a result is always converted to what
its record will return: validated against the declared type or, without one, reduced to plain JSON data.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, from_json, to_json

from ....queues import Redaction, contains_mask, unwrap_secrets
from ....queues.transport import bytes_as_json
from ...errors import ResultMismatch, UnserialisableResult
from ...errors.validation import first_problem

__all__ = [
    "Codec",
    "arguments_text",
    "codec_of",
    "digests_of",
    "fingerprint",
    "is_async",
    "make_codec",
    "type_name",
    "type_problem",
]

_PLAIN = frozenset((str, int, float, bool, type(None)))
_UNCHANGED = frozenset((str, int, bool, type(None)))  # by JSON; a float may be infinite, which becomes a string


class Codec:
    """Codec for results of one declared type.

    secrets: store secrets in clear, for the records of a task, which only that task reads; otherwise Pydantic masks
    them.
    """

    def __init__(self, declared: Any, *, secrets: bool = False) -> None:
        self._declared = declared
        self._secrets = secrets
        self._adapter: TypeAdapter[Any] | None = None
        self._from_json: Callable[[bytes], Any] = from_json
        if declared is not Any and declared is not inspect.Signature.empty:
            self._adapter = _adapter(declared)
            self._from_json = self._adapter.validator.validate_json

    def encode(self, what: str, name: str, value: Any) -> tuple[bytes, Any]:
        """Return the result as JSON, and as its record will return it.

        what, name: whose result it is, for errors, such as a step and its name.

        Raises `UnserialisableResult`.
        """
        try:
            if self._adapter is not None:
                checked = self._adapter.validator.validate_python(value)
                data = self._adapter.serializer.to_json(checked)
                if self._secrets and contains_mask(data):
                    whole, _ = unwrap_secrets(checked, self._adapter.dump_python(checked, mode="json"))
                    data = to_json(whole, inf_nan_mode="strings")
                return data, checked
            data = to_json(value, inf_nan_mode="strings")
            return data, value if type(value) in _UNCHANGED else from_json(data)
        except ValidationError as error:
            raise UnserialisableResult(f"{what} {name!r}", _unawaited(value) or first_problem(error)) from None
        except PydanticSerializationError as error:
            remedy = "return JSON data, or declare the type of the result, such as a dataclass or a Pydantic model"
            raise UnserialisableResult(f"{what} {name!r}", _unawaited(value) or f"{error}; {remedy}") from None
        except (ValueError, RecursionError) as error:
            raise UnserialisableResult(f"{what} {name!r}", str(error)) from None

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the results; None without a declared type, or for a type without a schema."""
        try:
            return None if self._adapter is None else self._adapter.json_schema(mode="serialization")
        except PydanticUserError:
            return None

    def decode(self, data: bytes) -> Any:
        """Return a result in its declared type. Raises `pydantic.ValidationError`."""
        return self._from_json(data)

    def decode_record(self, step: str, data: bytes) -> Any:
        """Return the recorded result of a step in its declared type. Raises `ResultMismatch`."""
        try:
            return self._from_json(data)
        except ValidationError as error:
            declared = self._declared
            name = declared.__qualname__ if isinstance(declared, type) else str(declared)
            raise ResultMismatch(
                f"the recorded result of step {step!r} does not fit {name}, which its function declares now: "
                f"{first_problem(error)}; declare a type that accepts it (a default for a new field, a validator for a "
                "changed one) and replay the task, give the step another name, or replay with --fresh"
            ) from None


def _unawaited(value: Any) -> str | None:
    """Return what is wrong with a result that is a coroutine, which is closed; None for any other."""
    if not inspect.iscoroutine(value):
        return None
    value.close()
    return "it is a coroutine; write 'await' before the call that returned it"


class BytesCodec(Codec):
    """Codec for results that are declared as `bytes`: text as a JSON string, any other as `{"base64": ...}`."""

    def encode(self, what: str, name: str, value: Any) -> tuple[bytes, Any]:
        """See `Codec`."""
        try:
            return super().encode(what, name, value)
        except UnserialisableResult:
            if not isinstance(value, bytes | bytearray | memoryview):
                raise
            data = bytes(value)
            return bytes_as_json(data), data

    def decode(self, data: bytes) -> Any:
        """See `Codec`."""
        return base64.b64decode(from_json(data)["base64"]) if data[:1] == b"{" else super().decode(data)

    def decode_record(self, step: str, data: bytes) -> Any:
        """See `Codec`."""
        try:
            return self.decode(data)
        except (ValidationError, LookupError, TypeError, ValueError):
            return super().decode_record(step, data)  # raises


def make_codec(declared: Any, *, secrets: bool = False) -> Codec:
    """Return the codec for results of a declared type."""
    return (BytesCodec if declared is bytes else Codec)(declared, secrets=secrets)


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
        return TypeAdapter(declared, config=_CONFIG)
    except PydanticUserError:
        return TypeAdapter(declared)


_CONFIG = ConfigDict(ser_json_inf_nan="strings")
_ANY = Codec(Any)
_by_code: dict[CodeType, tuple[Any, dict[str, Any], Codec]] = {}
"""Codec by code object, with the annotation and module it was made for: functions from one factory share their code."""


def codec_of(fn: Callable[..., Any]) -> Codec:
    """Return the codec of a function's result; plain JSON if it has no annotation or one that cannot be resolved."""
    code: CodeType | None
    if isinstance(fn, MethodType):
        fn = fn.__func__
    if type(fn) is FunctionType and not fn.__dict__:  # a plain function without a wrapper
        plain: Any = fn
        code = fn.__code__
    else:
        plain = inspect.unwrap(getattr(fn, "func", fn))
        plain = getattr(plain, "__func__", plain)
        code = getattr(plain, "__code__", None)
    if code is None:
        return _ANY
    declared = plain.__annotations__.get("return", Any)
    known = _by_code.get(code)
    if known is None or known[0] is not declared or known[1] is not plain.__globals__:
        known = _by_code[code] = (declared, plain.__globals__, _codec_for(plain, declared))
    return known[2]


def is_async(fn: Callable[..., Any]) -> bool:
    """Return whether a call returns an awaitable, as far as can be known without calling."""
    if type(fn) is FunctionType and not fn.__dict__:
        return bool(fn.__code__.co_flags & inspect.CO_COROUTINE)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _codec_for(fn: Callable[..., Any], declared: Any) -> Codec:
    if isinstance(declared, str):
        try:
            declared = get_type_hints(fn, include_extras=True)["return"]
        except (NameError, TypeError, AttributeError):
            return _ANY
    try:
        return _shared(declared)
    except (TypeError, PydanticUserError):
        return _ANY


@lru_cache(maxsize=1024)
def _shared(declared: Any) -> Codec:
    return make_codec(declared, secrets=True)


_SHOWN: Final = 200
"""Characters of a call's arguments that its record shows."""


def fingerprint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bytes]:
    """Return the hash of a step's arguments, and the canonical JSON that it is of.

    All values without a JSON form (a client, a connection) count as the same, so that the names of types may change.
    """
    values = (*args, kwargs) if kwargs else args
    for value in values:
        if type(value) not in _UNCHANGED:
            data = to_json(_ordered(values), fallback=_opaque)
            break
    else:
        try:
            data = orjson.dumps(values)  # as nearly always: the same bytes in a third of the time
        except orjson.JSONEncodeError:  # an integer of more than 64 bits
            data = to_json(values)
    digest = _HASH.copy()
    digest.update(data)
    return digest.hexdigest(), data


_HASH: Final = hashlib.blake2b(digest_size=12)
"""Hash of no data; a copy of it costs less than a new one."""


def digests_of(args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, data: bytes) -> tuple[str, ...]:
    """Return the hashes by which records of a step's arguments are found: `fingerprint` and its earlier form.

    That has the name of its type for a value without a JSON form.
    """
    if _OPAQUE not in data:
        return (digest,)
    former = to_json(_ordered((*args, kwargs) if kwargs else args), fallback=_by_type)
    return digest, hashlib.blake2b(former, digest_size=12).hexdigest()


def arguments_text(data: bytes, redact: Redaction | None) -> str:
    """Return the beginning of the JSON of a step's arguments, for people. `redact` masks secrets in it."""
    shown = data[1:-1].decode()
    if redact is not None:
        shown = redact.head(shown, _SHOWN + 1)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."


def _ordered(value: Any) -> Any:
    """Order sets and mappings the same way in every process, also inside models and dataclasses."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else _ordered(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((_ordered(item) for item in value), key=repr)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value, key=str)}
    return value


_OPAQUE: Final = b'"<object>"'


def _opaque(_: Any) -> str:
    return "<object>"


def _by_type(value: Any) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
