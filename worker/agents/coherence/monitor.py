"""Coherence monitor of a run: checks at step boundaries and, on some events, in between.

A finding is logged once for as long as it holds: one write contains its event and its entry in the checkpoint. Its
policy follows. If a run ends between the two, the next run carries out the policy, unless a person has sent a message
or replayed the task in the meantime.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import takewhile
from typing import Any, Final

import anyio

from ....queues.defaults import MAX_SECONDS
from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.delivery.settlement import message_after
from ....queues.errors import EntriesLost, LeaseLost
from ....queues.event_log import TaskEvent, read_last_events
from ....queues.inbox import last_message
from ....queues.runtime import RUNTIME
from ....queues.transport.backoff import retry_while_unavailable
from ...context import Context
from ...durable.journal.event import Event
from ...durable.journal.parsing import parse_event
from ...durable.run import Run, RunChecks, goal_of
from ...durable.steps.current import CURRENT_RUN
from ...durable.stop_reasons import ParkReason
from ...errors import Incoherent
from ...log import log_wait, logger
from ..background import in_background
from ..journal.agent_events import IncoherenceFound, Judged
from ..journal.json_patch import BadPatch
from ..journal.reducer import empty_state, reduce
from .checks import RecentCalls, View, check_repetition, run_checks
from .findings import (
    FINDINGS,
    MAX_DISMISSED,
    VERDICT,
    Coherence,
    Finding,
    Policy,
    StoredFinding,
    StoredFindings,
    StoredVerdict,
    check_coherence,
    key_of,
)

_MAX_LENGTH: Final = 2000
"""Characters of an objection that are recorded."""

_SHORTEST: Final = 0.05
"""Least seconds between two checks of progress."""

_DISMISSALS_EVERY: Final = 5.0
"""Least seconds between two reads of dismissals while a finding holds."""

_BY_PERSONS: Final = ("replayed", "forked")
"""Types of events by which a person lets the task continue."""


class CoherenceMonitor(RunChecks):
    """Checks of one run. They read the reduction of the event log, never the state that the agent is changing."""

    def __init__(
        self,
        run: Run,
        goal: str,
        coherence: Coherence,
        *,
        state: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Create the monitor of a run.

        Args:
            goal: the goal that was enqueued.
            state: returns the reduction of the event log, as JSON.
        """
        self._run = run
        self._goal = goal
        self._coherence = coherence
        self._state = state
        self._recent = RecentCalls(coherence.window)
        self._stored = StoredFindings.decode(run.history.saved.get(FINDINGS))
        self._lock = asyncio.Lock()
        self._check_due = asyncio.Event()
        self._dismissals_read = 0.0
        self._verdict = StoredVerdict.decode(run.history.saved.get(VERDICT))
        self._work = self._verdict.work
        self._judging: asyncio.Task[None] | None = None
        self.prompt: object = None
        """The last prompt that was built in this run, for the judge."""

    @property
    def findings(self) -> Sequence[StoredFinding]:
        """Return the findings that hold. May be called from any thread."""
        return self._stored.findings

    @property
    def failed(self) -> Sequence[str]:
        """Names of the checks that have failed, each once."""
        return tuple(dict.fromkeys(finding.check for finding in self.findings))

    async def open(self) -> None:
        """Load recent calls and findings of earlier runs."""
        run = self._run
        if not run.delivery.has_history:
            return
        events = await retry_while_unavailable(
            lambda: read_last_events(run.gateway, run.delivery.partition, run.id, 4 * self._coherence.window),
            on_wait=log_wait(f"task {run.id}", run.touch),
        )
        dismissed = self._merged(events)
        if dismissed != self._stored.dismissed:
            await self._store(self._stored.mail, self.findings, dismissed=dismissed)
        if self.findings and (run.history.mail > self._stored.mail or _continued_by_person(events)):
            known = tuple([one.model_copy(update={"known": True}) for one in self.findings])
            await self._store(self._stored.mail, known, dismissed=dismissed)
        for event in reversed([*takewhile(lambda one: not one.restarts, events)]):
            self._recent.record(parse_event(event), from_earlier_run=True)

    def on_event(self, event: Event, number: int) -> None:
        """Record an event. A repeated call triggers a check at once; all else is checked at the next boundary."""
        self._recent.record(event)
        if event.type in ("tool_called", "step_completed"):
            self._count_work()
        if event.type in ("tool_called", "message_added") and self._coherence.repetition != "off":
            recent = self._recent
            view = View({}, self._goal, tuple(recent.calls), tuple(recent.sentences))
            if check_repetition(view, self._coherence) is not None:
                self._check_due.set()

    def _count_work(self) -> None:
        self._work += 1
        if self._coherence.judge is not None and self._work - self._verdict.work >= self._coherence.judge_every:
            self._check_due.set()

    def note_work(self) -> None:
        """Count work that no event reports as progress."""
        self._recent.note_progress()
        self._count_work()

    def request_check(self) -> None:
        """Run the checks soon."""
        self._check_due.set()

    async def on_boundary(self) -> None:
        """Check before the next step of the plan."""
        await self.check()

    async def check(self) -> None:
        """Run the checks, log new findings and carry out policies. Does not return if a policy ends the run.

        Raises `LeaseLost`.
        """
        async with self._lock:
            found = [self._redacted(one) for one in run_checks(self._view(), self._coherence)]
            await self._update(found)
        policies = {one.policy for one in self.findings if not one.known}
        if "bury" in policies:
            await self._bury()
        elif "hand_off" in policies:
            await self._hand_off()

    async def run(self) -> None:
        """Run the checks after repeated calls, and after too long a time without progress."""
        try:
            await self._run_checks()
        finally:
            if self._judging is not None:
                self._judging.cancel()
                await asyncio.gather(self._judging, return_exceptions=True)

    async def _run_checks(self) -> None:
        longest = self._coherence.stuck_minutes * 60
        while True:
            self._ask_judge()
            stuck = any(one.check == "progress" for one in self.findings)
            remaining = longest if stuck else longest - self._recent.idle
            with anyio.move_on_after(max(_SHORTEST, min(remaining + _SHORTEST, MAX_SECONDS))):
                await self._check_due.wait()
            self._check_due.clear()
            try:
                await self.check()
            except (LeaseLost, EntriesLost):
                return  # the run is cancelled
            except Exception:  # noqa: BLE001 - the agent continues with checks at boundaries only
                logger.bind(task=self._run.envelope.task, id=self._run.id).exception("coherence check failed")
                return

    def _ask_judge(self) -> None:
        """Ask the judge if it is due, beside the run."""
        due = self._work - self._verdict.work >= self._coherence.judge_every
        if self._coherence.judge is not None and due and (self._judging is None or self._judging.done()):
            self._judging = asyncio.create_task(self._judge(), name=f"perdure judge {self._run.id}")

    async def _judge(self) -> None:
        """Record the verdict of the judge: an event and a field of the checkpoint in one write.

        A run that dies before that asks again; one that dies later does not.
        """
        run, work, judge = self._run, self._work, self._coherence.judge
        if judge is None:
            return
        objection = ""
        try:
            objection = str(await judge(self._view()) or "")[:_MAX_LENGTH]
        except Exception:  # noqa: BLE001 - it may raise anything; it is asked again later
            logger.bind(task=run.envelope.task, id=run.id).exception("the judge of coherence failed")
            self._verdict = self._verdict.model_copy(update={"work": work})
            return
        if run.redact is not None:
            objection = run.redact(objection)
        self._verdict = StoredVerdict(work=work, objection=objection)
        entry = run.next_entry(Judged(work=work, objection=objection))
        await run.recorder.put(entry, Entry(Kind.SAVED, VERDICT, self._verdict.model_dump_json().encode()), wait=False)
        self._check_due.set()

    def _view(self) -> View:
        recent = self._recent
        return View(
            self._state(),
            self._goal,
            tuple(recent.calls),
            tuple(recent.sentences),
            tuple(recent.events),
            self.prompt,
            self._verdict.objection,
            idle=recent.idle,
        )

    def _redacted(self, finding: Finding) -> Finding:
        redact = self._run.redact
        if redact is None:
            return finding
        return Finding(finding.check, redact(finding.detail), redact(finding.about))

    async def _update(self, found: Sequence[Finding]) -> None:
        """Log new findings and store those that hold. A finding that no longer holds is logged again if it returns."""
        run, stored = self._run, self._stored
        known = {(one.check, one.about): one for one in stored.findings}
        if any((one.check, one.about) not in known for one in found) or self._dismissals_due():
            dismissed = await self._read_dismissals()
        else:
            dismissed = stored.dismissed
        found = [one for one in found if key_of(one) not in dismissed]
        kept = [known[one.check, one.about] for one in found if (one.check, one.about) in known]
        new = [one for one in found if (one.check, one.about) not in known]
        if not new and len(kept) == len(known) and dismissed == stored.dismissed:
            return
        mail = await self._last_message() if new else stored.mail
        entries: list[Entry] = []
        for one in new:
            policy = self._coherence.policy(one.check)
            found_now = IncoherenceFound(check=one.check, detail=one.detail, policy=policy, key=key_of(one))
            event = run.next_entry(found_now)
            entries.append(event)
            number = int(event.value)
            kept.append(StoredFinding(check=one.check, detail=one.detail, about=one.about, policy=policy, n=number))
            self._log(one, policy)
        await self._store(mail, tuple(kept), *entries, dismissed=dismissed)

    def _dismissals_due(self) -> bool:
        return bool(self.findings) and RUNTIME.monotonic() - self._dismissals_read >= _DISMISSALS_EVERY

    async def _read_dismissals(self) -> tuple[str, ...]:
        """Return the keys of dismissed findings: those that are stored, and what persons have dismissed since."""
        run = self._run
        self._dismissals_read = RUNTIME.monotonic()
        return self._merged(
            await retry_while_unavailable(
                lambda: read_last_events(run.gateway, run.delivery.partition, run.id, 4 * self._coherence.window),
                on_wait=log_wait(f"task {run.id}", run.touch),
            )
        )

    def _merged(self, events: Sequence[TaskEvent]) -> tuple[str, ...]:
        """Return the keys of dismissed findings with those that the latest events add, newest first."""
        data = [one.data for one in reversed(events) if one.type == "dismissed" and isinstance(one.data, dict)]
        keys = dict.fromkeys([*self._stored.dismissed, *(str(one.get("finding")) for one in data)])
        return tuple(keys)[-MAX_DISMISSED:]

    async def _store(
        self, mail: int, findings: Sequence[StoredFinding], *events: Entry, dismissed: tuple[str, ...]
    ) -> None:
        """Store findings and their events in one write, and wait for it if a policy follows."""
        self._stored = StoredFindings(mail=mail, findings=tuple(findings), dismissed=dismissed)
        data = self._stored.encode()
        empty = not (findings or dismissed)
        saved = Entry(Kind.DROP, FINDINGS, b"") if empty else Entry(Kind.SAVED, FINDINGS, data)
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
        review = ParkReason(MAX_SECONDS, "review", (message_after(self._stored.mail),))
        await self._run.park(review, grace=self._run.settings.grace)


