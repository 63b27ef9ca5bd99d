"""Watching over one run of an agent: looks at step boundaries, and in between when there is reason to.

A finding is told of once, as long as it holds: by an event, in the act that stores it in the checkpoint, and a line in
the log. Then its policy is carried out. A run that dies between the two has told of it and not acted on it: the next
run acts, unless a person has come in between, who sent a message or replayed the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any, Final

import anyio

from ....queues import (
    LONGEST,
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
from ..background import in_background
from .checks import Finding, RecentCalls, View, check_repetition, run_checks
from .findings import STANDING, StoredFinding, StoredFindings
from .settings import Coherence, Policy

__all__ = ["CoherenceMonitor", "watching"]

_SHORTEST: Final = 0.05
"""Seconds between two looks at whether anything got done."""

_BY_PERSONS: Final = ("replayed", "forked")
"""Events that tell of a person who has looked at the task, and wants it to go on."""


class CoherenceMonitor(RunObserver):
    """The checks of one run. They look at what the log comes to, never at a state that is being changed."""

    def __init__(
        self,
        run: Run,
        goal: str,
        coherence: Coherence,
        *,
        state: Callable[[], Mapping[str, Any]],
        tokens: Callable[[], int],
    ) -> None:
        """goal: the envelope's. state: the reduction of the log, as JSON. tokens: of the agent's messages."""
        self._run = run
        self._goal = goal
        self._coherence = coherence
        self._state = state
        self._tokens = tokens
        self._trail = RecentCalls(coherence.window)
        self._standing = StoredFindings.decode(run.history.saved.get(STANDING))
        self._unread_at: int | None = None
        self._ignored = 0
        self._looking = asyncio.Lock()
        self._wanted = asyncio.Event()

    @property
    def findings(self) -> Sequence[StoredFinding]:
        """What is wrong, as far as was seen. May be read from any thread."""
        return self._standing.findings

    async def open(self) -> None:
        """Begin with what former runs left: their last calls, and what was wrong with them."""
        run = self._run
        if not run.delivery.has_history:
            return
        events = await retry_while_unavailable(
            lambda: read_last_events(run.gateway, run.delivery.partition, run.id, 4 * self._coherence.window),
            on_wait=log_wait(f"task {run.id}", run.touch),
        )
        if self.findings and (run.history.mail > self._standing.mail or _was_seen_by_a_person(events)):
            known = tuple([one.model_copy(update={"known": True}) for one in self.findings])
            await self._store(self._standing.mail, known)
        for event in reversed([*takewhile(lambda one: not one.starts_afresh, events)]):
            self._trail.record(parse_event(event), from_earlier_run=True)

    def on_event(self, event: Event, number: int) -> None:
        """An event was numbered. A call that is made again and again is looked at soon, all else at the boundary."""
        self._trail.record(event)
        if event.type == "tool_called" and self._coherence.repetition != "off":
            view = View(self._state(), self._goal, tuple(self._trail.calls))
            if check_repetition(view, self._coherence) is not None:
                self._wanted.set()

    async def on_boundary(self) -> None:
        """Check before the next step of the plan."""
        await self.look(boundary=True)

    async def look(self, *, boundary: bool = False) -> None:
        """Look, tell of what is new, and carry out what follows. Does not return where that ends the run.

        boundary: between two steps of the plan. Raises `LeaseLost`.
        """
        async with self._looking:
            if boundary:
                await self._notice_mail()
            found = [self._redacted(one) for one in run_checks(self._view(), self._coherence)]
            await self._tell(found)
        policies = {one.policy for one in self.findings if not one.known}
        if "bury" in policies:
            await self._bury()
        elif "hand_off" in policies:
            await self._hand_off()

    async def keep_looking(self) -> None:
        """Look whenever something was heard that is reason to, and when nothing got done for too long."""
        longest = self._coherence.stuck_minutes * 60
        while True:
            stuck = any(one.check == "progress" for one in self.findings)
            patience = longest if stuck else longest - self._trail.idle
            with anyio.move_on_after(max(_SHORTEST, min(patience + _SHORTEST, LONGEST))):
                await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.look()
            except LeaseLost:
                return  # the run has been told
            except Exception:  # noqa: BLE001 - the agent goes on without being watched between its steps
                logger.bind(task=self._run.envelope.task, id=self._run.id).exception("coherence cannot be looked at")
                return

    def _view(self) -> View:
        coherence = self._coherence
        tokens = 0 if coherence.context == "off" else self._tokens()
        calls = tuple(self._trail.calls)
        return View(self._state(), self._goal, calls, idle=self._trail.idle, tokens=tokens, ignored=self._ignored)

    def _redacted(self, finding: Finding) -> Finding:
        redact = self._run.redact
        if redact is None:
            return finding
        return Finding(finding.check, redact(finding.detail), redact(finding.about))

    async def _notice_mail(self) -> None:
        """How many steps were done while a message that it waits for was there."""
        state = self._state()
        if not state.get("waiting_for") or self._coherence.waiting == "off" or not await self._has_mail():
            self._unread_at, self._ignored = None, 0
            return
        done = sum(step["status"] == "done" for step in state["plan"])
        if self._unread_at is None:
            self._unread_at = done
        self._ignored = done - self._unread_at

    async def _has_mail(self) -> bool:
        run = self._run

        async def look() -> bool:
            async for message in read_inbox(run.gateway, run.delivery.partition, run.id):
                if message.number not in run.used_messages:
                    return True
            return False

        return await retry_while_unavailable(look, on_wait=log_wait(f"the inbox of task {run.id}", run.touch))

    # what follows

    async def _tell(self, found: Sequence[Finding]) -> None:
        """Tell of what is new, and store what holds now. What holds no more may be found, and told of, anew."""
        run, standing = self._run, self._standing
        known = {(one.check, one.about): one for one in standing.findings}
        kept = [known[one.check, one.about] for one in found if (one.check, one.about) in known]
        fresh = [one for one in found if (one.check, one.about) not in known]
        if not fresh and len(kept) == len(known):
            return
        mail = await self._last_mail() if fresh else standing.mail
        entries: list[Entry] = []
        for one in fresh:
            policy = self._coherence.policy(one.check)
            event = run.next_entry(IncoherenceFound(check=one.check, detail=one.detail, policy=policy))
            entries.append(event)
            number = int(event.value)
            kept.append(StoredFinding(check=one.check, detail=one.detail, about=one.about, policy=policy, n=number))
            self._log(one, policy)
        await self._store(mail, tuple(kept), *entries)

    async def _store(self, mail: int, findings: tuple[StoredFinding, ...], *told: Entry) -> None:
        """Keep what holds, in one act with the events that tell of it; at once where something is to follow."""
        self._standing = StoredFindings(mail=mail, findings=findings)
        data = self._standing.encode()
        stored = Entry(Kind.SAVED, STANDING, data) if findings else Entry(Kind.DROP, STANDING, b"")
        await self._run.recorder.put(*told, stored, wait=any(one.policy != "warn" for one in findings))

    def _log(self, finding: Finding, policy: Policy) -> None:
        logger.bind(task=self._run.envelope.task, id=self._run.id).warning(
            "incoherent ({}, {}): {}", finding.check, policy, finding.detail
        )

    async def _last_mail(self) -> int:
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
        """Park the task until a message comes; one that came since it was told of is such."""
        review = ParkReason(LONGEST, "review", self._standing.mail)
        await self._run.park(review, grace=self._run.settings.grace)


def _was_seen_by_a_person(events: Sequence[TaskEvent]) -> bool:
    """Whether a person put the task back after it was found to be incoherent. events: the newest first."""
    for event in events:
        if event.type in _BY_PERSONS:
            return True
        if event.type == "incoherent":
            return False
    return False


@asynccontextmanager
async def watching(watch: CoherenceMonitor) -> AsyncIterator[None]:
    """Look once in a while, for as long as the block runs."""
    async with in_background(watch.keep_looking()):
        yield
