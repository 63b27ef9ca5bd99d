"""Codec of step results: to JSON and back to their declared type.

A step must return the same value whether it ran or was read from its record. So a result is always converted to what
its record will return: validated against the declared type or, without one, reduced to plain JSON data.

Large results: those above the payload limit are stored in chunks, with a reference in their place.

Those above the limit of large ones are objects of the artifact store, if all workers reach it. Their one chunk is the
link. A run that ends before it stores the link leaves an object that `perdure artifacts gc` deletes.

The chunks are entries of the checkpoint like any other: fenced, numbered, and stored before the entry or the outcome
that refers to them. So Redis never has a reference without its chunks, also after it has lost its last second. A run
that ends in between leaves chunks in the keys of its task, which are deleted with the task.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, Protocol, get_type_hints

import orjson
from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, from_json, to_json

from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.errors import PayloadTooLarge
from ....queues.json_form import as_json, encodable, is_exact, is_too_deep
from ....queues.security.encryption import RESULT_CHUNKS, TaskCipher, step_chunks
from ....queues.security.redaction import Redaction
from ....queues.transport.large_values import CutValue, LargeValue, cut, read_large
from ....queues.wording import shortened
from ...errors import ResultMismatch, UnserialisableResult, first_problem
from ...resume_warning import warn_once
from ..json_types import JsonType, type_name
from ..run import Run
from ..value_loss import Misread, find_misread, is_equal, warn_of_losses

_PLAIN = frozenset((str, int, float, bool, type(None)))
_UNCHANGED = frozenset((str, int, bool, type(None)))  # by JSON; a float may be infinite, which becomes a string


class Codec:
    """Codec for results of one declared type.

    Args:
        secrets: store secrets in clear, for the records of a task, which only that task reads; otherwise Pydantic
            masks them.
        untyped: why nothing is known of the results' type, for a warning, where the function may have meant one.

    Attributes:
        problem: why no result of the type can be read back, None if it can.
    """

    def __init__(self, declared: Any, *, secrets: bool = False, untyped: str | None = None) -> None:
        self._secrets, self._untyped = secrets, untyped
        self._type = None if declared is Any or declared is inspect.Signature.empty else JsonType(declared)
        self.problem = None if self._type is None else self._type.problem
        self._closed = self._type is not None and self._type.closed
        if self._type is not None:
            self._validate, self._to_json = self._type.validate, self._type.adapter.serializer.to_json

    def encode(self, what: str, name: str, value: Any) -> tuple[bytes, Any]:
        """Return the result as JSON, and as its record will return it.

        what, name: whose result it is, for errors, such as a step and its name.

        Raises `UnserialisableResult`.
        """
        if (exact := self.encode_exact(value)) is not None:
            return exact
        data, checked = self.write(what, name, value)
        return self.read_back(what, name, data, checked)

    def encode_exact(self, value: Any) -> tuple[bytes, Any] | None:
        """Return what `encode` does, if the type alone tells that the result is read back as it is; else None."""
        if not self._closed:
            return None
        try:
            checked = self._validate(value)
            data: bytes = self._to_json(checked)
        except (ValueError, RecursionError):
            return None
        return (data, checked) if is_exact(data) else None

    def write(self, what: str, name: str, value: Any) -> tuple[bytes, Any]:
        """Return the result as JSON, and validated. Raises `UnserialisableResult`."""
        try:
            if self._type is None:
                return as_json(value), value
            checked = self._type.validate(value)
            return self._type.write(checked, secrets=self._secrets), checked
        except ValidationError as error:
            raise UnserialisableResult(f"{what} {name!r}", _unawaited(value) or first_problem(error)) from None
        except PydanticSerializationError as error:
            remedy = "return JSON data, or declare the type of the result, such as a dataclass or a Pydantic model"
            raise UnserialisableResult(f"{what} {name!r}", _unawaited(value) or f"{error}; {remedy}") from None
        except (ValueError, RecursionError) as error:
            raise UnserialisableResult(f"{what} {name!r}", str(error)) from None

    def read_back(self, what: str, name: str, data: bytes, checked: Any) -> tuple[bytes, Any]:
        """Return a result that `write` returned as its record will return it, after its JSON.

        Raises:
            UnserialisableResult: it cannot be read back, or is read back as another member of a union.
            ResumeWarning: it lacks something, and warnings are errors.
        """
        if self._type is None:
            return self._read_plain(what, name, data, checked)
        if self._type.is_closed(data):
            return data, checked
        try:
            data, decoded = self._type.read_back(data, checked, secrets=self._secrets)
        except ValidationError as error:
            problem = f"its JSON does not fit {self.type_name}: {first_problem(error)}; {_REMEDY}"
            raise UnserialisableResult(f"{what} {name!r}", problem, data) from None
        if self._type.unions:
            misread = find_misread(checked, decoded)
            if misread is not None:
                raise UnserialisableResult(f"{what} {name!r}", str(misread), data, misread)
        if self._type.has_models:
            warn_of_losses(f"{what} {name!r}", checked, decoded)
        return data, decoded

    def _read_plain(self, what: str, name: str, data: bytes, value: Any) -> tuple[bytes, Any]:
        if type(value) in _UNCHANGED and is_exact(data):
            return data, value
        try:
            decoded = from_json(data)
        except ValueError as error:
            if is_too_deep(error):
                data = as_json(encodable(value))
                return data, from_json(data)
            raise UnserialisableResult(f"{what} {name!r}", f"its JSON cannot be read: {error}", data) from None
        if self._untyped is not None and not (is_equal(decoded, value) or _differs_in_tuples(decoded, value)):
            kind = type_name(type(value))
            warn_once(f"{what} {name!r}: its result, a {kind}, was replaced by its JSON data, because {self._untyped}")
        return data, decoded

    @property
    def type_name(self) -> str:
        """Name of the declared type, for errors."""
        return "JSON" if self._type is None else type_name(self._type.declared)

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the results; None without a declared type, or for a type without a schema."""
        return None if self._type is None else self._type.schema()

    def decode(self, data: bytes) -> Any:
        """Return a result in its declared type. Raises `pydantic.ValidationError`, `ValueError`."""
        return from_json(data) if self._type is None else self._type.read(data)

    def misfit(self, data: bytes) -> str:
        """Return why JSON data does not fit the declared type."""
        try:
            self.decode(data)
        except ValueError as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            return f"{self.type_name} is declared: {problem}"
        return "it cannot be read"

    def decode_record(self, step: str, data: bytes, misread: Misread | None = None) -> Any:
        """Return the recorded result of a step in its declared type.

        misread: what the run that recorded it found out about the result.

        Raises `ResultMismatch`.
        """
        try:
            value = self.decode(data)
        except ValueError as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise ResultMismatch(
                f"the recorded result of step {step!r} does not fit {self.type_name}, which its function declares "
                f"now: {problem}; {_REMEDY} and replay the task, give the step another name, or replay with --fresh"
            ) from None
        if misread is not None and misread.persists(value):
            raise ResultMismatch(f"the recorded result of step {step!r}: {misread}, and replay the task")
        return value


