"""Commands that clean up when interrupted, and a temporary namespace."""

from __future__ import annotations

import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Final, TypeVar

import anyio
import typer

from ....queues.keys import Namespace, Partition
from ....queues.transport.gateway import Gateway
from ...app import App

R = TypeVar("R")


def run_interruptible(work: Callable[[], Awaitable[R]]) -> R:
    """Run a coroutine function. SIGINT and SIGTERM cancel it; after its clean-up, exit with 128 + the signal."""
    signals: list[int] = []
    results: list[R] = []

    async def until_interrupted() -> None:
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()
            group.start_soon(_cancel_on_signal, scope, signals)
            with scope:
                results.append(await work())
            group.cancel_scope.cancel()

    anyio.run(until_interrupted, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    if not results:
        raise typer.Exit(128 + signals[0])
    return results[0]


async def _cancel_on_signal(scope: anyio.CancelScope, signals: list[int]) -> None:
    """Cancel on each signal until the clean-up is done, so that a second Ctrl-C does not interrupt the clean-up."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            signals.append(number)
            scope.cancel()


_SCAN_COUNT: Final = 1_000


@asynccontextmanager
async def temporary_namespace(app: App, *queues: str, **settings: object) -> AsyncIterator[Namespace]:
    """Open an app in a new namespace, and remove the namespace's keys on exit, also after an error or Ctrl-C.

    Args:
        queues: All queues of the namespace. Each has one partition.
        settings: Settings of the app.
    """
    app.configure(**(settings | {"namespace": f"{app.name}-{secrets.token_hex(6)}"}))
    namespace = Namespace(app.settings.namespace)
    async with app:
        try:
            yield namespace
        finally:
            with anyio.CancelScope(shield=True):
                await _remove_namespace(app.producer.gateway, namespace, map(namespace.partition, queues))


async def _remove_namespace(gateway: Gateway, namespace: Namespace, partitions: Iterable[Partition]) -> None:
    """Remove all keys of a namespace.

    Scans the whole server in small steps that do not block other clients; in a cluster, each node that has such keys.

    Args:
        partitions: All partitions of the namespace.
    """
    if not gateway.clustered:
        await _remove(gateway, f"{{{namespace.name}[:}}]*", namespace.queues)
        return
    await _remove(gateway, f"{{{namespace.name}}}:*", namespace.queues)
    for partition in partitions:
        await _remove(gateway, f"{partition.ready.removesuffix('ready')}*", partition.ready)


async def _remove(gateway: Gateway, pattern: str, node_of: str) -> None:
    cursor = b"0"
    while True:
        scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        cursor, keys = await gateway.command(*scan, node_of=node_of)
        await gateway.pipeline([("UNLINK", key) for key in keys])
        if cursor == b"0":
            return
