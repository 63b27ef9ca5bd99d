"""`perdure worker health`: health of workers, as they report it to Redis."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import anyio
import typer

from ...queues.errors import Unavailable
from ...queues.inspection.views import list_queues
from ...queues.presence import WorkerInfo, list_workers
from ..runtime.health.report import ALIVE, CONNECTED, LEVELS, Level, Report
from .support.connection import ConnectionOptions, with_connection_options
from .support.errors import Failed, Misuse
from .support.output import AsJson, duration, note, print_data, print_json, print_table


@with_connection_options
def health(
    place: ConnectionOptions,
    worker: Annotated[
        str | None,
        typer.Argument(metavar="[WORKER-ID]", help="Id of the worker, as 'worker list' shows it.", show_default=False),
    ] = None,
    *,
    pid: Annotated[
        int | None, typer.Option(metavar="PID", help="Check the worker of this host with this process id.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Check the workers of this host with this --name.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Check the health of workers; exit with 0 if all are healthy, else with 1.

    Use it in probes that run a command. It reads from Redis what the
    workers report every few seconds. Default: all workers of this host.

    A worker whose process has ended without a shutdown is lost. It fails
    the check until its deliveries were claimed.

    alive: it reported lately, and its event loop responds.
    connected: Redis responds, and its leases are renewed.
    consuming: it reads messages, or all its slots are taken.
    progress: its tasks make progress, or it runs none.

    Example: perdure worker health --pid 1
    """
    if sum(choice is not None for choice in (worker, pid, name)) > 1:
        raise Misuse("give only one of WORKER-ID, --pid and --name")
    try:
        registered, held = anyio.run(_registered, place)
    except Unavailable as error:
        raise Failed(f"not connected: {error}; restore Redis, and the workers reconnect") from error
    selected = _select(registered, held, worker, pid, name)
    reports = [_report(info, held.get(info.id, 0)) for info in selected]
    if json:
        print_json([report.summary() for report in reports])
    else:
        for position, report in enumerate(reports):
            if position > 0:
                print_data("")
            _print_report(report)
    failing = [(report.worker, level) for report in reports for level in report.levels if not level.ok]
    for worker_id, level in failing:
        remedy = f"; {level.remedy}" if level.remedy else ""
        note(f"worker {worker_id} is not {_AS_ADJECTIVE.get(level.name, level.name)}: {level.said}{remedy}")
    if failing:
        raise typer.Exit(1)


_AS_ADJECTIVE = {"progress": "making progress"}


async def _registered(place: ConnectionOptions) -> tuple[list[WorkerInfo], Mapping[str, int]]:
    """Return the registered workers, and the number of deliveries that each one presumed dead still holds."""
    held: Counter[str] = Counter()
    async with place.producer() as producer:
        registered = await list_workers(producer.gateway, producer.namespace)
        lost = {info.id for info in registered if info.presumed_dead}
        for stats in await list_queues(producer.gateway, producer.namespace) if lost else ():
            held.update({name: number for name, number in stats.consumers.items() if name in lost})
    return registered, held


def _select(
    registered: Sequence[WorkerInfo], held: Mapping[str, int], worker: str | None, pid: int | None, name: str | None
) -> Sequence[WorkerInfo]:
    """Return the selected workers without those that are lost and hold no delivery, which are noted.

    Raises:
        Failed: No such worker is registered.
    """
    if worker is not None:
        found = [info for info in registered if info.id == worker]
        if not found:
            raise Failed(f"no worker {worker!r} reported lately; see 'perdure worker list'")
        return found
    here = socket.gethostname()
    found = [info for info in registered if info.host == here]
    wanted = f"on host {here!r}"
    if pid is not None:
        found = [info for info in found if info.pid == pid]
        wanted = f"with process id {pid} {wanted}"
    if name is not None:
        found = [info for info in found if info.id.startswith(f"{name}-{here}-")]
        wanted = f"with name {name!r} {wanted}"
    checked = [info for info in found if held.get(info.id) or not _has_ended(info, found)]
    for info in found:
        if info.presumed_dead and info not in checked:
            note(f"worker {info.id} is lost: last report {duration(info.seen)} ago; it holds no delivery")
    if not checked:
        raise Failed(f"not alive: no worker {wanted} reported lately; see 'perdure worker list'")
    return checked


def _has_ended(info: WorkerInfo, workers: Sequence[WorkerInfo]) -> bool:
    """Whether the process of a worker of this host has ended: a later worker has its id, or it does not run."""
    if any(other.pid == info.pid and other.started > info.started for other in workers):
        return True
    return info.presumed_dead and not _is_running(info.pid, info.seen)


def _is_running(pid: int, for_seconds: float) -> bool:
    """Whether a process exists and has run for this time. A younger one has the id of another that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return fields[0] != "Z" and age > for_seconds - 1
    except (OSError, ValueError, IndexError):  # it has ended, or this is not Linux
        return _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _report(info: WorkerInfo, held: int) -> Report:
    """Return the report of a worker, unless it is too old to be valid. held: number of its deliveries."""
    if info.presumed_dead:
        silent = f"last report {duration(info.seen)} ago; a report is due every {info.interval:g} s"
        if held:
            silent += f"; it holds {held} {'delivery' if held == 1 else 'deliveries'}"
        remedy = "it has ended, or its event loop is blocked, or it cannot reach Redis: check its log, then restart it"
        return Report(info.id, (Level(ALIVE, False, silent, remedy),))
    alive = Level(ALIVE, True, f"last report {duration(info.seen)} ago")
    try:
        report = Report.from_summary(info.health)
    except (KeyError, TypeError):
        unknown = Level(CONNECTED, True, f"version {info.version} sends no health report")
        return Report(info.id, (alive, unknown))
    return Report(info.id, tuple(alive if level.name == ALIVE and level.ok else level for level in report.levels))


def _print_report(report: Report) -> None:
    from rich.text import Text

    levels = {level.name: level for level in report.levels}
    rows = [
        (name, Text("yes", "green") if level.ok else Text("no", "red"), level.said)
        if (level := levels.get(name)) is not None
        else (name, Text("?"), "unknown")
        for name in LEVELS
    ]
    print_table((report.worker, "", ""), rows)
