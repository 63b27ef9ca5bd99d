"""Errors of steps as data, and errors that are made from it: of the original class, and of `RecordedFailure`.

Nothing of the original class is called, and nothing is imported. The stored data are bounded: a text is cut at a
quarter of the payload limit, and what else does not fit into another quarter is left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import orjson

from ....deadletter.error_text import error_text
from ...errors import RecordedFailure

_HEAP_TYPE: Final = 1 << 9
"""Flag of classes that a program has defined (Py_TPFLAGS_HEAPTYPE)."""

_SHARE: Final = 4
"""Part of the payload limit that a text may have, and all other data."""

_MAX_MEMBERS: Final = 100
"""Members of an exception group that are stored."""


def describe(error: BaseException, limit: int) -> tuple[str, dict[str, Any]]:
    """Return the text of an error, and what else of it is stored. limit: the payload limit in bytes."""
    text = _bounded(error_text(error), limit // _SHARE)
    try:
        return text, _described(error, limit // _SHARE)
    except BaseException:  # noqa: BLE001 - methods of the error may do anything, as `error_text` knows
        return text, {"classes": _classes(error), "args": None, "attributes": {}, "lost": []}


def _classes(error: BaseException) -> list[list[str]]:
    return [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__[:-1]]


def _bounded(text: str, most: int) -> str:
    """Return a text of at most so many bytes of UTF-8, with a note of what was cut."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return data.decode()
    return f"{data[:most].decode('utf-8', 'ignore')}... ({len(data) - most:,} bytes were cut)"


def _described(error: BaseException, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {"classes": _classes(error)}
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions[:_MAX_MEMBERS]
        share = most // (len(members) + 1)
        found["message"] = _bounded(error.message, share)
        found["members"] = [[_bounded(error_text(one), share), _described(one, share)] for one in members]
    else:
        args = _plain(list(error.args), most)
        found["args"] = None if args is _NOT_PLAIN else args
    shown = _repr_of(error)
    if len(shown.encode("utf-8", "replace")) <= most:
        found["repr"] = shown.encode("utf-8", "replace").decode()
    values, lost, left = dict[str, Any](), list[str](), most - len(orjson.dumps(found))
    for name, value in _attributes(error):
        data = _plain(value, left)
        if data is _NOT_PLAIN:
            lost.append(name)
        else:
            values[name] = data
            left -= len(orjson.dumps([name, data]))
    return found | {"attributes": values, "lost": lost[:_MAX_MEMBERS]}


def _repr_of(error: BaseException) -> str:
    try:
        return repr(error)
    except BaseException:  # noqa: BLE001 - of a foreign class
        return f"{type(error).__name__}()"


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an error: its own, and those of built-in classes, such as `errno`."""
    own: dict[str, Any] = object.__getattribute__(error, "__dict__")
    for name, value in own.items():
        if isinstance(name, str):
            yield name, value
    for kind in type(error).__mro__:
        if kind in (BaseException, BaseExceptionGroup, object) or kind.__flags__ & _HEAP_TYPE:
            continue
        for name, member in vars(kind).items():
            if name.startswith("__") or not hasattr(type(member), "__set__"):
                continue
            with suppress(Exception):
                if (value := member.__get__(error)) is not None:
                    yield name, value


_SCALARS: Final = frozenset((str, int, float, bool, type(None)))


_NOT_PLAIN: Final = object()


def _plain(value: Any, most: int) -> Any:
    """Return JSON data that read back as they are; `_NOT_PLAIN` for any other value and for larger ones."""
    if not _is_plain(value, 4):
        return _NOT_PLAIN
    try:
        data = orjson.dumps(value)
    except (orjson.JSONEncodeError, TypeError):  # a large integer, half of a surrogate pair
        return _NOT_PLAIN
    return orjson.loads(data) if len(data) <= most else _NOT_PLAIN


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return kind is not float or math.isfinite(value)
    if kind is list:
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return (
        kind is dict and depth > 0 and all(type(key) is str and _is_plain(one, depth - 1) for key, one in value.items())
    )


def make_error(step: str, text: str, data: Mapping[str, Any]) -> Exception:
    """Return the error of a recorded failure. step: key of its step."""
    classes: Sequence[Sequence[str]] = data["classes"]
    name = classes[0][1].rpartition(".")[2]
    for module, qualname in classes:
        kind = _loaded_class(module, qualname)
        if kind is None:
            continue
        with suppress(Exception):  # such as a class that must not have subclasses
            return _filled(_recorded_class(kind, name, *classes[0]), step, text, data)
    return _filled(_recorded_class(Exception, name, *classes[0]), step, text, data)


def _loaded_class(module: str, qualname: str) -> Any:
    """Return a class of errors if its module is imported, else None."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = None if found is None else vars(found).get(part)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


@lru_cache(maxsize=512)
def _recorded_class(kind: Any, name: str, module: str, qualname: str) -> type[Exception]:
    """Return a subclass of an error's class, which has its name. Its metaclass is not called."""
    bases = (RecordedFailure,) if kind is Exception else (RecordedFailure, kind)
    names = {"__module__": module, "__qualname__": qualname, "__doc__": kind.__doc__}
    made: type[Exception] = type.__new__(type(kind), name, bases, names)
    return made


def _filled(kind: type[Exception], step: str, text: str, data: Mapping[str, Any]) -> Exception:
    new: Any = next(one for one in kind.__mro__ if not one.__flags__ & _HEAP_TYPE).__new__
    lost = set(data["lost"])
    if "members" in data:
        members = [make_error(step, *member) for member in data["members"]]
        error: Exception = new(kind, data["message"], members)
    elif data["args"] is None:
        error = new(kind)
        lost.add("args")
    else:
        error = new(kind, *data["args"])
    own = object.__getattribute__(error, "__dict__")
    for name, value in data["attributes"].items():
        member = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
        if member is not None and not type(member).__flags__ & _HEAP_TYPE and hasattr(type(member), "__set__"):
            with suppress(AttributeError, TypeError):
                member.__set__(error, value)
                continue
        own[name] = value
    own.update(_perdure_step=step, _perdure_text=text, _perdure_repr=data.get("repr"), _perdure_lost=lost)
    return error
