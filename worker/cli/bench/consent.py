"""Consent to put a server under load, and the checks that it has free memory and serves no other clients."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

import anyio
import typer

from ....queues import Address, Gateway, Refused
from ..support.errors import Failed, Misuse
from ..support.output import note

__all__ = ["ask", "check_room"]

_LOCAL = ("localhost", "127.0.0.1", "::1", "")

_BUSY = 1_000
"""Commands per second of other clients; more than a person at a prompt, less than a service in use."""

_SAMPLE = 0.25
"""Seconds for which the commands of other clients are counted."""

_PER_TASK = 4_096
"""Bytes that a task without payload may take: a generous bound."""


def ask(address: Address, agreed: bool) -> None:
    """Announce the load, and ask for consent if the server is another machine. Raises `Misuse`, `Abort`."""
    notice = f"this puts {address.shown} under load for about 20 seconds"
    if agreed or address.embedded or _is_local(address):
        note(notice)
    elif sys.stdin.isatty():
        typer.confirm(f"perdure: {notice}. Continue?", abort=True, err=True)
    else:
        raise Misuse(f"{notice}: add --yes to agree")


def _is_local(address: Address) -> bool:
    if address.nodes:
        return all(node.host in _LOCAL for node in address.nodes)
    return urlsplit(address.url).scheme == "unix" or (urlsplit(address.url).hostname or "") in _LOCAL


async def check_room(gateway: Gateway, key: str, tasks: int, payload: int, agreed: bool) -> None:
    """Raise `Failed` if the server has too little free memory, or serves other clients and there is no consent.

    key: of the tasks; in a cluster, its node is checked.
    """
    try:
        before = await _info(gateway, key)
        await anyio.sleep(_SAMPLE)
        info = await _info(gateway, key)
    except Refused:
        return  # a managed server may hide it
    limit, needed = int(info.get("maxmemory", 0)), tasks * (_PER_TASK + payload)
    free = max(0, limit - int(info.get("used_memory", 0)))
    if limit and free < needed:
        raise Failed(
            f"the server has {free / 1e6:.0f} MB free of its maxmemory, and {tasks} tasks of {payload} bytes "
            f"may take {needed / 1e6:.0f} MB: ask for less with --tasks or --payload"
        )
    others = (int(info["total_commands_processed"]) - int(before["total_commands_processed"])) / _SAMPLE
    if others > _BUSY and not agreed:
        raise Failed(
            f"the server executes {others:,.0f} commands per second of other clients: add --yes to measure anyway"
        )


async def _info(gateway: Gateway, key: str) -> dict[str, str]:
    sections = await gateway.pipeline([("INFO", "memory"), ("INFO", "stats")], node_of=key)
    return dict(line.split(":", 1) for line in b"\n".join(sections).decode().splitlines() if ":" in line)
