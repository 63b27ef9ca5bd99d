"""`perdure bench`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ....queues import Refused, pairs
from ...observe import configure_logging
from ..connection import Place, placed
from ..interruption import run_interruptible
from ..output import AsJson, print_json, print_table
from .consent import ask, check_room
from .figures import Row, Size
from .ground import Ground, prepare_ground
from .measures import MEASURES
from .tasks import app

__all__ = ["bench"]

TASKS: Final = 10_000


@placed
def bench(
    place: Place,
    *,
    tasks: Annotated[int, typer.Option(min=100, max=1_000_000, metavar="N", help="Tasks of each measure.")] = TASKS,
    concurrency: Annotated[int, typer.Option(min=1, metavar="C", help="Tasks that a worker runs at once.")] = 32,
    payload: Annotated[
        int, typer.Option(min=0, max=500_000, metavar="BYTES", help="Argument of each task; it runs to nothing.")
    ] = 0,
    processes: Annotated[
        int, typer.Option(min=0, max=64, metavar="P", help="Measure P worker processes together, too.")
    ] = 0,
    steps: Annotated[bool, typer.Option("--steps/--no-steps", help="Measure durable steps, too.")] = True,
    yes: Annotated[bool, typer.Option("--yes", help="Put a server that others may use under load.")] = False,
    json: AsJson = False,
) -> None:
    """Measure Perdure on your server, beside a raw client.

    Works in a namespace of its own, which is removed at the end, also
    after Ctrl-C. Asks first where the server is another machine.

    Example: perdure bench --tasks 20000 --payload 1000
    """
    configure_logging("ERROR")
    names = [name for name in MEASURES if (steps or name != "steps") and (processes or name != "processes")]
    size = Size(tasks=tasks, payload=payload, concurrency=concurrency, processes=processes)
    ask(place.producer().address, yes)
    server, rows = run_interruptible(partial(_measure, place, names, size, yes))
    if json:
        print_json({"server": server, "size": asdict(size), "rows": [row.summary() for row in rows]})
    else:
        _show(server, rows)


async def _measure(place: Place, names: list[str], size: Size, agreed: bool) -> tuple[str, list[Row]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between measures only: a bar that moves by itself would take time from what is measured.
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    rows: list[Row] = []
    async with prepare_ground(app, place) as ground:
        await check_room(ground.gateway, ground.partition.ready, size.tasks, size.payload, agreed)
        with progress:
            bar = progress.add_task("", total=len(names))
            for name in names:
                progress.update(bar, description=name, refresh=True)
                rows += await MEASURES[name](ground, size)
                progress.advance(bar)
        return await _server_line(ground), rows


async def _server_line(ground: Ground) -> str:
    """Address, version and durability of the server, as far as it tells."""
    gateway = ground.gateway
    info, setting = b"", dict[bytes, bytes]()
    with suppress(Refused):  # a managed server may hide them
        info = await gateway.command("INFO", "server", node_of=ground.partition.ready)
        for name in ("appendonly", "appendfsync"):
            setting |= pairs(await gateway.command("CONFIG", "GET", name, node_of=ground.partition.ready))
    told = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    mode = setting.get(b"appendfsync", b"?").decode()
    kept = {b"yes": f"append-only file, fsync {mode}", b"no": "no append-only file"}
    version = told.get("valkey_version") or told.get("redis_version", "?")
    durability = kept.get(setting.get(b"appendonly", b""), "durability not told")
    return f"{told.get('server_name', 'redis').capitalize()} {version} at {gateway.address.shown}, {durability}"


def _show(server: str, rows: list[Row]) -> None:
    Console(markup=False, highlight=False).print(server)
    print_table(
        ("what", "unit", "Perdure#", "raw client#", "ratio#", "what the raw client does"),
        [(row.what, row.unit, _number(row.value), _number(row.raw), _number(_ratio(row)), row.does) for row in rows],
    )


def _ratio(row: Row) -> float | None:
    return None if row.value is None or not row.raw else row.value / row.raw


def _number(value: float | None) -> str:
    """Three significant digits, and thousands in groups."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"
