"""Registry of the tasks of an app."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic.errors import PydanticUserError

from ..deadletter.policy import Retry
from ..queues.catalog import AppEntry, CatalogTask
from ..queues.defaults import MAX_SECONDS
from ..queues.durations import Duration, to_seconds
from ..queues.envelope import Envelope, EnvelopeTemplate
from ..queues.lanes import NORMAL, Lane, Priority, check_lane
from ..queues.unique import Unique, UniqueTask, check_unique
from .arguments import CALL_OPTIONS, Arguments, type_hints
from .durable.json_types import type_problem
from .durable.steps.codec import Codec
from .durable.steps.current import Durability
from .errors import TaskDefinitionError
from .task import Handler, OnOrphan, Task, TaskOwner, as_async, check_cleanup, check_options

if TYPE_CHECKING:
    from ..queues.budgets.definition import TaskBudgets
    from ..queues.depth import MaxDepth, WhenFull
    from ..queues.limits.task_limits import TaskLimits


class Registry(Mapping[str, Task[Any, Any]]):
    """The tasks of one app, by name."""

    def __init__(self, app: TaskOwner) -> None:
        self._app = app
        self._tasks: dict[str, Task[Any, Any]] = {}

    def __getitem__(self, name: str) -> Task[Any, Any]:
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def app(self) -> str:
        """The name of the app."""
        return self._app.name

    def accepts(self, app: str | None) -> bool:
        """Return whether a task of this app may run here. None: the producer named no app."""
        return app is None or app == self._app.name or app in self._app.aliases

    def of(self, envelope: Envelope) -> Task[Any, Any] | None:
        """Return the task that an envelope names; None if it is unknown here or belongs to another app."""
        known = envelope.app == self._app.name or self.accepts(envelope.app)  # nearly always the first
        return self._tasks.get(envelope.task) if known else None

    def add(
        self,
        handler: Callable[..., Any],
        *,
        name: str | None,
        queue: str,
        retry: Retry,
        timeout: Duration | None,
        idle_timeout: Duration | None,
        durability: Durability,
        result_ttl: Duration | None,
        on_orphan: OnOrphan | None = "warn",
        version: int = 1,
        strict_order: bool = False,
        watches_tools: bool = False,
        around: Callable[[str, Handler[..., Any]], Handler[..., Any]] | None = None,
        on_end: object = None,
        unique: Unique | None = None,
        limits: object = (),
        budget: object = (),
        priority: Priority | None = None,
        idle: bool = False,
        slots: int = 1,
        max_depth: int | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
        call_options: Collection[str] = CALL_OPTIONS,
    ) -> Task[Any, Any]:
        """Register a handler. Raises `TaskDefinitionError` for one that cannot be a task.

        around: returns another handler in place of it, given the name of the task and the async function.
        """
        name = name or getattr(handler, "__name__", "")
        if not name or name == "<lambda>":
            raise TaskDefinitionError(f"{handler!r} must have a name: pass name=...")
        function = as_async(name, handler)
        orphans = "warn" if on_orphan is None else on_orphan
        check_options(name, retry=retry, durability=durability, on_orphan=orphans, strict_order=strict_order)
        check_cleanup(name, on_end, self._app)
        if name in self._tasks:
            raise TaskDefinitionError(f"task name must be unique, got {name!r} twice: pass name=... to one task")
        if type(version) is not int or version < 1:
            raise TaskDefinitionError(f"task {name!r}: version must be a whole number from 1, got {version!r}")
        try:
            lane = check_lane(priority, idle or None) or NORMAL
        except ValueError as error:
            raise TaskDefinitionError(f"task {name!r}: {error}") from None
        if type(slots) is not int or slots < 1:
            raise TaskDefinitionError(f"task {name!r}: slots must be a whole number from 1, got {slots!r}")
        given = {"timeout": timeout, "idle_timeout": idle_timeout, "result_ttl": result_ttl}
        try:
            times = {what: None if one is None else to_seconds(one, what) for what, one in given.items()}
        except (TypeError, ValueError) as error:
            raise TaskDefinitionError(f"task {name!r}: {error}") from None
        for what, seconds in times.items():
            if what == "idle_timeout" and seconds == math.inf:
                continue  # no such limit
            if seconds is not None and not 0 < seconds <= MAX_SECONDS:
                raise TaskDefinitionError(
                    f"task {name!r}: {what} must be more than 0 seconds and at most {MAX_SECONDS:.0e}, got {seconds}"
                )
        returned = type_hints(name, handler).get("return", Any)
        try:
            result = Codec(returned)
        except PydanticUserError as error:
            raise TaskDefinitionError(f"task {name!r}: its result: {type_problem(returned, error)}") from None
        if result.problem is not None:
            raise TaskDefinitionError(f"task {name!r}: its result cannot be read back from JSON: {result.problem}")
        arguments = Arguments(name, handler, call_options)
        task = Task(
            name=name,
            handler=function if around is None else around(name, function),
            queue=queue,
            retry=retry,
            timeout=times["timeout"],
            idle_timeout=times["idle_timeout"],
            durability=durability,
            result_ttl=times["result_ttl"],
            on_orphan=on_orphan,
            version=version,
            strict_order=strict_order,
            watches_tools=watches_tools,
            on_end=on_end if isinstance(on_end, Task) else None,
            app=self._app,
            unique=None if unique is None else _bind_unique(name, arguments, unique),
            limits=_bind_limits(name, arguments, limits),
            budgets=_bind_budgets(name, arguments, budget),
            lane=lane,
            slots=slots,
            max_depth=make_max_depth(f"task {name!r}", max_depth, when_full, wait_limit),
            arguments=arguments,
            result=result,
            template=EnvelopeTemplate(name, app=self._app.name, on_end=on_end is not None, lane=lane),
        )
        self._tasks[name] = task
        return task

    def remove(self, name: str) -> None:
        """Remove a task that could not be registered as a whole."""
        del self._tasks[name]

    def entry(self, app: str) -> AppEntry:
        """Return the tasks as the catalog lists them."""
        tasks = [
            CatalogTask(
                task.name,
                task.queue,
                inspect.getdoc(task.handler) or "",
                arguments=task.arguments.schema(),
                result=task.result.schema(),
                max_attempts=task.retry.max_attempts,
                max_crashes=task.retry.max_crashes,
                task_version=task.version,
                unique=None if task.unique is None else task.unique.published(),
                limits=None if task.limits is None else task.limits.published(),
                budgets=None if task.budgets is None else task.budgets.published(),
                lane=task.lane,
                depth=None if (limit := task.limit_on(task.queue)) is None else limit.published(),
            )
            for task in self._tasks.values()
        ]
        return AppEntry(app, tasks)

    @property
    def versions(self) -> dict[str, int]:
        """Versions of the tasks by name, without those of version 1."""
        return {name: task.version for name, task in self._tasks.items() if task.version > 1}

    @property
    def lanes(self) -> dict[str, set[Lane]]:
        """Lanes of the tasks by queue, without the normal one."""
        found: dict[str, set[Lane]] = {}
        for task in self._tasks.values():
            if task.lane != NORMAL:
                found.setdefault(task.queue, set()).add(task.lane)
        return found

    @property
    def queues(self) -> list[str]:
        """Names of the tasks' queues, sorted."""
        return sorted({task.queue for task in self._tasks.values()})


