"""`perdure worker`: running workers, and seeing who works."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Annotated, Final

import typer

from ...queues import (
    Producer,
    SupervisorInfo,
    WorkerInfo,
    check_name,
    list_supervisors,
    list_workers,
    paused_supervisors,
    resume_supervisor,
)
from .health import health
from .lazy import load
from .support.connection import ConnectionOptions, connected, redis_now, with_connection_options
from .support.errors import Failed, Misuse
from .support.options import in_seconds
from .support.output import AsJson, ago, duration, note, print_data, print_json, print_table

__all__ = ["app"]

_SUPERVISOR: Final = "Several processes"
_HEALTH: Final = "Health"


class Partitions(StrEnum):
    """Which partitions a worker takes from."""

    ALL = "all"
    SHARE = "share"


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def worker() -> None:
    """Run workers and supervisors, see who works, resume what is paused."""


@app.command()
@with_connection_options
def run(
    place: ConnectionOptions,
    context: typer.Context,
    application: Annotated[
        str, typer.Argument(metavar="APP", help="module:attribute or path/to/file.py:attribute.", show_default=False)
    ],
    *,
    queues: Annotated[
        str | None, typer.Option(metavar="A,B", help="Work on these queues. Else on those of the app's tasks.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Tasks to run at once.")] = 16,
    burst: Annotated[bool, typer.Option("--burst", help="End when the queues are empty.")] = False,
    lease: Annotated[
        float | None,
        in_seconds("How long a silent worker keeps its tasks; the same for all workers. Else PERDURE_LEASE, else 15."),
    ] = None,
    grace: Annotated[
        float | None,
        in_seconds("How long running steps may take to end at shutdown. Else PERDURE_GRACE, else 30."),
    ] = None,
    partitions: Annotated[
        Partitions | None,
        typer.Option(
            help="Of its queues' partitions: all, or its share among the workers who share. "
            "Else PERDURE_PARTITIONS, else all.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Begins the worker's id, and the supervisor's. Else the app's.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="P",
            help="Supervise so many worker processes, each with --concurrency of its own. Else this process is the "
            "worker, and nobody starts it again.",
            rich_help_panel=_SUPERVISOR,
        ),
    ] = None,
    isolated: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="At most so many processes more, for tasks whose worker died: each runs one at a time and nothing "
            "else. One is always kept waiting. Else as many as there are slots, at most 16.",
            rich_help_panel=_SUPERVISOR,
            show_default=False,
        ),
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this in the shell, with JSON on its standard input, when workers crash so often that the "
            "supervisor pauses.",
            rich_help_panel=_SUPERVISOR,
        ),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Answer HTTP probes here: /livez and /readyz. 0 for any free port, which is logged.",
            rich_help_panel=_HEALTH,
        ),
    ] = None,
    health_host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Where they are answered; 0.0.0.0 in a container that is probed from outside. Else 127.0.0.1.",
            rich_help_panel=_HEALTH,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a worker until it is told to stop.

    SIGTERM or Ctrl-C: it takes nothing more, lets running steps end and
    hands its tasks to others, at no cost. Again: at once. A third time:
    the process ends, and its tasks are recovered by others.

    With --processes, a supervisor runs workers as its children: one that
    dies is replaced, and what it held goes on at once. It passes signals
    on. SIGHUP replaces the workers one at a time, to load new code. After
    too many crashes it pauses, until 'perdure worker resume'.

    Example: perdure worker run tasks.py:app --processes 4 --concurrency 32
    """
    chosen = None if name is None else _checked("--name", "worker name", name)
    listed = _read_queues(queues)
    probe = load(".support.worker_process:ProbePlace")(health_host, health_port)
    if processes is not None:
        load(".support.supervisor_process:run_supervisor")(
            context, place, probe, processes=processes, isolated=isolated, alert=alert, name=chosen, burst=burst
        )
        return
    if isolated is not None or alert is not None:
        raise Misuse(f"--{'alert' if isolated is None else 'isolated'} is a supervisor's: give --processes too")
    load(".support.worker_process:run_worker")(
        place,
        probe,
        application,
        concurrency=concurrency,
        queues=listed,
        name=chosen,
        burst=burst,
        settings={"lease": lease, "grace": grace, "partitions": partitions},
    )


