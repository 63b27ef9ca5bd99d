"""Renewing leases, from a thread of its own: a blocked event loop does not lose them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import NoScriptError

from .address import Address
from .connection import sync_client, translated
from .errors import QueueError
from .keys import GROUP, Partition
from .leases import Leases
from .scripts import queue_script

__all__ = ["Beat"]

_BEAT = queue_script("beat")

_BATCH = 500
"""Deliveries renewed by one call of the script."""


class Beat:
    """Renews all of a worker's leases every third of the lease.

    When a delivery turns out to be another worker's, its `on_lost` is called; when somebody asked for the task to be
    cancelled, its `on_cancel`. `on_trouble` hears what kept a beat from happening, None when one succeeded again.
    """

    def __init__(
        self,
        address: Address,
        socket: Path | None,
        worker: str,
        leases: Leases[Any],
        lease: float,
        on_trouble: Callable[[QueueError | None], None],
    ) -> None:
        self._address = address
        self._socket = socket
        self._worker = worker
        self._leases = leases
        self._interval = lease / 3
        self._on_trouble = on_trouble
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; returns when the thread has ended or its last call has timed out."""
        self._stop.set()
        self._thread.join(timeout=self._interval + 1.0)

    def _run(self) -> None:
        client = sync_client(self._address, self._socket, timeout=self._interval)
        troubled = False
        try:
            while not self._stop.wait(self._interval if not troubled else self._interval / 4):
                try:
                    self._renew_all(client)
                except QueueError as error:
                    troubled = True
                    self._on_trouble(error)
                else:
                    if troubled:
                        self._on_trouble(None)
                    troubled = False
        finally:
            client.close()

    def _renew_all(self, client: redis.Redis) -> None:
        for partition, held in self._leases.by_partition().items():
            for start in range(0, len(held), _BATCH):
                batch = held[start : start + _BATCH]
                keys = [partition.ready, *(one.record for one in batch)]
                args: list[Any] = [GROUP, self._worker]
                for one in batch:
                    args += (one.delivery.entry, one.delivery.count)
                lost, cancelled = self._call(client, partition, keys, args)
                for position in lost:
                    # Settled since the table was read? Then it is no longer held, and nothing is lost.
                    if self._leases.holds(partition, batch[position].delivery.entry):
                        batch[position].on_lost()
                for position in cancelled:
                    batch[position].on_cancel()

    def _call(
        self, client: redis.Redis, partition: Partition, keys: list[str], args: list[Any]
    ) -> tuple[list[int], list[int]]:
        with translated(f"{self._address.shown} ({partition.queue})"):
            try:
                reply: Any = client.execute_command("EVALSHA", _BEAT.sha, len(keys), *keys, *args)
            except NoScriptError:
                reply = client.execute_command("EVAL", _BEAT.source, len(keys), *keys, *args)
        return reply[0], reply[1]
