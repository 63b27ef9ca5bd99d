"""Agents: what the work of a task is, what its agent knew, and what it cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from typing import Annotated, Any, Final
from urllib.parse import quote

import orjson
from pydantic import Field

from ....queues.budgets.store import BudgetStore
from ....queues.errors import DecryptionError
from ....queues.event_log import LogTail, TaskEvent, find_event, read_last_events, read_log_tail
from ....queues.handle import TaskHandle
from ....queues.inspection.views import checkpoint_fields
from ....queues.wording import iso_time
from ...agents.coherence.findings import FINDINGS, VERDICT, StoredFindings, StoredVerdict
from ...agents.context.background import BACKGROUND, stored_background
from ...agents.context.recorded import BadPrompt, PromptHead, decode_head, decode_messages
from ...agents.identity import IdentityVersion, load_identity
from ...agents.journal.archive import read_archived_step
from ...agents.journal.current_handoff import current_handoff, received_handoff
from ...agents.journal.draft import failed_steps, latest_state
from ...agents.journal.history import CannotCorrect, PastState, agent_name, preview_correction, state_at
from ...agents.journal.json_patch import diff
from ...artifacts.links import ArtifactLink, task_links
from ...artifacts.store import artifact_store
from ...durable.call_records import (
    CHARGES,
    PROMPTS,
    CallRecord,
    cost_by_step,
    count_calls,
    read_call,
    read_calls,
)
from ...durable.journal.function_plan import FunctionPlan
from ...durable.journal.handoff.budget import HANDOFF_TOKENS, fitted, fitted_text
from ...durable.journal.step_record import PLANNED
from ...durable.spent import Charge
from ...errors import BadHistory, IdentityError
from ...memory.task_memory import CITED_MEMORIES, cited_memories
from ...settings import Settings, load_settings
from ...shown_events import event_sentence, event_step
from ..operation import MAX_LIMIT, Call, Download, ResultModel, operation
from ..problems import Problem
from ..users import Role
from .tasks import OneTask

EventNumber = Annotated[int, Field(ge=0, lt=10**15)]

_UNREADABLE: Final = 100
"""Problems that an answer lists."""


# handoff


class WantedHandoff(OneTask):
    """A handoff document, and its length."""

    budget: int = Field(HANDOFF_TOKENS, ge=1, le=100_000, description="Greatest length in tokens (estimated).")
    received: bool = Field(False, description="Return the document that the task received from its predecessor.")


class HandoffSection(ResultModel):
    """Section of a handoff document."""

    title: str
    lines: list[str]


class HandoffView(ResultModel):
    """A handoff document."""

    id: str
    document: dict[str, Any]
    sections: list[HandoffSection] = Field(description="The document for readers, section by section.")
    markdown: str = Field(description="The document for readers.")
    problems: list[str] = Field(description="Why the stored document cannot be read; this one is from the log.")


@operation("GET", "/tasks/{task_id}/handoff", roles=[Role.VIEWER])
async def show_handoff(call: Call, given: WantedHandoff) -> HandoffView:
    """Return the handoff document of a task.

    It says what is in progress, decided, next and waited for. It is the document that the last run stored, or, if that
    is missing or outdated, one made from the event log.
    """
    handle, problems = await call.find(given.task_id, given.queue), list[str]()
    found = await (received_handoff if given.received else current_handoff)(call.producer, handle, problems)
    if found is None:
        what = f"task {handle.id} has received no handoff document: it continues no other task"
        raise Problem(404, "no-handoff", what)
    small = fitted(found, given.budget, form=lambda one: one.to_json().decode())
    return HandoffView(
        id=handle.id,
        document=small.model_dump(mode="json"),
        sections=[
            HandoffSection(title=title, lines=[line.removeprefix("- ") for line in lines])
            for title, lines in small.sections(brief=False)
        ],
        markdown=fitted_text(found, given.budget).rstrip(),
        problems=problems,
    )


# plan


class PlanStepView(ResultModel):
    """Step of a plan."""

    key: str
    title: str
    status: str
    attempts: int = 0
    error: str = ""
    risky: bool = False
    has_result: bool = False


class ReplacedStepView(ResultModel):
    """Step that another plan replaced."""

    key: str
    title: str
    why: str


class PlanView(ResultModel):
    """Plan of an agent or of a function."""

    id: str
    agent: str | None = Field(description="Name of the agent; null for a function.")
    event: int = Field(description="Number of the event after which this is the plan.")
    goal: str
    current: str | None
    done: int = Field(description="Steps that are done, archived ones too.")
    total: int
    archived: int = Field(description="Closed steps that are no longer listed.")
    steps: list[PlanStepView]
    replaced: list[ReplacedStepView]
    problem: str | None = Field(default=None, description="Why the plan is not the latest one.")


@operation("GET", "/tasks/{task_id}/plan", roles=[Role.VIEWER])
async def show_plan(call: Call, given: OneTask) -> PlanView:
    """Return the plan of a task with its progress."""
    handle = await call.find(given.task_id, given.queue)
    tail = await read_log_tail(call.producer.gateway, handle.partition, handle.id)
    if (plan := FunctionPlan.decode(tail.saved.get(PLANNED))) is not None:
        return _function_plan(handle.id, tail, plan)
    problem = None
    if (found := latest_state(handle.id, tail)) is not None:
        (state, agent), number = found, tail.number
    else:
        past = await _past(call, handle, None, lenient=True)
        state, agent, number = past.state, past.agent, past.number
        problem = past.skipped[0] if past.skipped else None
    steps = [_plan_step(step, state.get("results")) for step in _objects(state.get("plan"))]
    archived = _count(state.get("archive"), "steps")
    return PlanView(
        id=handle.id,
        agent=agent,
        event=number,
        goal=_text(state.get("goal")),
        current=_text(state.get("current")) or None,
        done=archived + sum(step.status == "done" for step in steps),
        total=archived + len(steps),
        archived=archived,
        steps=steps,
        replaced=[
            ReplacedStepView(key=_text(one.get("key")), title=_text(one.get("title")), why=_text(one.get("why")))
            for one in _objects(state.get("replaced"))
        ],
        problem=problem,
    )


def _function_plan(task_id: str, tail: LogTail, plan: FunctionPlan) -> PlanView:
    failed = failed_steps(tail)
    items = plan.items(tail.done, running=tail.intents.keys(), failed=failed)
    _, total, step = plan.position(tail.done, running=tail.intents.keys(), failed=failed)
    return PlanView(
        id=task_id,
        agent=None,
        event=tail.number,
        goal="",
        current=None if step is None else step.key,
        done=sum(item.status == "done" for item in items),
        total=total,
        archived=0,
        steps=[
            PlanStepView(key=item.key, title=item.title, status=item.status, has_result=item.key in tail.done)
            for item in items
        ],
        replaced=[
            ReplacedStepView(key=one.key, title=one.title, why=one.why)
            for one in plan.replaced(tail.done, failed=failed)
        ],
    )


def _plan_step(step: Mapping[str, Any], results: Any) -> PlanStepView:
    key = _text(step.get("key"))
    return PlanStepView(
        key=key,
        title=_text(step.get("title")),
        status=_text(step.get("status")),
        attempts=_count(step, "attempts"),
        error=_text(step.get("error")),
        risky=step.get("risky") is True,
        has_result=isinstance(results, dict) and key in results,
    )


class WantedPlanStep(OneTask):
    """A step of a plan."""

    key: str = Field(min_length=1, max_length=1000, description="Key of the step.")


class PlanStepResult(ResultModel):
    """A step of a plan with its result."""

    id: str
    step: dict[str, Any]
    archived: bool
    has_result: bool
    result: Any = None


@operation("GET", "/tasks/{task_id}/plan/step", roles=[Role.VIEWER])
async def show_plan_step(call: Call, given: WantedPlanStep) -> PlanStepResult:
    """Return one step of an agent's plan with its result, also an archived one."""
    handle = await call.find(given.task_id, given.queue)
    found = await read_archived_step(call.producer.gateway, handle.partition, handle.id, given.key)
    archived = found is not None
    if found is None:
        latest = (await _past(call, handle, None, lenient=True)).state
        planned = next((one for one in _objects(latest.get("plan")) if one.get("key") == given.key), None)
        if planned is None:
            what = f"task {handle.id} has no step {given.key!r} in its plan: its plan lists its steps"
            raise Problem(404, "no-plan-step", what)
        results = latest.get("results")
        held = results if isinstance(results, dict) else {}
        found = {"step": planned} | ({"result": held[given.key]} if given.key in held else {})
    return PlanStepResult(
        id=handle.id,
        step=dict(found["step"]),
        archived=archived,
        has_result="result" in found,
        result=found.get("result"),
    )


