"""Notifications to the service manager that started this process: its state, and a watchdog.

The protocol is that of systemd, sd_notify(3): datagrams of lines `NAME=value` to the socket in `NOTIFY_SOCKET`. Other
service managers speak it too. Nothing is sent if the variable is not set.

    READY=1         the workers run, or the reload has ended
    RELOADING=1     a rolling reload begins, with the time of CLOCK_MONOTONIC
    STOPPING=1      the workers stop
    STATUS=text     one line for `systemctl status`
    WATCHDOG=1      sent three times within `WatchdogSec=`, from the event loop, so that a blocked loop sends none
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final, Self

import anyio

from ...queues.runtime import RUNTIME
from ..log import FirstOfEach, logger

_INTERVAL: Final = 2.0
"""Longest interval between two notifications that have something to say, in seconds."""

_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The service manager of this process. No method raises an error or blocks.

    Args:
        address: Of its socket: a path, or a name that starts with `@` (abstract). None: no service manager.
        watchdog: Seconds without a notification after which it ends this process. None: it does not.
    """

    def __init__(self, address: str | None = None, watchdog: float | None = None) -> None:
        self._address = address
        self._interval = _INTERVAL if watchdog is None else min(_INTERVAL, watchdog / 3)
        self._watched = watchdog is not None
        self._unsent: dict[str, str] = {}
        self._status = ""
        self._errors = FirstOfEach()

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """Return the service manager that the environment names.

        The variables are removed, so that child processes do not notify it.
        """
        address, limit, pid = (environment.pop(name, "") for name in _VARIABLES)
        if address[:1] not in ("/", "@"):  # none, or a family that Python has not everywhere
            return cls()
        watched = limit.isdecimal() and int(limit) > 0 and pid in ("", str(RUNTIME.pid()))
        return cls(address, int(limit) / 1e6 if watched else None)

    def ready(self) -> None:
        """Report that the workers run, or that a reload has ended."""
        self._notify(READY="1")

    def reloading(self) -> None:
        """Report that a reload begins; `ready` reports its end."""
        self._notify(RELOADING="1", MONOTONIC_USEC=str(int(RUNTIME.monotonic() * 1e6)))

    def stopping(self) -> None:
        """Report that the workers stop."""
        self._notify(STOPPING="1")

    @contextmanager
    def watching(self, alive: Callable[[], bool], status: Callable[[], str]) -> Iterator[None]:
        """Report that the worker runs, call `run` meanwhile in the running event loop, and report that it stops."""
        if self._address is None:
            yield
            return
        task = asyncio.create_task(self.run(alive, status))
        self.ready()
        try:
            yield
        finally:
            self.stopping()
            task.cancel()

    async def run(self, alive: Callable[[], bool], status: Callable[[], str]) -> None:
        """Report the status when it changes, and answer the watchdog while `alive` returns True.

        Returns at once if there is no service manager.
        """
        while self._address is not None:
            if (text := " ".join(status().split())) != self._status:
                self._status = text
                self._notify(STATUS=text)
            if self._watched and alive():
                self._notify(WATCHDOG="1")
            await anyio.sleep(self._interval)

    def _notify(self, **fields: str) -> None:
        """Send fields, and those that could not be sent before."""
        if self._address is None:
            return
        if fields.keys() & {"READY", "RELOADING", "STOPPING"}:  # the last one of them counts
            for name in ("READY", "RELOADING", "MONOTONIC_USEC", "STOPPING"):
                self._unsent.pop(name, None)
        self._unsent |= fields
        message = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.connect("\0" + self._address[1:] if self._address[0] == "@" else self._address)
                sender.send(message.encode())
        except OSError as error:
            if self._errors.is_first(type(error).__name__):
                logger.warning("could not notify the service manager at {}: {}", self._address, error)
            return
        self._unsent.clear()
