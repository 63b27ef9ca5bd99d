"""Comparison of a value with what its JSON is read back as: what a resumed run would not see."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import BaseModel

from ..resume_warning import warn_once

Place: TypeAlias = tuple[int | str, ...]
"""The path of a value in another one: the names of attributes, and the positions of items and of mappings' values."""


class Misread(NamedTuple):
    """A value whose JSON is read back as another member of a union. written, read: names of the two types."""

    place: Place
    written: str
    read: str

    @classmethod
    def decode(cls, stored: Sequence[Any] | None) -> Misread | None:
        """Return what a record has of a misread result."""
        return None if stored is None else cls(tuple(stored[0]), *stored[1:])

    def __str__(self) -> str:
        where = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in self.place)
        return (
            f"{f'{where} is ' if where else ''}{self.written}, whose JSON is read back as {self.read}; declare a "
            "discriminator for the union, or types that differ in JSON"
        )

    def persists(self, decoded: Any) -> bool:
        """Return whether the value of this place is still not read as the type that was written."""
        for step in self.place:
            try:
                if isinstance(step, str):
                    decoded = getattr(decoded, step)
                else:
                    decoded = list(decoded.values() if isinstance(decoded, Mapping) else decoded)[step]
            except (AttributeError, IndexError, TypeError):
                return True
        return _name(decoded) != self.written


def warn_of_losses(what: str, checked: Any, decoded: Any) -> None:
    """Warn once per type of models and dataclasses that lack something after they were read back.

    what: whose value it is, for the warning. Raises `ResumeWarning` where warnings are errors.
    """
    if not is_equal(checked, decoded):
        for loss in losses(checked, decoded):
            warn_once(f"{what}: {loss}")


def find_misread(  # noqa: PLR0911 - one per kind
    checked: Any, decoded: Any, place: Place = (), *, models_only: bool = False
) -> Misread | None:
    """Return the first value that was read back as another member of a union.

    models_only: of models and dataclasses only, not of a `Path` that is read back as `str`.
    """
    if checked is decoded:
        return None
    if isinstance(checked, Mapping) and isinstance(decoded, Mapping):
        return _find_in(checked.values(), decoded.values(), place, models_only)
    if isinstance(checked, _SEQUENCES) and isinstance(decoded, _SEQUENCES):
        return _find_in(checked, decoded, place, models_only)
    if isinstance(checked, _COLLECTIONS) and isinstance(decoded, _COLLECTIONS):
        return None  # without an order to compare their items by
    if isinstance(checked, str) and type(decoded) is str and checked == decoded:  # a member of a StrEnum
        return None
    if type(checked) is not type(decoded) and not _is_subclass(checked, decoded):
        if isinstance(checked, _NUMBERS) and isinstance(decoded, _NUMBERS):
            return None
        if models_only and not (_is_model(checked) or _is_model(decoded)):
            return None
        return Misread(place, _name(checked), _name(decoded))
    for name, kept in _attributes(decoded).items():
        found = find_misread(getattr(checked, name, None), kept, (*place, name), models_only=models_only)
        if found is not None:
            return found
    return None


def _find_in(checked: Iterable[Any], decoded: Iterable[Any], place: Place, models_only: bool) -> Misread | None:
    for at, (item, kept) in enumerate(zip(checked, decoded, strict=False)):
        if (found := find_misread(item, kept, (*place, at), models_only=models_only)) is not None:
            return found
    return None