def _differs_in_tuples(decoded: Any, value: Any) -> bool:
    """Return whether data was replaced where JSON has no other form: tuples, and text with lone surrogates."""
    if isinstance(decoded, str):
        return isinstance(value, str)
    if isinstance(decoded, list) and isinstance(value, list | tuple):
        return all(map(_differs_in_tuples, decoded, value))
    if isinstance(decoded, dict) and isinstance(value, dict) and decoded.keys() == value.keys():
        return all(map(_differs_in_tuples, decoded.values(), value.values()))
    return is_equal(decoded, value)


_REMEDY: Final = "declare a type that accepts it (a default for a new field, a validator for a changed one)"


def _unawaited(value: Any) -> str | None:
    """Return what is wrong with a result that is a coroutine, which is closed; None for any other."""
    if not inspect.iscoroutine(value):
        return None
    value.close()
    return "it is a coroutine; write 'await' before the call that returned it"


_NONE: Final = object()
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
        if isinstance(plain, type):  # a call of a class returns an object of it
            return _codec_for(plain, plain)
        if not hasattr(plain, "__code__") and not hasattr(plain, "__func__"):
            plain = type(plain).__call__  # of a callable object
        plain = getattr(plain, "__func__", plain)
        code = getattr(plain, "__code__", None)
    if code is None:
        return Codec(Any, untyped=f"{_shown(fn)} has no annotations that Perdure can read")
    declared = plain.__annotations__.get("return", _NONE)
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
    if declared is _NONE:
        return Codec(Any, untyped=f"{_shown(fn)} declares no type of its result")
    if isinstance(declared, str):
        try:
            declared = get_type_hints(fn, include_extras=True)["return"]
        except (NameError, TypeError, AttributeError) as error:
            problem = f"the annotations of {_shown(fn)} cannot be resolved: {error}"
            return Codec(Any, untyped=f"{problem}; import the type where the module is loaded")
    try:
        return _shared(declared, repr(declared))
    except (TypeError, PydanticUserError):
        return Codec(Any, untyped=f"Pydantic has no schema for {type_name(declared)}, which {_shown(fn)} declares")


