"""Faults of a run, and which of them can have interrupted a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..journal import SECOND, Line

__all__ = ["DEADLY", "HARMLESS", "LOSSES", "SYMPTOMS", "Fault", "Faults"]

DEADLY: Final = frozenset(
    {"kill", "kill_host", "kill_supervisor", "kill_all", "kill_producer", "deploy", "reload", "poison", "exit"}
)
"""Faults that end a process: their effect does not end."""

HARMLESS: Final = frozenset(
    {
        *("blink", "flush", "cut_all", "cut_news", "cut_one", "break", "slow", "replay", "partitions", "resume"),
        *("redis_kill", "redis_stop", "redis_freeze", "newcomer", "clock", "settings", "plan", "pause"),
    }
)
"""Faults that excuse nothing: a worker keeps its leases through them."""

LOSSES: Final = frozenset({"lose_tail", "failover"})
"""Faults by which Redis loses what it stored last."""

SYMPTOMS: Final = frozenset({"exit", "stall", "slow server"})
"""Consequences of faults; without a known fault, they are caused by the machine."""

_EVER: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        until: Its end.
        pids: Processes that it hit; None for all.
        kept: Of a loss of data: time up to which Redis has kept what it had stored.
    """

    kind: str
    begin: Line
    until: int
    pids: frozenset[int] | None
    host: int | None = None
    kept: int = 0


class Faults:
    """All faults: the injected ones, those of tasks that kill their process, and those of the machine."""

    def __init__(self, lines: Sequence[Line], lease: float) -> None:
        """lease: seconds. A fault counts until one lease after its end: by then a worker knows which leases it lost."""
        self._slack = round(lease * SECOND)
        self._families = _families(lines)
        self.all = [*_injected(lines), *_by_tasks(lines), *_by_the_machine(lines)]
        self.all.sort(key=lambda fault: fault.begin.at)

    def hitting(self, pid: int, since: int, until: int) -> Iterator[Fault]:
        """Yield the faults that hit a process between two times and can interrupt it."""
        family, host = self._families.get(pid, ({pid}, None))
        for fault in self.all:
            if fault.begin.at > until:
                return
            if fault.kind in HARMLESS or fault.until + self._slack < since:
                continue
            if (
                fault.pids is None
                or not fault.pids.isdisjoint(family)
                or (fault.host is not None and fault.host == host)
            ):
                yield fault

    def supervised(self, pid: int) -> bool:
        """Return whether the process has a supervisor."""
        return len(self._families.get(pid, ({pid}, None))[0]) > 1

    def explain(self, pid: int, since: int, until: int) -> Fault | None:
        """Return the last fault that hit a process between two times and may have interrupted it.

        A symptom is returned only if no fault is known.
        """
        return max(
            self.hitting(pid, since, until),
            key=lambda fault: (fault.kind not in SYMPTOMS, fault.begin.at),
            default=None,
        )


def _families(lines: Sequence[Line]) -> dict[int, tuple[set[int], int | None]]:
    """Return for each process: itself and its supervisor, and the number of its host."""
    hosts = {line["child"]: line["number"] for line in lines if line.what == "started" and line["role"] == "worker"}
    found: dict[int, tuple[set[int], int | None]] = {pid: ({pid}, host) for pid, host in hosts.items()}
    for line in lines:
        if line.what == "process" and line["parent"] in hosts:
            found[line.pid] = ({line.pid, line["parent"]}, hosts[line["parent"]])
    return found


def _injected(lines: Iterable[Line]) -> Iterator[Fault]:
    open_ones: dict[int, Line] = {}
    kept: dict[int, int] = {}
    for line in lines:
        if line.what == "fault":
            open_ones[line["number"]] = line
        elif line.what == "kept":
            kept[line["number"]] = line["until"]
        elif line.what == "fault_over":
            begin = open_ones.pop(line["number"])
            yield _fault(begin, line.at, kept.get(line["number"], begin.at))
    for begin in open_ones.values():
        yield _fault(begin, _EVER, begin.at)


def _fault(begin: Line, until: int, kept: int) -> Fault:
    kind, pids = begin["kind"], begin.get("pids")
    hit = None if pids is None else frozenset(pids)
    return Fault(kind, begin, _EVER if kind in DEADLY else until, hit, begin.get("host"), kept)


def _by_tasks(lines: Iterable[Line]) -> Iterator[Fault]:
    for line in lines:
        if line.what == "kills":
            yield Fault("poison", line, _EVER, frozenset({line.pid}))


def _by_the_machine(lines: Iterable[Line]) -> Iterator[Fault]:
    """Yield the processes that ended, and standstills without a known cause."""
    for line in lines:
        if line.what == "exited":
            yield Fault("exit", line, _EVER, frozenset({line["child"]}))
        elif line.what == "stalled":
            yield Fault("stall", _since(line), line.at, frozenset({line.pid}))
        elif line.what == "slow_server":
            yield Fault("slow server", _since(line), line.at, None)


def _since(line: Line) -> Line:
    return Line(line.number, line["since"], line.pid, line.what, line.data)
