"""The run of a handler, and the keys of a session, for tests that look below the public API."""

from __future__ import annotations

from typing import Any

from perdure import App, Context
from perdure.queues.sessions.record import SessionAddress
from perdure.worker.durable.run import Run
from perdure.worker.durable.steps.current import CURRENT_RUN
from perdure.worker.session import Session


def current_run(ctx: Context) -> Run:
    """Return the run of the handler that calls this."""
    run = CURRENT_RUN.get()
    assert run is not None
    assert run.id == ctx.task_id
    return run


def address_of(app: App, agent: str, session: Session[Any]) -> SessionAddress:
    """Return the keys of a session with an agent of this name."""
    return SessionAddress.of(app.producer.namespace, agent, session.id)
