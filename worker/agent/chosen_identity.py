"""Identity with which a run of an agent works: the stored one, else the identity of the class.

A method that is cut off is called again with the identity with which it has recorded steps: they would not fit another
one. So a new version counts from the next method on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.keys import Namespace
from ...queues.transport.backoff import retry_while_unavailable
from ..durable.run import Run
from ..identity import Identity, IdentityVersion, load_identity
from ..journal.agent_events import IdentityRead
from ..log import log_wait

IDENTITY: Final = "#identity"
"""Checkpoint key of the version of the identity with which the last run worked."""


class ChosenIdentity:
    """The identity of a run: the version of the run before it until nothing is cut off, then the one read at the start.

    A version that is not kept any more is replaced at once.
    """

    def __init__(self, run: Run, declared: Identity, cut_off: Callable[[], bool]) -> None:
        """cut_off: returns whether a method of the agent has recorded steps and has not returned."""
        self._run = run
        self._declared = declared
        self._cut_off = cut_off
        self._newer: IdentityVersion | None = None

    async def read(self) -> None:
        """Set the identity of the run. Raises `IdentityError`, `DecryptionError`."""
        run = self._run
        self._newer = await self._load(None) or IdentityVersion(identity=self._declared)
        former = run.history.saved.get(IDENTITY)
        if former is not None and int(former) != self._newer.version and self._cut_off():
            number = int(former)
            kept = await self._load(number) if number else IdentityVersion(identity=self._declared)
            if kept is not None:
                run.identity = kept
                return
        await self._adopt(self._newer)

    async def update(self) -> None:
        """Change to the version that was read at the start of the run, unless a method is cut off."""
        if self._newer is not None and not self._cut_off():
            await self._adopt(self._newer)

    async def _adopt(self, found: IdentityVersion) -> None:
        run, self._newer = self._run, None
        run.identity, former = found, run.history.saved.get(IDENTITY)
        if former is None or int(former) != found.version:
            run.history.saved[IDENTITY] = version = b"%d" % found.version
            event = IdentityRead(
                agent=run.envelope.task,
                number=found.version,
                former=None if former is None else int(former),
                by=found.by,
            )
            await run.recorder.put(Entry(Kind.SAVED, IDENTITY, version), run.next_entry(event), wait=False)

    async def _load(self, version: int | None) -> IdentityVersion | None:
        run = self._run
        agent, namespace = run.envelope.task, Namespace(run.delivery.partition.namespace)
        return await retry_while_unavailable(
            lambda: load_identity(run.gateway, namespace, agent, version), on_wait=log_wait(f"task {run.id}", run.touch)
        )
