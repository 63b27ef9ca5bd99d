"""Capacity of a worker: the share of its slots that it may fill now, by free slots, memory and the lag of its loop.

Reading obeys it: a worker asks for no more messages than the slots that are free and usable. What runs is not touched.

    lag       Above `lag_limit`, the usable slots are that share of all which the limit is of the lag, and at least one.
    memory    From 90 % of the limit on, none is usable, until less than 85 % is used.

So no worker starves for ever. A lag leaves one slot, and is forgotten within seconds after the loop answers in time. A
worker whose memory stays full although nothing has been running for ten seconds takes one task at a time: what it holds
will not be freed by waiting, and its tasks may have no other worker.

The limit of memory is the setting `memory_limit`, compared with the resident memory of this process, or what the system
sets: that of the control groups of the process (version 2 or 1), compared with what all their processes use without
page cache that can be dropped, and RLIMIT_AS, compared with the address space. The one that is the most used counts.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ....queues.runtime import RUNTIME
from ...log import logger
from ..slots import Slots

_STOP: Final = 0.90
_RESUME: Final = 0.85
"""Shares of the memory limit from which on nothing is read, and below which reading resumes."""

_PATIENCE: Final = 10.0
"""Seconds without a running task after which a worker that is short of memory takes one."""

_LOOK: Final = 1.0
"""Seconds between two looks at the memory."""

_NEWEST: Final = 0.5
"""Share of the last measurement in the lag; the others have the rest, so that one pause is no reason to read less."""

_UNLIMITED: Final = 1 << 60
"""Version 1 of control groups has a huge limit in place of none."""

_LARGEST_FILE: Final = 1 << 16

_STATM: Final = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in bytes. of: what has the limit, for the log."""

    used: int
    limit: int
    of: str

    @property
    def share(self) -> float:
        return self.used / self.limit

    def __str__(self) -> str:
        return f"{self.share:.0%} of {self.limit / 1024**2:,.0f} MiB ({self.of})"


ReadMemory = Callable[[], MemoryUse | None]


class Capacity:
    """The capacity of one worker. `observe` is called in its loop, the properties may be read in any thread."""

    def __init__(self, slots: Slots, *, lag_limit: float, read_memory: ReadMemory) -> None:
        """lag_limit: lag of the event loop in seconds that is no reason to read less, 0 for any lag."""
        self._slots = slots
        self._lag_limit = lag_limit
        self._read_memory = read_memory
        self._looked = -_LOOK
        self._idle_since: float | None = None
        self._short = False
        self._failed = False
        self.lag = 0.0
        """Lag of the event loop in seconds: a mean in which the last measurement counts half."""
        self.memory: MemoryUse | None = None
        """Use of the memory at the last look, None without a limit."""

    @property
    def figure(self) -> float:
        """The share of the slots that may be filled now, from 0 to 1."""
        return self._slots.free / self._slots.capacity

    @property
    def short_of_memory(self) -> bool:
        """Whether the memory is a reason to read nothing new."""
        return self._short

    @property
    def lags(self) -> bool:
        """Whether the loop lags so much that the worker reads less."""
        return 0 < self._lag_limit < self.lag

    def observe(self, lag: float) -> None:
        """Note a measurement of the loop's lag in seconds, look at the memory now and then, and limit the slots."""
        self.lag += (lag - self.lag) * _NEWEST
        if self.lag < 0.001:
            self.lag = 0.0
        now = RUNTIME.monotonic()
        if now - self._looked >= _LOOK:
            self._looked = now
            self._look()
        self._slots.limit(self._usable(now))

    def summary(self) -> dict[str, Any]:
        """Return the capacity as plain data, for the registration."""
        memory = self.memory
        return {
            "figure": round(self.figure, 3),
            "free_slots": self._slots.free,
            "lag": round(self.lag, 3),
            "memory": None if memory is None else memory.used,
            "memory_limit": None if memory is None else memory.limit,
        }

    def _usable(self, now: float) -> int:
        every = self._slots.capacity
        if self.lags:
            every = max(1, int(every * self._lag_limit / self.lag))
        if not self._short:
            self._idle_since = None
            return every
        if self._slots.taken:
            self._idle_since = None
            return 0
        if self._idle_since is None:
            self._idle_since = now
            gc.collect()  # nothing runs that it could delay
        return 1 if now - self._idle_since >= _PATIENCE else 0

    def _look(self) -> None:
        try:
            memory = self.memory = self._read_memory()
        except (OSError, ValueError) as error:
            if not self._failed:
                self._failed = True
                logger.warning("could not read the use of memory: {}; reading does not depend on it", error)
            memory = self.memory = None
        if memory is None:
            self._short = False
        elif not self._short and memory.share >= _STOP:
            self._short = True
            logger.warning(
                "memory is short: {} is used; no new task is read until it is less than {:.0%}", memory, _RESUME
            )
        elif self._short and memory.share < _RESUME:
            self._short = False
            logger.info("memory is free again: {} is used; tasks are read", memory)


def memory_reader(limit: int) -> ReadMemory:
    """Return the function that reads the use of memory. limit: the setting, 0 for the limits of the system."""
    if not sys.platform.startswith("linux"):
        return _nothing
    if limit:
        return lambda: MemoryUse(_resident(), limit, "the setting memory_limit")
    readers = [*control_groups(), *_address_space()]
    if not readers:
        return _nothing

    def read() -> MemoryUse | None:
        return max((reader() for reader in readers), key=lambda use: use.share)

    return read


def _nothing() -> None:
    return None


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_LARGEST_FILE).decode("ascii", "replace")


def _pages(field: int) -> int:
    """Return a field of the process's memory in bytes: 0 its address space, 1 its resident part."""
    import resource

    return int(_text(_STATM).split()[field]) * resource.getpagesize()


def _resident() -> int:
    return _pages(1)


def resident_memory() -> int | None:
    """Return the resident memory of this process in bytes; None where the system does not tell."""
    try:
        return _resident() if sys.platform.startswith("linux") else None
    except (OSError, ValueError):
        return None


def _address_space() -> Iterator[Callable[[], MemoryUse]]:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield lambda: MemoryUse(_pages(0), limit, "RLIMIT_AS")


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the files of a control group, and of the page cache in its statistics that can be dropped."""

    limit: str
    used: str
    cache: str


_VERSION_2: Final = _Names("memory.max", "memory.current", "inactive_file ")
_VERSION_1: Final = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


def control_groups(
    root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")
) -> Iterator[Callable[[], MemoryUse]]:
    """Yield a reader for each control group of the process that has a limit, those above its own included."""
    try:
        lines = _text(process).splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            top, names = root, _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "memory", _VERSION_1
        else:
            continue
        place = top / path.lstrip("/")
        for folder in (place, *place.parents):
            if _limit_of(folder / names.limit) is not None:
                yield lambda folder=folder, names=names: _use_of(folder, names)  # type: ignore[misc]
            if folder == top:
                break


def _use_of(folder: Path, names: _Names) -> MemoryUse:
    limit = _limit_of(folder / names.limit)
    if limit is None:  # it was lifted meanwhile
        return MemoryUse(0, 1, "a control group")
    cache = next(
        (int(line.split()[1]) for line in _text(folder / "memory.stat").splitlines() if line.startswith(names.cache)), 0
    )
    return MemoryUse(max(0, int(_text(folder / names.used)) - cache), limit, "the control group")


def _limit_of(path: Path) -> int | None:
    """Return the limit in a file; None without one, also if the file cannot be read."""
    try:
        text = _text(path).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < _UNLIMITED else None
