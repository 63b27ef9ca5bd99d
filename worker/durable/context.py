"""The context of a running task: the first argument of its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Never, NoReturn, TypeVar

from ...deadletter.policy import Retry
from ...queues.defaults import unknown_option
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.durations import Duration
from ...queues.event_log import find_event
from ...queues.handle import TaskHandle
from ...queues.inbox import Sent
from ...queues.json_form import encodable
from ...queues.transport.backoff import retry_while_unavailable
from ..errors import StepDefinitionError, StepOutsideTask
from ..identity import IdentityVersion
from ..journal.agent_events import Decided, Discovered, MessageAdded
from ..journal.chat import Message, Role, ToolCall
from ..journal.event import Event
from ..journal.event_redaction import redacted
from ..journal.parsing import parse_event
from ..journal.resumption import Resumption
from ..journal.run_events import Orphaned
from ..journal.step_record import StepRecord
from ..log import log_wait, logger
from .attempt_end import forget
from .continuation import Receiver, continue_as
from .ended_task import EndedTask, read_ended_task
from .messaging import send
from .recall import RecalledStep, recall_step
from .resume_info import ResumeInfo
from .run import Run
from .saga import Saga
from .shared_workspace import SharedWorkspace
from .step_caller import StepCaller
from .steps.current import (
    CURRENT_RUN,
    DEFAULT_OPTIONS,
    STEP_OPTIONS,
    STEP_WORDS,
    Durability,
    StepOptions,
    check_call,
    check_name,
    report_progress,
    step_here,
    step_timeout,
)
from .steps.matching import digest_of, match_call, read_recorded_steps
from .steps.threads import CURRENT_SESSION
from .steps.tool_calls import CallReasons
from .stop_reasons import Stop
from .task_artifacts import Artifacts
from .task_memory import TaskMemory
from .task_workspace import Workspace, workspace_of

if TYPE_CHECKING:
    from loguru import Logger


def _no_resources() -> None:
    return None


class TaskInfo:
    """Properties of the running task, which both kinds of context have."""

    _run: Run
    _resources: Callable[[], Any]

    @property
    def task_id(self) -> str:
        return self._run.id

    @property
    def task(self) -> str:
        """The task's name."""
        return self._run.envelope.task

    @property
    def queue(self) -> str:
        return self._run.delivery.partition.queue

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that the producer and its middleware set."""
        return self._run.envelope.headers

    @property
    def tags(self) -> Sequence[str]:
        """Tags that the producer set."""
        return self._run.envelope.tags

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. A run that resumes after a crash belongs to the same attempt."""
        return self._run.history.counters.attempts + 1

    @property
    def crashes(self) -> int:
        """Number of deliveries of this task that ended without an outcome."""
        return self._run.history.counters.crashes

    @property
    def version(self) -> int:
        """The version of the task's code with which its first run began: `@app.task(version=2)`; 1 by default."""
        return self._run.version

    @property
    def resumed(self) -> bool:
        """Whether earlier runs left recorded steps."""
        return self._run.history.records > 0

    @property
    def resumption(self) -> Resumption | None:
        """The previous run: what it left, why it stopped and how long ago; None in the first run."""
        return self._run.resumption

    @property
    def stopping(self) -> Stop | None:
        """The stop of this run: its reason, and whether it ends the task; None while the run continues.

        For clean-up: `if ctx.stopping and ctx.stopping.ends_task:`. A stop may come while the clean-up runs.
        """
        return self._run.stop

    @property
    def identity(self) -> IdentityVersion | None:
        """The identity of the agent; it changes between two steps of the plan only. None for tasks without one."""
        found: IdentityVersion | None = self._run.identity
        return found

    @property
    def log(self) -> Logger:
        """A logger with the task's name and id bound, and within a step its name."""
        step, bound = step_here(), logger.bind(task=self.task, id=self.task_id)
        return bound if step is None else bound.bind(step=step.key)

    @property
    def resources(self) -> Any:
        """The value that the app's lifespan yielded in this process; None without a lifespan."""
        return self._resources()


