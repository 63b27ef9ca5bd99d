"""`perdure queue`: queues in numbers."""

from __future__ import annotations

import typer

from ...queues import Producer, list_queues
from .connection import connected
from .output import AsJson, duration, print_json, print_table, tell

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def queue() -> None:
    """See queues in numbers."""


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
            ("queue", "waiting#", "running#", "due later#", "dead#", "oldest waits#", "workers#"),
            [
                (
                    stats.queue,
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
