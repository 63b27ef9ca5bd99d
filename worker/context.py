"""The context of a running task: the first argument of its handler.

What many tasks never use (memories, artifacts, workspaces, the state of agents) is imported when it is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, ParamSpec, TypeVar, overload

from ..deadletter.policy import Retry
from ..queues.defaults import unknown_option
from ..queues.durations import Duration
from ..queues.handle import TaskHandle
from ..queues.inbox import Sent
from .durable.attempt_end import forget
from .durable.continuation import Receiver, continue_as
from .durable.ended_task import EndedTask, read_ended_task
from .durable.event_calls import log_once
from .durable.joining import DEFAULT_LIMIT, Errors, Spawnable, as_completed, gather, join, spawn
from .durable.journal.chat import Message, Role, ToolCall
from .durable.journal.event import Event
from .durable.journal.resumption import Resumption
from .durable.journal.step_record import PLANNED
from .durable.messaging import send
from .durable.run import Run
from .durable.step_caller import StepCaller
from .durable.steps.current import (
    CURRENT_RUN,
    DEFAULT_OPTIONS,
    STEP_OPTIONS,
    STEP_WORDS,
    Durability,
    StepOptions,
    check_name,
    emit,
    report_progress,
    step_here,
    step_timeout,
)
from .durable.steps.threads import CURRENT_SESSION
from .durable.steps.tool_calls import CallReasons
from .durable.stop_reasons import Stop
from .errors import ChildFailed, StepDefinitionError, StepOutsideTask
from .log import logger

if TYPE_CHECKING:
    from loguru import Logger

    from ..queues.limits.definition import Limit
    from .agents.identity import IdentityVersion
    from .agents.journal.state import PlanStep
    from .agents.recall import RecalledStep
    from .agents.resume_info import ResumeInfo
    from .artifacts.task_artifacts import Artifacts
    from .durable.budget_left import BudgetLeft
    from .durable.first import First
    from .durable.limiting import LimitBlock
    from .durable.saga import Saga
    from .durable.task_capacity import TaskCapacity
    from .durable.values import Values
    from .memory.task_memory import TaskMemory
    from .store import Store
    from .workspace.shared_workspace import SharedWorkspace
    from .workspace.task_workspace import Workspace


P = ParamSpec("P")
R = TypeVar("R")


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
    def tenant(self) -> str | None:
        """The tenant that the task belongs to; None without one."""
        return self._run.envelope.tenant

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
        from .agents.identity import IdentityVersion

        return self._run.extras.get(IdentityVersion)

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
        from .agents.resume_info import ResumeInfo

        return ResumeInfo(self._run)

    async def recall_step(self, key: str) -> RecalledStep | None:
        """Return a step of the agent's plan with its result, also if it has left the state; None if it is unknown.

        In a turn of a session, steps of earlier turns are unknown: each turn has a plan of its own. In a function, it
        is a step that the task has recorded, or one of its plan, by its key: `fetch`, `fetch#2`, `page-3/open`.

        Raises `DecryptionError`, `LargeValueLost`.
        """
        from .agents.recall import recall_step

        return await recall_step(self._run, key)

    @property
    def memory(self) -> TaskMemory:
        """Long-term memories, which outlive the task."""
        from .memory.task_memory import TaskMemory

        return TaskMemory(self._run, self._options.durability)

    @property
    def workspace(self) -> Workspace:
        """A folder whose files are saved with each step and restored with the task."""
        from .workspace.task_workspace import workspace_of

        return workspace_of(self._run)

    def shared_workspace(self, name: str) -> SharedWorkspace:
        """Return files that several tasks change, with compare-and-set."""
        from .workspace.shared_workspace import SharedWorkspace

        return SharedWorkspace(self._run.gateway, self._run.settings, name, by=self._run.id, run=self._run)

    def store(self, *parts: str | Sequence[str]) -> Store:
        """Return a namespace of the key-value store, by the parts of its name: `ctx.store("threads", "user-42")`."""
        from .store import store_of

        return store_of(self._run, parts)

    @property
    def values(self) -> Values:
        """Named values that pages read and write while the task runs: `handle.values()`, `handle.update(...)`."""
        from .durable.values import Values

        return Values(self._run, self._options.durability)

    @property
    def artifacts(self) -> Artifacts:
        """Files and other bytes that the task produces, stored outside Redis."""
        from .artifacts.task_artifacts import Artifacts

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

        `inbox` and waits for answers take `durability` and `on_mismatch`.

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
        if PLANNED not in self._run.history.saved:
            return self._run.keys.scoped(name)
        from .durable.planning import planned_scope

        return planned_scope(self._run, name)

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

    async def emit(self, item: Any, to: str = "output", *, key: str | None = None) -> None:
        """Emit an item into a stream of this task, for `handle.stream()` and `perdure task watch --stream`.

        An item is stored once, however often this task runs again. If a step is cut off or fails, and runs again, what
        it had emitted is void, and readers see a mark. Outside a step, the items of a stream are matched by their
        order: a resumed run skips those that are stored. Emit what differs from run to run inside a step.

        It returns before the item is stored, which is soon, and always before the outcome. In a step it is also
        `current_step().emit(item)`.

        Args:
            item: JSON data of at most 64 KiB.
            to: name of the stream: 1 to 64 letters, digits, `.`, `_` or `-`. A task has at most 16; each keeps its
                last 10,000 items, fewer if they are large.
            key: identifies the item in the stream: a later one with the same key is dropped, whichever try emits it,
                and the item is never void.

        Raises:
            StepDefinitionError: the item is no JSON data, or an argument is not valid.
            PayloadTooLarge: the item is too large.
            StepOutsideTask, LeaseLost: see there.
        """
        await emit(self._run, item, to, key)

    async def capacity(self) -> TaskCapacity:
        """Return what this task has left now: time, context window, and the load of its queue and worker.

        Not recorded: a resumed run finds other numbers. What they decide belongs into a step. Raises `Unavailable`.
        """
        from .durable.task_capacity import read_capacity

        return await read_capacity(self._run)

    # budgets, see docs/how-to/budgets.md

    async def spend(
        self,
        *,
        tokens: int | None = None,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        usd: float | Decimal | None = None,
        model: str | None = None,
    ) -> BudgetLeft:
        """Charge what a call has cost to the budgets of this task, and return what is left of them.

        It returns once the charge is stored. In a step it is also `current_step().spend(...)`; each try of a step
        charges, and a recorded step charges nothing. Outside of steps it is recorded, and charges once; if a budget is
        used up then, the task waits or ends. A task without budgets charges nothing.

        Args:
            tokens: tokens of the call together, or `input_tokens` and `output_tokens`.
            usd: dollars. Without them, and if a budget limits them, the price of `model` counts: that of
                `App(prices=...)`, else that of genai-prices if it is installed.
            model: name of the model, such as `"gpt-5"` or `"openai/gpt-5"`.

        Raises:
            ConfigurationError: a budget limits dollars, and the price of the model is not known; the tokens count.
            StepDefinitionError: an argument is not valid, or nothing is given.
            StepOutsideTask, LeaseLost: see there.
        """
        from .durable.spending import spend
        from .durable.spent import Spent

        return await spend(self._run, Spent.of(tokens, input_tokens, output_tokens, usd, model))

    async def budget(self) -> BudgetLeft:
        """Return what is left of the budgets of this task now. Not recorded, as `capacity`."""
        from .durable.spending import budget_left

        return await budget_left(self._run)

    async def checkpoint(self) -> None:
        """Save the `progress` of the current step of an agent's plan now; it is also saved periodically.

        Does nothing outside such a step. Raises `PayloadTooLarge`, `LeaseLost`.
        """
        await self._run.save()

    async def plan(self, steps: Iterable[str | PlanStep], *, why: str = "") -> list[str]:
        """Record the steps to come, in place of an earlier plan, and return their names. Recorded once, like a step.

        A step of the plan is done when a step, a tool call, a wait for an answer or a scope of its name has ended. So
        `perdure task show`, the handoff document and `ctx.resumption` name the step to continue with.

        Args:
            steps: names of the steps in their order, or `PlanStep`, which also has a title, of which 200 characters
                are kept. A name that occurs twice stands for two steps.
            why: reason of a plan that replaces another one.

        Raises:
            StepDefinitionError: a step has no valid name, or the context is that of an agent.
            StepOutsideTask, PayloadTooLarge, LeaseLost: see there.
        """
        from .durable.planning import make_plan

        return await make_plan(self._run, steps, why)

    # events

    async def decide(self, choice: str, *, reasoning: str = "", alternatives: Sequence[str] = ()) -> None:
        """Record a choice, the reason, and the alternatives. Recorded once, like a step."""
        from .agents.journal.agent_events import Decided

        await log_once(self._run, Decided(choice=choice, reasoning=reasoning, alternatives=tuple(alternatives)))

    async def discover(self, fact: str, *, source: str = "") -> None:
        """Record a fact and its source. Recorded once."""
        from .agents.journal.agent_events import Discovered

        await log_once(self._run, Discovered(fact=fact, source=source))

    async def promise(
        self, to: str | TaskHandle[Any], what: str, due: datetime | None = None, *, by: str = "me"
    ) -> None:
        """Record a promise. Recorded once, like a step.

        It is open until `keep` is called with the same receiver and text. It stands in each handoff document, a
        successor takes it over, and a task that ends before logs `left_promises`. In an agent it is a `Commitment` of
        the state.

        Args:
            to: name of the person or task that it is made to.
            what: at most 1,000 characters.
            due: until when, with a time zone.
            by: name of the party that has made it, with "me" as the receiver: what this task is owed.

        Raises:
            StepDefinitionError: an argument is not valid.
        """
        from .durable.promises import promise

        await promise(self._run, to, what, due=due, by=by)

    async def keep(self, to: str | TaskHandle[Any], what: str, *, by: str = "me") -> None:
        """Record that a promise was kept. Recorded once, like a step.

        Args:
            to, what, by: those of the promise, which this task or one that it continues has made.

        Raises:
            StepDefinitionError: no such promise is open.
        """
        from .durable.promises import keep

        await keep(self._run, to, what, by=by)

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

        Raises `ValueError` for the role "system": what the system says is part of the identity, and is not stored.

        Args:
            reasoning: of an assistant, the blocks that its provider returned. The result of a tool has the reasoning
                that was given to `ctx.options(call=..., reasoning=...)`.
        """
        from .agents.journal.agent_events import MessageAdded

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
        from .durable.saga import Saga

        return Saga(self._run, self._options)

    # limits, see docs/how-to/limits.md

    def limit(self, limit: str | Limit, *, cost: int | None = None, key: Any = None) -> LimitBlock:
        """Return a block that uses a limit: `async with ctx.limit("openai", cost=1200) as use: use.cost = actual`.

        It holds a token of the limit while its code runs. If the limit has no room, the task is parked; in a step or a
        tool the call waits in memory. A resumed run takes the token at the first step in the block that is not
        recorded, and is not charged again if any of them is. In a block of a limit that the task has itself, with the
        same key, the task's own token counts, and `use.cost` is a part of what the task costs.

        Args:
            limit: `app.limit(...)`, or the name of a limit that an app has defined.
            cost: units that are reserved; `use.cost` replaces them at the end. None for 1.
            key: values that make the key of the limit, a text, a number, or a tuple of such; by default the key of the
                task's own limit of this name. A limit without `by` has none.

        Raises:
            StepDefinitionError: the limit is used around this call already with the same key, or is not defined, or has
                keys and none is given.
            InvalidLimitUse, ValueError: the key or the cost is not valid.
        """
        from .durable.limiting import LimitBlock

        return LimitBlock(self._run, limit, cost, key)

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
        from .agents.journal.draft import handoff_of

        given: dict[str, Any] = {"why": why, "queue": queue, "message": message, "arguments": arguments}
        await continue_as(self._run, to, **given, draft=handoff_of)

    # waits, see docs/how-to/sleep.md

    async def sleep(self, duration: Duration | str) -> None:
        """Wait for a time. The task is parked meanwhile, without a worker or a lease, and no message wakes it.

        A time below a second passes in memory. A resumed run waits for the rest; one that has passed is recorded.

        Args:
            duration: seconds, a timedelta, or a text such as `"90s"`, `"15m"`, `"2h"`, `"7d"`.

        Raises:
            TypeError, ValueError: it is no duration, not more than 0, or longer than three centuries.
            StepOutsideTask: a step called this.
        """
        from .durable.sleeping import sleep

        await sleep(self._run, duration, self._options.durability)

    async def sleep_until(self, moment: datetime) -> None:
        """Wait until a point in time of Redis' clock; one that has passed is recorded. See `sleep`.

        Raises:
            TypeError, ValueError: it is no datetime, or has no time zone.
        """
        from .durable.sleeping import sleep_until

        await sleep_until(self._run, moment, self._options.durability)

    async def first(self, /, **branches: Awaitable[Any]) -> First[Any]:
        """Return the name and the value of the branch that ends first, and cancel the others.

        The branches run concurrently, each in a scope of its name. Waits that the others have opened are closed. The
        outcome is recorded: a resumed run runs the branch that ended first, whose steps are recorded, and no other. If
        that branch has raised an exception, this raises it. If several have ended, the first one of the call counts.

        Args:
            branches: calls of the context, or coroutines that make some.

        Raises:
            StepDefinitionError: there is no branch, or it is not awaitable, or runs already.
            StepMismatch: an earlier run has recorded another call here.
            StepOutsideTask: a step called this.
        """
        from .durable.first import first

        return await first(self._run, branches, self._options.durability)

    # children, see docs/how-to/child-tasks.md

    async def spawn(self, task: Spawnable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue a task as a child of this one: once per attempt, whatever happens to the worker.

        A child does not outlive the attempt of its parent: what the attempt leaves open is cancelled. It has the trace
        headers of the parent. `task.enqueue` enqueues a task that is no child.

        Args:
            task: a registered task, or `task.options(...)`.
            args, kwargs: its arguments.

        Raises:
            InvalidArguments: the arguments do not fit the task; nothing was enqueued.
            SpawnRefused: `task` is no task, or this one has too many parents above it; nothing was enqueued.
            StepOutsideTask, LeaseLost: see there.
        """
        return await spawn(self._run, task, args, kwargs)

    async def join(self, child: TaskHandle[R], /) -> R:
        """Wait for a child that `spawn` has returned, and return its result. Recorded once, like a step.

        This task is parked meanwhile, without a worker.

        Raises:
            ChildFailed: the child is a dead letter, or was cancelled.
            SpawnRefused: the handle is of another task; `await handle.result()` waits for any.
        """
        result: R = await join(self._run, child)
        return result

    @overload
    async def gather(
        self,
        task: Spawnable[..., R],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        limit: int | None = DEFAULT_LIMIT,
        errors: Literal["raise", "wait"] = "raise",
    ) -> list[R]: ...
    @overload
    async def gather(
        self,
        task: Spawnable[..., R],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        limit: int | None = DEFAULT_LIMIT,
        errors: Literal["keep"],
    ) -> list[R | ChildFailed]: ...
    async def gather(
        self,
        task: Spawnable[..., Any],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        limit: int | None = DEFAULT_LIMIT,
        errors: Errors = "raise",
    ) -> list[Any]:
        """Spawn a child for each item, wait for all, and return their results in the order of the items.

        This task is parked meanwhile, without a worker, and runs once more when all children have ended. Recorded once,
        like a step: a later attempt has the results, unless the call failed.

        Args:
            task: a registered task, or `task.options(...)`.
            items: a list, or a generator, which is read to its end before the first child starts. An item is the only
                argument of its child; a tuple has the arguments by position, a dict has them by name.
            limit: children that are open at once; None for all. The next one starts when one has ended.
            errors: the meaning of a child that ends without a result. `raise` cancels the others and raises
                `ChildFailed`. `keep` puts the `ChildFailed` into the list. `wait` waits until the dead letter is
                replayed.

        Raises:
            ChildFailed: see `errors`; also if a child was cancelled, and `errors` is `wait`.
            InvalidArguments, SpawnRefused: see `spawn`; nothing was enqueued.
        """
        return await gather(self._run, task, items, limit, errors)

    def as_completed(
        self,
        task: Spawnable[..., R],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        limit: int | None = DEFAULT_LIMIT,
        errors: Errors = "raise",
    ) -> AsyncGenerator[R]:
        """Spawn a child for each item, and yield the results as they arrive: `async for page in ctx.as_completed(...)`.

        A resumed run gets the results in the same order. This task is parked while it waits for the next one. Children
        that are left when the loop ends early are cancelled with the end of the attempt.

        Args:
            task, items, limit, errors: see `gather`.

        Raises:
            ChildFailed, InvalidArguments, SpawnRefused: see `gather`.
        """
        return as_completed(self._run, task, items, limit, errors)

    # messages, see docs/how-to/messages.md

    async def send(
        self,
        to: str | TaskHandle[Any],
        content: Any,
        *,
        promise: str | None = None,
        due: datetime | None = None,
    ) -> Sent:
        """Send a message to another task: once, however often this task runs again. Its sender is this task's id.

        Args:
            to: id or handle of the task.
            content: JSON data.
            promise: what is promised to the receiver, recorded with the message: see `promise`. due: until when.

        Raises:
            TaskNotFound, TaskEnded, InboxFull, PayloadTooLarge, StepMismatch: see there.
        """
        promised = None
        if promise is not None or due is not None:
            from .durable.promises import made_promise

            promised = made_promise(self._run, to, promise, due)
        durability = self._options.durability
        return await send(self._run, to, content, promised=promised, durability=durability)


def current_context() -> Context:
    """Return the context of the running task. Raises `StepOutsideTask` outside a task, and after it has ended.

    In the thread of a handler that is a plain function, use `SyncContext.current()`.
    """
    run = CURRENT_RUN.get()
    if run is None or not isinstance(ctx := run.context, Context):
        raise StepOutsideTask("no task is running here: current_context() is for what a task's handler calls")
    if CURRENT_SESSION.get() is not None and not _in_event_loop():
        raise StepOutsideTask("current_context() has async methods: use SyncContext.current() in a plain function")
    return ctx


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
