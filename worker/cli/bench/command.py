"""`perdure bench`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Annotated, Final

import typer
from rich.console import Console

from ....queues import Gateway, Refused, pairs
from ...log import configure_logging
from ..support.connection import ConnectionOptions, with_connection_options
from ..support.output import AsJson, print_json, print_table
from ..support.temporary import run_interruptible, temporary_namespace
from .consent import ask, check_room
from .measures import Row, app, measure

__all__ = ["bench"]

_KEPT_FOR: Final = 600.0
"""Seconds that outcomes are kept if this process is killed before it removes them."""


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
    yes: Annotated[
        bool, typer.Option("--yes", help="Agree to put load on a server that other clients may use.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Measure Perdure on your server, compared with a raw client.

    Takes about 20 seconds, in a temporary namespace, which is removed at
    the end, also after Ctrl-C. Asks first if the server is another machine.

    Example: perdure bench --tasks 20000 --payload 1000
    """
    configure_logging("ERROR")
    ask(place.producer().address, yes)
    server, rows = run_interruptible(partial(_measure, place, tasks, payload, yes))
    if json:
        size = {"tasks": tasks, "payload": payload}
        print_json({"server": server, "size": size, "rows": [asdict(row) for row in rows]})
        return
    Console(markup=False, highlight=False).print(server)
    print_table(
        ("what", "unit", "Perdure#", "raw client#", "ratio#", "what the raw client does"),
        [(row.what, row.unit, *map(_number, (row.value, row.raw, row.value / row.raw)), row.does) for row in rows],
    )


async def _measure(place: ConnectionOptions, tasks: int, payload: int, agreed: bool) -> tuple[str, list[Row]]:
    settings = place.overrides() | {"result_ttl": _KEPT_FOR, "dead_letter_ttl": _KEPT_FOR}
    async with temporary_namespace(app, "default", "raw", **settings) as namespace:
        gateway, ready = app.producer.gateway, namespace.partition("default").ready
        await check_room(gateway, ready, tasks, payload, agreed)
        return await _server_line(gateway, ready), await measure(namespace.partition("raw"), tasks, payload)


async def _server_line(gateway: Gateway, key: str) -> str:
    """Return the server's version, address and durability, as far as it tells them."""
    info, setting = b"", dict[bytes, bytes]()
    with suppress(Refused):  # a managed server may hide them
        info = await gateway.command("INFO", "server", node_of=key)
        setting = pairs(await gateway.command("CONFIG", "GET", "append*", node_of=key))
    fields = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    name, version = fields.get("server_name", "redis"), fields.get("valkey_version") or fields.get("redis_version", "?")
    only, fsync = (setting.get(name, b"?").decode() for name in (b"appendonly", b"appendfsync"))
    return f"{name} {version} at {gateway.address.shown}, appendonly {only}, appendfsync {fsync}"


def _number(value: float) -> str:
    """Three significant digits, and thousands in groups."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