# timeline

TOLD: Final = frozenset(
    (
        *("started", "planned", "decided", "discovered", "tool_called", "message_added", "withdrawn", "compacted"),
        *("step_started", "step_completed", "step_failed", "step_resolved", "waiting", "answered", "answer_dropped"),
        *("received", "message_sent", "corrected", "correction_refused", "incoherent", "judged", "dismissed"),
        *("resumed", "forked", "rewound", "identity_read", "handed_off", "continued", "budget_low", "finished"),
        *("children_spawned", "children_joined", "promised", "promise_kept", "artifact_saved", "attempt_failed"),
        *("buried", "crashed", "replayed", "cancelled", "data_lost"),
    )
)
"""Types of events in the timeline of an agent; the list of events has the others."""


class WantedTimeline(OneTask):
    """A page of the timeline, the newest event first."""

    limit: int = Field(50, ge=1, le=MAX_LIMIT, description="Events that are read at most; all types count.")
    cursor: str | None = Field(None, pattern=r"^[0-9]{1,15}-[0-9]{1,19}$", description="'next' of the page before.")
    decisions: bool = Field(False, description="Only decisions, discoveries and tool calls.")


class TimelineEvent(ResultModel):
    """An event of the work of an agent."""

    id: str
    number: int | None = Field(description="The state after this event: /state?at=NUMBER.")
    at: str | None
    type: str
    step: str
    sentence: str
    reason: str = Field(description="Why it was decided, called or planned; empty if nothing was said.")
    data: Any
    changes_state: bool
    problem: str | None


