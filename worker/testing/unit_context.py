"""A context for one call of a handler, without a server: for unit tests of handlers."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

import orjson

from ...deadletter.burial import Evidence
from ...queues.delivery.checkpoint import Entry, History, Kind
from ...queues.delivery.leases import Delivery
from ...queues.delivery.settlement import Counters
from ...queues.durations import Duration, Moment, seconds_until
from ...queues.envelope import Envelope, new_task_id
from ...queues.errors import Refused, TaskFailed
from ...queues.handle import TaskHandle
from ...queues.inbox import InboxMessage, Sent
from ...queues.keys import Namespace
from ...queues.records import State
from ...queues.stream_items import stream_of_place
from ...queues.transport.gateway import Gateway
from ...queues.waits import RECORDS
from ..artifacts.task_artifacts import Artifacts
from ..context import Context
from ..durable.answers import QUESTION, UnitWait, Wait, describe_wait
from ..durable.checkpoint_writer import CheckpointWriter
from ..durable.extras import Host
from ..durable.joining import (
    DEFAULT_LIMIT,
    ChildCall,
    Errors,
    arguments_of,
    check_window,
    child_call,
    each_item,
)
from ..durable.journal.event import Event
from ..durable.run import Run, RunObserver
from ..durable.sleeping import check_sleep, check_sleep_until
from ..durable.step_caller import StepCaller
from ..durable.steps.current import CURRENT_RUN, StepCall, StepOptions, check_place
from ..durable.steps.threads import Threads
from ..durable.task_capacity import TaskCapacity
from ..durable.values import Values, encoded_value
from ..durable.waiting import REQUIRED
from ..errors import ChildFailed, SpawnRefused
from ..memory.task_memory import TaskMemory
from ..settings import Settings
from ..workspace.folders import remove_folder
from ..workspace.task_workspace import FolderOnly, Workspace

_THREADS: Final = 40
_REMEDY: Final = "run the task with the fixture 'perdure' and run_until_idle"


class _UnitCaller(StepCaller):
    """Steps with options, whose reads are those of the context."""

    def __init__(self, ctx: UnitContext, options: StepOptions) -> None:
        super().__init__(ctx._run, options)
        self._ctx = ctx

    async def inbox(self, *args: Any, **kwargs: Any) -> list[InboxMessage]:
        return await self._ctx.inbox(*args, **kwargs)

    async def wait_for(self, *args: Any, **kwargs: Any) -> Any:
        return await self._ctx.wait_for(*args, **kwargs)

    async def open_wait(self, *args: Any, **kwargs: Any) -> Wait[Any]:
        return await self._ctx.open_wait(*args, **kwargs)

    async def ask(self, *args: Any, **kwargs: Any) -> Any:
        return await self._ctx.ask(*args, **kwargs)


class UnitContext(Context):
    """A context whose steps run, and whose records stay in memory.

    Attributes:
        steps: results of the steps that the handler called, by key (`read`, `read#2`), in the order of their ends.
        events: what the handler logged: decisions, discoveries, messages, tool calls, failed tries.
        sent: messages that the handler sent: (task id, content).
        spawned: children that the handler spawned: name of the task and arguments. Their handlers are called at once.
        named: values by name: those that were given, and those that the handler has set.
        slept: how long the handler slept: a duration or a datetime for each call. The time passes at once.
    """

    def __init__(
        self,
        run: Run,
        *,
        inbox: Sequence[Any] = (),
        answers: Mapping[str, Any] | None = None,
        recorded: Mapping[str, Any] | None = None,
        values: Mapping[str, Any] | None = None,
        resources: Any = None,
    ) -> None:
        super().__init__(run, resources=lambda: resources)
        self.steps: dict[str, Any] = {}
        self.events: list[Event] = []
        self.sent: list[tuple[str, Any]] = []
        self.slept: list[Duration | str | datetime] = []
        self.spawned: list[tuple[str, dict[str, Any]]] = []
        self.named = dict(values or {})
        self._recorded = dict(recorded or {})
        self._answers = {
            name: [*found] if isinstance(found, list) else [found] for name, found in (answers or {}).items()
        }
        self._inbox = [
            one if isinstance(one, InboxMessage) else InboxMessage(number, f"message-{number}", "", one, _now_ms())
            for number, one in enumerate(inbox, 1)
        ]
        run.around_step = self._around_step
        run.observe(_EventList(self.events))

    @property
    def emitted(self) -> list[tuple[str, Any]]:
        """Items that the handler emitted: (stream, item)."""
        checkpoint = self._run.recorder
        return checkpoint.emitted if isinstance(checkpoint, _DroppedCheckpoint) else []

    async def _around_step(self, call: StepCall, perform: Callable[[], Awaitable[Any]]) -> Any:
        """Return the recorded result of a step, else run it."""
        call.recorded = call.key in self._recorded
        value = self._recorded[call.key] if call.recorded else await perform()
        self.steps[call.key] = value
        return value

    def options(self, /, *unnamed: Any, **options: Any) -> StepCaller:
        """Return `step`, `tool`, `inbox` and waits for answers with options."""
        return _UnitCaller(self, super().options(*unnamed, **options)._options)

    async def capacity(self) -> TaskCapacity:
        """Return what the context has left: as if no other task waited and the worker were free."""
        run = self._run
        return TaskCapacity(run.time_left, run.time_limit, None, None, queued=0, free=1.0)

    @property
    def resumed(self) -> bool:
        """Whether there were recorded steps."""
        return bool(self._recorded)

    async def inbox(
        self,
        wait: Moment | None = None,
        *,
        limit: int | None = None,
        sender: str | None = None,
        why: str = "",
    ) -> list[InboxMessage]:
        """Return the given messages that are unread. If there are none, the time to wait has passed at once.

        A message that was given as plain content fits every `sender`. Raises `Refused` where the task would wait for
        ever.
        """
        check_place(self._run, "#inbox", own=True)
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be 1 or more messages, got {limit}")
        found = [one for one in self._inbox if sender is None or one.sender in ("", sender)][:limit]
        self._inbox = [one for one in self._inbox if one not in found]
        if not found and wait is not None and seconds_until(wait, "wait") == math.inf:
            whom = "" if sender is None else f" from {sender!r}"
            raise Refused(f"the handler waits for ever for a message{whom}: pass make_context(inbox=[...])")
        return found

    async def wait_for(self, name: str, type: Any = Any, **options: Any) -> Any:
        """Return the next given answer to this name. Without one, the time to wait has passed at once.

        Raises `Refused` where the task would wait for ever, `WaitTimedOut`, and `pydantic.ValidationError` for an
        answer that is not of this type.
        """
        return await (await self.open_wait(name, type, **options))

    async def open_wait(self, name: str, type: Any = Any, **options: Any) -> Wait[Any]:
        """Return a wait for the next given answer to this name."""
        check_place(self._run, RECORDS + name, own=True)
        call = describe_wait(self._run, name, type, **options)
        return UnitWait(self._run, call, self._run.keys.next(RECORDS + name), self._answers.get(name, []))

    async def ask(
        self,
        who: str,
        question: str,
        type: Any = str,
        *,
        name: str | None = None,
        timeout: Moment | None = None,
        default: Any = REQUIRED,
    ) -> Any:
        """Return the next given answer to this name, or to `question`. See `wait_for`."""
        given: dict[str, Any] = {"timeout": timeout, "default": default, "who": who, "why": question}
        return await self.wait_for(name or QUESTION, type, **given)

    async def send(
        self,
        to: str | TaskHandle[Any],
        content: Any,
        *,
        promise: str | None = None,
        due: datetime | None = None,
    ) -> Sent:
        """Append the message to `sent`, and record what is promised."""
        check_place(self._run, "#send", own=True)
        task_id = to if isinstance(to, str) else to.id
        if promise is not None or due is not None:
            await self.promise(task_id, promise or "", due)
        self.sent.append((task_id, content))
        return Sent(task_id, len(self.sent), State.QUEUED)

    @property
    def values(self) -> Values:
        """The values in `named`."""
        return _UnitValues(self._run, self.named)

    async def sleep(self, duration: Duration | str) -> None:
        """Append the duration to `slept`."""
        check_sleep(self._run, duration)
        self.slept.append(duration)

    async def sleep_until(self, moment: datetime) -> None:
        """Append the moment to `slept`."""
        check_sleep_until(self._run, moment)
        self.slept.append(moment)

    # children: their handlers are called at once, with contexts of their own

    async def spawn(self, task: Any, /, *args: Any, **kwargs: Any) -> TaskHandle[Any]:
        """Call the handler of a child, and append its name and arguments to `spawned`."""
        check_place(self._run, "#spawn", own=True)
        call = child_call("spawn", task)
        child = _Child(call.task.name, len(self.spawned))
        self.spawned.append((call.task.name, call.task.arguments.by_name(args, kwargs)))
        child.outcome = await asyncio.create_task(_call_child(call, args, kwargs, child))
        return cast("TaskHandle[Any]", child)

    async def join(self, child: TaskHandle[Any], /) -> Any:
        """Return the result of a child. Raises `ChildFailed`."""
        check_place(self._run, "#join", own=True)
        if not isinstance(child, _Child):
            raise SpawnRefused(f"join needs the handle that ctx.spawn has returned, got {child!r}")
        if isinstance(child.outcome, ChildFailed):
            raise child.outcome
        return child.outcome

    async def gather(
        self, task: Any, items: Any, *, limit: int | None = DEFAULT_LIMIT, errors: Errors = "raise"
    ) -> list[Any]:
        """Call the handlers of children, one after the other."""
        results = self.as_completed(task, items, limit=limit, errors=errors)
        return [result async for result in results]

    async def as_completed(
        self, task: Any, items: Any, *, limit: int | None = DEFAULT_LIMIT, errors: Errors = "raise"
    ) -> AsyncGenerator[Any]:
        """Call the handlers of children, and yield each result."""
        check_place(self._run, "#gather", own=True)
        check_window(limit, errors)
        listed = [item async for item in each_item("gather", items)]
        for number, item in enumerate(listed):
            args, kwargs = arguments_of(item)
            child = cast("_Child", await self.spawn(task, *args, **kwargs))
            failed = isinstance(child.outcome, ChildFailed)
            if failed:
                child.outcome.number = number
            if failed and errors != "keep":
                raise child.outcome
            yield child.outcome

    @property
    def memory(self) -> TaskMemory:
        """Raise `Refused`: memories need a store."""
        raise Refused(f"could not open the memory store: make_context() has none; {_REMEDY}")

    @property
    def artifacts(self) -> Artifacts:
        """Raise `Refused`: artifacts need a store."""
        raise Refused(f"could not open the artifact store: make_context() has none; {_REMEDY}")

    @property
    def workspace(self) -> Workspace:
        """A folder whose files are not saved, removed with the context."""
        files = self._run.files
        if not isinstance(files, Workspace):
            files = self._run.files = FolderOnly(self._run, self._run.settings)
            weakref.finalize(self, remove_folder, files.path)
        return files


def make_context(
    *,
    task: str = "unit_test",
    task_id: str | None = None,
    queue: str = "default",
    attempt: int = 1,
    crashes: int = 0,
    version: int = 1,
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    inbox: Sequence[Any] = (),
    answers: Mapping[str, Any] | None = None,
    recorded: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    resources: Any = None,
) -> UnitContext:
    """Return a context with which a test calls a handler: `await report(make_context(), "src")`. It needs no server.

    Steps run, with their retries, options and checks, and their results must be JSON data as in a worker.

    Args:
        task, task_id, queue, attempt, crashes, version, headers, tags, resources: what the context says about the task.
        inbox: messages for `ctx.inbox`: their contents, or each an `InboxMessage`.
        answers: by the name of the wait, for `ctx.wait_for` and `ctx.open_wait`; `question` for `ctx.ask`. A list has
            one for each wait of the name.
        recorded: results of steps that an earlier run recorded, by key; these steps are not run.
        values: by name, for `ctx.values`.

    Raises:
        RuntimeError: no event loop runs. The context belongs to the asyncio task that creates it, and replaces the one
            that this task has created before.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("make_context() must be called in an 'async def' test, where an event loop runs") from None
    settings = Settings.model_construct()  # the defaults: the environment must not change a unit test
    envelope = Envelope(id=task_id or new_task_id(), task=task, headers=dict(headers or {}), tags=tuple(tags))
    run = _UnitRun(
        cast("Gateway", _NoServer()),
        Delivery(Namespace("unit-test").partition(queue), b"0-1", "unit-test", 1, {}),
        envelope,
        History(counters=Counters(attempts=attempt - 1, crashes=crashes)),
        host=Host(Threads(_THREADS)),
        settings=settings,
    )
    run.version = version
    ctx = UnitContext(run, inbox=inbox, answers=answers, recorded=recorded, values=values, resources=resources)
    CURRENT_RUN.set(run)
    run.context = ctx
    return ctx


