"""The heartbeat: renews leases from its own thread, so that a blocked event loop does not lose them at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import redis
from redis.exceptions import NoScriptError, RedisError

from ..envelope import LimitUse
from ..errors import LeaseLost, QueueError, Unavailable
from ..keys import GROUP, RELEASED, Partition
from ..runtime import RUNTIME
from ..transport.address import Address
from ..transport.clients import is_read_only, sync_client, translated
from ..transport.cluster.client import SyncClusterConnection
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import Script, queue_script
from .leases import NOT_STARTED, Delivery, Leases, OnTouch, RunStatus, Touch, ignore_touch

_logger = logging.getLogger(__name__)

_RENEW = queue_script("renew_leases")

_BATCH = 500
"""Deliveries that one call of the script renews at most."""

_SPACING = 0.05
"""Seconds between two renewals at least, however many of them are requested."""


def renewal(
    partition: Partition, lease: float, worker: str, held: Sequence[tuple[Delivery, str, RunStatus]]
) -> tuple[list[str], list[Argument]]:
    """Return keys and arguments of the script for deliveries, the ids of their tasks, and what their runs do."""
    keys = [partition.ready, partition.seen]
    args: list[Argument] = [GROUP, worker, round(lease * 1000), RELEASED]
    for delivery, task_id, (ran, step, stepped) in held:
        keys += (partition.record(task_id), partition.control(task_id))
        args += (delivery.entry, delivery.count, "" if ran is None else round(ran * 1000), step, round(stepped * 1000))
    return keys, args


async def renew_lease(gateway: Gateway, delivery: Delivery, task_id: str, lease: float) -> None:
    """Renew the lease of one delivery now. lease: seconds. Raises `LeaseLost`."""
    partition = delivery.partition
    held = [(delivery, task_id, NOT_STARTED)]
    _, lost, _ = await gateway.run(_RENEW, *renewal(partition, lease, delivery.worker, held))
    if lost:
        raise LeaseLost(task_id, "start")


def ignore_renewal(_left: float) -> None:
    """Do nothing after a renewal."""


class LeaseHeartbeat:
    """Renewal of all leases of a worker, each third of the lease. It stores which step each run is in.

    If a delivery has passed to another worker, its `on_lost` is called; if its task's cancellation was requested, its
    `on_cancel`.

    Args:
        socket: Returns the unix socket of an embedded server, None for any other.
        on_error: Called with the error of a renewal that failed, and with None after the next one that succeeded.
        should_renew: Called before each renewal. While it returns False, nothing is renewed, and other workers claim
            the deliveries after the lease.
        on_touch: Called with the touch of each renewal (see touch.py).
        idle_key: Returns a key to read where there is nothing to renew, so that `reached` is known; None: read
            nothing.
        on_renewed: Called after each complete renewal of leases with the part of the lease that was left.
    """

    def __init__(
        self,
        address: Address,
        socket: Callable[[], Path | None],
        worker: str,
        leases: Leases[Any],
        lease: float,
        on_error: Callable[[QueueError | None], None],
        should_renew: Callable[[], bool] = lambda: True,
        on_touch: OnTouch = ignore_touch,
        idle_key: Callable[[], str | None] = lambda: None,
        on_renewed: Callable[[float], None] = ignore_renewal,
    ) -> None:
        self._address = address
        self._socket = socket
        self._worker = worker
        self._leases = leases
        self._lease = lease
        self._interval = lease / 3
        self._on_error = on_error
        self._should_renew = should_renew
        self._on_touch = on_touch
        self._idle_key = idle_key
        self._on_renewed = on_renewed
        self._renewed = RUNTIME.monotonic()
        self._stop = RUNTIME.event()
        self._woken = RUNTIME.event()
        self._thread = RUNTIME.thread(self._run_thread, "perdure heartbeat")
        self.ended = False
        """Whether the thread has ended without a request."""
        self.reached: tuple[float, float] | None = None
        """First and last time of the current series of rounds that reached Redis, on the monotonic clock; None if the
        last round did not, or if it is not known."""

    def start(self) -> None:
        self._renewed = RUNTIME.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; return when it has ended, or does not within a second: its last call gets no answer."""
        self._stop.set()
        self._woken.set()
        self._thread.join(timeout=1.0)

    def set_lease(self, lease: float) -> None:
        """Renew each third of another lease, from now on. Returns at once."""
        self._lease = lease
        self._interval = lease / 3
        self._woken.set()

    def renew_now(self) -> None:
        """Renew all leases now, and with them read the requests to cancel. Returns at once."""
        self._woken.set()

    def _wait(self, interval: float) -> bool:
        """Wait until the next renewal is due or requested, or the lease has changed. Return whether to continue."""
        if not self._stop.wait(_SPACING):
            self._woken.wait(max(0.0, interval - _SPACING))
        self._woken.clear()
        return not self._stop.is_set()

    @property
    def overdue(self) -> float:
        """Seconds since the last complete renewal; 0 if there is nothing to renew.

        The time in which `should_renew` is False does not count.
        """
        return RUNTIME.monotonic() - self._renewed if len(self._leases) else 0.0

    def _run_thread(self) -> None:
        try:
            self._run()
        finally:
            self.ended = not self._stop.is_set()

    def _run(self) -> None:
        """Renew until `stop`. Any error is reported, and the next round comes after a part of the interval."""
        interval = self._interval
        connection: _RenewalConnection | None = None
        failed = paused = False
        try:
            while self._wait(interval / 4 if failed or paused else interval):
                try:
                    if connection is not None and interval != self._interval:
                        connection.close()
                        connection = None
                    if connection is None:
                        interval = self._interval
                        connection = _open_connection(self._address, self._socket(), interval)
                    paused = not self._should_renew()
                    if paused:
                        self._renewed = RUNTIME.monotonic()
                    else:
                        self._renew_all(connection)
                except Exception as error:
                    failed, self.reached = True, None
                    if isinstance(error, QueueError):
                        self._report(error)
                        continue
                    _logger.exception("could not renew leases; trying again")
                    _discard(connection)
                    connection = None
                    self._report(Unavailable(f"{type(error).__name__}: {error}"))
                else:
                    if failed and not paused:
                        failed = False
                        self._report(None)
        finally:
            _discard(connection)

    def _report(self, error: QueueError | None) -> None:
        try:
            self._on_error(error)
        except Exception:
            _logger.exception("could not report the state of lease renewal")

    def _renew_all(self, connection: _RenewalConnection) -> None:
        """Renew all leases. An unavailable node of a cluster does not affect leases on other nodes."""
        failure: Exception | None = None
        lost_here: set[int] = set()
        by_partition = self._leases.by_partition()
        if not by_partition:
            self._renewed = RUNTIME.monotonic()
            self._read_idle_key(connection)
            return
        # A node that did not answer lately comes last, and is called once only: its time-out takes time.
        for partition in sorted(by_partition, key=lambda partition: connection.is_suspect(partition.ready)):
            held = by_partition[partition]
            for start in range(0, len(held), _BATCH):
                if failure is not None and connection.is_suspect(partition.ready):
                    break
                batch = held[start : start + _BATCH]
                held_here = [(holder.delivery, holder.id, _status(holder)) for holder in batch]
                try:
                    lost, cancelled = self._call(
                        connection, partition, *renewal(partition, self._lease, self._worker, held_here)
                    )
                except Exception as error:  # noqa: BLE001 - raised below: other partitions come first
                    failure = error
                    continue
                for position in lost:
                    lost_here.add(id(batch[position]))
                    # A delivery that was settled since the table was read is not lost.
                    if self._leases.holds(partition, batch[position].delivery.entry):
                        _notify(batch[position], batch[position].on_lost)
                for position in cancelled:
                    _notify(batch[position], batch[position].on_cancel)
        failure = self._renew_tokens(connection, by_partition, lost_here) or failure
        connection.refresh()
        if failure is not None:
            raise failure
        before, self._renewed = self._renewed, RUNTIME.monotonic()
        self._on_renewed(1 - (self._renewed - before) / self._lease)
        self._note_reached()

    def _renew_tokens(
        self, connection: _RenewalConnection, by_partition: Mapping[Partition, Sequence[Any]], lost: Collection[int]
    ) -> Exception | None:
        """Renew the tokens of limits that runs with a lease hold. lost: other runs, by identity. Return an error."""
        held: list[tuple[Any, tuple[str, Sequence[LimitUse]]]] = []
        for holders in by_partition.values():
            for holder in holders:
                if holder.tokens is not None and id(holder) not in lost:
                    held += [(holder, token) for token in holder.tokens.held()]
        failure: Exception | None = None
        for start in range(0, len(held), _BATCH):
            batch = held[start : start + _BATCH]
            script, keys, args = batch[0][0].tokens.renewal([token for _, token in batch], self._lease)
            try:
                gone = self._run_script(connection, keys[0], script, keys, args)
            except Exception as error:  # noqa: BLE001 - the caller raises it: the leases are renewed
                failure = error
                continue
            for position in gone:
                holder, (member, _) = batch[position]
                _notify(holder, partial(holder.tokens.on_gone, member))
        return failure

    def _read_idle_key(self, connection: _RenewalConnection) -> None:
        """Find out whether this thread reaches Redis. No lease depends on it, so an error is not reported."""
        key = self._idle_key()
        if key is None:
            self.reached = None
            return
        try:
            with translated(self._address.shown):
                connection.execute(key, "EXISTS", key)
        except QueueError:
            self.reached = None
        else:
            self._note_reached()

    def _note_reached(self) -> None:
        now = RUNTIME.monotonic()
        self.reached = (now if self.reached is None else self.reached[0], now)

    def _call(
        self, connection: _RenewalConnection, partition: Partition, keys: list[str], args: list[Argument]
    ) -> tuple[list[int], list[int]]:
        sent = RUNTIME.monotonic()
        touched, lost, cancelled = self._run_script(connection, partition.ready, _RENEW, keys, args, partition.queue)
        self._on_touch(partition, Touch.of(touched, sent))
        return lost, cancelled

    def _run_script(
        self,
        connection: _RenewalConnection,
        key: str,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        queue: str = "limits",
    ) -> Any:
        """Run a script on the node of a key. queue: for the error."""
        with translated(f"{self._address.shown} ({queue})"):
            try:
                return connection.execute(key, "EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:
                connection.execute(key, "SCRIPT", "LOAD", script.source)
                return connection.execute(key, "EVALSHA", script.sha, len(keys), *keys, *args)


def _status(holder: Any) -> RunStatus:
    """Return what a run does. An error of one run must not end the leases of all."""
    try:
        status: RunStatus = holder.status()
    except Exception:
        _logger.exception("could not read the state of task %s", holder.id)
        return NOT_STARTED
    return status


def _notify(holder: Any, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        _logger.exception("could not notify the run of task %s", holder.id)


def _discard(connection: _RenewalConnection | None) -> None:
    """Close a connection."""
    if connection is not None:
        with suppress(Exception):
            connection.close()


class _RenewalConnection(Protocol):
    """Connection to the server that holds a key."""

    def execute(self, key: str, *command: Argument) -> Any: ...

    def is_suspect(self, key: str) -> bool: ...

    def refresh(self) -> None: ...

    def close(self) -> None: ...


class _SingleConnection:
    """One connection to one server."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def execute(self, key: str, *command: Argument) -> Any:
        try:
            return self._client.execute_command(*command)
        except RedisError as error:
            if is_read_only(error):  # a demoted server: the next connection goes to the new primary
                self._client.connection_pool.disconnect()
            raise

    def is_suspect(self, key: str) -> bool:
        return False

    def refresh(self) -> None:
        """Do nothing: one server has no topology."""

    def close(self) -> None:
        self._client.close()


def _open_connection(address: Address, socket: Path | None, interval: float) -> _RenewalConnection:
    if address.clustered:
        return SyncClusterConnection(address, timeout=interval / 2)
    return _SingleConnection(sync_client(address, socket, timeout=interval))
