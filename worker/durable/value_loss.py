"""Comparison of a value with what its JSON is read back as: what a resumed run would not see."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import BaseModel

from ...queues.plain_json import encodable
from ..resume_warning import warn_once

__all__ = ["Misread", "find_misread", "is_equal", "warn_of_losses"]


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
    if is_equal(checked, decoded):
        return
    comparison = _Comparison()
    comparison.visit(checked, decoded, ())
    for loss in comparison.losses:
        warn_once(f"{what}: {loss}")


def find_misread(what: str, checked: Any, decoded: Any) -> Misread | None:
    """Return the first value that was read back as another member of a union. Warns as `warn_of_losses`."""
    comparison = _Comparison()
    comparison.visit(checked, decoded, ())
    if comparison.misread is None:
        for loss in comparison.losses:
            warn_once(f"{what}: {loss}")
    return comparison.misread


_SEQUENCES: Final = (list, tuple)
_NUMBERS: Final = (int, float)


class _Comparison:
    """A walk through a value and what it was read back as. losses: texts for warnings."""

    def __init__(self) -> None:
        self.losses: dict[str, None] = {}
        self.misread: Misread | None = None

    def visit(self, checked: Any, decoded: Any, place: Place) -> None:
        if checked is decoded:
            return
        if isinstance(checked, Mapping) and isinstance(decoded, Mapping):
            self._visit_items(checked.values(), decoded.values(), place)
        elif isinstance(checked, _SEQUENCES) and isinstance(decoded, _SEQUENCES):
            self._visit_items(checked, decoded, place)
        elif _is_collection(checked) and _is_collection(decoded):
            return  # an order to compare their items by does not exist
        elif type(checked) is type(decoded) or _is_subclass(checked, decoded):
            self._visit_attributes(checked, decoded, place)
        elif self.misread is None and not (isinstance(checked, _NUMBERS) and isinstance(decoded, _NUMBERS)):
            self.misread = Misread(place, _name(checked), _name(decoded))

    def _visit_items(self, checked: Iterable[Any], decoded: Iterable[Any], place: Place) -> None:
        for at, (item, kept) in enumerate(zip(checked, decoded, strict=False)):
            self.visit(item, kept, (*place, at))

    def _visit_attributes(self, checked: Any, decoded: Any, place: Place) -> None:
        attributes = _attributes(decoded)
        if attributes is None:
            return
        if type(checked) is not type(decoded):
            lacking = ", ".join(sorted((_attributes(checked) or {}).keys() - attributes.keys()))
            self._lose(
                f"{_name(checked)} is stored as the declared {_name(decoded)}"
                f"{f', without {lacking}' if lacking else ''}; declare a union of the classes with a discriminator"
            )
        private = getattr(checked, "__pydantic_private__", None) or {}
        lost = [name for name, value in private.items() if not is_equal(value, _private(decoded, name))]
        if lost:
            self._lose(f"private attributes of {_name(checked)} are not stored: {', '.join(sorted(lost))}")
        for name, kept in attributes.items():
            value = getattr(checked, name, None)
            if _attributes(kept) is None and type(value) is type(kept) and not isinstance(kept, _COMPARED_BY_ITEM):
                if not (is_equal(value, kept) or is_equal(encodable(value), encodable(kept))):
                    self._lose(
                        f"field {name!r} of {_name(checked)} is read back with another value: it has init=False or "
                        "exclude=True, or a validator changes what it has returned"
                    )
            else:
                self.visit(value, kept, (*place, name))

    def _lose(self, loss: str) -> None:
        self.losses[loss] = None


_COMPARED_BY_ITEM: Final = (Mapping, *_SEQUENCES)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the fields of a model or a dataclass, None for any other value."""
    if isinstance(value, BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def _private(decoded: Any, name: str) -> Any:
    return (getattr(decoded, "__pydantic_private__", None) or {}).get(name)


def _is_collection(value: Any) -> bool:
    return isinstance(value, (*_SEQUENCES, AbstractSet)) or type(value).__name__ == "deque"


def _is_subclass(checked: Any, decoded: Any) -> bool:
    return _attributes(decoded) is not None and isinstance(checked, type(decoded))


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal, as far as they can be compared."""
    try:
        return bool(value == other)
    except Exception:  # noqa: BLE001 - an array has no single truth value
        return False


def _name(value: Any) -> str:
    return type(value).__qualname__
