"""Identity with which a run of an agent works: the stored one, else that of the class."""

from __future__ import annotations

from typing import Final

from ...queues import Entry, Kind, Namespace, retry_while_unavailable
from ..durable import Run
from ..identity import Identity, IdentityVersion, load_identity
from ..journal.agent_events import IdentityRead
from ..log import log_wait

__all__ = ["read_identity"]

IDENTITY: Final = "#identity"
"""Checkpoint key of the version of the identity with which the last run worked."""


async def read_identity(run: Run, declared: Identity) -> None:
    """Set the identity of a run, and log it if the run before it had another version. Raises `IdentityError`."""
    agent, namespace = run.envelope.task, Namespace(run.delivery.partition.namespace)
    stored = await retry_while_unavailable(
        lambda: load_identity(run.gateway, namespace, agent), on_wait=log_wait(f"task {run.id}", run.touch)
    )
    run.identity = found = stored or IdentityVersion(identity=declared)
    former = run.history.saved.get(IDENTITY)
    if former is None or int(former) != found.version:
        run.history.saved[IDENTITY] = version = b"%d" % found.version
        event = IdentityRead(
            agent=agent, number=found.version, former=None if former is None else int(former), by=found.by
        )
        await run.recorder.put(Entry(Kind.SAVED, IDENTITY, version), run.next_entry(event), wait=False)
