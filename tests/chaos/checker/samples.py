"""The parts of a long run beside each other: memory of the server and of workers, and how soon tasks start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import Any, Final

from ..journal import SECOND, Line
from .history import History

__all__ = ["sampled"]

_PARTS: Final = 6
"""Parts of a run that are compared."""


def sampled(history: History) -> Iterator[str]:
    """Yield a table of the parts of a run; nothing if it has no samples."""
    samples = [line for line in history.lines if line.what == "sample"]
    if not samples:
        return
    begin, over = samples[0].at, next((line.at for line in history.lines if line.what == "faults_over"), history.end)
    length = (over - begin) / _PARTS
    acknowledged = [task.acknowledged.at for task in history.tasks.values() if task.acknowledged is not None]
    started = _started(history)
    yield f"parts of {length / SECOND / 60:.1f} minutes, while faults were injected:"
    yield "  minute  tasks  to start: p50      p95  server: memory      keys  bytes per task  workers without faults"
    for part in range(_PARTS):
        since, until = begin + part * length, begin + (part + 1) * length
        waits = [wait for at, wait in started if since <= at < until]
        here = [line for line in samples if since <= line.at < until]
        if len(waits) < 2 or not here:
            continue
        late = quantiles(waits, n=100, method="inclusive")
        memory, keys = here[-1]["memory"], here[-1]["keys"]
        known = sum(at < here[-1].at for at in acknowledged)
        yield (
            f"  {(until - begin) / SECOND / 60:6.1f} {len(waits):6}   {late[49]:7.3f} s {late[94]:7.3f} s"
            f"   {memory / 1e6:10.1f} MB {keys:9,} {memory / max(1, known):15,.0f}  {_resident(here)}"
        )


def _started(history: History) -> list[tuple[int, float]]:
    """Return when each task was acknowledged that nothing holds back, and the seconds until its first run."""
    found = []
    for task in history.tasks.values():
        line = task.acknowledged
        held_back = line is None or line["key"] is not None or bool(task.enqueue and task.enqueue["delay"])
        if line is not None and not held_back and task.runs and not task.rules.limits:
            found.append((line.at, max(0, task.runs[0].at - line.at) / SECOND))
    return sorted(found)


def _resident(samples: Sequence[Line]) -> str:
    """Return the memory of each process at its last sample of a part, and its age."""
    last: dict[str, Any] = {}
    for line in samples:
        last |= line["workers"]
    return ", ".join(f"{memory / 1e6:.1f} MB at {age / 60:.0f} min" for age, memory in last.values()) or "none"
