"""Coherence monitor of a run: checks at step boundaries and, on some events, in between.

A finding is logged once for as long as it holds: one write contains its event and its entry in the checkpoint. Its
policy follows. If a run ends between the two, the next run carries out the policy, unless a person has sent a message
or replayed the task in the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import anyio

from ....queues import (
    LONGEST,
    EntriesLost,
    Entry,
    Kind,
    LeaseLost,
    TaskEvent,
    last_message,
    read_inbox,
    read_last_events,
    retry_while_unavailable,
)
from ...durable import ParkReason, Run, RunObserver
from ...errors import Incoherent
from ...journal import Event, parse_event
from ...journal.agent_events import IncoherenceFound
from ...log import log_wait, logger
from .checks import Finding, RecentCalls, View, check_repetition, run_checks
from .findings import FINDINGS, StoredFinding, StoredFindings
from .settings import Coherence, Policy

__all__ = ["CoherenceMonitor"]

_SHORTEST: Final = 0.05
"""Least seconds between two checks of progress."""

_BY_PERSONS: Final = ("replayed", "forked")
"""Types of events by which a person lets the task continue."""


class CoherenceMonitor(RunObserver):
    """Checks of one run. They read the reduction of the event log, never the state that the agent is changing."""

    def __init__(
        self,
        run: Run,
        goal: str,
        coherence: Coherence,
        *,
        state: Callable[[], Mapping[str, Any]],
        tokens: Callable[[], int],
    ) -> None:
        """Create the monitor of a run.

        Args:
            goal: the goal that was enqueued.
            state: returns the reduction of the event log, as JSON.
            tokens: returns the tokens of the agent's messages.
        """
        self._run = run
        self._goal = goal
        self._coherence = coherence
        self._state = state
        self._tokens = tokens
        self._recent = RecentCalls(coherence.window)
        self._stored = StoredFindings.decode(run.history.saved.get(FINDINGS))
        self._unread_at: int | None = None
        self._ignored = 0
        self._lock = asyncio.Lock()
        self._check_due = asyncio.Event()

    @property
    def findings(self) -> Sequence[StoredFinding]:
        """Return the findings that hold. May be called from any thread."""
        return self._stored.findings

    async def open(self) -> None:
        """Load recent calls and findings of earlier runs."""
        run = self._run
        if not run.delivery.has_history:
            return
        events = await retry_while_unavailable(
            lambda: read_last_events(run.gateway, run.delivery.partition, run.id, 4 * self._coherence.window),
            on_wait=log_wait(f"task {run.id}", run.touch),
        )
        if self.findings and (run.history.mail > self._stored.mail or _continued_by_person(events)):
            known = tuple([one.model_copy(update={"known": True}) for one in self.findings])
            await self._store(self._stored.mail, known)
        for event in reversed([*takewhile(lambda one: not one.restarts, events)]):
            self._recent.record(parse_event(event), from_earlier_run=True)

    def on_event(self, event: Event, number: int) -> None:
        """Record an event. A repeated call triggers a check at once; all else is checked at the next boundary."""
        self._recent.record(event)
        if event.type == "tool_called" and self._coherence.repetition != "off":
            view = View(self._state(), self._goal, tuple(self._recent.calls))
            if check_repetition(view, self._coherence) is not None:
                self._check_due.set()

    async def on_boundary(self) -> None:
        """Check before the next step of the plan."""
        await self.check(boundary=True)

    async def check(self, *, boundary: bool = False) -> None:
        """Run the checks, log new findings and carry out policies. Does not return if a policy ends the run.

        Inbox messages are read at a boundary only, which is between two steps of the plan. Raises `LeaseLost`.
        """
        async with self._lock:
            if boundary:
                await self._count_ignored()
            found = [self._redacted(one) for one in run_checks(self._view(), self._coherence)]
            await self._update(found)
        policies = {one.policy for one in self.findings if not one.known}
        if "bury" in policies:
            await self._bury()
        elif "hand_off" in policies:
            await self._hand_off()

    async def run(self) -> None:
        """Run the checks after repeated calls, and after too long a time without progress."""
        longest = self._coherence.stuck_minutes * 60
        while True:
            stuck = any(one.check == "progress" for one in self.findings)
            remaining = longest if stuck else longest - self._recent.idle
            with anyio.move_on_after(max(_SHORTEST, min(remaining + _SHORTEST, LONGEST))):
                await self._check_due.wait()
            self._check_due.clear()
            try:
                await self.check()
            except (LeaseLost, EntriesLost):
                return  # the run is cancelled
            except Exception:  # noqa: BLE001 - the agent continues with checks at boundaries only
                logger.bind(task=self._run.envelope.task, id=self._run.id).exception("coherence check failed")
                return

    def _view(self) -> View:
        coherence = self._coherence
        tokens = 0 if coherence.context == "off" else self._tokens()
        calls = tuple(self._recent.calls)
        return View(self._state(), self._goal, calls, idle=self._recent.idle, tokens=tokens, ignored=self._ignored)

    def _redacted(self, finding: Finding) -> Finding:
        redact = self._run.redact
        if redact is None:
            return finding
        return Finding(finding.check, redact(finding.detail), redact(finding.about))

    async def _count_ignored(self) -> None:
        """Count the steps that were done while the awaited message was in the inbox."""
        state = self._state()
        if not state.get("waiting_for") or self._coherence.waiting == "off" or not await self._has_unread():
            self._unread_at, self._ignored = None, 0
            return
        done = sum(step["status"] == "done" for step in state["plan"])
        if self._unread_at is None:
            self._unread_at = done
        self._ignored = done - self._unread_at

    async def _has_unread(self) -> bool:
        run = self._run

        async def find() -> bool:
            async for message in read_inbox(run.gateway, run.delivery.partition, run.id):
                if message.number not in run.used_messages:
                    return True
            return False

        return await retry_while_unavailable(find, on_wait=log_wait(f"the inbox of task {run.id}", run.touch))

    async def _update(self, found: Sequence[Finding]) -> None:
        """Log new findings and store those that hold. A finding that no longer holds is logged again if it returns."""
        run, stored = self._run, self._stored
        known = {(one.check, one.about): one for one in stored.findings}
        kept = [known[one.check, one.about] for one in found if (one.check, one.about) in known]
        new = [one for one in found if (one.check, one.about) not in known]
        if not new and len(kept) == len(known):
            return
        mail = await self._last_message() if new else stored.mail
        entries: list[Entry] = []
        for one in new:
            policy = self._coherence.policy(one.check)
            event = run.next_entry(IncoherenceFound(check=one.check, detail=one.detail, policy=policy))
            entries.append(event)
            number = int(event.value)
            kept.append(StoredFinding(check=one.check, detail=one.detail, about=one.about, policy=policy, n=number))
            self._log(one, policy)
        await self._store(mail, tuple(kept), *entries)

    async def _store(self, mail: int, findings: tuple[StoredFinding, ...], *events: Entry) -> None:
        """Store findings and their events in one write, and wait for it if a policy follows."""
        self._stored = StoredFindings(mail=mail, findings=findings)
        data = self._stored.encode()
        saved = Entry(Kind.SAVED, FINDINGS, data) if findings else Entry(Kind.DROP, FINDINGS, b"")
        await self._run.recorder.put(*events, saved, wait=any(one.policy != "warn" for one in findings))

    def _log(self, finding: Finding, policy: Policy) -> None:
        logger.bind(task=self._run.envelope.task, id=self._run.id).warning(
            "incoherent ({}, {}): {}", finding.check, policy, finding.detail
        )

    async def _last_message(self) -> int:
        run = self._run
        number, _ = await retry_while_unavailable(
            lambda: last_message(run.gateway, run.delivery.partition, run.id),
            on_wait=log_wait(f"the inbox of task {run.id}", run.touch),
        )
        return number

    async def _bury(self) -> None:
        wrong = [f"{one.check}: {one.detail}" for one in self.findings if one.policy == "bury"]
        error = Incoherent(self._run.envelope.task, wrong)
        await self._run.fail(error, grace=self._run.settings.grace)

    async def _hand_off(self) -> None:
        """Park the task until a message arrives. A message since the finding counts."""
        review = ParkReason(LONGEST, "review", self._stored.mail)
        await self._run.park(review, grace=self._run.settings.grace)


def _continued_by_person(events: Sequence[TaskEvent]) -> bool:
    """Return whether a person let the task continue after its last finding. Events are newest first."""
    for event in events:
        if event.type in _BY_PERSONS:
            return True
        if event.type == "incoherent":
            return False
    return False
