"""`perdure worker`: run workers and supervisors, list and drain them, resume paused supervisors."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import typer

from ...queues.defaults import nearest
from ...queues.errors import Unavailable
from ...queues.inspection.views import list_queues, observed_workers
from ...queues.keys import check_name
from ...queues.presence import DrainAnswer, WorkerInfo, drain_worker, list_workers, read_registered
from ...queues.producer import Producer
from ...queues.supervisors import SupervisorInfo, list_supervisors, paused_supervisors, resume_supervisor
from ...queues.wording import counted, duration
from ..runtime.health.report import ALIVE, CONNECTED, LEVELS, Level, Report
from .lazy import load
from .support.connection import ConnectionOptions, connected, where
from .support.errors import Failed, Misuse
from .support.options import By, in_duration, login
from .support.output import Column, StderrText, Styled, Table, Time, note, table
from .support.runner import LiveListing, Output, command

_SUPERVISOR: Final = "Supervisor"
_HEALTH: Final = "Health"
_DEVELOPMENT: Final = "Development"
_SUPERVISED: Final = "PERDURE_SUPERVISED"
"""Environment variable of a supervisor's children; `worker.runtime.supervisor_link` is not imported for it."""


class Partitions(StrEnum):
    """Partitions that a worker reads."""

    ALL = "all"
    SHARE = "share"


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def worker() -> None:
    """Run workers and supervisors, list and drain them, check their health, and resume paused supervisors."""


