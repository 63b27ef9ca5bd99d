"""Saying that this worker is there, for those who list workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version

import anyio

from ...queues import Gateway, Namespace, QueueError, WorkerInfo, announce, withdraw
from ..observe import logger
from .rates import Rates
from .slots import Slots

__all__ = ["Registration", "describe"]

_INTERVAL = 5.0
_TTL = 15.0


def describe(worker_id: str, app: str, queues: tuple[str, ...], concurrency: int) -> WorkerInfo:
    """This process, as a worker."""
    return WorkerInfo(
        id=worker_id,
        app=app,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=version("perdure"),
        queues=queues,
        concurrency=concurrency,
        in_flight=0,
        started=0,
    )


class Registration:
    """Announces the worker every few seconds, and withdraws it at the end."""

    def __init__(
        self, gateway: Gateway, namespace: Namespace, info: WorkerInfo, slots: Slots, settled: Mapping[str, int]
    ) -> None:
        """settled: by queue, how many deliveries the worker has settled."""
        self._gateway = gateway
        self._namespace = namespace
        self._info = info
        self._slots = slots
        self._rates = Rates(settled)

    async def announce(self) -> None:
        started = await announce(self._gateway, self._namespace, self._current(), _TTL)
        self._info = replace(self._info, started=started)

    async def run(self) -> None:
        while True:
            await anyio.sleep(_INTERVAL)
            try:
                await self.announce()
            except QueueError as error:
                logger.debug("cannot announce the worker: {}", error)

    async def withdraw(self) -> None:
        await withdraw(self._gateway, self._namespace, self._info.id)

    def _current(self) -> WorkerInfo:
        return replace(self._info, in_flight=self._slots.busy, rates=self._rates.look())