class _UnitValues(Values):
    """Values in memory, as JSON data like those of a worker."""

    def __init__(self, run: Run, named: dict[str, Any]) -> None:
        super().__init__(run, "sync")
        self._named = named

    async def get(self, name: str, default: Any = None) -> Any:
        check_place(self._run, "#get", own=True, within=True)
        encoded_value(name, None)
        return self._named.get(name, default)

    async def set(self, name: str, value: Any) -> None:
        check_place(self._run, "#set", own=True, within=True)
        self._named[name] = orjson.loads(encoded_value(name, value))["value"]


class _Child:
    """The handle of a child whose handler was called."""

    def __init__(self, task: str, number: int) -> None:
        self.id = f"{task}-{number}"
        self.outcome: Any = None

    async def result(self, timeout: object = None) -> Any:
        if isinstance(self.outcome, ChildFailed):
            raise self.outcome.error
        return self.outcome


async def _call_child(call: ChildCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], child: _Child) -> Any:
    """Return what the handler of a child returns, as a worker would read it, or `ChildFailed`."""
    task = call.task
    arguments = task.arguments.decode(call.encode_child(args, kwargs).data)
    try:
        value = await task.handler(make_context(task=task.name, task_id=child.id, queue=call.own_queue), **arguments)
        data, _ = task.result.encode("task", task.name, value)
        return task.decode(data)
    except Exception as error:  # noqa: BLE001 - the outcome of the child
        evidence = Evidence.of(error).fields()
        failed = ChildFailed(child.id, TaskFailed(child.id, "attempts_exhausted", evidence))
        failed.__cause__ = error
        return failed