@app.command()
@command
def run(
    place: ConnectionOptions,
    context: typer.Context,
    application: Annotated[
        str,
        typer.Argument(
            metavar="APP", help="The app: module:attribute or path/to/file.py:attribute.", show_default=False
        ),
    ],
    *,
    queues: Annotated[
        str | None, typer.Option(metavar="A,B", help="Read these queues. Default: the queues of the app's tasks.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Run up to N tasks at the same time. Default: 16.", show_default=False),
    ] = None,
    burst: Annotated[bool, typer.Option("--burst", help="Exit when the queues are empty.")] = False,
    lease: Annotated[
        float | None,
        in_duration(
            "Time after which the tasks of a silent worker are claimed by others; the same for all workers: store it "
            "with 'perdure config set lease'. Default: PERDURE_LEASE, then 15."
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse to start if the lease, result TTL or dead-letter TTL given to this worker differs from the "
            "one that 'perdure config' has stored. Default: log the difference, and use the stored value.",
        ),
    ] = False,
    grace: Annotated[
        float | None,
        in_duration("Time for running steps to finish at shutdown. Default: PERDURE_GRACE, then 30."),
    ] = None,
    partitions: Annotated[
        Partitions | None,
        typer.Option(
            help="Read all partitions of the queues, or a share that is balanced with the other workers. "
            "Default: PERDURE_PARTITIONS, then all.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="First part of the ids of worker and supervisor. Default: the app's name."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="P",
            help="Run P worker processes, each with its own --concurrency. Default: 1.",
            rich_help_panel=_SUPERVISOR,
        ),
    ] = None,
    no_supervisor: Annotated[
        bool,
        typer.Option(
            "--no-supervisor",
            help="Run one worker in this process, where another supervisor restarts it. It runs quarantined tasks "
            "one at a time, and no other task meanwhile. If it dies, its tasks are claimed after the lease.",
            rich_help_panel=_SUPERVISOR,
        ),
    ] = False,
    isolated: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Use up to N additional processes for quarantined tasks, one task per process. Default: one per slot, "
            "at most 16.",
            rich_help_panel=_SUPERVISOR,
            show_default=False,
        ),
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this shell command, with JSON on its standard input, when the supervisor pauses because of too "
            "many crashes.",
            rich_help_panel=_SUPERVISOR,
        ),
    ] = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Replace the workers when a source file changes. For development.",
            rich_help_panel=_DEVELOPMENT,
        ),
    ] = False,
    reload_dir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Watch the files in this folder and below. Repeatable. Default: the working directory.",
            rich_help_panel=_DEVELOPMENT,
            show_default=False,
        ),
    ] = None,
    reload_include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Watch files with such a name, too, such as '*.md'. Repeatable. Default: '*.py' only.",
            rich_help_panel=_DEVELOPMENT,
            show_default=False,
        ),
    ] = None,
    log_tasks: Annotated[
        bool, typer.Option("--log-tasks", help="Log the start and the end of each run. Default: PERDURE_LOG_TASKS.")
    ] = False,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve the HTTP probes /livez and /readyz, and metrics at /metrics, on this port. 0: any free port, "
            "which is logged.",
            rich_help_panel=_HEALTH,
        ),
    ] = None,
    health_host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address for the probes, such as 0.0.0.0 in a container. Default: 127.0.0.1.",
            rich_help_panel=_HEALTH,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a worker until a signal stops it.

    SIGTERM or Ctrl-C: the worker reads no more tasks, lets running steps
    finish and releases its tasks to other workers, which costs no attempt.
    The second signal stops it at once. The third one ends the process;
    other workers then claim its tasks after the lease.

    A supervisor runs the workers as child processes. It replaces a worker
    that crashes, and its tasks resume at once. SIGHUP replaces all workers
    one at a time, to load new code. After too many crashes without
    progress it pauses until 'perdure worker resume'.

    While you write the app: --reload does so when a file is saved. New code
    that cannot be imported leaves the old workers running.

    Example: perdure worker run tasks.py:app --processes 4 --concurrency 32
    """
    checked_name = None if name is None else _check("--name", "worker name", name)
    queue_names = _read_queues(queues)
    probe = load(".support.probe:ProbeOptions")(health_host, health_port)
    supervisor_options = {"processes": processes, "isolated": isolated, "alert": alert}
    given = [name for name, value in supervisor_options.items() if value is not None]
    if no_supervisor and given:
        raise Misuse(f"--{given[0]} is for a supervisor: omit --no-supervisor")
    if reload:
        production = {"--no-supervisor": no_supervisor, "--burst": burst, "--alert": alert is not None}
        if wrong := [option for option, is_given in production.items() if is_given]:
            raise Misuse(f"--reload is for development: omit {wrong[0]}")
    elif reload_dir or reload_include:
        raise Misuse(f"--reload-{'dir' if reload_dir else 'include'} needs --reload")
    if not no_supervisor and _SUPERVISED not in os.environ:
        load(".support.supervisor_process:run_supervisor")(
            context,
            place,
            probe,
            processes=processes or 1,
            isolated=isolated,
            alert=alert,
            name=checked_name,
            burst=burst,
            sources=_sources(application, reload_dir, reload_include) if reload else None,
        )
        return
    load(".support.worker_process:run_worker")(
        place,
        probe,
        application,
        concurrency=concurrency,
        queues=queue_names,
        name=checked_name,
        burst=burst,
        settings={
            "lease": lease,
            "strict": strict or None,
            "grace": grace,
            "partitions": partitions,
            "log_tasks": log_tasks or None,
        },
    )


def _sources(application: str, folders: Sequence[Path] | None, patterns: Sequence[str] | None) -> Any:
    """Return the files to watch: of the given folders, else of the working directory and the folder of the app."""
    if not folders:
        target = Path(application.rpartition(":")[0])
        folders = [Path.cwd(), *([target.parent] if target.suffix == ".py" else [])]
    resolved = dict.fromkeys(folder.absolute() for folder in folders)
    roots = [folder for folder in resolved if not any(other in folder.parents for other in resolved)]
    return load("..supervise.source_files:SourceFiles")(roots, ("*.py", *(patterns or ())))


def _read_queues(text: str | None) -> list[str] | None:
    return None if text is None else [_check("--queues", "queue", name) for name in dict.fromkeys(text.split(","))]


def _check(option: str, kind: str, name: str) -> str:
    try:
        return check_name(kind, name)
    except ValueError as error:
        raise Misuse(f"{option}: {error}") from None


@app.command("list")
@connected
async def list_(producer: Producer) -> LiveListing:
    """List the workers and supervisors that are registered in Redis.

    A paused supervisor is listed until it is resumed. With --json: an
    object with "workers", "supervisors" and "problems", which names what
    another program wrote into the registries.

    Example: perdure worker list
    """
    workers = await observed_workers(producer.gateway, producer.namespace)
    problems = (await read_registered(producer.gateway, producer.namespace)).problems
    supervisors = await list_supervisors(producer.gateway, producer.namespace, problems)
    paused = sorted({info.name for info in supervisors if info.paused_since})
    listing = LiveListing(
        WORKER_COLUMNS,
        workers,
        empty=f"no workers {where(producer)}",
        data={
            "workers": [info.summary() for info in workers],
            "supervisors": [info.summary() for info in supervisors],
            "problems": [{"id": name, "problem": problem} for name, problem in problems.items()],
        },
    )
    listing.parts[:0] = [StderrText(f"{name}: {problem}") for name, problem in problems.items()]
    if supervisors:
        listing.parts += [*([""] if workers else []), Table(_SUPERVISOR_COLUMNS, supervisors)]
    resume = "is paused; fix the cause, then run: perdure worker resume"
    listing.parts += [StderrText(f"supervisor {name} {resume} {name}") for name in paused]
    listing.parts += [StderrText(text) for text in await load(".queue_pause:pause_notes")(producer)]
    return listing


def _capacity(info: WorkerInfo) -> str:
    """Return the share of the slots that a worker may fill now; '-' where it is unknown."""
    reported: object = info.capacity  # any JSON, if another program wrote it
    figure = reported.get("figure") if isinstance(reported, Mapping) else None
    return f"{figure:.0%}" if isinstance(figure, (int, float)) else "-"


WORKER_COLUMNS: Final[Sequence[Column[WorkerInfo]]] = (
    Column("worker", lambda info: info.id, least=16),
    Column("app", lambda info: info.app, wide=True),
    Column("queues", lambda info: info.queues, least=8),
    Column("busy", lambda info: f"{info.in_flight}/{info.concurrency}", right=True),
    Column("capacity", _capacity, right=True),
    Column("health", lambda info: info.status, least=8),
    Column("started", lambda info: Time(info.started), wide=True),
    Column("seen", lambda info: f"{duration(info.seen, whole=True)} ago"),
    Column("host", lambda info: info.host, least=6),
    Column("pid", lambda info: info.pid, right=True, wide=True),
    Column("version", lambda info: info.version, wide=True),
)


def _count_states(info: SupervisorInfo) -> str:
    """Return the number of children per state, such as '3 working, 1 idle'."""
    states = Counter(child.state for child in info.children)
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "none"


_SUPERVISOR_COLUMNS: Final[Sequence[Column[SupervisorInfo]]] = (
    Column("supervisor", lambda info: info.name, least=12),
    Column("children", _count_states, least=10),
    Column("of", lambda info: info.processes, right=True, wide=True),
    Column("crashes", lambda info: info.crashes, right=True),
    Column("within", lambda info: duration(info.window) if info.window else "-", right=True, wide=True),
    Column("started", lambda info: Time(info.started or None), wide=True),
    Column("seen", lambda info: "gone" if info.seen is None else f"{duration(info.seen, whole=True)} ago"),
    Column("host", lambda info: info.host, least=6),
    Column("pid", lambda info: info.pid or "-", right=True, wide=True),
    Column("paused", lambda info: Time(info.paused_since, f": {info.why}") if info.paused_since else "no", least=6),
)


@app.command()
@connected
async def resume(
    producer: Producer,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Name of the supervisor, as 'worker list' shows it.", show_default=False),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Resume all paused supervisors.")] = False,
) -> Output:
    """Resume paused supervisors, and print their names.

    A supervisor pauses when its workers crash too often. Fix the cause
    first. This lifts the pause and resets the crash count; it takes effect
    within two seconds.

    Example: perdure worker resume --all
    """
    if (name is None) is not every:
        raise Misuse("give the name of a supervisor, as 'perdure worker list' shows it, or --all")
    paused = await paused_supervisors(producer.gateway, producer.namespace)
    if name is not None and name not in paused:
        raise Failed(
            f"no supervisor {name!r} is paused in namespace {producer.namespace.name!r}; "
            f"paused supervisors: {', '.join(paused) or 'none'}"
        )
    lifted = [
        one
        for one in (paused if name is None else [name])
        if await resume_supervisor(producer.gateway, producer.namespace, one) or name
    ]
    return Output(lifted, *lifted, notes=[f"resumed: {len(lifted)}"])


@app.command()
@connected
async def drain(
    producer: Producer,
    workers: Annotated[
        list[str],
        typer.Argument(metavar="WORKER-ID...", help="Ids of workers, as 'worker list' shows them.", show_default=False),
    ],
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the workers have stopped.")] = False,
    by: By = None,
) -> Output:
    """Let workers take no more tasks, finish what they run, and stop. Prints their ids.

    They follow within a moment, and run their tasks to the end, however long
    that takes; SIGTERM cuts it short. Other workers take their partitions. The
    process exits with code 0. A supervisor starts no other worker in place of
    a drained one, and exits with code 0 when all of its workers were drained.

    Example: perdure worker drain shop-web1-4711-5f3a --wait
    """
    gateway, namespace = producer.gateway, producer.namespace
    notes = []
    for worker_id in dict.fromkeys(workers):
        answer = await drain_worker(gateway, namespace, worker_id, by=login() if by is None else by)
        if answer is DrainAnswer.NOT_REGISTERED:
            known = [info.id for info in await list_workers(gateway, namespace)]
            raise Failed(f"no worker {worker_id!r} is registered {where(producer)}{nearest(worker_id, known)}")
        if answer is DrainAnswer.UNSUPPORTED:
            raise Failed(f"worker {worker_id!r} is of an earlier version, which cannot be drained: send it SIGTERM")
        if answer is DrainAnswer.ASKED_BEFORE:
            notes.append(f"worker {worker_id} was drained before")
    if wait:
        await _wait_stopped(producer, set(workers))
    return Output(list(dict.fromkeys(workers)), *dict.fromkeys(workers), notes=notes)


async def _wait_stopped(producer: Producer, workers: set[str]) -> None:
    """Return when none of these workers is registered any more. Raises `Failed` for one that is lost."""
    noted: dict[str, int] = {}
    while True:
        left = [info for info in await list_workers(producer.gateway, producer.namespace) if info.id in workers]
        if not left:
            return
        for info in left:
            if info.presumed_dead:
                silent = f"its last report was {duration(info.seen)} ago"
                raise Failed(f"worker {info.id} did not stop: {silent}; see 'perdure worker health {info.id}'")
            if info.draining and noted.get(info.id) != info.in_flight:  # it has registered since
                noted[info.id] = info.in_flight
                note(f"worker {info.id} runs {counted(info.in_flight, 'task')}")
        await anyio.sleep(_POLL)


_POLL: Final = 0.5
"""Seconds between two looks at workers that are drained."""


@app.command()
@command
async def health(
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
) -> Output:
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
        registered, held = await _registered(place)
    except Unavailable as error:
        raise Failed(f"not connected: {error}; restore Redis, and the workers reconnect") from error
    selected = _select(registered, held, worker, pid, name)
    reports = [_report(info, held.get(info.id, 0)) for info in selected]
    failing = [(report.worker, level) for report in reports for level in report.levels if not level.ok]
    tables = [part for report in reports for part in ("", _levels(report))]
    return Output(
        [report.summary() for report in reports],
        *tables[1:],
        notes=[
            f"worker {worker_id} is not {_AS_ADJECTIVE.get(level.name, level.name)}: {level.said}"
            f"{f'; {level.remedy}' if level.remedy else ''}"
            for worker_id, level in failing
        ],
        failure=typer.Exit(1) if failing else None,
    )


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


def _levels(report: Report) -> Table[Any]:
    levels = {level.name: level for level in report.levels}
    rows = [
        (name, Styled("yes", "green") if level.ok else Styled("no", "red"), level.said)
        if (level := levels.get(name)) is not None
        else (name, "?", "unknown")
        for name in LEVELS
    ]
    return table((report.worker, "", ""), rows)