def _read_queues(text: str | None) -> list[str] | None:
    return None if text is None else [_checked("--queues", "queue", name) for name in dict.fromkeys(text.split(","))]


def _checked(option: str, kind: str, name: str) -> str:
    try:
        return check_name(kind, name)
    except ValueError as error:
        raise Misuse(f"{option}: {error}") from None


@app.command("list")
@connected
async def list_(producer: Producer, *, json: AsJson = False) -> None:
    """List the workers and supervisors that gave a sign of life lately.

    A supervisor that is paused is listed until it is resumed. With
    --json: an object with "workers" and "supervisors".

    Example: perdure worker list
    """
    workers = await list_workers(producer.gateway, producer.namespace)
    supervisors = await list_supervisors(producer.gateway, producer.namespace)
    if json:
        print_json(
            {
                "workers": [info.summary() for info in workers],
                "supervisors": [info.summary() for info in supervisors],
            }
        )
        return
    now = await redis_now(producer)
    if workers:
        _show_workers(workers, now)
    else:
        note(f"no workers in namespace {producer.namespace.name!r} on {producer.address.shown}")
    if supervisors:
        if workers:
            print_data("")
        _show_supervisors(supervisors, now)


def _show_workers(workers: list[WorkerInfo], now: int) -> None:
    since = ago(now)
    print_table(
        ("worker", "app", "queues", "running#", "of#", "health", "started", "seen", "host", "pid#", "version"),
        [
            (
                info.id,
                info.app,
                ", ".join(info.queues),
                str(info.in_flight),
                str(info.concurrency),
                _health_in_a_word(info),
                since(info.started),
                f"{duration(info.seen)} ago",
                info.host,
                str(info.pid),
                info.version,
            )
            for info in workers
        ],
    )


def _health_in_a_word(info: WorkerInfo) -> str:
    """'ready', or what it is not; '?' for a worker of a version that does not tell."""
    if info.presumed_dead:
        return "presumed dead"
    if not info.health:
        return "?"
    failing = [str(level["name"]) for level in info.health.get("levels", ()) if not level["ok"]]
    return f"not {', '.join(failing)}" if failing else "ready"


def _show_supervisors(supervisors: list[SupervisorInfo], now: int) -> None:
    since = ago(now)
    print_table(
        ("supervisor", "children", "of#", "crashes#", "within#", "started", "seen", "host", "pid#", "paused"),
        [
            (
                info.name,
                _count_states(info),
                str(info.processes),
                str(info.crashes),
                duration(info.window) if info.window else "-",
                since(info.started or None),
                "gone" if info.seen is None else f"{duration(info.seen)} ago",
                info.host,
                str(info.pid or "-"),
                f"{since(info.paused_since)}: {info.why}" if info.paused_since else "no",
            )
            for info in supervisors
        ],
    )
    for name in sorted({info.name for info in supervisors if info.paused_since}):
        note(f"supervisor {name} is paused; when the cause is gone: perdure worker resume {name}")


def _count_states(info: SupervisorInfo) -> str:
    """How many children are in which state: '3 working, 1 idle'."""
    states = Counter(child.state for child in info.children)
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "none"


@app.command()
@connected
async def resume(
    producer: Producer,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The supervisor, as listed.", show_default=False)
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All that are paused.")] = False,
    json: AsJson = False,
) -> None:
    """Have paused supervisors go on; prints their names.

    A supervisor pauses when its workers crash too often. This lifts the
    pause, forgets the crashes, and takes effect within two seconds.

    Example: perdure worker resume --all
    """
    if (name is None) is not every:
        raise Misuse("give the supervisor's name, as 'perdure worker list' shows it, or --all")
    paused = await paused_supervisors(producer.gateway, producer.namespace)
    if name is not None and name not in paused:
        listed = f"paused are {', '.join(paused)}" if paused else "none is"
        raise Failed(f"no supervisor {name!r} is paused in namespace {producer.namespace.name!r}: {listed}")
    lifted = [
        one
        for one in (paused if name is None else [name])
        if await resume_supervisor(producer.gateway, producer.namespace, one) or name
    ]
    if json:
        print_json(lifted)
    else:
        for one in lifted:
            print_data(one)
        note(f"resumed: {len(lifted)}")


app.command()(health)
