"""Keys that are made of the arguments of a task: by the names of arguments, or by a function of all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

By = str | Sequence[str] | Callable[[Mapping[str, Any]], object] | None
"""A key: names of arguments, or a function of all of them."""

_Scalar: Final = (str, int, float, bool, type(None))


class KeyProblem(ValueError):
    """The arguments of a task make no key. The text is the end of a sentence that starts with the name of the key."""


def check_by(by: Any, whose: str) -> tuple[str, ...] | Callable[[Mapping[str, Any]], object] | None:
    """Return names of arguments as a tuple, a function, or None. Raises `ValueError`. whose: such as `unique`."""
    if by is None or callable(by):
        return by  # type: ignore[no-any-return]  # what it returns is checked at each call
    names = (by,) if isinstance(by, str) else tuple(by) if isinstance(by, Sequence) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise ValueError(f"by of {whose} must be names of arguments, each once, or a function of them, got {by!r}")
    return names


def named_values(names: Sequence[str], arguments: Mapping[str, Any], secrets: Collection[str]) -> dict[str, Any]:
    """Return the values of a key by the names of its arguments. secrets: names of arguments. Raises `KeyProblem`."""
    for name in names:
        check_secret(name, secrets)
        if name not in arguments:
            raise KeyProblem(f"{name!r} is missing in the arguments")
    return {name: scalar(repr(name), arguments[name]) for name in names}


def check_secret(name: str, secrets: Collection[str]) -> None:
    """Raise `KeyProblem` if an argument that a key needs is a secret."""
    if name in secrets:
        raise KeyProblem(f"{name!r} must not be a secret: name other arguments in by=")


def returned_values(by: Callable[[Mapping[str, Any]], object], arguments: Mapping[str, Any]) -> list[Any]:
    """Return the values that a function makes of the arguments. Raises `KeyProblem`."""
    try:
        found = by(arguments)
    except LookupError as error:
        raise KeyProblem(f"could not be made by its function: {type(error).__name__}: {error}") from error
    items = found if isinstance(found, (tuple, list)) and found else [found]
    return [scalar("what its function returns", value) for value in items]


def scalar(what: str, value: object) -> Any:
    """Return one value of a key as JSON data. what: whose it is, for the error. Raises `KeyProblem`."""
    if not isinstance(value, _Scalar):
        raise KeyProblem(f"{what} must be a text, a number, true, false or null, got {type(value).__name__}")
    return canonical(value)


def canonical(value: Any) -> Any:
    """Return JSON data in which equal numbers are written alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: canonical(item) for name, item in value.items()}
    return [canonical(item) for item in value] if isinstance(value, list) else value