def _shown(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


@lru_cache(maxsize=1024)
def _shared(declared: Any, text: str) -> Codec:  # unions with other orders of members are equal
    return Codec(declared, secrets=True)


_SHOWN: Final = 200
"""Characters of a call's arguments that its record shows."""


class _Constants(Protocol):
    """Texts that count as constants: see constants.py."""

    @property
    def texts(self) -> Sequence[bytes]: ...

    @property
    def shortest(self) -> int: ...

    def older(self) -> _Constants | None: ...

    def replace(self, text: str) -> str: ...


def fingerprint(
    args: tuple[Any, ...], kwargs: dict[str, Any], constants: _Constants | None = None
) -> tuple[str, bytes]:
    """Return the hash of a step's arguments, and their canonical JSON. constants: count as equal.

    All values without a JSON form (a client, a connection) count as the same, so that the names of types may change.
    """
    values = (*args, kwargs) if kwargs else args
    for value in values:
        if type(value) not in _UNCHANGED:
            data = _canonical(_ordered(values))
            break
    else:
        try:
            data = orjson.dumps(values)  # as nearly always: the same bytes in a third of the time
        except orjson.JSONEncodeError:  # an integer of more than 64 bits, or half of a surrogate pair
            data = _canonical(values)
    if constants is not None and len(data) > constants.shortest:
        for text in constants.texts:
            if text in data:
                return _hash_with(values, constants), data
    digest = _HASH.copy()
    digest.update(data)
    return digest.hexdigest(), data


def _hash_with(values: Any, constants: _Constants) -> str:
    """Return the hash of arguments in which constants may occur. Their order must not depend on the constants."""

    def sort_key(value: object) -> str:
        return constants.replace(value if isinstance(value, str) else repr(value))

    data = _canonical(_ordered(values, sort_key))
    return hashlib.blake2b(constants.replace(data.decode()).encode(), digest_size=12).hexdigest()


_HASH: Final = hashlib.blake2b(digest_size=12)
"""Hash of no data; a copy of it costs less than a new one."""


def digests_of(args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, constants: _Constants) -> tuple[str, ...]:
    """Return the hashes by which records of a step's arguments are found: `fingerprint`, and those of a copied task.

    A copy finds what its source has recorded also where the id of the copy is in the arguments by accident.
    """
    found, older = [digest], constants.older()
    while older is not None:
        found.append(fingerprint(args, kwargs, older)[0])
        older = older.older()
    return tuple(dict.fromkeys(found))


def arguments_text(data: bytes, redact: Redaction | None) -> str:
    """Return the beginning of the JSON of a step's arguments, for people. `redact` masks secrets in it."""
    shown = data[1:-1].decode()
    if redact is not None:
        shown = redact.head(shown, _SHOWN + 1)
    return shortened(shown, _SHOWN)


def _canonical(ordered: Any) -> bytes:
    """Return ordered arguments as JSON. Bytes that are not UTF-8 are written in base64."""
    try:
        return to_json(ordered, fallback=_opaque)
    except PydanticSerializationError:
        return to_json(encodable(ordered), fallback=_opaque, bytes_mode="base64")


def _ordered(value: Any, sort_key: Callable[[object], str] | None = None) -> Any:
    """Order sets and mappings the same way in every process, also inside models and dataclasses.

    Iterators and open files are not read: their items are for the step.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else _ordered(item, sort_key) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((_ordered(item, sort_key) for item in value), key=sort_key or repr)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, dict):
        return {key: _ordered(value[key], sort_key) for key in sorted(value, key=sort_key or str)}
    return _opaque(value) if isinstance(value, Iterator) else value


def _opaque(_: Any) -> str:
    return "<object>"


_BASE64: Final = b'{"base64":'


async def store_step_result(run: Run, key: str, data: bytes, value: Any, size: int) -> bytes:
    """Store the result of a step in chunks, and return the reference for its record.

    Args:
        data, value: The result as JSON, and as the step returns it.
        size: Bytes of the record.

    Raises:
        PayloadTooLarge: It is over the limit of large results.
        ArtifactError: The artifact store did not take it.
        LeaseLost, EntriesLost: See `CheckpointWriter`.
    """
    _check(run, f"the record of step {key!r}", size)
    what = f"the result of step {key!r} of task {run.id}"
    return await _store(run, step_chunks(key), key, Kind.CHUNK, data, value, what)


async def store_task_result(run: Run, data: bytes, value: Any) -> bytes:
    """Store the task's result in chunks, and return the reference for the outcome. See `store_step_result`."""
    _check(run, "the result", len(data))
    return await _store(run, RESULT_CHUNKS, "", Kind.RESULT_CHUNK, data, value, f"the result of task {run.id}")


async def read_step_result(run: Run, key: str, reference: bytes) -> bytes:
    """Return the result that a step's record refers to, as JSON. Raises `LargeValueLost`, `DecryptionError`."""
    value = LargeValue.decode(reference)
    if value is None:
        return reference
    field = run.delivery.partition.steps(run.id)
    what = f"the result of step {key!r} of task {run.id}"
    decrypt = partial(_cipher(run).decrypt, step_chunks(key))
    data = await read_large(run.gateway, field, "c", key, value, decrypt, what)
    run.touch()
    return data


def _check(run: Run, what: str, size: int) -> None:
    limit = max(run.settings.max_value_size, run.payload_limit)
    if size > limit:
        raise PayloadTooLarge(what, size, limit, "large_limit")


async def _store(run: Run, kind: str, place: str, entry: Kind, data: bytes, value: Any, what: str) -> bytes:
    raw = type(value) is bytes and data.startswith(_BASE64)
    stored = await asyncio.to_thread(_prepare, run, kind, place, value if raw else data, raw=raw)
    await stored.save_object(run.gateway, what)
    field = "c" if entry is Kind.CHUNK else "result"
    async with run.recorder.large_values:
        for number, chunk in enumerate(stored.chunks):
            name = stored.reference.field(field, number).removeprefix(f"{field}:")
            await run.recorder.put(Entry(entry, name, chunk), wait=True)
            run.touch()
    return stored.reference.encode()


def _prepare(run: Run, kind: str, place: str, data: bytes, *, raw: bool) -> CutValue:
    stored = _cipher(run).encrypt(kind, data)
    return cut(place, stored, size=len(data), raw=raw, store=run.gateway.value_store)


def _cipher(run: Run) -> TaskCipher:
    return run.gateway.encryptor.of(run.delivery.partition, run.id)
