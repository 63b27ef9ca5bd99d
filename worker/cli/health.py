"""`perdure worker health`: health of workers, as they report it to Redis."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Annotated

import anyio
import typer
from rich.text import Text

from ...queues import Unavailable, WorkerInfo, list_workers
from ..runtime.health import ALIVE, CONNECTED, LEVELS, Level, Report
from .support.connection import ConnectionOptions, with_connection_options
from .support.errors import Failed, Misuse
from .support.output import AsJson, duration, note, print_data, print_json, print_table

__all__ = ["health"]


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

    alive: it reported lately, and its event loop responds.
    connected: Redis responds, and its leases are renewed.
    consuming: it reads messages, or all its slots are taken.
    progress: its tasks make progress, or it runs none.

    Example: perdure worker health --pid 1
    """
    if sum(choice is not None for choice in (worker, pid, name)) > 1:
        raise Misuse("give only one of WORKER-ID, --pid and --name")
    try:
        registered = anyio.run(_registered, place)
    except Unavailable as error:
        raise Failed(f"not connected: {error}; restore Redis, and the workers reconnect") from error
    selected = _select(registered, worker, pid, name)
    reports = [_report(info) for info in selected]
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


async def _registered(place: ConnectionOptions) -> list[WorkerInfo]:
    async with place.producer() as producer:
        return await list_workers(producer.gateway, producer.namespace)


def _select(
    registered: Sequence[WorkerInfo], worker: str | None, pid: int | None, name: str | None
) -> Sequence[WorkerInfo]:
    """Return the selected workers.

    Raises:
        Failed: No such worker is registered.
    """
    if worker is not None:
        found = [info for info in registered if info.id == worker]
        if not found:
            raise Failed(f"no worker {worker!r} reported lately; see 'perdure worker list'")
        return found
    here = socket.gethostname()
    found = _without_ended([info for info in registered if info.host == here])
    wanted = f"on host {here!r}"
    if pid is not None:
        found = [info for info in found if info.pid == pid]
        wanted = f"with process id {pid} {wanted}"
    if name is not None:
        found = [info for info in found if info.id.startswith(f"{name}-{here}-")]
        wanted = f"with name {name!r} {wanted}"
    if not found:
        raise Failed(f"not alive: no worker {wanted} reported lately; see 'perdure worker list'")
    return found


def _without_ended(workers: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Return the workers of this host whose process still exists, or that reported lately."""
    last = {info.pid: info for info in sorted(workers, key=lambda info: info.started)}
    return [info for info in last.values() if not info.presumed_dead or _is_running(info.pid)]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _report(info: WorkerInfo) -> Report:
    """Return the report of a worker, unless it is too old to be valid."""
    if info.presumed_dead:
        silent = f"last report {duration(info.seen)} ago; a report is due every {info.interval:g} s"
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
    levels = {level.name: level for level in report.levels}
    rows = [
        (name, Text("yes", "green") if level.ok else Text("no", "red"), level.said)
        if (level := levels.get(name)) is not None
        else (name, Text("?"), "unknown")
        for name in LEVELS
    ]
    print_table((report.worker, "", ""), rows)
