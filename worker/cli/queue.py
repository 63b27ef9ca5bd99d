"""`perdure queue`: queues in numbers, and over how many partitions they are spread.

Queues in numbers, as Prometheus reads them. Needs the extra `metrics`.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Annotated, Final

import anyio
import anyio.to_thread
import typer
from anyio.from_thread import BlockingPortal
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ...queues import (
    MOST_PARTITIONS,
    Producer,
    QueueError,
    QueueStats,
    Route,
    close_previous,
    list_queues,
    load_route,
    set_partitions,
)
from .lazy import load
from .support.connection import connected, known_partitions
from .support.errors import Failed
from .support.options import read_queue
from .support.output import AsJson, duration, note, print_data, print_json, print_table

__all__ = ["app", "exposition", "queue_registry"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def queue() -> None:
    """See queues in numbers, and spread them."""


@app.command("list")
@connected
async def list_(producer: Producer, *, json: AsJson = False) -> None:
    """List queues: what waits, what runs, what is due later, what is dead.

    Example: perdure queue list
    """
    queues = await list_queues(producer.gateway, producer.namespace)
    if json:
        print_json([stats.summary() for stats in queues])
    elif queues:
        print_table(
            (
                "queue",
                "partitions#",
                "waiting#",
                "running#",
                "due later#",
                "dead#",
                "oldest waits#",
                "settled#",
                "drained in#",
                "workers#",
            ),
            [
                (
                    stats.queue,
                    str(len(stats.partitions)),
                    str(stats.depth),
                    str(stats.in_flight),
                    str(stats.due),
                    str(stats.dead),
                    "-" if stats.oldest_age is None else duration(stats.oldest_age),
                    f"{stats.rate or 0:.1f}/s",
                    _drained_in(stats),
                    str(len(stats.consumers)),
                )
                for stats in queues
            ],
        )
    else:
        note(f"no queues in namespace {producer.namespace.name!r} on {producer.address.shown}")


def _drained_in(stats: QueueStats) -> str:
    match stats.drain_time:
        case None:
            return "?"  # nothing is settled at present
        case 0:
            return "-"
        case seconds:
            return duration(seconds)


@app.command()
@connected
async def metrics(
    producer: Producer,
    *,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="N", help="Serve them over HTTP on this port; 0 for a free one."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 or :: for everywhere.")
    ] = "127.0.0.1",
) -> None:
    """Tell Prometheus of the queues: once, or with --port whenever it asks.

    Prints gauges in Prometheus' text format: depth, in flight, due, dead
    letters, oldest age, settled tasks per second, drain time, workers.
    Needs the extra "metrics" of the package perdure.

    Example: perdure queue metrics --port 9464
    """
    if find_spec("prometheus_client") is None:
        raise Failed("metrics need a package that is not installed: pip install 'perdure[metrics]'")
    if port is None:
        found = await list_queues(producer.gateway, producer.namespace)
        registry = load(".queue:queue_registry")(producer.namespace.name, lambda: found)
        print_data(load(".queue:exposition")(registry).rstrip())
        return
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as stops:
        await _serve(producer, host, port, stops)


async def _serve(producer: Producer, host: str, port: int, stops: AsyncIterator[signal.Signals]) -> None:
    """Answer scrapers until the first of `stops`. Each scrape has a thread of its own, which asks the event loop."""
    serve, queue_registry = load("prometheus_client:start_http_server"), load(".queue:queue_registry")
    async with BlockingPortal() as portal:

        def look() -> list[QueueStats]:
            return portal.call(list_queues, producer.gateway, producer.namespace)

        try:
            server, _ = serve(port, host, queue_registry(producer.namespace.name, look))
        except (OSError, OverflowError) as error:
            raise Failed(f"cannot listen on {host}, port {port}: {error}") from error
        print_data(f"http://{_in_url(host)}:{server.server_port}/metrics")
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
    queue_name: Annotated[
        str, typer.Argument(metavar="QUEUE", parser=read_queue, help="The queue.", show_default=False)
    ],
    count: Annotated[
        int | None,
        typer.Argument(metavar="[N]", min=1, max=MOST_PARTITIONS, help="Spread it over so many.", show_default=False),
    ] = None,
    *,
    json: AsJson = False,
) -> None:
    """Show the partitions of a queue, or spread it over N of them from now on.

    Nothing stops meanwhile: what is in the former partitions is taken up
    first, then what is in the new ones.

    Example: perdure queue partitions default 4
    """
    if count is None:
        await known_partitions(producer, queue_name)
        await _show(producer, queue_name, json)
        return
    before = await load_route(producer.gateway, producer.namespace, queue_name)
    route = await set_partitions(producer.gateway, producer.namespace, queue_name, count)
    if before is None:
        note(f"queue {queue_name} is new: nobody has used it yet")
    if route == before:
        await close_previous(producer.gateway, producer.namespace, queue_name, route)
        note(f"queue {queue_name} has {_partitions(count)} already: nothing was changed")
    else:
        note(f"queue {queue_name} is spread over {_partitions(count)} from now on: {_indexes(route)}")
    await _show(producer, queue_name, json)


async def _show(producer: Producer, queue_name: str, json: bool) -> None:
    route = await load_route(producer.gateway, producer.namespace, queue_name)
    found = await list_queues(producer.gateway, producer.namespace, queue_name)
    if route is None or not found:
        return
    (stats,) = found
    if json:
        generations = [{"first": one.first, "count": one.count} for one in route.generations]
        print_json({"queue": queue_name, "generations": generations, "partitions": stats.summary()["partitions"]})
        return
    print_table(
        (
            "partition#",
            "generation#",
            "takes new tasks",
            "waiting#",
            "running#",
            "due later#",
            "dead#",
            "oldest waits#",
        ),
        [
            (
                str(one.index),
                str(number),
                "yes" if generation == route.last else "no",
                str(one.depth),
                str(one.in_flight),
                str(one.due),
                str(one.dead),
                "-" if one.oldest_age is None else duration(one.oldest_age),
            )
            for number, generation in enumerate(route.generations, 1)
            for one in stats.partitions
            if one.index in generation.indexes
        ],
    )


def _partitions(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _indexes(route: Route) -> str:
    first, last = route.last.first, route.last.end - 1
    return str(first) if first == last else f"{first} to {last}"


Look = Callable[[], Sequence[QueueStats]]

_LABELS: Final = ("namespace", "queue")

_GAUGES: Final[tuple[tuple[str, str, Callable[[QueueStats], float | None]], ...]] = (
    ("perdure_queue_depth", "Messages that no worker holds.", lambda stats: stats.depth),
    ("perdure_queue_in_flight", "Messages that a worker holds.", lambda stats: stats.in_flight),
    ("perdure_queue_due", "Tasks that wait for their time.", lambda stats: stats.due),
    ("perdure_queue_dead_letters", "Dead letters.", lambda stats: stats.dead),
    (
        "perdure_queue_oldest_age_seconds",
        "How long the oldest message that no worker holds has waited; 0 where there is none.",
        lambda stats: stats.oldest_age or 0.0,
    ),
    (
        "perdure_queue_settled_tasks_per_second",
        "Deliveries that all workers settle per second, over the last 30 seconds.",
        lambda stats: stats.rate,
    ),
    (
        "perdure_queue_drain_time_seconds",
        "Time until nothing waits or runs at the present rate; no sample where something does and the rate is 0.",
        lambda stats: stats.drain_time,
    ),
    ("perdure_queue_workers", "Workers that read the queue.", lambda stats: len(stats.consumers)),
)
"""Name, meaning, and where the value is found."""


class _Queues(Collector):
    """Looks at the queues when it is asked. Where Redis cannot be reached, `perdure_up` is all it tells."""

    def __init__(self, namespace: str, look: Look) -> None:
        self._namespace = namespace
        self._look = look

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = "Whether Redis could be asked."
        try:
            queues = self._look()
        except QueueError:
            yield GaugeMetricFamily("perdure_up", up, value=0)
            return
        yield GaugeMetricFamily("perdure_up", up, value=1)
        for name, meaning, read in _GAUGES:
            gauge = GaugeMetricFamily(name, meaning, labels=_LABELS)
            for stats in queues:
                if (value := read(stats)) is not None:
                    gauge.add_metric((self._namespace, stats.queue), value)
            yield gauge


def queue_registry(namespace: str, look: Look) -> CollectorRegistry:
    """A registry of these gauges alone. look: the queues as they are now; called anew for each scrape."""
    registry = CollectorRegistry()
    registry.register(_Queues(namespace, look))
    return registry


def exposition(registry: CollectorRegistry) -> str:
    """The gauges in Prometheus' text format."""
    return generate_latest(registry).decode()
