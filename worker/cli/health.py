"""`perdure worker health`: whether workers are well, as they tell it in Redis."""

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
        str | None, typer.Argument(metavar="[WORKER-ID]", help="The worker, as listed.", show_default=False)
    ] = None,
    *,
    pid: Annotated[
        int | None, typer.Option(metavar="PID", help="The worker of this host with this process id.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Those of this host that run under this --name.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Tell whether workers are well; exit code 0 if all are, else 1.

    Asks Redis for what the workers announce every few seconds: for
    probes that run a command. Without a choice: all workers of this host.

    alive: it was heard of lately, and its event loop answers.
    connected: Redis answers it, and its leases are renewed.
    consuming: it takes messages, or has no slot free for them.
    progress: what it runs gets on, or it has nothing to run.

    Example: perdure worker health --pid 1
    """
    if sum(choice is not None for choice in (worker, pid, name)) > 1:
        raise Misuse("give one of WORKER-ID, --pid and --name")
    try:
        announced = anyio.run(_announced, place)
    except Unavailable as error:
        raise Failed(f"not connected: {error}; see that Redis answers, workers reconnect by themselves") from error
    chosen = _choose(announced, worker, pid, name)
    reports = [_judge(info) for info in chosen]
    if json:
        print_json([report.summary() for report in reports])
    else:
        for position, report in enumerate(reports):
            _show(report, apart=position > 0)
    failing = [(report.worker, level) for report in reports for level in report.levels if not level.ok]
    for worker_id, level in failing:
        remedy = f"; {level.remedy}" if level.remedy else ""
        note(f"worker {worker_id} is not {_AS_ADJECTIVE.get(level.name, level.name)}: {level.said}{remedy}")
    if failing:
        raise typer.Exit(1)


_AS_ADJECTIVE = {"progress": "making progress"}


async def _announced(place: ConnectionOptions) -> list[WorkerInfo]:
    async with place.producer() as producer:
        return await list_workers(producer.gateway, producer.namespace)


def _choose(
    announced: Sequence[WorkerInfo], worker: str | None, pid: int | None, name: str | None
) -> Sequence[WorkerInfo]:
    """Those that are meant. Raises `Failed` where there is none."""
    if worker is not None:
        found = [info for info in announced if info.id == worker]
        if not found:
            raise Failed(f"no worker {worker!r} was heard of lately; see 'perdure worker list'")
        return found
    here = socket.gethostname()
    found = _present([info for info in announced if info.host == here])
    wanted = f"on host {here!r}"
    if pid is not None:
        found = [info for info in found if info.pid == pid]
        wanted = f"with process id {pid} {wanted}"
    if name is not None:
        found = [info for info in found if info.id.startswith(f"{name}-{here}-")]
        wanted = f"of name {name!r} {wanted}"
    if not found:
        raise Failed(f"not alive: no worker {wanted} was heard of lately; see 'perdure worker list'")
    return found


def _present(workers: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Workers of this host, without those of processes that have ended: a silent one that is there still is stuck."""
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


def _judge(info: WorkerInfo) -> Report:
    """What it said of itself, if that is still to be believed; of an older version it is known that it was heard of."""
    if info.presumed_dead:
        silent = f"it was last heard of {duration(info.seen)} ago, and tells every {info.interval:g} s how it is"
        remedy = "it has ended, or its event loop is blocked, or it cannot reach Redis: see its log, and restart it"
        return Report(info.id, (Level(ALIVE, False, silent, remedy),))
    heard = Level(ALIVE, True, f"heard of {duration(info.seen)} ago")
    try:
        told = Report.from_summary(info.health)
    except (KeyError, TypeError):
        return Report(info.id, (heard, Level(CONNECTED, True, f"it is of version {info.version}, and tells no more")))
    return Report(info.id, tuple(heard if level.name == ALIVE and level.ok else level for level in told.levels))


def _show(report: Report, *, apart: bool) -> None:
    if apart:
        print_data("")
    levels = {level.name: level for level in report.levels}
    rows = [
        (name, Text("yes", "green") if level.ok else Text("no", "red"), level.said)
        if (level := levels.get(name)) is not None
        else (name, Text("?"), "not known")
        for name in LEVELS
    ]
    print_table((report.worker, "", ""), rows)