def _now_ms() -> int:
    return int(time.time() * 1000)


class _UnitRun(Run):
    """A run whose checkpoint is dropped."""

    __slots__ = ("_dropped",)

    @property
    def recorder(self) -> CheckpointWriter:
        if not hasattr(self, "_dropped"):
            self._dropped = _DroppedCheckpoint()
        return self._dropped


class _DroppedCheckpoint(CheckpointWriter):
    """A checkpoint that counts its entries, and keeps what is emitted."""

    def __init__(self) -> None:
        self._last = 0
        self.emitted: list[tuple[str, Any]] = []

    async def put(self, *entries: Entry, wait: bool, replicated: bool = False, progress: bool = False) -> None:
        self._last += len(entries)
        for entry in entries:
            if entry.kind is Kind.EMITTED:
                self.emitted.append((stream_of_place(entry.step), orjson.loads(entry.value)))

    def put_first(self, entry: Entry) -> None:
        self._last += 1

    def report(self, *entries: Entry) -> None:
        """Drop what is reported."""

    async def flush(self) -> None:
        """There is nothing to store."""


class _EventList(RunObserver):
    """Appends the events of a run to a list."""

    __slots__ = ("_events",)

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def on_event(self, event: Event, number: int) -> None:
        self._events.append(event)


class _NoServer:
    """In place of a gateway: whatever is asked of it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise Refused(f"could not call {name} of the server: make_context() has none; {_REMEDY}")
