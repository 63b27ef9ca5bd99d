"""Synchronous form of an object whose methods are async."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from .session import call_in_loop

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Blocking(Generic[T]):
    """Base of the synchronous form of an object, whose methods block until those of the object have returned."""

    def __init__(self, wrapped: T) -> None:
        self._wrapped = wrapped


def blocking(method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Blocking[T], P], R]:
    """Return the synchronous form of a method."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Blocking[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = call_in_loop(functools.partial(getattr(self._wrapped, name), *args, **kwargs))
        return result

    return call