class TimelinePage(ResultModel):
    """A page of a timeline."""

    items: list[TimelineEvent]
    next: str | None
    read: int = Field(description="Events that were read for this page.")
    of: int = Field(description="Events in the log.")


_DECISIONS: Final = frozenset(("decided", "discovered", "tool_called", "planned", "corrected"))


@operation("GET", "/tasks/{task_id}/timeline", roles=[Role.VIEWER])
async def show_timeline(call: Call, given: WantedTimeline) -> TimelinePage:
    """Return what an agent planned, decided, called and received, with the reasons, the newest first."""
    handle = await call.find(given.task_id, given.queue)
    gateway = call.producer.gateway
    events, length = await asyncio.gather(
        read_last_events(gateway, handle.partition, handle.id, given.limit, before=given.cursor),
        gateway.command("XLEN", handle.partition.log(handle.id)),
    )
    kinds = _DECISIONS if given.decisions else TOLD
    return TimelinePage(
        items=[timeline_event(event) for event in events if event.type in kinds or event.problem is not None],
        next=events[-1].id if len(events) == given.limit else None,
        read=len(events),
        of=int(length),
    )


def timeline_event(event: TaskEvent) -> TimelineEvent:
    """Return an event as it is shown."""
    data = event.data if isinstance(event.data, dict) else {}
    return TimelineEvent(
        id=event.id,
        number=event.number,
        at=iso_time(event.at),
        type=event.type,
        step=event_step(event),
        sentence=event_sentence(event),
        reason=_text(data.get("reasoning") or data.get("why")),
        data=event.data,
        changes_state=bool(data.get("changes")) or event.type in ("planned", "decided", "discovered", "message_added"),
        problem=event.problem,
    )


# state


class WantedState(OneTask):
    """A state, or the difference between two."""

    at: EventNumber | None = Field(None, description="Number of the event after which the state is; the latest.")
    against: EventNumber | None = Field(None, description="Return the changes from the state after this event to 'at'.")
    skip_unreadable: bool = Field(False, description="Leave out events that are missing or cannot be read.")


class StateChange(ResultModel):
    """A change of a state: an operation of a JSON Patch, with the value before it."""

    op: str
    path: str
    before: Any = None
    value: Any = None