def make_max_depth(
    what: str, max_depth: int | None, when_full: WhenFull | None, wait_limit: Duration | None
) -> MaxDepth | None:
    """Return the limit of the depth that options make. what: their owner. Raises `TaskDefinitionError`."""
    if (max_depth, when_full, wait_limit) == (None, None, None):
        return None
    from ..queues.depth import make_limit

    try:
        if max_depth is False:
            raise TypeError("max_depth must be a whole number, got False")
        return make_limit(max_depth, when_full, wait_limit)
    except (TypeError, ValueError) as error:
        raise TaskDefinitionError(f"{what}: {error}") from None


def _bind_unique(name: str, arguments: Arguments, unique: object) -> UniqueTask:
    """Return the rule of a task. Raises `TaskDefinitionError`."""
    try:
        return arguments.bind_unique(check_unique(unique))
    except (TypeError, ValueError) as error:
        raise TaskDefinitionError(f"task {name!r}: {error}") from None


def _bind_limits(name: str, arguments: Arguments, limits: object) -> TaskLimits | None:
    """Return the limits of a task. Raises `TaskDefinitionError`."""
    try:
        return arguments.bind_limits(limits)
    except (TypeError, ValueError) as error:
        raise TaskDefinitionError(f"task {name!r}: {error}") from None


def _bind_budgets(name: str, arguments: Arguments, budgets: object) -> TaskBudgets | None:
    """Return the budgets of a task. Raises `TaskDefinitionError`."""
    try:
        return arguments.bind_budgets(budgets)
    except (TypeError, ValueError) as error:
        raise TaskDefinitionError(f"task {name!r}: {error}") from None
