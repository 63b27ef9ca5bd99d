"""`perdure queue`: list and purge queues, list junk, export metrics, set partitions. `perdure task catalog`.

The commands that pause and resume are in queue_pause.py.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated, Final

import anyio
import anyio.to_thread
import typer
from anyio.from_thread import BlockingPortal

from ...queues.budgets.store import BudgetStore, Ledger
from ...queues.catalog import CatalogTask
from ...queues.inspection.junk_items import JunkItem, read_junk
from ...queues.inspection.views import QueueStats, list_queues, overdue_schedules
from ...queues.junk import shown_bytes
from ...queues.keys import Namespace, Partition, SessionPartition
from ...queues.limit_views import LimitStatus, list_limits
from ...queues.partitions.resharding import close_previous, load_route, set_partitions
from ...queues.partitions.route import MAX_PARTITIONS, Route
from ...queues.producer import Producer
from ...queues.wording import counted, duration
from . import queue_pause
from .lazy import load
from .support.connection import connected, known_partitions, where
from .support.errors import Failed, Misuse, cause_of
from .support.jobs import JobOptions, TaskFilterOptions, cancel_many, preview_tasks
from .support.options import Assured, TaskNameOption, Until, Where, read_queue
from .support.output import Column, StderrText, Styled, Time, note, print_text, table
from .support.runner import Listing, LiveListing, Output

app = typer.Typer(no_args_is_help=True, add_completion=False)

app.command()(queue_pause.pause)
app.command()(queue_pause.resume)

_MAX_JUNK: Final = 10_000
"""Most items of one list of junk."""

_LEDGERS: Final = 1_000
"""Most keys of named budgets that one scrape reads, the last charged ones: each is a time series."""


@app.callback()
def queue() -> None:
    """List, pause, resume and purge queues, list junk, export metrics, and set partitions."""


@app.command("list")
@connected
async def list_(producer: Producer) -> LiveListing:
    """List queues with their numbers of ready, running, scheduled and dead tasks.

    Use it to see whether the workers keep up: "drained in" estimates how
    long they need for all tasks that are ready or running. "workers" counts
    live workers of the queue. Pauses follow the table, each with the command
    that ends it.

    Example: perdure queue list
    """
    queues = await list_queues(producer.gateway, producer.namespace)
    paused = any(stats.pause for stats in queues)
    columns = [*QUEUE_COLUMNS, *((_STATE,) if paused else ())]
    listing = LiveListing(columns, queues, empty=f"no queues {where(producer)}")
    listing.parts += [StderrText(text) for text in await queue_pause.pause_notes(producer)]
    listing.parts += [StderrText(f"queue {stats.queue}: {stats.problem}") for stats in queues if stats.problem]
    return listing


def _drained_in(stats: QueueStats) -> str:
    match stats.drain_time:
        case None:
            return "?"  # nothing is settled at present
        case 0:
            return "-"
        case seconds:
            return duration(seconds, whole=True)


def _oldest(stats: QueueStats) -> str | None:
    return None if stats.oldest_age is None else duration(stats.oldest_age, whole=True)


def _by_lane(stats: QueueStats) -> str | None:
    """Return how many tasks of each priority wait; None without priorities."""
    lanes = stats.lanes
    return ", ".join(f"{lane} {found.depth}" for lane, found in lanes.items()) if len(lanes) > 1 else None


QUEUE_COLUMNS: Final[Sequence[Column[QueueStats]]] = (
    Column("queue", lambda stats: stats.queue, least=8),
    Column("partitions", lambda stats: len(stats.partitions), right=True, wide=True),
    Column("by priority", _by_lane, wide=True),
    Column("ready", lambda stats: stats.depth, right=True),
    Column("running", lambda stats: stats.in_flight, right=True),
    Column("due", lambda stats: stats.due, right=True),
    Column("limited", lambda stats: stats.limited, right=True, wide=True),
    Column("held", lambda stats: stats.held, right=True, wide=True),
    Column("dead", lambda stats: stats.dead, right=True),
    Column("workers", lambda stats: stats.workers, right=True),
    Column("rate", lambda stats: f"{stats.rate or 0:.1f}/s", right=True),
    Column("oldest", _oldest, right=True),
    Column("drained in", _drained_in, right=True),
)

_STATE: Final[Column[QueueStats]] = Column("state", lambda stats: Styled("paused", "yellow") if stats.pause else None)


@app.command()
@connected
async def metrics(
    producer: Producer,
    *,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="N", help="Serve the metrics over HTTP on this port; 0 for a free one."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 or :: for all interfaces.")
    ] = "127.0.0.1",
) -> None:
    """Print Prometheus metrics of queues, limits, budgets; with --port, serve them.

    The metrics are gauges: depth, in flight, due, dead letters, oldest age,
    settled tasks per second, drain time, workers; of limits what holds them,
    what waits, and whether they let nothing start; what was spent of named
    budgets. They need the extra "metrics": pip install 'perdure[metrics]'.

    Example: perdure queue metrics --port 9464
    """
    if find_spec("prometheus_client") is None:
        raise Failed("metrics need the package prometheus-client: pip install 'perdure[metrics]'")
    if port is None:
        found = await _read_stats(producer)
        registry = load(".queue_metrics:queue_registry")(producer.namespace.name, lambda: found)
        print_text(load(".queue_metrics:exposition")(registry).rstrip())
        return
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as stops:
        await _serve(producer, host, port, stops)


Reading = tuple[list[QueueStats], list[LimitStatus], list[Ledger], float]
"""Queues, limits, ledgers of named budgets, and the seconds for which a schedule is overdue."""


async def _read_stats(producer: Producer) -> Reading:
    place = (producer.gateway, producer.namespace)
    ledgers = await BudgetStore(*place).list_named(most=_LEDGERS)
    return await list_queues(*place), await list_limits(*place), ledgers, await overdue_schedules(*place)


async def _serve(producer: Producer, host: str, port: int, stops: AsyncIterator[signal.Signals]) -> None:
    """Answer scrapes until a signal. Each scrape runs in its own thread and reads the queues in the event loop."""
    serve, queue_registry = load("prometheus_client:start_http_server"), load(".queue_metrics:queue_registry")
    async with BlockingPortal() as portal:

        def read() -> Reading:
            return portal.call(_read_stats, producer)

        try:
            server, _ = serve(port, host, queue_registry(producer.namespace.name, read))
        except (OSError, OverflowError) as error:
            raise Failed(
                f"could not listen on {host}, port {port}: {cause_of(error)}; choose another --port"
            ) from error
        print_text(f"http://{_in_url(host)}:{server.server_port}/metrics")
        try:
            await anext(stops)
        finally:
            await anyio.to_thread.run_sync(server.shutdown)
            server.server_close()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@app.command()
@connected
async def partitions(
    producer: Producer,
    queue_name: Annotated[str, typer.Argument(metavar="QUEUE", parser=read_queue, help="Name of the queue.")],
    count: Annotated[
        int | None, typer.Argument(metavar="[N]", min=1, max=MAX_PARTITIONS, help="Number of partitions to set.")
    ] = None,
) -> Output | None:
    """Show the partitions of a queue, or set their number to N.

    Use more partitions if one Redis node is the bottleneck. Workers and
    producers keep running: tasks in the previous partitions run first, new
    tasks go to the new ones. Each priority that the queue has ever had gets
    N partitions.

    Example: perdure queue partitions audit 4
    """
    if count is None:
        await known_partitions(producer, queue_name)
        return await _partitions_of(producer, queue_name)
    before = await load_route(producer.gateway, producer.namespace, queue_name)
    route = await set_partitions(producer.gateway, producer.namespace, queue_name, count)
    if before is None:
        note(f"created queue {queue_name}")
    if route == before:
        await close_previous(producer.gateway, producer.namespace, queue_name, route)
        note(f"queue {queue_name} already has {counted(count, 'partition')}: nothing was changed")
    else:
        note(f"queue {queue_name} now has {counted(count, 'partition')}: {_indexes(route)}")
    return await _partitions_of(producer, queue_name)


async def _partitions_of(producer: Producer, queue_name: str) -> Output | None:
    route = await load_route(producer.gateway, producer.namespace, queue_name)
    found = await list_queues(producer.gateway, producer.namespace, queue_name)
    if route is None or not found:
        return None
    (stats,) = found
    generations = [{"first": one.first, "count": one.count} for one in route.generations]
    rows = [
        (
            one.index,
            lane,
            number,
            "yes" if route.takes(generation.first) else "no",
            one.depth,
            one.in_flight,
            one.due,
            one.dead,
            _oldest(one),
        )
        for lane in route.lanes
        for number, generation in enumerate((route.of(lane) or route).generations, 1)
        for one in stats.partitions
        if one.index in generation.indexes
    ]
    names = ("partition#", "priority", "generation#", "takes new tasks", "waiting#", "running#", "due later#", "dead#")
    return Output(
        {"queue": queue_name, "generations": generations, "partitions": stats.summary()["partitions"]},
        table((*names, "oldest waits#"), rows),
    )


@app.command()
@connected
async def junk(
    producer: Producer,
    queue_name: Annotated[
        str | None, typer.Argument(metavar="[QUEUE]", parser=read_queue, help="Only items of this queue.")
    ] = None,
    *,
    sessions: Annotated[bool, typer.Option("--sessions", help="Only items of the sessions of agents.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=_MAX_JUNK, metavar="N", help="Print at most N items.")] = 100,
) -> Listing:
    """List what other programs wrote into keys of Perdure, the newest first.

    Workers move such items out of the way and log a warning. An item here
    was no task: nothing is lost, and you need not do anything but find the
    program that wrote it. Items are kept for 30 days, at most 1,000 of each
    partition. Bytes that are not printable are shown as escapes.

    Example: perdure queue junk default --json
    """
    if queue_name is not None and sessions:
        raise Misuse("give either QUEUE or --sessions")
    names = producer.namespace
    places: list[Partition | SessionPartition | Namespace] = []
    if not sessions:
        places += await known_partitions(producer, queue_name)
    if queue_name is None:
        places += names.session_partitions
    if queue_name is None and not sessions:
        places.append(names)
    found, problems = await read_junk(producer.gateway, places, limit)
    return Listing(_JUNK_COLUMNS, found, empty=f"no junk {where(producer)}", notes=problems)


_JUNK_COLUMNS: Final[Sequence[Column[JunkItem]]] = (
    Column("moved", lambda item: Time(item.at)),
    Column("key", lambda item: shown_bytes(item.key)[1:-1], least=12),
    Column("item", lambda item: shown_bytes(item.item), least=8),
    Column("content", lambda item: shown_bytes(item.content), wide=True),
    Column("bytes", lambda item: item.size, right=True),
    Column("reason", lambda item: item.reason, least=12),
)


@app.command()
@connected
async def purge(
    producer: Producer,
    queue_name: Annotated[str, typer.Argument(metavar="QUEUE", parser=read_queue, help="Name of the queue.")],
    options: JobOptions,
    *,
    task: TaskNameOption = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Only tasks with this tag. Repeatable.")] = None,
    where: Where = None,
    until: Until = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how many tasks would be cancelled, and change nothing.")
    ] = False,
    yes: Assured = False,
) -> AsyncIterator[Output]:
    """Cancel the tasks of a queue that have not started, and print their ids.

    Queued, scheduled and limited tasks are cancelled, if no worker has ever
    started them. Running and waiting tasks go on, and so do those that wait
    for their next attempt: 'perdure task cancel --all --queue QUEUE' cancels
    these too. Only tasks that were enqueued before now are meant. The purge
    is a job: see 'perdure job'.

    Example: perdure queue purge audit --task report --where tenant=acme --yes
    """
    chosen = TaskFilterOptions(queue_name, task=task, tag=tag, where=where, until=until)
    wanted = await chosen.filter(producer)
    if dry_run:
        yield await preview_tasks(producer, queue_name, wanted, unstarted=True)
        return
    async for output in cancel_many(producer, "purge", queue_name, wanted, options, yes=yes):
        yield output


def _indexes(route: Route) -> str:
    first, last = route.last.first, route.last.end - 1
    return str(first) if first == last else f"{first} to {last}"


@connected
async def catalog(
    producer: Producer,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only the tasks of this name.")] = None,
) -> Output:
    """List the tasks that workers have published, with queue and arguments.

    An entry stays for 30 days after the last worker of its app. With --json,
    each task has the JSON schemas of its arguments and result, and the problem
    of schemas that cannot be used, such as a reference to another document.
    An entry that another program wrote is a row with its problem. "limits"
    are those that a task must get before it starts: 'perdure limit list'.
    "budgets" are what it may spend: 'perdure budget list'.

    Example: perdure task catalog report --json
    """
    listed = await producer.catalog()
    tasks = listed.tasks if name is None else listed.named(name)
    if name is not None and not tasks:
        raise Failed(f"no worker has published a task {name!r}")
    problems = {} if name is not None else listed.problems
    further = [what for what in ("limits", "budgets") if any(getattr(task, what) for task in tasks)]
    names = ("task", "app", "queue", "arguments", *further, "description")
    damaged = [(entry, *("",) * (len(names) - 2), f"(problem: {problem})") for entry, problem in problems.items()]
    unusable = [
        StderrText(f"the schemas of task {task.name!r} of app {task.app!r} cannot be used: {task.problem}")
        for task in tasks
        if task.problem is not None
    ]
    shown = table(names, [*(_catalog_row(task, further) for task in tasks), *damaged])
    return Output(
        [
            *(asdict(task) | {"problem": task.problem} for task in tasks),
            *({"name": entry, "problem": problem} for entry, problem in problems.items()),
        ],
        shown if shown.rows else StderrText(f"no worker has published tasks in namespace {producer.namespace.name}"),
        *unusable,
    )


def _catalog_row(task: CatalogTask, further: Sequence[str]) -> tuple[str, ...]:
    """Return the row of a task. further: what the table has columns for: `limits`, `budgets`."""
    found = {"limits": ", ".join(task.limit_names), "budgets": "; ".join(task.budget_texts)}
    return (
        task.name,
        task.app,
        task.queue,
        _arguments(task),
        *(found[what] for what in further),
        task.description.partition("\n")[0],
    )


def _arguments(task: CatalogTask) -> str:
    if task.problem is not None:
        return "(unusable schema)"
    schema = task.arguments or {}
    required = schema.get("required", ())
    return ", ".join(name if name in required else f"[{name}]" for name in schema.get("properties", {}))