class StateView(ResultModel):
    """A state of a task."""

    id: str
    event: int
    agent: str | None
    state: dict[str, Any] | None = Field(description="Null if changes are asked for.")
    against: int | None
    changes: list[StateChange] | None
    cause: TimelineEvent | None = Field(description="The event 'at': what was decided then, and why.")
    skipped: list[str] = Field(description="Problems of events that are missing from the state.")


@operation("GET", "/tasks/{task_id}/state", roles=[Role.VIEWER])
async def show_state(call: Call, given: WantedState) -> StateView:
    """Return what an agent knew after an event, or what changed between two events.

    The state of a function task has its decisions, discoveries and messages.
    """
    handle = await call.find(given.task_id, given.queue)
    past = await _past(call, handle, given.at, lenient=given.skip_unreadable)
    changes = None
    if given.against is not None:
        before = await _past(call, handle, given.against, lenient=given.skip_unreadable)
        changes = [_state_change(change, before.state) for change in diff(before.state, past.state)]
    cause = None
    if past.number:
        event = await find_event(call.producer.gateway, handle.partition, handle.id, past.number)
        cause = None if event is None else timeline_event(event)
    return StateView(
        id=handle.id,
        event=past.number,
        agent=past.agent,
        state=past.state if given.against is None else None,
        against=given.against,
        changes=changes,
        cause=cause,
        skipped=past.skipped[:_UNREADABLE],
    )


def _state_change(change: Mapping[str, Any], before: Any) -> StateChange:
    former = None if change["op"] == "add" else _at_pointer(before, change["path"])
    return StateChange(op=change["op"], path=change["path"] or "/", before=former, value=change.get("value"))


def _at_pointer(value: Any, path: str) -> Any:
    """Return the part of a document at a pointer; None if a change before has moved it."""
    for name in path.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return None
    return value


async def _past(call: Call, handle: TaskHandle[Any], at: int | None, *, lenient: bool) -> PastState:
    try:
        return await state_at(call.producer.gateway, handle.partition, handle.id, at, lenient=lenient)
    except BadHistory as error:
        raise Problem(409, "no-such-state", str(error)) from None


# prompts


class WantedPrompts(OneTask):
    """A page of prompts, the latest first."""

    limit: int = Field(20, ge=1, le=100, description="Most prompts of the page.")
    cursor: int | None = Field(None, ge=1, lt=10**15, description="'next' of the page before.")


class PromptView(ResultModel):
    """A recorded prompt, without its messages."""

    number: int
    at: str | None
    step: str = Field(default="", description="Key of the step that called the model.")
    tries: int = Field(default=1, description="Number of the step's try.")
    attempt: int = Field(default=1, description="Attempt of the task.")
    plan_step: str = Field(default="", description="Key of the current step of the plan.")
    event: int = Field(default=0, description="Last event before it was built: /state?at=EVENT is what the agent knew.")
    window: int = 0
    total: int = Field(default=0, description="Tokens of all layers (estimated).")
    tokens: dict[str, int] = Field(default={}, description="Tokens by layer.")
    left_out: dict[str, int] = Field(default={}, description="Items that did not fit, by kind.")
    wanted: int = Field(default=0, description="Tokens that it would have had with everything.")
    cacheable: int = Field(default=0, description="Messages at its start that the next prompt repeats.")
    count: int = Field(default=0, description="Number of messages.")
    digest: str = ""
    cut: int = Field(default=0, description="Characters that are missing from the recorded messages.")
    problem: str | None = Field(default=None, description="Why it cannot be read.")


class PromptPage(ResultModel):
    """A page of prompts."""

    items: list[PromptView]
    next: int | None
    read: int
    of: int = Field(description="Prompts that are kept: the latest ones.")


@operation("GET", "/tasks/{task_id}/prompts", roles=[Role.VIEWER])
async def list_prompts(call: Call, given: WantedPrompts) -> PromptPage:
    """List the prompts of model calls as they were built, the latest first.

    `ContextBuilder` records them; secrets of the task are masked.
    """
    handle = await call.find(given.task_id, given.queue)
    place = (call.producer.gateway, handle.partition, handle.id, PROMPTS)
    found, kept = await asyncio.gather(read_calls(*place, before=given.cursor, limit=given.limit), count_calls(*place))
    return PromptPage(
        items=[_prompt_view(record) for record in found],
        next=found[-1].number if len(found) == given.limit and found[-1].number > 1 else None,
        read=len(found),
        of=kept,
    )