def _continued_by_person(events: Sequence[TaskEvent]) -> bool:
    """Return whether a person let the task continue after its last finding. Events are newest first."""
    for event in events:
        if event.type in _BY_PERSONS:
            return True
        if event.type == "incoherent":
            return False
    return False


Handler = Callable[..., Coroutine[Any, Any, Any]]


class _FunctionMonitor(CoherenceMonitor):
    """Monitor of a function, whose state has what it logged. Its steps have no events, so each stored one counts."""

    def __init__(self, run: Any, coherence: Coherence) -> None:
        goal = goal_of(run)
        self._reduced = {**empty_state(), "goal": goal}
        self._by_event = False
        super().__init__(run, goal, coherence, state=lambda: self._reduced)

    def on_event(self, event: Event, number: int) -> None:
        if event.type != "message_added":  # the list of all messages would grow without end
            with suppress(BadPatch):
                self._reduced = reduce(self._reduced, event, number)
        self._by_event = event.type == "tool_called"
        super().on_event(event, number)

    def on_recorded(self) -> None:
        if self._by_event:  # the record of a tool call, which may be a repetition
            self._by_event = False
            return
        self.note_work()

    def on_step(self, key: str) -> None:
        self.request_check()


def watched(name: str, handler: Handler, *, coherence: Coherence) -> Handler:
    """Return a handler that is checked while it runs as a task. Called as a plain function it is not.

    Raises `TaskDefinitionError`.
    """
    check_coherence(f"task {name!r}", coherence)

    @functools.wraps(handler)
    async def checked(ctx: Context, /, *args: Any, **kwargs: Any) -> Any:
        run = CURRENT_RUN.get()
        if run is None or run.context is not ctx or run.observer(CoherenceMonitor) is not None:
            return await handler(ctx, *args, **kwargs)
        monitor = _FunctionMonitor(run, coherence)
        await monitor.open()
        run.observe(monitor)
        try:
            async with in_background(monitor.run()):
                return await handler(ctx, *args, **kwargs)
        finally:
            run.unobserve(monitor)

    return checked


WARNINGS: Final = Coherence()
"""Checks of a function that names none: they warn."""


async def watch(run: Run) -> AsyncExitStack:
    """Check a function that runs, with warnings as the only policy. Closing the stack ends the checks.

    What the last calls show is found before that, unless the run was stopped.
    """
    monitor = _FunctionMonitor(run, WARNINGS)
    await monitor.open()

    async def check() -> None:
        if run.stop_reason is None:
            with suppress(LeaseLost, EntriesLost):  # the outcome of the run meets the same
                await monitor.check()

    stack = AsyncExitStack()
    run.observe(monitor)
    stack.callback(run.unobserve, monitor)
    stack.push_async_callback(check)
    await stack.enter_async_context(in_background(monitor.run()))
    return stack
