"""The sweeper of sessions: stores lost tasks of turns, starts turns that fell due, deletes idle sessions."""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from ...queues.delivery.fleet_locks import acquire_fleet_locks
from ...queues.errors import QueueError
from ...queues.keys import Namespace
from ...queues.sessions.removal import finish_forgetting, forget_idle_sessions
from ...queues.sessions.turns import check_session, due_sessions
from ...queues.transport.gateway import Gateway
from ..log import logger
from ..loop_errors import LoopErrors
from .session_turn import lost_end


class SessionSweeper:
    """Part of the janitor of a worker that has agents. One worker looks at the sessions of the fleet."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: Namespace,
        *,
        ttl: float,
        worker: str,
        lock_ttl: float,
        waking: Container[str] = (),
    ) -> None:
        """Create a sweeper.

        Args:
            ttl: seconds for which a session without a message is kept.
            worker: id of the worker.
            lock_ttl: seconds.
            waking: names of agents with `wake_when_due`. If Redis has lost the end of a turn of another agent, its
                commitments come up after its next turn only.
        """
        self._gateway = gateway
        self._namespace = namespace
        self._ttl = ttl
        self._worker = worker
        self._lock_ttl = lock_ttl
        self._errors = LoopErrors("look at session")
        self._lost_end = partial(lost_end, gateway, namespace, waking)

    async def sweep(self) -> None:
        """Store lost tasks of claimed turns, start turns of commitments that fell due, delete sessions."""
        locks = {"sessions": self._namespace.session_lock}
        waits = await acquire_fleet_locks(self._gateway, locks, self._worker, self._lock_ttl)
        if waits["sessions"]:
            return
        shared = [key for group in self._namespace.session_partitions for key in group.shared_keys]
        await self._errors.attempt(partial(self._gateway.set_keys_aside, shared), "keys")
        for address in await due_sessions(self._gateway, self._namespace):
            try:
                await check_session(self._gateway, address, self._lost_end)
            except QueueError as error:  # such as a missing key; the other sessions must not wait for this one
                logger.warning("could not look at session {}: {}", address.digest, error)
            except Exception as error:  # noqa: BLE001 - as above: fields that another program wrote
                self._errors.note(error, address.digest)
        await self._errors.attempt(partial(finish_forgetting, self._gateway, self._namespace), "forgotten sessions")
        if forgotten := await forget_idle_sessions(self._gateway, self._namespace, self._ttl):
            logger.info("deleted {} sessions that were idle for {:g} s", forgotten, self._ttl)
