"""Renewing leases, from a thread of its own: a blocked event loop does not lose them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import redis
from redis.exceptions import NoScriptError, RedisError

from ..errors import QueueError
from ..keys import GROUP, Partition
from ..transport import Address, Argument, is_read_only, queue_script, sync_client, translated
from ..transport.cluster import SyncClusterConnection
from .leases import Leases

__all__ = ["LeaseHeartbeat"]

_BEAT = queue_script("renew_leases")

_BATCH = 500
"""Deliveries renewed by one call of the script."""


class LeaseHeartbeat:
    """Renews all of a worker's leases every third of the lease.

    When a delivery turns out to be another worker's, its `on_lost` is called; when somebody asked for the task to be
    cancelled, its `on_cancel`. `on_trouble` hears what kept a beat from happening, None when one succeeded again.
    `may_beat` is asked before each: while it says no, nothing is renewed, and others take what is held once its lease
    has passed.
    """

    def __init__(
        self,
        address: Address,
        socket: Path | None,
        worker: str,
        leases: Leases[Any],
        lease: float,
        on_error: Callable[[QueueError | None], None],
        should_renew: Callable[[], bool] = lambda: True,
    ) -> None:
        self._address = address
        self._socket = socket
        self._worker = worker
        self._leases = leases
        self._interval = lease / 3
        self._on_error = on_error
        self._should_renew = should_renew
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; returns when the thread has ended or its last call has timed out."""
        self._stop.set()
        self._thread.join(timeout=self._interval + 1.0)

    def _run(self) -> None:
        line = _open_connection(self._address, self._socket, self._interval)
        troubled = held_back = False
        try:
            while not self._stop.wait(self._interval / 4 if troubled or held_back else self._interval):
                held_back = not self._should_renew()
                if held_back:
                    continue
                try:
                    self._renew_all(line)
                except QueueError as error:
                    troubled = True
                    self._on_error(error)
                else:
                    if troubled:
                        self._on_error(None)
                    troubled = False
        finally:
            line.close()

    def _renew_all(self, line: _RenewalConnection) -> None:
        """One beat. A node of a cluster that does not answer keeps no lease on another one from being renewed."""
        trouble: QueueError | None = None
        by_partition = self._leases.by_partition()
        # Who did not answer lately is asked last, and once only: its silence takes time.
        for partition in sorted(by_partition, key=lambda partition: line.is_suspect(partition.ready)):
            held = by_partition[partition]
            for start in range(0, len(held), _BATCH):
                if trouble is not None and line.is_suspect(partition.ready):
                    break
                batch = held[start : start + _BATCH]
                keys = [partition.ready, *(one.record for one in batch)]
                args: list[Any] = [GROUP, self._worker]
                for one in batch:
                    args += (one.delivery.entry, one.delivery.count)
                try:
                    lost, cancelled = self._call(line, partition, keys, args)
                except QueueError as error:
                    trouble = error
                    continue
                for position in lost:
                    # Settled since the table was read? Then it is no longer held, and nothing is lost.
                    if self._leases.holds(partition, batch[position].delivery.entry):
                        batch[position].on_lost()
                for position in cancelled:
                    batch[position].on_cancel()
        line.refresh()
        if trouble is not None:
            raise trouble

    def _call(
        self, line: _RenewalConnection, partition: Partition, keys: list[str], args: list[Any]
    ) -> tuple[list[int], list[int]]:
        with translated(f"{self._address.shown} ({partition.queue})"):
            try:
                reply: Any = line.execute(partition.ready, "EVALSHA", _BEAT.sha, len(keys), *keys, *args)
            except NoScriptError:
                reply = line.execute(partition.ready, "EVAL", _BEAT.source, len(keys), *keys, *args)
        return reply[0], reply[1]


class _RenewalConnection(Protocol):
    """A way to the server that holds a key."""

    def execute(self, key: str, *command: Argument) -> Any: ...

    def is_suspect(self, key: str) -> bool: ...

    def refresh(self) -> None: ...

    def close(self) -> None: ...


class _SingleConnection:
    """One server, on one connection."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def execute(self, key: str, *command: Argument) -> Any:
        try:
            return self._client.execute_command(*command)
        except RedisError as error:
            if is_read_only(error):  # demoted: the next connection finds the one that was promoted
                self._client.connection_pool.disconnect()
            raise

    def is_suspect(self, key: str) -> bool:
        return False

    def refresh(self) -> None:
        """There is nothing to learn about one server."""

    def close(self) -> None:
        self._client.close()


def _open_connection(address: Address, socket: Path | None, interval: float) -> _RenewalConnection:
    if address.clustered:
        return SyncClusterConnection(address, timeout=interval / 2)
    return _SingleConnection(sync_client(address, socket, timeout=interval))
