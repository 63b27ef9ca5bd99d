"""Contact to Redis: whether the event loop reaches it, and whether the thread that renews leases does.

The two have connections of their own. Where the loop's connections fail and the thread's do not (a certificate that
only one of them has read, for example), the thread would renew for ever the leases of runs that can record nothing.
After two leases in that state, `cut_off` is True: the leases lapse, and other workers claim the tasks. While neither
reaches Redis, it is Redis that is away, and no worker is to blame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import anyio

from ....queues.delivery.heartbeat import LeaseHeartbeat
from ....queues.delivery.leases import Leases
from ....queues.errors import QueueError, Unavailable
from ....queues.keys import Namespace
from ....queues.runtime import RUNTIME
from ....queues.transport.gateway import Gateway
from ...log import logger

_SHORTEST: Final = 3.0
"""Seconds that the loop has to reach Redis at least, whatever the lease: it reconnects with delays of up to 1 s."""


class RedisContact:
    """The contacts of one worker. `run` checks that of the event loop; the others may be called from any thread."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        leases: Leases[Any],
        heartbeat: LeaseHeartbeat,
        lease: Callable[[], float],
    ) -> None:
        """lease: returns the lease in seconds."""
        self._gateway = gateway
        self._heartbeat = heartbeat
        self._leases = leases
        self._lease = lease
        self._idle_key = namespace.queues
        self._failing_since: float | None = None
        self._reached: tuple[float, float] | None = None
        self._reported = False
        self._outages: tuple[float, float | None] = (0.0, None)
        """Seconds of the former outages, and since when the present one lasts; one object, for other threads."""
        self.error = ""
        """The last error of the event loop's connection; empty while it works."""

    async def run(self) -> None:
        """Read a key once per third of the lease."""
        while True:
            began = RUNTIME.monotonic()
            try:
                await self._read()
            except Unavailable as error:
                self.error, self._reached = str(error), None
                if self._failing_since is None:
                    self._failing_since = began
                    self._outages = (self._outages[0], began)
                if self.cut_off and not self._reported:
                    self._reported = True
                    logger.error("leases are no longer renewed, other workers claim the tasks: {}", self.text)
            else:
                if self._reported:
                    logger.warning("the event loop reaches Redis again, and leases are renewed again")
                self._outages = (self.away, None)
                self.error, self._failing_since, self._reported = "", None, False
                now = RUNTIME.monotonic()
                self._reached = (now if self._reached is None else self._reached[0], now)
            await anyio.sleep(self._lease() / 3)

    async def _read(self) -> None:
        """Raise `Unavailable` if no node that holds a task of this worker answers."""
        keys = [partition.ready for partition in self._leases.by_partition()] if self._gateway.clustered else []
        failure: Unavailable | None = None
        for key in keys or [self._idle_key]:
            try:
                await self._gateway.command("EXISTS", key)
            except Unavailable as error:
                failure = error
            except QueueError:
                return  # Redis answered
            else:
                return
        if failure is not None:
            raise failure

    @property
    def away(self) -> float:
        """Seconds for which the event loop has not reached Redis, in all, as precise as a third of the lease."""
        seconds, since = self._outages
        return seconds if since is None else seconds + RUNTIME.monotonic() - since

    @property
    def lease(self) -> float:
        """The lease in seconds."""
        return self._lease()

    @property
    def limit(self) -> float:
        """Seconds for which one of the two may fail alone."""
        return max(2 * self._lease(), _SHORTEST)

    @property
    def cut_off(self) -> bool:
        """Whether only the thread that renews leases has reached Redis for two leases."""
        return self._alone(self._failing_since, self._heartbeat.reached)

    @property
    def renewal_stopped(self) -> bool:
        """Whether leases have not been renewed for two leases, although the event loop reached Redis."""
        failing_since = RUNTIME.monotonic() - self._heartbeat.overdue
        return self._heartbeat.ended or self._alone(failing_since, self._reached)

    def _alone(self, failing_since: float | None, reached: tuple[float, float] | None) -> bool:
        """Return whether the other one is known to have reached Redis throughout the limit, after this one failed."""
        if failing_since is None or reached is None:
            return False
        first, last = reached
        return last - max(failing_since, first) > self.limit

    def idle_key(self) -> str | None:
        """Return the key that the thread reads if it has nothing to renew; None while the loop reaches Redis."""
        return None if self._failing_since is None else self._idle_key

    @property
    def text(self) -> str:
        """The state of a worker that is cut off."""
        since = self._failing_since
        silent = 0.0 if since is None else RUNTIME.monotonic() - since
        return (
            f"the event loop has not reached Redis for {silent:.0f} s, the thread that renews leases has: {self.error}"
        )
