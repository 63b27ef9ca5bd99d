"""`make bench-scale`: measure the constants of docs/explanation/scaling.md with 1, 16 and 500 workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import hiredis
import redis
import typer
from perdure import PerdureError
from rich import box
from rich.console import Console
from rich.table import Table

from ..support.machine import origin_line, run
from ..support.server import NoServer, own_server, server_line
from .capacity import capacities
from .crews import FULL, QUICK, Crew, measure_crew

CREWS: Final = (
    Crew("1 worker", 1, 1, 32),
    Crew("16 processes", 16, 1, 32),
    Crew("500 workers", 5, 100, 4),
)
SMALL: Final = (Crew("1 worker", 1, 1, 32), Crew("4 workers", 2, 2, 4))

LINES: Final[Mapping[str, tuple[str, str]]] = {
    "tasks_per_second": ("no-op tasks, enqueueing included", "tasks/s"),
    "load": ("CPU of Redis during that load", "% of a core"),
    "enqueue_micros": ("Redis CPU to enqueue a task, in bulk", "µs/task"),
    "task_micros": ("Redis CPU to deliver and settle a task", "µs/task"),
    "step_micros": ("Redis CPU to record a durable step", "µs/step"),
    "task_commands": ("commands to deliver and settle, including those in scripts", "per task"),
    "task_scripts": ("scripts among them", "per task"),
    "task_reads": ("reads among them", "per task"),
    "task_received": ("bytes to Redis, enqueueing included", "bytes/task"),
    "task_sent": ("bytes from Redis, enqueueing included", "bytes/task"),
    "step_received": ("bytes to Redis for a durable step", "bytes/step"),
    "idle_load": ("CPU of Redis while all workers are idle", "% of a core"),
    "idle_commands": ("commands of an idle worker", "per worker and s"),
    "idle_micros": ("Redis CPU of an idle worker", "µs per worker and s"),
    "beats": ("lease renewals (scripts) of all workers with one task each", "per s"),
    "renewed": ("leases renewed by them", "per s"),
    "wake_ups": ("reads that one arriving task ends", "per task"),
    "single_micros": ("Redis CPU of one task sent to idle workers, including polls for its result", "µs/task"),
    "promotions": ("promotions attempted for a due task", "per task"),
    "least": ("tasks of the worker with the fewest", "tasks"),
    "median": ("tasks of the median worker", "tasks"),
    "most": ("tasks of the worker with the most", "tasks"),
    "gini": ("Gini coefficient of tasks per worker", "0 to 1"),
    "connections": ("connections of a worker (its share of the process)", "per worker"),
    "memory": ("memory of a worker (its share of the process)", "MB"),
}

BEGIN: Final = "<!-- begin: written by make bench-scale -->"
END: Final = "<!-- end: written by make bench-scale -->"

_WIDTH: Final = 148
"""Width of the output to a file or a pipe."""

Found = Sequence[tuple[Crew, Mapping[str, float]]]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables between the marks of this page.")
    ] = None,
) -> None:
    """Measure the cost of tasks, steps and idle workers on a private Redis server."""
    try:
        with own_server(fsync=False) as deployment:
            conditions = [origin_line(server_line(deployment))]
            found = []
            for crew in SMALL if quick else CREWS:
                print(f"measuring {crew.name}", file=sys.stderr)
                here = deployment.within(crew.name.replace(" ", "-"))
                found.append((crew, run(measure_crew(here, crew, QUICK if quick else FULL))))
                here.purge()
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps({"conditions": conditions, "crews": {crew.name: dict(figures) for crew, figures in found}}))
    else:
        _show(conditions, found)
    if write is not None:
        _write(write, conditions, found)


def _show(conditions: Sequence[str], found: Found) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("constant", no_wrap=True)
    table.add_column("unit")
    for crew, _ in found:
        table.add_column(crew.name, justify="right", no_wrap=True)
    for key, (what, unit) in LINES.items():
        table.add_row(what, unit, *(_number(figures[key]) for _, figures in found))
    console.print(*conditions, sep="\n", markup=False, highlight=False)
    console.print(table)


def _write(page: Path, conditions: Sequence[str], found: Found) -> None:
    """Replace the text between the marks."""
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise typer.BadParameter(f"{page} must have the lines {BEGIN!r} and {END!r}")
    head = ["what", "unit", *(crew.name for crew, _ in found)]
    rows = [
        [what.strip(), unit, *(_number(figures[key]) for _, figures in found)] for key, (what, unit) in LINES.items()
    ]
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---", "---", *("---:" for _ in found)], *rows]]
    text = [before + BEGIN, "", *lines, "", *conditions, "", *_plan(found), "", END + after]
    page.write_text("\n".join(text), "utf-8")


def _plan(found: Found) -> list[str]:
    """Return the table of capacities, from the highest value of each constant."""
    lines = [
        "| a task with | Redis CPU | one node at 70 % | bytes to the node | nodes for 1,000,000 tasks/s | partitions |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in capacities(figures for _, figures in found):
        kind = f"{one.steps} step{'' if one.steps == 1 else 's'}"
        carries = f"{_number(one.per_node)} tasks/s | {one.received / 1e6:.0f} MB/s"
        lines.append(f"| {kind} | {_number(one.micros)} µs | {carries} | {one.nodes} | {one.partitions} |")
    return lines


def _number(value: float) -> str:
    """Return three significant digits, with thousands grouped."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


if __name__ == "__main__":
    typer.run(main)
