"""Turns of sessions that ended without an answer: the session learns of it as soon as the outcome is stored."""

from __future__ import annotations

from ...queues import Gateway, Namespace, QueueError
from ...queues.sessions import SessionAddress, SessionTurnEnd, end_turn, forget_task, parse_turn_id
from ..durable import CallNext, Context, Middleware, Settlement
from ..log import logger
from .outcome import Burial, Cancelled
from .settlement import RunSettlement

__all__ = ["SessionMiddleware"]


class SessionMiddleware(Middleware):
    """Ends the turn of a cancelled task, and marks the session of a dead letter as failed.

    If the worker dies before, or Redis does not answer, the session sweeper does the same.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        await call_next()
        if not isinstance(settlement, RunSettlement) or not settlement.run.id.startswith("turn-"):
            return
        match settlement.outcome:
            case Burial(reason=reason):
                end = SessionTurnEnd("failed", str(reason).encode())
            case Cancelled():
                end = SessionTurnEnd("cancelled", b"cancelled")
            case _:
                return
        run = settlement.run
        if (turn := parse_turn_id(run.id)) is None:
            return
        address = SessionAddress.at(Namespace(run.delivery.partition.namespace), turn.digest)
        try:
            if not await end_turn(self._gateway, address, turn, end):
                # The session was forgotten, and the task stored by a sender that had read the session before.
                await forget_task(self._gateway, run.delivery.partition, run.id)
        except QueueError as error:
            logger.bind(task=run.envelope.task, id=run.id).warning(
                "could not end turn {} of its session: {}; a worker does so within a minute", turn.number, error
            )