_SEQUENCES: Final = (list, tuple)
_COLLECTIONS: Final = (*_SEQUENCES, AbstractSet, deque)
_NUMBERS: Final = (int, float)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the fields of a model or a dataclass; of any other value, none."""
    if isinstance(value, BaseModel):
        return dict(value)
    if _is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {}


def _is_model(value: Any) -> bool:
    return isinstance(value, BaseModel) or _is_dataclass(value)


def _is_subclass(checked: Any, decoded: Any) -> bool:
    return _is_model(decoded) and isinstance(checked, type(decoded))


def _name(value: Any) -> str:
    return type(value).__qualname__


def losses(value: Any, read: Any) -> Iterator[str]:
    """Yield what a value has that its JSON does not: fields of a subclass, private attributes, excluded fields."""
    if isinstance(value, BaseModel) and isinstance(read, BaseModel):
        fields = type(value).model_fields
        lost = [name for name in fields if name not in type(read).model_fields]
        lost += [name for name, field in fields.items() if field.exclude and not _is_same_part(value, read, name)]
        private, other = value.__pydantic_private__ or {}, read.__pydantic_private__ or {}
        lost += [name for name, part in private.items() if name not in other or not _is_remade(part, other[name])]
        yield from _lost(value, read, lost)
        for name in fields.keys() & type(read).model_fields.keys():
            yield from losses(getattr(value, name, None), getattr(read, name, None))
    elif _is_dataclass(value) and _is_dataclass(read):
        known = {field.name for field in dataclasses.fields(read)}
        names = [(field.name, field.init) for field in dataclasses.fields(value)]
        lost = [name for name, init in names if name not in known or not (init or _is_same_part(value, read, name))]
        yield from _lost(value, read, lost)
        for name in [name for name, _ in names if name in known]:
            yield from losses(getattr(value, name, None), getattr(read, name, None))
    elif isinstance(value, Mapping) and isinstance(read, Mapping):
        for part, other in zip(value.values(), read.values(), strict=False):
            yield from losses(part, other)
    elif isinstance(value, list | tuple) and isinstance(read, list | tuple):
        for part, other in zip(value, read, strict=False):
            yield from losses(part, other)


def _lost(value: object, read: object, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{type(value).__name__} is read as {type(read).__name__}, without {', '.join(sorted(names))}"


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def without_computed(value: Any, stored: Any) -> Any:
    """Return the JSON data of a value without the fields of dataclasses that `__init__` does not take."""
    if isinstance(value, Mapping) and isinstance(stored, dict):
        parts = zip(stored, value.values(), stored.values(), strict=False)
        return {key: without_computed(part, kept) for key, part, kept in parts}
    if isinstance(value, _SEQUENCES) and isinstance(stored, list):
        return list(map(without_computed, value, stored))
    if _is_model(value) and isinstance(stored, dict):
        fields: dict[str, Any] = getattr(value, "__dataclass_fields__", {})
        kept = {name: part for name, part in stored.items() if name not in fields or fields[name].init}
        return {name: without_computed(getattr(value, name, None), part) for name, part in kept.items()}
    return stored


def _is_remade(value: object, read: object) -> bool:
    """Return whether a private attribute has its value again, or another object without a value, such as a lock."""
    if type(value) is type(read) and type(value).__eq__ is object.__eq__ and not _attributes(value):
        return True
    return is_same(value, read)


def _is_same_part(value: object, read: object, name: str) -> bool:
    """Return whether two objects have the same value under a name."""
    return is_same(getattr(value, name, None), getattr(read, name, None))


def is_same(value: Any, read: Any) -> bool:
    """Return whether two values are of the same types and equal, where NaN is equal to itself."""
    return type(value) is type(read) and _is_same(value, read)


def _is_same(value: Any, read: Any) -> bool:  # noqa: PLR0911 - one for each kind of value
    if isinstance(value, BaseModel):
        return is_same(value.__dict__, read.__dict__) and is_same(value.__pydantic_extra__, read.__pydantic_extra__)
    if isinstance(value, Mapping):
        return value.keys() == read.keys() and all(is_same(part, read[key]) for key, part in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(read) and all(map(is_same, value, read))
    if _is_dataclass(value):
        return all(_is_same_part(value, read, field.name) for field in dataclasses.fields(value))
    if isinstance(value, datetime):  # equal times may be in different zones
        return bool(value == read and value.tzinfo == read.tzinfo)
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(read)
    return bool(value == read)


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal, as far as they can be compared."""
    try:
        return bool(value == other)
    except Exception:  # noqa: BLE001 - an array has no single truth value
        return False
