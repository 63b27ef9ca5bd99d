"""`python -m benchmarks`: all benchmarks in one table."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated

import hiredis
import redis
import typer
from perdure import PerdureError
from perdure.worker.log import configure_logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import report
from .measures.backlog import BACKLOG
from .measures.delayed import DUE
from .measures.enqueue import ENQUEUE
from .measures.footprint import FOOTPRINT
from .measures.latency import LATENCY
from .measures.measure import Figure, Measure, Row, rows_of
from .measures.memory import MEMORY
from .measures.processes import PROCESSES
from .measures.release import RELEASE
from .measures.startup import STARTUP
from .measures.steps import STEPS
from .measures.throughput import THROUGHPUT
from .recovery import SUPERVISED, recovery
from .sizes import FULL, QUICK, Size
from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.server import NoServer, given_server, own_server, server_line


def measures(size: Size) -> list[Measure]:
    """Return all benchmarks, in the order of the report."""
    return [
        THROUGHPUT,
        ENQUEUE,
        STEPS,
        LATENCY,
        DUE,
        STARTUP,
        PROCESSES,
        FOOTPRINT,
        BACKLOG,
        MEMORY,
        RELEASE,
        recovery("recovery_short_lease", size.short_lease, at_once=False),
        recovery("recovery", size.lease, at_once=True),
        SUPERVISED,
    ]


async def measure_all(
    deployment: Deployment, size: Size, wanted: Sequence[Measure], advance: Callable[[str, int], None]
) -> list[Row]:
    """Run the benchmarks in sequence. advance: called with the current one and the number of rounds done."""

    async def one_round(measure: Measure, number: int) -> dict[str, Figure]:
        here = deployment.within(f"{measure.name}-{number}".replace("_", "-"))
        try:
            return dict(await measure.round(here, size))
        finally:
            here.purge()
            advance(measure.name, 1)

    rows: list[Row] = []
    for measure in wanted:
        advance(measure.name, 0)
        if measure.at_once:
            rounds = await asyncio.gather(*(one_round(measure, number) for number in range(size.rounds)))
        else:
            times = size.rounds if measure.repeated else 1
            rounds = [await one_round(measure, number) for number in range(times)]
        rows += rows_of(measure, rounds)
    return rows


def main(
    redis_url: Annotated[str | None, typer.Option(help="Measure on this server, in a namespace of its own.")] = None,
    fsync: Annotated[bool, typer.Option("--fsync", help="Fsync every write on the started server.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often each measure is repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the measure of this name; may be repeated.")] = None,
) -> None:
    """Measure Perdure and a raw client on the same server in the same run."""
    if redis_url and fsync:
        raise typer.BadParameter("--fsync applies to the started server; configure the given one instead")
    size = QUICK if quick else FULL
    size = replace(size, rounds=rounds or size.rounds)
    wanted = [measure for measure in measures(size) if not only or measure.name in only]
    if unknown := set(only or ()) - {measure.name for measure in wanted}:
        known = ", ".join(measure.name for measure in measures(size))
        raise typer.BadParameter(f"--only must be one of {known}, got {', '.join(sorted(unknown))}")
    configure_logging("ERROR")
    try:
        conditions, rows = _measure(given_server(redis_url) if redis_url else own_server(fsync=fsync), size, wanted)
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(report.as_data(conditions, size.rounds, rows), indent=2))
    else:
        report.show(conditions, size.rounds, rows)


def _measure(
    server: AbstractContextManager[Deployment], size: Size, wanted: Sequence[Measure]
) -> tuple[list[str], list[Row]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Drawn between rounds only: a bar that refreshes by itself would take CPU time from the benchmark.
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    with server as deployment, progress:
        conditions = [origin_line(server_line(deployment))]
        bar = progress.add_task("starting", total=sum(size.rounds if one.repeated else 1 for one in wanted))

        def advance(name: str, rounds: int) -> None:
            progress.update(bar, description=name, advance=rounds, refresh=True)

        return conditions, run(measure_all(deployment, size, wanted, advance))


if __name__ == "__main__":
    typer.run(main)