def _prompt_view(record: CallRecord) -> PromptView:
    at = iso_time(record.at or None)
    try:
        head = decode_head(record)
    except BadPrompt as error:
        return PromptView(number=record.number, at=at, problem=str(error))
    return PromptView(number=record.number, at=at, **_head_fields(head))


def _head_fields(head: PromptHead) -> dict[str, Any]:
    return head.model_dump(exclude={"v", "stable"}) | {"total": sum(head.tokens.values())}


class OnePrompt(OneTask):
    """A prompt by its number."""

    number: int = Field(ge=1, lt=10**15, description="Number of the prompt.")


class PromptMessages(PromptView):
    """A recorded prompt with its messages."""

    messages: list[dict[str, Any]]


@operation("GET", "/tasks/{task_id}/prompts/{number}", roles=[Role.VIEWER])
async def show_prompt(call: Call, given: OnePrompt) -> PromptMessages:
    """Return the prompt of a model call as it was built, message by message."""
    handle = await call.find(given.task_id, given.queue)
    record = await read_call(call.producer.gateway, handle.partition, handle.id, PROMPTS, given.number)
    if record is None:
        what = f"prompt {given.number} of task {handle.id} is not kept: the list of prompts has those that are"
        raise Problem(404, "no-prompt", what)
    try:
        head, messages = decode_head(record), decode_messages(record)
    except BadPrompt as error:
        what = f"prompt {given.number} of task {handle.id} cannot be read: {error}"
        raise Problem(500, "unreadable-prompt", what, source="redis") from None
    return PromptMessages(number=record.number, at=iso_time(record.at or None), messages=messages, **_head_fields(head))


# costs


class StepCostView(ResultModel):
    """Cost of the calls of a step in one attempt of the task."""

    step: str = Field(description="Key of the step; empty for calls outside of steps.")
    attempt: int
    tries: int
    calls: int
    tokens: int
    usd: str = Field(description="Dollars, as exact text.")
    unpriced: int = Field(description="Calls whose dollars are not known.")
    models: list[str]


class CostView(ResultModel):
    """Cost of a task."""

    id: str
    budgets: list[dict[str, Any]] = Field(description="What is spent of the budgets of the task and of its parents.")
    steps: list[StepCostView] = Field(description="By step and attempt, in the order of the first call.")
    tokens: int
    usd: str
    read: int = Field(description="Calls that were summed, the latest ones.")
    of: int = Field(description="Calls that are kept.")
    problems: list[str]


@operation("GET", "/tasks/{task_id}/costs", roles=[Role.VIEWER])
async def show_costs(call: Call, given: OneTask) -> CostView:
    """Return what a task has spent, by step and attempt, from its calls of `spend`."""
    handle = await call.find(given.task_id, given.queue)
    gateway = call.producer.gateway
    place = (gateway, handle.partition, handle.id, CHARGES)
    records, kept, envelope = await asyncio.gather(
        read_calls(*place, limit=MAX_LIMIT),
        count_calls(*place),
        gateway.command("HGET", handle.partition.record(handle.id), "env"),
    )
    ledgers = await BudgetStore(gateway, call.producer.namespace).of_task(handle.id, envelope)
    charges, problems = list[Charge](), list[str]()
    for record in reversed(records):
        try:
            if record.problem is not None:
                raise ValueError(record.problem)
            charges.append(Charge.decode(record.data))
        except ValueError as error:
            problems.append(f"charge {record.number}: {error}")
    steps = cost_by_step(charges)
    return CostView(
        id=handle.id,
        budgets=[ledger.summary() for ledger in ledgers],
        steps=[
            StepCostView(
                step=cost.step,
                attempt=cost.attempt,
                tries=cost.tries,
                calls=cost.calls,
                tokens=cost.tokens,
                usd=f"{cost.usd:f}",
                unpriced=cost.unpriced,
                models=list(cost.models),
            )
            for cost in steps
        ],
        tokens=sum(cost.tokens for cost in steps),
        usd=f"{sum((cost.usd for cost in steps), start=Decimal(0)):f}",
        read=len(records),
        of=kept,
        problems=problems[:_UNREADABLE],
    )


