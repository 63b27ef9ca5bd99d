"""`perdure queue`: queues in numbers, and over how many partitions they are spread."""

from __future__ import annotations

from typing import Annotated

import typer

from ...queues import MOST_PARTITIONS, Producer, Route, close_former, list_queues, load_route, set_partitions
from .connection import connected
from .lookup import known_partitions
from .output import AsJson, duration, print_json, print_table, tell
from .parameters import read_queue

__all__ = ["app"]

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
            ("queue", "partitions#", "waiting#", "running#", "due later#", "dead#", "oldest waits#", "workers#"),
            [
                (
                    stats.queue,
                    str(len(stats.partitions)),
                    str(stats.depth),
                    str(stats.in_flight),
                    str(stats.due),
                    str(stats.dead),
                    "-" if stats.oldest_age is None else duration(stats.oldest_age),
                    str(len(stats.consumers)),
                )
                for stats in queues
            ],
        )
    else:
        tell(f"no queues in namespace {producer.namespace.name!r} on {producer.address.shown}")


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
    if route == before:
        await close_former(producer.gateway, producer.namespace, queue_name, route)
        tell(f"queue {queue_name} has {_partitions(count)} already: nothing was changed")
    else:
        tell(f"queue {queue_name} is spread over {_partitions(count)} from now on: {_indexes(route)}")
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
