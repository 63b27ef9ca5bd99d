"""What a measure gives, and what it needs to take one. Rates are per second, latencies in milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ....queues import Envelope, new_task_id

__all__ = ["Row", "Size", "message", "percentile", "timed"]


@dataclass(frozen=True, slots=True)
class Size:
    """tasks: of each measure. payload: bytes of each task's argument. concurrency: of each worker. processes: that work
    on the same tasks, 0 for none.
    """

    tasks: int
    payload: int
    concurrency: int
    processes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. raw: what the raw client reaches, None where it has no such thing; `does` says how."""

    key: str
    what: str
    unit: str
    value: float | None
    raw: float | None
    does: str

    def summary(self) -> dict[str, Any]:
        """The line as plain data, for programs."""
        return asdict(self)


def message(data: str) -> tuple[str | bytes, ...]:
    """What a message of Perdure carries."""
    return "env", Envelope(id=new_task_id(), task="noop").encode(), "args", f'{{"data":"{data}"}}'.encode()


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Gives a function that tells, afterwards, how many seconds the block took."""
    began, ended = time.perf_counter(), [0.0]
    yield lambda: ended[0] - began
    ended[0] = time.perf_counter()


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