# coherence


class FindingView(ResultModel):
    """A finding of a coherence check that holds."""

    event: int = Field(description="Number of the event that reported it.")
    check: str
    detail: str
    about: str
    policy: str
    known: bool = Field(description="Whether a person has since let the task continue.")


class FindingList(ResultModel):
    """Findings of coherence checks."""

    id: str
    items: list[FindingView]
    dismissed: int = Field(description="Findings that people have dismissed.")
    objection: str = Field(description="Last verdict of the judge; empty if it did not object.")


@operation("GET", "/tasks/{task_id}/findings", roles=[Role.VIEWER])
async def list_findings(call: Call, given: OneTask) -> FindingList:
    """List the findings of the coherence checks that hold."""
    handle = await call.find(given.task_id, given.queue)
    gateway = call.producer.gateway
    saved = await checkpoint_fields(gateway, handle.partition, handle.id, FINDINGS)
    saved |= await checkpoint_fields(gateway, handle.partition, handle.id, VERDICT)
    stored = StoredFindings.decode(saved.get(FINDINGS))
    return FindingList(
        id=handle.id,
        items=[
            FindingView(
                event=one.n,
                check=one.check,
                detail=one.detail,
                about=one.about,
                policy=one.policy,
                known=one.known,
            )
            for one in stored.findings
        ],
        dismissed=len(stored.dismissed),
        objection=StoredVerdict.decode(saved.get(VERDICT)).objection,
    )


class OneFinding(OneTask):
    """A finding by the number of its event."""

    event: int = Field(ge=1, lt=10**15, description="Number of the event of the finding.")


class DismissedFinding(ResultModel):
    """A dismissed finding."""

    id: str
    event: int


@operation("POST", "/tasks/{task_id}/findings/{event}/dismiss", roles=[Role.OPERATOR], changes=True)
async def dismiss_finding(call: Call, given: OneFinding) -> DismissedFinding:
    """Dismiss a finding of a coherence check.

    For a false alarm: equal findings of this task do not return. A parked task then needs a message, a dead letter a
    replay.
    """
    handle = await call.find(given.task_id, given.queue)
    try:
        await handle.dismiss(given.event)
    except ValueError as error:
        what = f"could not dismiss event {given.event} of task {handle.id}: {error}"
        raise Problem(404, "no-finding", what) from None
    return DismissedFinding(id=handle.id, event=given.event)


# corrections


class CorrectState(OneTask):
    """Other values for fields of an agent's state."""

    changes: dict[Annotated[str, Field(min_length=1, max_length=1000)], Any] = Field(
        {}, max_length=100, description="Values by path, such as context.city, or by JSON pointer: /context/a.b"
    )
    confirm: bool = Field(False, description="Confirm that an agent that asks may continue, also without changes.")
    message_id: str | None = Field(
        None, min_length=1, max_length=200, description="A correction that is sent again under it is stored once."
    )


class CorrectionPreview(ResultModel):
    """Changes that a correction would make."""

    id: str
    event: int | None = Field(description="Event after which the state was compared; null if no state is known yet.")
    changes: list[StateChange]


class SentCorrection(ResultModel):
    """A correction that was sent."""

    id: str
    number: int = Field(description="Number of the message.")
    state: str = Field(description="State of the task; a dead letter reads it after a replay.")


@operation("POST", "/tasks/{task_id}/corrections/preview", roles=[Role.VIEWER])
async def preview_state_correction(call: Call, given: CorrectState) -> CorrectionPreview:
    """Return what a correction would change in the latest state, or why it would be refused. Nothing is sent."""
    handle = await call.find(given.task_id, given.queue)
    return await _preview(call, handle, given)


async def _preview(call: Call, handle: TaskHandle[Any], given: CorrectState) -> CorrectionPreview:
    gateway = call.producer.gateway
    try:
        found = await preview_correction(gateway, handle, given.changes)
    except CannotCorrect as error:
        raise Problem(422, "cannot-correct", str(error)) from None
    if found is None:
        return CorrectionPreview(id=handle.id, event=None, changes=[])
    number, changes = found
    before = (await state_at(gateway, handle.partition, handle.id, number)).state if changes else {}
    return CorrectionPreview(id=handle.id, event=number, changes=[_state_change(change, before) for change in changes])


