"""Declaration of schedules in the code of an app."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from ..queues.defaults import MAX_SECONDS, nearest
from ..queues.durations import Duration, to_seconds
from ..queues.envelope import DEFAULT_PAYLOAD_LIMIT
from ..queues.errors import ConfigurationError
from ..queues.schedules.call import ScheduledCall
from ..queues.schedules.definition import Rules, check_schedule_name, check_when
from ..queues.schedules.store import ScheduleDefinition
from .agent_task import AgentTask
from .task import Task, TaskCall, TaskOwner


def declare(
    app: TaskOwner,
    tasks: Mapping[str, Task[Any, Any]],
    known: Collection[str],
    name: str,
    task: object,
    when: object,
    *,
    args: Mapping[str, Any] | None = None,
    jitter: Duration = 0.0,
    missed: str = "once",
    expires: Duration | None = None,
) -> ScheduleDefinition:
    """Return a schedule of an app.

    Args:
        tasks: The tasks of the app. known: names of its schedules.

    Raises `ConfigurationError`, `InvalidArguments`, `PayloadTooLarge`.
    """
    try:
        check_schedule_name(name)
        if name in known:
            raise ValueError("the app has a schedule of this name already: use another name")
        times = check_when(when)
        rules = Rules.of(times, missed, jitter)
        seconds = None if expires is None else _deadline(expires)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"schedule {name!r}: {error}") from None
    call = _call(app, tasks, name, task)
    given: object = args
    if not (given is None or isinstance(given, Mapping)):
        raise ConfigurationError(f"schedule {name!r}: args must be a dict of arguments by name, got {args!r}")
    data, secrets = call.task.arguments.encode_call((), args or {})
    key = call.key
    if not (key is None or isinstance(key, str)):
        raise ConfigurationError(f"schedule {name!r}: key of its task must be a text, got {key!r}")
    message = call.limited(call.template.message(data, secrets, key=key))
    message.check(DEFAULT_PAYLOAD_LIMIT, 0)
    rule = (call.task.unique if call.unique is None else call.unique) or None
    stored = ScheduledCall.of(message, call.task.name, call.own_queue, rule, seconds)
    return ScheduleDefinition(name, times, rules, stored)


def _deadline(expires: object) -> float:
    if isinstance(expires, (bool, datetime)):
        raise TypeError(f"expires must be seconds or a timedelta, got {expires!r}")
    seconds = to_seconds(expires, "expires")  # type: ignore[arg-type]
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"expires must be more than 0 seconds and at most {MAX_SECONDS:.0e}, got {seconds:g}")
    return seconds


def _call(app: TaskOwner, tasks: Mapping[str, Task[Any, Any]], name: str, task: object) -> TaskCall[..., Any]:
    """Return the task of a schedule with its options. Raises `ConfigurationError`."""
    if isinstance(task, str):
        if task not in tasks:
            hint = nearest(task, tasks) or "; register it before its schedule"
            raise ConfigurationError(f"schedule {name!r}: app {app.name!r} has no task {task!r}{hint}")
        task = tasks[task]
    if not isinstance(task, (Task, TaskCall, AgentTask)):
        raise ConfigurationError(
            f"schedule {name!r}: its task must be a registered task, task.options(...) or a name, got {task!r}"
        )
    call: TaskCall[..., Any] = task.as_call()
    if call.task.app is not app:
        raise ConfigurationError(
            f"schedule {name!r}: its task must be a task of app {app.name!r}, got {call.task.name!r} of another app"
        )
    refused: dict[str, object] = {"delay": call.delay, "task_id": call.task_id, "durability": call.durability}
    refused |= {"max_depth": call.max_depth, "expires": call.limits.expires, "tenant": call.tenant}
    if given := [option for option, value in refused.items() if value]:
        raise ConfigurationError(f"schedule {name!r}: its task cannot have the option {given[0]}")
    return call
