"""Saying that this worker is there, and how it is, for those who list workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Final

import anyio

from ...queues import Gateway, Namespace, QueueError, WorkerInfo, announce, withdraw
from ..observe import logger
from .health import Health
from .rates import Rates
from .slots import Slots

__all__ = ["Registration", "describe"]

_KEPT: Final = 6
"""Intervals for which an announcement is kept: after two the worker is presumed dead, and is seen to be for a while."""


def describe(worker_id: str, app: str, queues: tuple[str, ...], concurrency: int, interval: float) -> WorkerInfo:
    """This process, as a worker. interval: seconds between two announcements."""
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
        interval=interval,
    )


class Registration:
    """Announces the worker every few seconds, and withdraws it at the end."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        info: WorkerInfo,
        slots: Slots,
        settled: Mapping[str, int],
        health: Health,
    ) -> None:
        """settled: by queue, how many deliveries the worker has settled."""
        self._gateway = gateway
        self._namespace = namespace
        self._info = info
        self._slots = slots
        self._health = health
        self._rates = Rates(settled)

    async def announce(self) -> None:
        started = await announce(self._gateway, self._namespace, self._current(), _KEPT * self._info.interval)
        self._info = replace(self._info, started=started)
        self._health.answered()

    async def run(self) -> None:
        while True:
            try:
                await self.announce()
            except QueueError as error:
                self._health.troubled(error)
                logger.debug("cannot announce the worker: {}", error)
            await anyio.sleep(self._info.interval)

    async def withdraw(self) -> None:
        await withdraw(self._gateway, self._namespace, self._info.id)

    def _current(self) -> WorkerInfo:
        return replace(
            self._info,
            in_flight=self._slots.busy,
            rates=self._rates.look(),
            progress=self._health.progress(),
            health=self._health.report(told_to_redis=True).summary(),
        )
