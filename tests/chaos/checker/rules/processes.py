"""Rule: no worker exits by itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from ...journal import SECOND, Line
from ..faults import Fault
from ..history import History, Violation

__all__ = ["check_processes"]

_STARTING = 30 * SECOND
"""Longest time in which a process that has loaded the package tries to reach the server."""

_BY_SIGNAL = 128
"""Above it, the exit code of a supervisor says which signal ended its first child."""


def check_processes(history: History) -> Iterator[Violation]:
    """Check that a process that exited was killed, stopped, or could not reach the server when it was started."""
    started: dict[int, Line] = {}
    loaded: dict[int, int] = {}
    killed = {line.pid for line in history.lines if line.what == "kills"}
    for line in history.lines:
        if line.what == "started":
            started[line["child"]] = line
        elif line.what == "process":
            loaded[line.pid] = line.at
            loaded.setdefault(line["parent"], line.at)  # of a supervisor: its first child
        elif line.what == "exited" and not line["closing"] and line["child"] not in killed:
            start = started[line["child"]]
            if start["role"] == "producer" and line["code"] == -signal.SIGTERM:
                continue  # stopped before its signal handler was installed
            if start["role"] == "page" and line["code"] == 0:
                continue  # all of its pages have ended
            if (
                line["code"] == 1
                and line.at - loaded.get(line["child"], start.at) < _STARTING
                and _away(history, start, line)
            ):
                continue
            if not any(_ended(fault, line) for fault in history.faults.all):
                what = f"a {line['role']} ended by itself, with code {line['code']}"
                yield Violation("ended by itself", what, (start, line))


def _ended(fault: Fault, exited: Line) -> bool:
    """Return whether a fault can have ended a process: it hit the process, or the only child of a supervisor."""
    if fault.kind == "exit" or fault.begin.at > exited.at:
        return False
    hit = fault.pids is not None and exited["child"] in fault.pids
    return hit or (exited["code"] > _BY_SIGNAL and fault.begin.get("of") == exited["child"])


def _away(history: History, start: Line, ended: Line) -> bool:
    """Whether the server could not be reached while the process was starting."""
    return any(
        fault.kind != "exit" and fault.pids is None and fault.begin.at <= ended.at and fault.until >= start.at
        for fault in history.faults.all
    ) or any(
        fault.host == start.get("number") and fault.begin.at <= ended.at and fault.until >= start.at
        for fault in history.faults.all
    )
