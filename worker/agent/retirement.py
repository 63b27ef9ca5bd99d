"""Retirement of the oldest events of an agent, and of the results of the steps that they archived if it replans.

The plan of an agent that does not replan is finite, and `finish` has all of its results.

The log starts with an event that has the whole state (`log_base`). When there have been enough events since the last
one, another one is written, and what is before the last one goes. So a log has one to two times as many events as the
agent keeps, and the state at each of them is known.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.transport.backoff import retry_while_unavailable
from ..durable.observer import RunObserver
from ..journal.archive import ARCHIVED, archived_steps, retire_steps, retired_fields
from ..log import log_wait
from .live_state import LiveState

_PAYLOADS: Final = 16
"""A long log has so many times the payload limit in bytes since its last base, as counted from the start of the run."""


class Retirement(RunObserver):
    """Retirement of what one run of an agent does not keep, between two steps.

    keep_results: whether the records of archived steps stay.
    """

    def __init__(self, live: LiveState[Any], keep_events: int, *, keep_results: bool) -> None:
        self._live = live
        self._keep = keep_events
        self._keep_results = keep_results
        self._most = _PAYLOADS * live.run.payload_limit
        self._logged = 0
        self._tried = 0

    async def on_boundary(self) -> None:
        """Retire events if the log is long. The agent has no unstored changes here."""
        live = self._live
        base = max(live.logged_state["archive"]["base"], self._tried)
        if live.number - base >= self._keep or live.run.recorder.logged - self._logged >= self._most:
            await self._retire(live.logged_state["archive"]["base"])

    async def _retire(self, former: int) -> None:
        """Write a base and drop the records of steps that were archived up to the former one. Their keys stay known."""
        live, run = self._live, self._live.run
        partition, wait = run.delivery.partition, log_wait(f"the archive of task {run.id}", run.touch)
        gone: dict[str, str] = {}
        fields: dict[str, bytes] = {}
        if former and not self._keep_results:
            read = partial(archived_steps, run.gateway, partition, run.id)
            records = {
                key: orjson.loads(one) for key, one in (await retry_while_unavailable(read, on_wait=wait)).items()
            }
            gone = {key: one["step"]["status"] for key, one in records.items() if one.get("n", 0) <= former}
        if gone:
            fields = await retry_while_unavailable(
                partial(retired_fields, run.gateway, partition, run.id), on_wait=wait
            )
        self._tried, self._logged = live.number, run.recorder.logged
        entries = live.log_base(retired=len(gone))
        if not entries:
            return
        cipher = run.gateway.encryptor.of(partition, run.id)
        entries += [Entry(Kind.CHUNK, f"{ARCHIVED}{key}", b"") for key in gone]
        for name, data in retire_steps(fields, gone).items():
            entries.append(Entry(Kind.CHUNK, name.removeprefix("c:"), cipher.encrypt(name, data)))
        await run.recorder.put(*entries, *live.snapshot(force=True), wait=True)
        run.touch()