class Context(TaskInfo, StepCaller):
    """The running task, as its handler and middleware see it."""

    def __init__(
        self, run: Run, *, durability: Durability = "sync", resources: Callable[[], Any] = _no_resources
    ) -> None:
        self._run = run
        self._options = DEFAULT_OPTIONS[durability]
        self._resources = resources

    def resume_info(self) -> ResumeInfo:
        """Return what to read before resuming, in this order: handoff, messages, state; and the history on demand."""
        return ResumeInfo(self._run)

    async def recall_step(self, key: str) -> RecalledStep | None:
        """Return a step of the agent's plan with its result, also if it has left the state; None if it is unknown.

        In a turn of a session, steps of earlier turns are unknown: each turn has a plan of its own.

        Raises `DecryptionError`.
        """
        return await recall_step(self._run, key)

    @property
    def memory(self) -> TaskMemory:
        """Long-term memories, which outlive the task."""
        return TaskMemory(self._run, self._options.durability)

    @property
    def workspace(self) -> Workspace:
        """A folder whose files are saved with each step and restored with the task."""
        return workspace_of(self._run)

    def shared_workspace(self, name: str) -> SharedWorkspace:
        """Return files that several tasks change, with compare-and-set."""
        return SharedWorkspace(self._run.gateway, self._run.settings, name, by=self._run.id, run=self._run)

    @property
    def artifacts(self) -> Artifacts:
        """Files and other bytes that the task produces, stored outside Redis."""
        return Artifacts(self._run, self._options.durability)

    def options(
        self,
        /,
        *unnamed: Never,
        timeout: Duration | None = None,
        retry: Retry | None = None,
        durability: Durability | None = None,
        risky: bool = False,
        verify: Callable[..., Any] | None = None,
        in_doubt: Literal["retry", "fail"] = "retry",
        on_mismatch: Literal["error", "rerun"] = "error",
        step_id: str | None = None,
        nested: Literal["run", "record"] = "run",
        reasoning: str = "",
        call: str | None = None,
        intent: bool = True,
        **unknown: Never,
    ) -> StepCaller:
        """Return `step` and `tool` with options: `await ctx.options(timeout=30).step("fetch", fetch, url)`.

        `inbox` and `ask` take `durability` and `on_mismatch`.

        Raises `StepDefinitionError`.

        Args:
            durability: in place of the task's.
            timeout, retry, risky, verify, in_doubt, on_mismatch, step_id, nested, reasoning, call, intent: see
                `StepOptions`.
        """
        if unnamed:  # not a TypeError, which would be retried
            raise StepDefinitionError(f"options of a step must have names, such as timeout=30, got {unnamed[0]!r}")
        if unknown:
            raise StepDefinitionError(unknown_option("option of a step", unknown, STEP_OPTIONS, STEP_WORDS))
        options = StepOptions(
            timeout=step_timeout(timeout),
            retry=retry,
            durability=durability or self._options.durability,
            risky=risky,
            verify=verify,
            in_doubt=in_doubt,
            on_mismatch=on_mismatch,
            step_id=step_id,
            nested=nested,
            reasoning=reasoning,
            call=call,
            intent=intent,
        )
        return StepCaller(self._run, options)

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Return a scope of steps: `with ctx.scope("page-3"): ...` puts `page-3/` before their keys.

        A scope holds in the asyncio tasks that are started in it too, so that each concurrent branch of a handler has
        the records of its own steps, however the branches take turns.
        """
        check_name("scope", name)
        return self._run.keys.scoped(name)

    async def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report how far the task is, for `perdure task show`, `perdure task watch` and `handle.progress()`.

        Written at most once a second; the last report is always written, unless the task is cancelled. Ends the idle
        time, but excuses no crash, since nothing is recorded. The next run continues to show it.

        Args:
            done, total: such as pages; None for an unknown total.
            note: at most 200 characters, a longer one is cut.

        Raises:
            ValueError: a number is negative or not finite.
        """
        report_progress(self._run, done, total, note)

    async def checkpoint(self) -> None:
        """Save the `progress` of the current step of an agent's plan now; it is also saved periodically.

        Does nothing outside such a step. Raises `PayloadTooLarge`, `LeaseLost`.
        """
        await self._run.save()

    # events

    async def decide(self, choice: str, *, reasoning: str = "", alternatives: Sequence[str] = ()) -> None:
        """Record a choice, the reason, and the alternatives. Recorded once, like a step."""
        await log_once(self._run, Decided(choice=choice, reasoning=reasoning, alternatives=tuple(alternatives)))

    async def discover(self, fact: str, *, source: str = "") -> None:
        """Record a fact and its source. Recorded once."""
        await log_once(self._run, Discovered(fact=fact, source=source))

    async def add_message(
        self,
        role: Role,
        content: str = "",
        *,
        tool_calls: Sequence[ToolCall] = (),
        tool_call_id: str | None = None,
        name: str | None = None,
        reasoning: Sequence[dict[str, Any]] = (),
    ) -> Message:
        """Record a message of the conversation, and return it as it was recorded, with its number. Recorded once.

        If an earlier run has recorded the message of this call with another text, that is returned: the state and the
        log have it. The message becomes part of an agent's state; a function keeps its own list.

        Args:
            reasoning: of an assistant, the blocks that its provider returned. The result of a tool has the reasoning
                that was given to `ctx.options(call=..., reasoning=...)`.
        """
        if role == "tool" and tool_call_id is not None and not reasoning:
            reasoning = CallReasons.take(self._run, tool_call_id)
        message = Message(
            role=role,
            content=content,
            tool_calls=tuple(tool_calls),
            tool_call_id=tool_call_id,
            name=name,
            reasoning=tuple(reasoning),
        )
        number, event = await log_once(self._run, MessageAdded(message=message))
        return event.message.model_copy(update={"n": number})

    async def record_event(self, event: Event) -> None:
        """Record an event of a user-defined type, see `register_event`. Recorded once.

        Raises `StepDefinitionError` for anything else.
        """
        given: object = event
        if not isinstance(given, Event):
            raise StepDefinitionError(f"event must be an Event, got {given!r}")
        await log_once(self._run, event)

    # compensation, see docs/how-to/compensate.md

    async def forget(self, *steps: str) -> None:
        """Let the next attempt run steps again: the named ones, and all that were recorded after the first of them.

        It takes effect in the act that stores the end of this attempt, if that fails; a crash before that changes
        nothing. The next attempt, or a replay of the dead letter, calls the steps under new idempotency keys.

        Args:
            steps: names of steps of the scope here, recorded or called in this run.

        Raises:
            StepDefinitionError: no step has this name.
            StepOutsideTask, LeaseLost: see there.
        """
        await forget(self._run, steps)

    def saga(self) -> Saga:
        """Return a block of steps that are undone together if it fails: `async with ctx.saga() as saga: ...`."""
        return Saga(self._run, self._options)

    # clean-up, see docs/how-to/cancel.md

    async def ended_task(self, task_id: str) -> EndedTask:
        """Return a task that has ended, for its clean-up task (`@app.task(on_end=...)`). Recorded once, like a step.

        Raises:
            TaskNotFound: its record has expired, or an operator has purged the dead letter.
            DecryptionError, LargeValueLost, StepMismatch, LeaseLost: see there.
        """
        return await read_ended_task(self._run, task_id, self._options)

    # a successor, see docs/how-to/handoff.md

    async def continue_as(
        self,
        to: Receiver | str | None = None,
        *,
        why: str = "",
        queue: str | None = None,
        message: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Continue the work in another task, and end this one; its result is the other's. Does not return.

        Args:
            to: the successor: a task, an agent, or its name; None for this task on another queue.
            why: reason for the handoff document.
            queue: queue of the successor, else that of `to`; that of this task where `to` is a name.
            message: what the successor must know; part of the handoff document, which it finds in `ctx.resumption`.
            arguments: by name, else this task's own.

        Raises:
            InvalidArguments: the arguments do not fit the successor.
            HandOffRefused: the task was continued too often.
            PayloadTooLarge, LeaseLost: see there.
        """
        await continue_as(self._run, to, why=why, queue=queue, message=message, arguments=arguments)

    # messages, see docs/how-to/messages.md

    async def send(self, to: str | TaskHandle[Any], content: Any, *, sender: str | None = None) -> Sent:
        """Send a message to another task: once, however often this task runs again.

        Args:
            to: id or handle of the task.
            content: JSON data.
            sender: name of the sender, else this task's id, to which an answer can be sent.

        Raises:
            TaskNotFound, TaskEnded, InboxFull, PayloadTooLarge, StepMismatch: see there.
        """
        return await send(self._run, to, content, sender=sender, durability=self._options.durability)


def current_context() -> Context:
    """Return the context of the running task. Raises `StepOutsideTask` outside a task, and after it has ended.

    In the thread of a handler that is a plain function, use `SyncContext.current()`.
    """
    run = CURRENT_RUN.get()
    if run is None or run.context is None:
        raise StepOutsideTask("no task is running here: current_context() is for what a task's handler calls")
    if CURRENT_SESSION.get() is not None and not _in_event_loop():
        raise StepOutsideTask("current_context() has async methods: use SyncContext.current() in a plain function")
    ctx: Context = run.context
    return ctx


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_MAX_ORPHANS: Final = 20
"""Keys of an `orphaned` event."""


E = TypeVar("E", bound=Event)


async def log_once(run: Run, event: E) -> tuple[int, E]:
    """Log an event unless an earlier run has logged it.

    Events of one type are matched by their content, then by order: see `match_call`. The event is stored with the next
    write, and always before the outcome.

    Returns:
        Number of the event, and the event as it is in the log: an earlier run may have logged another content.

    Raises `StepOutsideTask`, `LeaseLost`.
    """
    await check_call(run, f"#{event.type}", own=True)
    name = f"#{event.type}"
    if event.step is None and (outer := run.keys.within) is not None:
        event = event.model_copy(update={"step": outer})
    if not run.history.records:
        key, entry = run.keys.next(name), run.next_entry(event)
    else:
        content = event if run.redact is None else redacted(event, run.redact)
        key, recorded, former = await match_call(run, name, digest_of(content.to_json()))
        if former is not None:
            recorded = StepRecord.decode(former).result
        if recorded is not None:
            run.replayed(int(recorded))
            return int(recorded), encodable(event) if former is None else await _logged(run, int(recorded), event)
        entry = run.next_entry(event)
    record = StepRecord(entry.value, digest_of(entry.log)).encode()
    await run.recorder.put(Entry(Kind.DONE_WITH_EVENT, key, record), entry, wait=False)
    return int(entry.value), encodable(event)


async def _logged(run: Run, number: int, event: E) -> E:
    """Return the event that the log has under a number; the given one if it has left the log."""
    await run.flush()  # a former call of this run may have logged it
    read = partial(find_event, run.gateway, run.delivery.partition, run.id, number)
    found = await retry_while_unavailable(read, on_wait=log_wait(f"the log of task {run.id}", run.touch))
    typed = None if found is None else parse_event(found)
    return typed if isinstance(typed, type(event)) else event


async def log_orphans(run: Run) -> str | None:
    """Log the recorded steps that the run has not asked for, and return a text if there are any. Raises `LeaseLost`."""
    orphans = run.keys.unasked(await read_recorded_steps(run))
    if not orphans:
        return None
    some = ", ".join(map(repr, orphans[:3]))
    problem = (
        f"the handler did not ask for {len(orphans)} of its recorded steps, such as {some}: "
        "they were renamed or removed, or called with other arguments"
    )
    logger.bind(task=run.envelope.task, id=run.id).warning("{}", problem)
    await run.log_event(Orphaned(steps=tuple(orphans[:_MAX_ORPHANS]), count=len(orphans)))
    return problem
