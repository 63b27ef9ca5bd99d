"""Turns of sessions that ended without an answer: the session learns of it as soon as the outcome is stored."""

from __future__ import annotations

from contextlib import suppress

from ...queues.errors import NotEncrypted, QueueError, TamperedData
from ...queues.keys import Namespace
from ...queues.sessions.address import SessionAddress, parse_turn_id
from ...queues.sessions.removal import forget_task, is_forgotten
from ...queues.sessions.turns import SessionTurnEnd, end_turn, refused_end
from ...queues.transport.gateway import Gateway
from ..durable.context import Context
from ..durable.middleware import CallNext, Middleware, Settlement
from ..log import logger
from .outcome import Burial, Cancelled
from .settlement import RunSettlement


class SessionMiddleware(Middleware):
    """Ends the turn of a cancelled task, and marks the session of a dead letter as failed.

    A turn whose message was changed, or is not encrypted as it must be, ends without an answer: the next one runs.

    If the worker dies before, or Redis does not answer, the session sweeper does the same. The task of a forgotten
    session, stored by a sender that had read the session before, is deleted in place of its burial.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        if (
            not isinstance(settlement, RunSettlement)
            or not isinstance(settlement.outcome, Burial | Cancelled)
            or not settlement.run.id.startswith("turn-")
            or (turn := parse_turn_id(settlement.run.id)) is None
        ):
            await call_next()
            return
        run = settlement.run
        address = SessionAddress.at(Namespace(run.delivery.partition.namespace), turn.digest)
        with suppress(QueueError):  # then the outcome is stored first
            if await is_forgotten(self._gateway, address, turn):
                await forget_task(self._gateway, run.delivery.partition, run.id)
        await call_next()
        match settlement.outcome:  # that was stored: a caller may have cancelled the task meanwhile
            case Burial(error=NotEncrypted() | TamperedData() as error) if error.of_arguments:
                end = refused_end(str(error))  # no replay could run it
            case Burial(reason=reason):
                end = SessionTurnEnd("failed", str(reason).encode())
            case _:
                end = SessionTurnEnd("cancelled", b"cancelled")
        try:
            if not await end_turn(self._gateway, address, turn, end):
                await forget_task(self._gateway, run.delivery.partition, run.id)
        except QueueError as error:
            logger.bind(task=run.envelope.task, id=run.id).warning(
                "could not end turn {} of its session: {}; a worker does so within a minute", turn.number, error
            )
