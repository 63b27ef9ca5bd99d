"""Loop that drives an agent: plan, the steps of the plan, finish. Each is recorded atomically with the state.

A method that is cut off is called again with the state of its start and with the steps that it recorded.

Identity with which a run of an agent works: the stored one, else the identity of the class.

A method that is cut off is called again with the identity with which it has recorded steps: they would not fit another
one. So a new version counts from the next method on.

Retirement of the oldest events of an agent, and of the results of the steps that they archived if it replans.

The plan of an agent that does not replan is finite, and `finish` has all of its results.

The log starts with an event that has the whole state (`log_base`). When there have been enough events since the last
one, another one is written, and what is before the last one goes. So a log has one to two times as many events as the
agent keeps, and the state at each of them is known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, NoReturn

import orjson
from pydantic import ValidationError

from ...deadletter.error_text import error_text
from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import message_after
from ...queues.doubts import Resolution, encode_intent, intent_arguments, resolution_in
from ...queues.envelope import check_size
from ...queues.errors import EntriesLost, LeaseLost, PayloadTooLarge
from ...queues.json_form import large_integer
from ...queues.keys import Namespace
from ...queues.pubsub import TaskNotifications
from ...queues.transport.backoff import retry_while_unavailable
from ..context import Context
from ..durable.emitting import begin_unit, end_unit
from ..durable.joining import followed
from ..durable.journal.event import Event
from ..durable.journal.run_events import (
    Planned,
    PlannedStep,
    StepCompleted,
    StepFailed,
    StepStarted,
    Waited,
    WaitStarted,
)
from ..durable.journal.step_record import StepRecord
from ..durable.promises import left_promises, warn_of_left
from ..durable.run import Run, RunObserver
from ..durable.steps.codec import arguments_text, codec_of, fingerprint
from ..durable.steps.current import AlreadyDone, StepCall
from ..durable.steps.execution import decided_result
from ..durable.steps.failures import drop_failures, forget_failures, hold_failures
from ..durable.steps.keys import changed_scope, forget_steps
from ..durable.steps.matching import reload_records
from ..durable.steps.variables import contained
from ..durable.stop_reasons import ParkReason
from ..errors import (
    Reschedule,
    ResolutionMismatch,
    RetryLater,
    StateError,
    StateTooLarge,
    StepDefinitionError,
    StepInDoubt,
    StepResolvedAsFailed,
    UnserialisableResult,
    first_problem,
)
from ..log import log_wait, logger
from ..memory.task_memory import store_discoveries, store_findings
from .agent import Agent, Plan, S
from .background import in_background
from .coherence.monitor import CoherenceMonitor
from .identity import Identity, IdentityVersion, load_identity
from .incoming import Corrections, Incoming, Interrupted, OnMessage
from .journal.agent_events import Changed, Finished, IdentityRead, Rewound
from .journal.archive import ARCHIVED, archived_keys, archived_since, archived_steps, retire_steps, retired_fields
from .journal.compaction import COMPACTION, TOO_LARGE
from .journal.state import AgentState, PlanStep, StepStatus
from .live_state import Autosave, LiveState, snapshots
from .resume_notice import OnResume, acknowledged, confirm_resume

_FROM_START: Final = b"plan"
"""Value of a due replan that asks `plan`, not `replan`."""

_OPEN: Final = (StepStatus.PENDING, StepStatus.RUNNING)


class Loop(Generic[S]):
    """One run of an agent. If `replicated`, a step is done only when Redis replicas have its record."""

    def __init__(
        self,
        agent: Agent[S],
        ctx: Context,
        live: LiveState[S],
        notifications: Callable[[], TaskNotifications],
        *,
        on_message: OnMessage = "next_step",
        on_resume: OnResume = None,
        replicated: bool = False,
    ) -> None:
        self._agent = agent
        self._ctx = ctx
        self._live = live
        self._run = live.run
        self._notifications = notifications
        self._on_message: OnMessage = on_message
        self._on_resume: OnResume = on_resume
        self._replicated = replicated
        self._replans = type(agent).replan is not Agent.replan
        self._interrupted = False
        self._identity: ChosenIdentity | None = None

    async def drive(self, goal: str, inputs: dict[str, Any]) -> Any:
        """Run the agent from the point that earlier runs reached; return the result of `finish`."""
        await self._run.history.read_all()
        recorded = self._run.history.done.get(FINISH)
        if recorded is not None:
            return codec_of(self._agent.finish).decode_record(FINISH, StepRecord.decode(recorded).result)
        try:
            await resume_after_compaction(self._run)
            await self._live.open(goal, inputs)
            return await self._drive(goal)
        except (StateTooLarge, PayloadTooLarge) as error:
            await park_too_large(self._live, error)

    async def _drive(self, goal: str) -> Any:
        """Run the agent from its restored state."""
        if self._agent.identity is not None:
            self._identity = ChosenIdentity(self._run, self._agent.identity, self._is_cut_off)
            await self._identity.read()
        if self._live.gap is not None:
            await rewind(
                self._live, *self._live.gap, replans=self._replans, retires=self._agent.keep_events is not None
            )
        if archived := self._live.archive_due():  # a version without an archive, or a larger one, wrote the state
            await self._run.recorder.put(*archived, *self._live.snapshot(), wait=True)
        monitor = await self._monitor(goal)
        self._incoming = Incoming(
            self._run, self._on_message, max_rounds=self._agent.message_rounds, replicated=self._replicated
        )
        self._run.observe(self._incoming)
        if self._agent.keep_events is not None:
            self._run.observe(Retirement(self._live, self._agent.keep_events, keep_results=not self._replans))
        self._corrections = Corrections(self._live, self._incoming, replicated=self._replicated)
        await confirm_resume(self._agent, self._ctx, self._live, self._on_resume, self._mark_all_changed)
        watching = in_background(self._incoming.watch(self._notifications))
        async with snapshots(self._live), in_background(monitor.run()), watching:
            await self._plan()
            while True:
                while (step := await self._next()) is not None:
                    if await self._take(step) and self._replans:
                        await self._replan_due()
                if (done := await self._finish()) is not None:
                    return done.result

    @property
    def has_finished(self) -> bool:
        """Whether an earlier run recorded the result. The checkpoint must have been read."""
        return FINISH in self._run.history.done

    @property
    def _state(self) -> S:
        return self._live.state

    async def _monitor(self, goal: str) -> CoherenceMonitor:
        live = self._live
        monitor = CoherenceMonitor(self._run, goal, self._agent.coherence, state=lambda: live.logged_state)
        await monitor.open()
        self._run.observe(monitor)
        return monitor

    async def _next(self) -> PlanStep | None:
        """Return the next step of the plan, after new messages; unless the run is stopped here."""
        await self._run.plan_boundary()
        if self._identity is not None:
            await self._identity.update()
        step = self._open_step()
        await self._corrections.apply(partial(self._mark_changed, FINISH if step is None else step.key))
        while self._incoming.has_new and await self._deliver(self._open_step()):
            await self._run.plan_boundary()
        return self._open_step()

    def _open_step(self) -> PlanStep | None:
        for step in self._state.plan:
            if step.status in _OPEN:
                return step
        return None

    async def _deliver(self, step: PlanStep | None) -> bool:
        """Add new messages to the conversation before a step, and plan again if they ask for it, or no step is left.

        A risky step in doubt comes before another plan. Return whether there was a new plan.
        """
        if step is None and not self._incoming.may_plan:
            return False
        if self._on_message == "restart" and step is not None and step.risky and step.status is StepStatus.RUNNING:
            return False  # another plan would forget that it was started, and call it again without `verify`
        interrupted, self._interrupted = self._interrupted, False
        from_start = self._on_message == "restart" or (step is None and not self._replans)
        replan = from_start or step is None or (interrupted and self._replans)
        due = [Entry(Kind.SAVED, REPLAN, _FROM_START if from_start else b"1")] if replan else []
        scope = FINISH if step is None else step.key
        if not await self._incoming.deliver(lambda: due + self._mark_changed(scope), last=step is None):
            return False
        if replan:
            await self._replan(from_start=from_start)
        return replan

    def _mark_changed(self, scope: str) -> list[Entry]:
        """Let recorded inner steps run again with other arguments; return the entry, to be put at once."""
        saved, mark = self._run.history.saved, changed_scope(scope)
        if mark in saved or not self._parts(scope):
            return []
        saved[mark] = b"1"
        return [Entry(Kind.SAVED, mark, b"1")]

    def _mark_all_changed(self) -> list[Entry]:
        """Let recorded inner steps of what was cut off run again with other arguments; return the entries."""
        return [mark for scope in self._scopes() for mark in self._mark_changed(scope)]

    def _scopes(self) -> list[str]:
        """Return the scopes of the methods that may be cut off."""
        step = self._open_step()
        return [PLAN, REPLAN, FINISH if step is None else step.key]

    def _is_cut_off(self) -> bool:
        return any(map(self._parts, self._scopes()))

    async def _plan(self) -> None:
        saved = self._run.history.saved
        if PLAN in self._run.history.done or self._state.plan:
            if REPLAN in saved:
                await self._replan_due(from_start=saved[REPLAN] == _FROM_START)
            return
        if not self._run.delivery.has_history:
            await self._run.flush()  # whose reply says whether there are messages
        await self._corrections.apply(partial(self._mark_changed, PLAN))
        await self._incoming.deliver(partial(self._mark_changed, PLAN))
        plan = as_plan("plan", await self._within(PLAN, lambda: self._agent.plan(self._ctx, self._state)))
        mark = Entry(Kind.DONE_WITH_EVENT, PLAN, StepRecord(b"null").encode())
        await self._record(PLAN, Planned(steps=planned_steps("plan", plan.steps), why=plan.why), mark)

    async def _replan_due(self, *, from_start: bool = False) -> None:
        """Ask for another plan after a step, and after the messages that came meanwhile. from_start: see `_replan`."""
        await self._corrections.apply(partial(self._mark_changed, REPLAN))
        restart = self._on_message == "restart"
        due = [Entry(Kind.SAVED, REPLAN, _FROM_START)] if restart else []
        came = await self._incoming.deliver(lambda: due + self._mark_changed(REPLAN))
        await self._replan(from_start=from_start or (came and restart))

    async def _replan(self, *, from_start: bool = False) -> None:
        """Ask for another plan after a step or a message. It is asked for again if the run is cut off.

        from_start: ask `plan`, not `replan`.
        """
        plan = await self._ask_again(self._agent.plan if from_start else self._agent.replan)
        due = Entry(Kind.DROP, REPLAN, b"")
        if plan is not None:
            planned = planned_steps("plan" if from_start else "replan", plan.steps)
            running = next((step.key for step in self._state.plan if step.status is StepStatus.RUNNING), None)
            replaced = running is not None and all(step.key != running for step in planned)
            gone = (
                forget_steps([running, *self._parts(running)], self._run.history)
                if running is not None and replaced
                else []
            )
            await self._record(REPLAN, Planned(steps=planned, why=plan.why, again=True), due, *gone)
        elif self._live.has_changed():
            await self._record(REPLAN, Changed(), due)
        else:
            ended = end_unit(self._run, REPLAN, within=True)[1] if self._run.emits else ()
            await self._run.recorder.put(due, *ended, *self._parts_gone(REPLAN), wait=False)

    async def _ask_again(
        self, method: Callable[[Context, S], Awaitable[Plan | Sequence[PlanStep] | None]]
    ) -> Plan | None:
        returned = await self._within(REPLAN, lambda: method(self._ctx, self._state))
        if returned is None:
            return None
        plan = as_plan(getattr(method, "__name__", "replan"), returned)
        return replace(plan, steps=await without_archived(self._run, self._state, plan.steps)) if plan.steps else plan

    async def _finish(self) -> AlreadyDone[Any] | None:
        """Finish, and return the result; None if messages came meanwhile: then `finish` is called again after them."""
        closed = await self._within(FINISH, self._close)
        if closed is None:
            await self._undo()
            return None
        data, result = closed
        promises = [] if self._live.carried is not None else self._live.open_promises()
        if promises:  # of a turn of a session, the next one has them
            warn_of_left(self._run, promises)
            await self._run.log_event(left_promises(promises))
        await self._record(FINISH, Finished(), Entry(Kind.DONE_WITH_EVENT, FINISH, StepRecord(data).encode()))
        return AlreadyDone(result)

    async def _close(self) -> tuple[bytes, Any] | None:
        """Call `finish` and store memories, unless messages came that the agent has not seen.

        Return the result as JSON and as its record decodes.
        """
        agent = self._agent
        codec = codec_of(agent.finish)
        await self._live.recall_results()
        returned = await agent.finish(self._ctx, self._state)
        await self._run.check_stopped()
        result = acknowledged(agent, self._live, codec, returned)
        data, result = codec.encode("method", "finish", result)
        check_size("what finish returned", len(data), self._run.payload_limit)
        await self._incoming.unread()
        if (self._incoming.has_new and self._incoming.may_plan) or await self._corrections.pending():
            return None
        if type(agent).remember is Agent.remember:
            await store_discoveries(self._run, [(one.n, one.fact, one.source) for one in self._state.discoveries])
        else:
            await store_findings(self._run, await agent.remember(self._ctx, self._state))
        return data, result

    async def _take(self, step: PlanStep) -> bool:
        """Take a step and return whether it is done. A step that failed and was replaced is not."""
        self._interrupted = False
        decided = resolution_in(self._run.history.intents.get(step.key))
        in_doubt = step.risky and step.status is StepStatus.RUNNING
        if decided is not None and decided.decision == "run_again":
            decided, in_doubt = None, False
        attempt = step.attempts + 1
        await self._start(step, attempt, decided)
        step = self._named(step.key)
        try:
            async with self._incoming.interruptible(risky=step.risky):
                act = partial(self._act_or_verify, step, decided, in_doubt=in_doubt)
                result = await self._hooked(step, attempt, act)
                await self._run.check_stopped()
        except Interrupted:
            await self._undo()
            self._interrupted = True
            return False
        except (LeaseLost, EntriesLost, StateError, StepInDoubt, ResolutionMismatch):
            raise
        except Exception as error:
            if not isinstance(error, Reschedule) or isinstance(error, RetryLater):
                await self._failed(step.key, attempt, error)
                return False
            raise
        data, _ = codec_of(self._agent.act).encode("step", step.key, result)
        check_size(f"the result of step {step.key!r}", len(data), self._run.payload_limit)
        if (number := large_integer(data)) is not None:
            problem = f"an integer must have at most 64 bits, got {number}; return it as text"
            raise UnserialisableResult(f"step {step.key!r}", problem)
        event = StepCompleted(step=step.key, attempt=attempt, result=orjson.loads(data))
        due = [Entry(Kind.SAVED, REPLAN, b"1")] if self._replans else []
        await self._record(step.key, event, *due)
        return True

    async def _undo(self) -> None:
        """Prepare for another call of a method that messages have cut off: its recorded inner steps stay."""
        self._live.rollback()
        await forget_failures(self._run)
        await reload_records(self._run)

    async def _start(self, step: PlanStep, attempt: int, decided: Resolution | None) -> None:
        """Log the start of a step. A risky one has an intent, and waits for the write.

        decided: what a person has decided about it, which stays until its result is recorded.
        """
        run = self._run
        left = self._parts_gone(REPLAN)  # steps of a replan that was cut off
        if step.risky and decided is None:
            digest, data = fingerprint((step.arguments,), {})
            shown = arguments_text(data, run.redact) if step.arguments else ""
            intent = run.history.intents[step.key] = encode_intent(digest, shown)
            left.append(Entry(Kind.INTENT, step.key, intent))
        event_entries = self._live.checkpoint(StepStarted(step=step.key, title=step.title, attempt=attempt))
        replicated = step.risky and self._replicated
        await run.recorder.put(*event_entries, *left, *self._live.snapshot(), wait=step.risky, replicated=replicated)

    async def _act_or_verify(self, step: PlanStep, decided: Resolution | None, *, in_doubt: bool) -> Any:
        """Return the result of a step: a person's, that of `verify` if it may have been done, or that of `act`."""
        if decided is not None and decided.decision == "failed":
            raise StepResolvedAsFailed(step.key, decided.text)
        if decided is not None:
            return decided_result(self._run.id, step.key, codec_of(self._agent.act), decided)
        async with Autosave(self._live, step, self._agent.save_every).running():
            if in_doubt:
                done = await self._resolve_doubt(step)
                if done is not None:
                    return done.result
            return await followed(self._agent.act(self._ctx, self._state, step))

    async def _resolve_doubt(self, step: PlanStep) -> AlreadyDone[Any] | None:
        if type(self._agent).verify is not Agent.verify:
            answer = await self._agent.verify(self._ctx, self._state, step)
            if answer is not None and not isinstance(answer, AlreadyDone):
                raise TypeError(f"verify of step {step.key!r} must return AlreadyDone(result) or None, got {answer!r}")
            return answer
        if self._agent.in_doubt == "fail":
            called_with = intent_arguments(self._run.history.intents[step.key])
            raise StepInDoubt(step.key, f"{self._run.id}:{step.key}", called_with)
        return None

    async def _failed(self, key: str, attempt: int, error: Exception) -> None:
        """Log a failed step. Raise its error if the agent keeps its plan: then the retry policy of the task decides."""
        live, run = self._live, self._run
        await run.check_stopped()
        live.rollback()
        hold_failures(run, f"{key}/")
        event = StepFailed(step=key, attempt=attempt, error=type(error).__name__, message=error_text(error)[:2000])
        event_entries = live.checkpoint(event)
        await run.recorder.put(*event_entries, *live.snapshot(), wait=False)
        if not self._replans:
            raise error
        plan = await self._ask_again(self._agent.replan)
        if plan is None:
            live.rollback()
            raise error
        if all(step.key != key for step in plan.steps):
            self._named(key).status = StepStatus.FAILED
        dropped = [*drop_failures(run, f"{key}/"), *forget_steps([key, *self._parts(key)], run.history)]
        await self._record(
            REPLAN, Planned(steps=planned_steps("replan", plan.steps), why=plan.why, again=True), *dropped
        )

    async def _hooked(self, step: PlanStep, attempt: int, act: Callable[[], Awaitable[Any]]) -> Any:
        """Act on a step of the plan, within the step hooks of the middleware."""
        if self._run.around_step is None:
            return await self._within(step.key, act)
        call = StepCall(step.key, step.key, attempt=attempt)
        return await self._run.around_step(call, lambda: self._within(step.key, act))

    async def _within(self, scope: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Call a method of the agent with `scope` as the prefix of its step keys.

        One that was stopped, and swallowed that, has no result: the next run calls it again.
        """
        self._live.withhold(scope)
        if self._run.emits:
            await begin_unit(self._run, scope, within=True)
        with self._run.keys.inside(scope), checked_steps():
            try:
                result = await contained(call(), always=True)
            except Exception:
                await self._run.check_stopped()
                raise
        await self._run.check_stopped()
        return result

    async def _record(self, key: str, event: Event, *entries: Entry) -> None:
        """Store a record with the state, and drop its inner steps, in one write with a snapshot if one is due.

        Raises `StateTooLarge`, `StateError`, `LeaseLost`.
        """
        run, live = self._run, self._live
        workspace = run.files
        files = None if workspace is None else await workspace.find_step_change()
        ended = end_unit(run, key, within=True)[1] if run.emits else ()
        parts = self._parts(key)
        event_entries = [*live.withdraw(), *live.checkpoint(event)]
        if not isinstance(event, Finished):
            event_entries += live.archive_due()
        dropped = forget_steps([key, *parts] if isinstance(event, StepCompleted) else parts, run.history)
        run.keys.restart(f"{key}/")  # a long run forgets the names of the steps inside
        saved = [] if workspace is None or files is None else workspace.entries(files, key)
        snapshot = live.snapshot(more=len(parts))
        stored = (*event_entries, *saved, *entries, *ended, *dropped, *snapshot)
        await run.recorder.put(*stored, wait=True, replicated=self._replicated, progress=True)
        run.touch()
        run.step_recorded()
        if workspace is not None and files is not None and files.problem is not None:
            await workspace.catch_up(files)

    def _parts(self, key: str) -> list[str]:
        """Return the keys of the recorded steps with this prefix."""
        return self._run.keys.under(f"{key}/", self._run.history)

    def _parts_gone(self, key: str) -> list[Entry]:
        return forget_steps(self._parts(key), self._run.history)

    def _named(self, key: str) -> PlanStep:
        return next(step for step in self._state.plan if step.key == key)


_OUTCOME_FIELDS: Final = {"status", "attempts", "error"}
"""Fields of a step that the loop sets, not the plan."""


async def without_archived(run: Run, state: AgentState, steps: Sequence[PlanStep]) -> Sequence[PlanStep]:
    """Return the steps of another plan without archived ones: like closed steps of the plan, they do not run again."""
    if state.archive.steps == 0:
        return steps
    planned = {step.key for step in state.plan}
    asked = [step.key for step in steps if step.key not in planned]
    place = (run.gateway, run.delivery.partition, run.id)
    find = partial(archived_keys, *place, asked, retired=state.archive.retired > 0)
    gone = await retry_while_unavailable(find, on_wait=log_wait(f"the archive of task {run.id}", run.touch))
    return [step for step in steps if step.key not in gone]


@contextmanager
def checked_steps() -> Iterator[None]:
    """Raise `StepDefinitionError` where the block makes a step with missing or wrong fields: no attempt could do it."""
    try:
        yield
    except ValidationError as error:
        if error.title != PlanStep.__name__:
            raise
        found = error.errors(include_url=False)[0]
        given = found["input"] if found["type"] == "missing" else None
        named = f"PlanStep {given['key']!r}" if isinstance(given, Mapping) and "key" in given else "a PlanStep"
        if found["type"] == "missing":
            problem = f"has no {found['loc'][0]}; pass {found['loc'][0]}="
        else:
            problem = f"is not valid: {first_problem(error)}"
        raise StepDefinitionError(f"{named} {problem}") from error


def as_plan(what: str, returned: object) -> Plan:
    """Return what a method of an agent returned as a plan. Raises `StepDefinitionError`."""
    if not isinstance(returned, Plan):
        return Plan(listed_steps(what, returned))
    if not isinstance(returned.why, str):
        raise StepDefinitionError(f"{what} must return a Plan whose why is a text, got {returned.why!r}")
    return replace(returned, steps=listed_steps(what, returned.steps))


def listed_steps(what: str, steps: object) -> list[PlanStep]:
    """Return the steps that a method of an agent returned as a list.

    Raises `StepDefinitionError` if they are not `PlanStep`s.
    """
    if not isinstance(steps, Iterable) or isinstance(steps, (PlanStep, Mapping, str)):
        raise StepDefinitionError(f"{what} must return a list of PlanStep, got {steps!r}")
    listed = list(steps)
    for step in listed:
        if not isinstance(step, PlanStep):
            raise StepDefinitionError(f"{what} must return a list of PlanStep, got an item {step!r}")
    return listed


def planned_steps(what: str, steps: Sequence[PlanStep]) -> tuple[PlannedStep, ...]:
    """Return the steps as logged. Raises `ValueError` if they are not a valid plan."""
    listed = listed_steps(what, steps)
    for step in listed:
        if not step.key or len(step.key) > 200 or "/" in step.key or "#" in step.key:
            raise ValueError(f"{what}: a step key must be 1 to 200 characters without '/' and '#', got {step.key!r}")
    keys = [step.key for step in listed]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{what}: step keys must be unique, got {twice!r} twice")
    return tuple([PlannedStep.model_validate(step.model_dump(mode="json", exclude=_OUTCOME_FIELDS)) for step in listed])


PLAN: Final = "#plan"
REPLAN: Final = "#replan"
FINISH: Final = "#finish"
"""Checkpoint keys and step scopes of the methods that are not steps of the plan."""


async def rewind(live: LiveState[Any], first: int, last: int, *, replans: bool, retires: bool) -> None:
    """Continue from before events that are missing: drop what may follow from them, and store a snapshot.

    The records of steps that were archived since then go as well: a plan would leave these steps out as done. If the
    events end after a step, another plan may have followed it, which is lost: an agent that `replans` is asked again.
    A log that is shortened may start in the lost future, so an agent that `retires` events writes the whole state.
    """
    run, history = live.run, live.run.history
    logger.bind(task=run.envelope.task, id=run.id).warning(
        "event {} is missing from the log, Redis has lost data: resumed from before it, without events {} to {}",
        first,
        first,
        last,
    )
    recorded = [*history.done, *history.intents, *history.saved]
    within = tuple(f"{scope}/" for scope in (PLAN, REPLAN, FINISH))
    gone = {key for key in recorded if key == REPLAN or key.startswith(within) or not key.startswith("#")}
    plan = live.state.plan
    if not plan:
        gone.add(PLAN)
    due = replans and live.state.current is None and any(step.status not in _OPEN for step in plan)
    archived = await retry_while_unavailable(
        partial(archived_since, run.gateway, run.delivery.partition, run.id, first),
        on_wait=log_wait(f"the archive of task {run.id}", run.touch),
    )
    event = live.checkpoint(Rewound(first=first, last=last))
    if retires:
        event += live.log_base(retired=0)
    dropped = [Entry(Kind.CHUNK, f"{ARCHIVED}{key}", b"") for key in archived]
    dropped += forget_steps(sorted(gone), history)
    if due:
        history.saved[REPLAN] = b"1"
        dropped.append(Entry(Kind.SAVED, REPLAN, b"1"))
    await run.recorder.put(*event, *dropped, *live.snapshot(force=True), wait=True)


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
                run.extras.put(kept)
                return
        await self._adopt(self._newer)

    async def update(self) -> None:
        """Change to the version that was read at the start of the run, unless a method is cut off."""
        if self._newer is not None and not self._cut_off():
            await self._adopt(self._newer)

    async def _adopt(self, found: IdentityVersion) -> None:
        run, self._newer = self._run, None
        run.extras.put(found)
        former = run.history.saved.get(IDENTITY)
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


async def park_too_large(live: LiveState[Any], error: StateTooLarge | PayloadTooLarge) -> NoReturn:
    """Park the task, with the error in its log. What was recorded stays; the current step will run again.

    An agent whose inputs are too large has no state yet: only a higher limit lets it start.
    """
    run, why = live.run, str(error)
    if isinstance(error, PayloadTooLarge):
        why = f"{error} of the workers; then run: perdure task compact {run.id}"
    if live.started:
        live.rollback()
    else:
        why = _too_large_to_start(run.id, error)
    logger.bind(task=run.envelope.task, id=run.id).error("parked until its state is compacted: {}", why)
    note = {"size": error.size, "limit": error.limit, "setting": _setting(error)}
    saved = Entry(Kind.SAVED, TOO_LARGE, orjson.dumps(note))
    waiting = run.next_entry(WaitStarted(what=COMPACTION, why=why))
    snapshot = live.snapshot() if live.started else []
    await run.recorder.put(*live.take_ahead(), waiting, saved, *snapshot, wait=True)
    await _park(run)


def _too_large_to_start(task_id: str, error: StateTooLarge | PayloadTooLarge) -> str:
    largest = f"; largest fields: {error.largest}" if isinstance(error, StateTooLarge) else ""
    return (
        f"the goal and the inputs of task {task_id}, and what it continues from, take {error.size:,} bytes in its "
        f"state or its first event, the limit is {error.limit:,}{largest}. Raise PERDURE_{_setting(error).upper()} of "
        f"the workers, then run: perdure task compact {task_id}; or run: perdure task cancel {task_id}, and enqueue it "
        "with references to its large data"
    )


def _setting(error: StateTooLarge | PayloadTooLarge) -> str:
    return error.setting if isinstance(error, PayloadTooLarge) else "payload_limit"


async def resume_after_compaction(run: Run) -> None:
    """Park the task again if its state was too large and nothing has changed since, before anything is paid for twice.

    A compaction deletes the note of the size that was needed. A higher limit makes room for it.
    """
    data = run.history.saved.get(TOO_LARGE)
    if data is None:
        return
    note = orjson.loads(data)
    large = note.get("setting") == "large_limit"
    if note["size"] > (max(run.settings.max_value_size, run.payload_limit) if large else run.payload_limit):
        await _park(run)
    del run.history.saved[TOO_LARGE]
    await run.recorder.put(run.next_entry(Waited()), Entry(Kind.DROP, TOO_LARGE, b""), wait=True)


async def _park(run: Run) -> NoReturn:
    await run.park(ParkReason(MAX_SECONDS, COMPACTION, (message_after(run.history.mail),)))


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
        self._max_count = _PAYLOADS * live.run.payload_limit
        self._logged = 0
        self._tried = 0

    async def on_boundary(self) -> None:
        """Retire events if the log is long. The agent has no unstored changes here."""
        live = self._live
        base = max(live.logged_state["archive"]["base"], self._tried)
        if live.number - base >= self._keep or live.run.recorder.logged - self._logged >= self._max_count:
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
