"""`perdure bench`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ...log import configure_process_log
from ..support.connection import ConnectionOptions, with_connection_options
from ..support.errors import Misuse
from ..support.output import AsJson, note, print_json, print_table
from ..support.temporary import run_interruptible
from .measures import measure


@with_connection_options
def bench(
    place: ConnectionOptions,
    *,
    tasks: Annotated[
        int, typer.Option(min=100, max=1_000_000, metavar="N", help="Number of tasks per measurement.")
    ] = 10_000,
    payload: Annotated[
        int, typer.Option(min=0, max=500_000, metavar="BYTES", help="Size of each task's argument.")
    ] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Put load on a server that is not the embedded one.")] = False,
    json: AsJson = False,
) -> None:
    """Measure Perdure on your server, beside bare commands of redis-py.

    Takes about 20 seconds, in a temporary namespace, which is removed at
    the end, also after Ctrl-C. Any server but the embedded one needs --yes,
    because the load slows down its other clients.

    Example: perdure bench --tasks 20000 --payload 1000
    """
    configure_process_log("ERROR")
    address = place.producer().address
    if not (yes or address.embedded):
        raise Misuse(
            f"could not measure {address.shown}: this puts it under load for about 20 seconds; add --yes to agree"
        )
    note(f"measuring {address.shown}")
    rows = run_interruptible(partial(measure, place.overrides(), tasks, payload))
    if json:
        print_json({"server": address.shown, "tasks": tasks, "payload": payload, "rows": rows})
        return
    print_table(
        ("what", "unit", "Perdure#", "redis-py#", "ratio#", "what redis-py does"),
        [
            (row.what, row.unit, *map(_number, (row.value, row.limit, row.value / row.limit)), row.commands)
            for row in rows
        ],
    )


def _number(value: float) -> str:
    """Three significant digits, and thousands in groups."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