@operation("POST", "/tasks/{task_id}/corrections", roles=[Role.OPERATOR], changes=True)
async def correct_state(call: Call, given: CorrectState) -> SentCorrection:
    """Correct the state of an agent.

    The agent applies all values, or none, before its next step. The event `corrected` or `correction_refused` says
    which. An agent that waits for a message wakes up; a dead letter applies the values after a replay.
    """
    handle = await call.find(given.task_id, given.queue)
    if not given.changes and not given.confirm:
        raise Problem(422, "invalid-input", "give at least one change, or confirm: true")
    await _preview(call, handle, given)
    sent = await handle.correct(given.changes, by=call.user.name, message_id=given.message_id, confirm=given.confirm)
    return SentCorrection(id=sent.task_id, number=sent.number, state=str(sent.state))


# identity, resumes and memories


class IdentityView(ResultModel):
    """A version of the identity of an agent."""

    version: int = Field(description="0 for the one of the agent's class.")
    at: str | None
    by: str
    why: str
    identity: dict[str, Any]


class ResumeView(ResultModel):
    """A resume: a run continued the work of an earlier one."""

    event: int | None
    at: str | None
    after: str
    gap: float | None = Field(description="Seconds during which no worker ran the task.")
    restored: dict[str, int]
    summary: str = Field(description="For operators.")
    text: str = Field(description="The notice for the user of the task.")


class IdentityPage(ResultModel):
    """Identity of an agent, and its resumes."""

    id: str
    agent: str | None
    used: list[IdentityView] = Field(description="Versions that the runs of the task have read, the latest first.")
    latest: int = Field(description="Latest stored version; 0 if none is stored.")
    resumes: list[ResumeView] = Field(description="The latest first.")
    read: int
    of: int
    problems: list[str]


@operation("GET", "/tasks/{task_id}/identity", roles=[Role.VIEWER])
async def show_agent_identity(call: Call, given: OneTask) -> IdentityPage:
    """Return the identity that an agent has read, and the resumes of the task.

    The latest 1,000 events of the log are searched.
    """
    handle = await call.find(given.task_id, given.queue)
    gateway = call.producer.gateway
    events, length = await asyncio.gather(
        read_last_events(gateway, handle.partition, handle.id, MAX_LIMIT),
        gateway.command("XLEN", handle.partition.log(handle.id)),
    )
    agent, versions = None, list[int]()
    for event in events:
        data = event.data if isinstance(event.data, dict) else {}
        if event.type == "identity_read" and isinstance(version := data.get("number"), int):
            versions.append(version)
            agent = agent or _text(data.get("agent")) or None
    used, latest, problems = list[IdentityView](), 0, list[str]()
    if agent is None:
        agent = await agent_name(gateway, handle.partition, handle.id)
    if agent is not None:
        try:
            last = await load_identity(gateway, call.producer.namespace, agent)
            latest = 0 if last is None else last.version
            for version in dict.fromkeys(versions):
                found = await load_identity(gateway, call.producer.namespace, agent, version) if version else None
                if found is not None:
                    used.append(_identity_view(found))
        except (IdentityError, DecryptionError) as error:
            problems.append(str(error))
    return IdentityPage(
        id=handle.id,
        agent=agent,
        used=used,
        latest=latest,
        resumes=[_resume_view(event) for event in events if event.type == "resumed"],
        read=len(events),
        of=int(length),
        problems=problems,
    )


def _identity_view(found: IdentityVersion) -> IdentityView:
    identity = found.identity.model_dump(mode="json")
    return IdentityView(version=found.version, at=iso_time(found.at), by=found.by, why=found.why, identity=identity)


def _resume_view(event: TaskEvent) -> ResumeView:
    data = event.data if isinstance(event.data, dict) else {}
    gap, restored = data.get("gap"), data.get("restored")
    counts = restored if isinstance(restored, dict) else {}
    return ResumeView(
        event=event.number,
        at=iso_time(event.at),
        after=_text(data.get("after")),
        gap=float(gap) if isinstance(gap, int | float) else None,
        restored={str(name): count for name, count in counts.items() if type(count) is int},
        summary=_text(data.get("summary")),
        text=_text(data.get("text")),
    )


