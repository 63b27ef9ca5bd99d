"""Whether a server may be put under load: it has room for what is sent, nobody is in the way, and somebody agreed."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

import anyio
import typer

from ....queues import Address, Gateway, Refused
from ..failures import Failed, Misuse
from ..output import tell

__all__ = ["ask", "check_room"]

_LOCAL = ("localhost", "127.0.0.1", "::1", "")

_BUSY = 1_000
"""Commands per second that others send; more than a person at a prompt, less than a service in use."""

_LOOK = 0.25
"""Seconds for which others are watched."""

_PER_TASK = 4_096
"""Bytes that a task without payload may take while the others of its measure are there too: a generous bound."""


def ask(address: Address, agreed: bool) -> None:
    """Say that load comes, and have somebody agree where the server is another machine. Raises `Misuse`, `Abort`."""
    notice = f"this puts {address.shown} under load for about 20 seconds"
    if agreed or address.embedded or _is_local(address):
        tell(notice)
    elif sys.stdin.isatty():
        typer.confirm(f"perdure: {notice}. Go on?", abort=True, err=True)
    else:
        raise Misuse(f"{notice}: say --yes if nobody minds")


def _is_local(address: Address) -> bool:
    if address.nodes:
        return all(node.host in _LOCAL for node in address.nodes)
    return urlsplit(address.url).scheme == "unix" or (urlsplit(address.url).hostname or "") in _LOCAL


async def check_room(gateway: Gateway, key: str, tasks: int, payload: int, agreed: bool) -> None:
    """Raise `Failed` where the server has too little memory left, or is at work for others and nobody agreed.

    key: that the tasks will be in; of a cluster, its node is meant.
    """
    try:
        before = await _info(gateway, key)
        await anyio.sleep(_LOOK)
        info = await _info(gateway, key)
    except Refused:
        return  # a managed server may hide it
    needed = tasks * (_PER_TASK + payload)
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    free = limit - used
    if limit and free < needed:
        raise Failed(
            f"the server has {max(0, free) / 1e6:.0f} MB free of its maxmemory, and {tasks} tasks of {payload} bytes "
            f"may take {needed / 1e6:.0f} MB: ask for less with --tasks or --payload"
        )
    others = (int(info["total_commands_processed"]) - int(before["total_commands_processed"])) / _LOOK
    if others > _BUSY and not agreed:
        raise Failed(
            f"the server carries out {others:,.0f} commands a second for others: say --yes to measure all the same"
        )


async def _info(gateway: Gateway, key: str) -> dict[str, str]:
    told = await gateway.pipeline([("INFO", "memory"), ("INFO", "stats")], node_of=key)
    return dict(line.split(":", 1) for line in b"\n".join(told).decode().splitlines() if ":" in line)
