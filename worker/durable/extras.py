"""Objects of parts of the package that many tasks do not use, by their class."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ...queues.errors import NotOpen
from ...queues.keys import Partition
from .steps.threads import Threads

T = TypeVar("T")


@runtime_checkable
class _Closable(Protocol):
    async def close(self) -> None: ...


class Extras:
    """Objects by their class: of one run, or of all runs of a worker. The core does not know the classes."""

    __slots__ = ("_closed", "_found")

    def __init__(self) -> None:
        self._found: dict[type, Any] = {}
        self._closed = False

    def get(self, kind: type[T]) -> T | None:
        """Return the object of a class, or None."""
        found: T | None = self._found.get(kind)
        return found

    def put(self, value: object) -> None:
        """Add an object, in place of another one of its class."""
        self._found[type(value)] = value

    def of(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the object of a class, made at its first use. Raises `NotOpen` after `close`."""
        found: T | None = self._found.get(kind)
        if found is None:
            if self._closed:
                raise NotOpen("the worker has ended")
            found = self._found[kind] = make()
        return found

    @property
    def busy(self) -> bool:
        """Whether one of them has work left, such as tokens of limits to release."""
        return any(getattr(value, "busy", False) for value in self._found.values())

    async def close(self) -> None:
        """Close the objects that can be closed."""
        self._closed = True
        for value in self._found.values():
            if isinstance(value, _Closable):
                await value.close()


IsNew = Callable[[Partition, bytes], bool]
"""Function that returns whether an entry of a partition was certainly added within the last seconds."""


def never_new(_partition: Partition, _entry: bytes) -> bool:
    """Return that it is not known."""
    return False


class StepMeter(Protocol):
    """Counts steps, see runtime/metrics."""

    def step_ended(self, run: Any, key: str, seconds: float, attempt: int) -> None:
        """Count a step of a run that was called. attempt: number of its last try."""


@dataclass(frozen=True, slots=True)
class Host:
    """Objects that the runs of a worker share.

    Attributes:
        threads: threads of synchronous steps and handlers.
        tasks: names of the app's tasks.
        extras: objects that the runs share; None without a worker, in unit tests.
        lease: returns the seconds for which the worker holds what it renews.
        limits: limits of the app, by their names.
        is_new: returns whether an entry of a partition was certainly added within the last seconds.
        free: returns the share of the worker's slots that may be filled now; None without a worker.
        prices: returns the dollars that a call of a model costs, see prices.py; None if the app has no such function.
        notify: posts a webhook about a run, from its event and its data; None without webhooks.
        meter: counts steps; None without metrics.
    """

    threads: Threads
    tasks: Container[str] = ()
    extras: Extras | None = None
    lease: Callable[[], float] = lambda: 30.0
    limits: Mapping[str, Any] = field(default_factory=dict)
    free: Callable[[], float] | None = None
    is_new: IsNew = never_new
    prices: Callable[..., Any] | None = None
    notify: Callable[[Any, str, Mapping[str, Any]], None] | None = None
    meter: StepMeter | None = None