class MemoriesView(ResultModel):
    """Memories that a task has used."""

    id: str
    profile: list[str] = Field(description="Lines about the user in each prompt.")
    memories: list[str] = Field(description="Memories for the goal in each prompt, as quoted lines.")
    left_out: int = Field(description="Memories for the goal that did not fit.")
    ids: list[str] = Field(description="Ids of all memories that the task has used, the first use first.")


@operation("GET", "/tasks/{task_id}/memories", roles=[Role.VIEWER])
async def list_used_memories(call: Call, given: OneTask) -> MemoriesView:
    """List the memories that a task has used: in its prompts, and by its tools."""
    handle = await call.find(given.task_id, given.queue)
    place = (call.producer.gateway, handle.partition, handle.id)
    saved, cited = await asyncio.gather(
        checkpoint_fields(*place, BACKGROUND), checkpoint_fields(*place, CITED_MEMORIES)
    )
    try:
        ids = cited_memories(cited)
    except (ValueError, LookupError, TypeError):  # changed by another program
        ids = []
    found = stored_background(saved)
    return MemoriesView(
        id=handle.id,
        profile=[] if found is None else list(found.profile),
        memories=[] if found is None else list(found.memories),
        left_out=0 if found is None else found.left_out,
        ids=ids,
    )


# artifacts


class ArtifactView(ResultModel):
    """Artifact of a task."""

    name: str
    size: int = Field(description="Bytes.")
    media_type: str = Field(description="As the task has declared it; downloads do not have it.")
    hash: str = Field(description="SHA-256.")
    event: int


class ArtifactList(ResultModel):
    """Artifacts of a task."""

    id: str
    items: list[ArtifactView]
    problems: list[str]


@operation("GET", "/tasks/{task_id}/artifacts", roles=[Role.VIEWER])
async def list_artifacts(call: Call, given: OneTask) -> ArtifactList:
    """List the artifacts of a task, the latest of each name."""
    handle = await call.find(given.task_id, given.queue)
    damaged: list[str] = []
    links = await task_links(call.producer.gateway, handle.partition, handle.id, damaged)
    return ArtifactList(id=handle.id, items=list(map(_artifact_view, links)), problems=damaged[:_UNREADABLE])


def _artifact_view(link: ArtifactLink) -> ArtifactView:
    return ArtifactView(name=link.name, size=link.size, media_type=link.media_type, hash=link.hash, event=link.n)


class OneArtifact(OneTask):
    """An artifact by its name."""

    name: str = Field(min_length=1, max_length=255, description="Name of the artifact.")


@operation("GET", "/tasks/{task_id}/artifact", roles=[Role.VIEWER])
async def download_artifact(call: Call, given: OneArtifact) -> Download:
    """Send an artifact as a file. Its hash is checked before the first byte is sent."""
    handle = await call.find(given.task_id, given.queue)
    damaged: list[str] = []
    links = await task_links(call.producer.gateway, handle.partition, handle.id, damaged)
    link = next((link for link in links if link.name == given.name), None)
    if link is None:
        names = ", ".join(repr(link.name) for link in links[:_UNREADABLE]) or "none"
        what = f"task {handle.id} has no artifact {given.name!r}; its artifacts: {names}"
        raise Problem(404, "no-artifact", what)
    store = await artifact_store(call.producer.gateway, _settings(call))
    chunks = store.chunks(f"artifact {link.name!r} of task {handle.id}", link.hash, link.size)
    first = await anext(chunks, b"")  # all bytes are verified by then, so a problem has a status of its own
    return Download(link.name, _with_first(first, chunks))


async def _with_first(first: bytes, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(chunks):
        yield first
        async for chunk in chunks:
            yield chunk


def _settings(call: Call) -> Settings:
    """Return the settings of the deployment, which say where its artifacts are."""
    if call.app is not None:
        return call.app.settings
    address = call.producer.address
    url = address.url if address.directory is None else f"embedded:{quote(str(address.directory))}"
    return load_settings(redis_url=url, namespace=call.producer.namespace.name)


def _objects(value: Any) -> Sequence[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _count(value: Any, name: str) -> int:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if type(found) is int else 0


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value, default=str).decode()
