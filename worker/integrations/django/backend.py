"""The backend for django.tasks: its tasks run in workers of Perdure.

A task of django.tasks is a task `django.QUEUE` of Perdure, with the path of the function, its arguments and what
`using` has set. The call of the function is one step: if a worker dies after the call, the recorded result holds.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Final

import django
from django.core.checks import Error
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, transaction
from django.tasks import Task as DjangoTask
from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TaskError
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from ....deadletter.policy import Retry
from ....queues.envelope import is_task_id
from ....queues.errors import LeaseLost
from ....queues.handle import TaskHandle
from ....queues.keys import check_name
from ....queues.records import Record, State
from ...app import App
from ...context import Context
from ...task import Task, TaskCall
from .outbox import DjangoOutbox

_STATUS: Final[Mapping[str, TaskResultStatus]] = {
    State.RUNNING: TaskResultStatus.RUNNING,
    State.SUCCEEDED: TaskResultStatus.SUCCESSFUL,
    State.DEAD: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
}

_OPTIONS: Final = ("app", "max_attempts", "namespace", "redis_url", "timeout")


class PerdureBackend(BaseTaskBackend):
    """A backend of TASKS: `{"BACKEND": "perdure.integrations.django.PerdureBackend"}`.

    OPTIONS:
        app: path of an `App` of the project that has the tasks, such as "mysite.jobs.app"; by default one of its own.
        redis_url, namespace: of its own app, else the settings of the environment.
        max_attempts: attempts of a task whose function raises, 1 by default. timeout: seconds for one.

    If the app has an outbox in a database of Django, a task that is enqueued within a transaction of that database is
    enqueued when the transaction commits.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self._app: App | None = None

    @property
    def app(self) -> App:
        """The app of Perdure whose workers run the tasks."""
        if self._app is None:
            self._app = self._make_app()
        return self._app

    def check(self, **kwargs: Any) -> list[Error]:
        """Return the problems of the backend's OPTIONS, for `manage.py check`."""
        unknown = sorted(self.options.keys() - set(_OPTIONS))
        listed = ", ".join(_OPTIONS)
        return [Error(f"TASKS[{self.alias!r}] has the unknown option {name!r}; there are {listed}") for name in unknown]

    def _make_app(self) -> App:
        for problem in self.check():
            raise ImproperlyConfigured(problem.msg)
        if (path := self.options.get("app")) is None:
            urls = {name: self.options.get(name) for name in ("redis_url", "namespace")}
            app = App("django", **urls)
        else:
            app = import_string(path.replace(":", "."))
            if not isinstance(app, App):
                raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: app must be the path of an App, got {path!r}")
        for queue in sorted(self.queues or {"default"}):
            self._task_of(app, queue)
        return app

    def _task_of(self, app: App, queue: str) -> Task[..., Any]:
        """Return the task that runs functions of a queue, which is registered at its first use."""
        name = f"django.{check_name('queue_name of a task', queue)}"
        if (known := app.tasks.get(name)) is not None:
            return known
        retry = Retry(max_attempts=self.options.get("max_attempts", 1))
        register = app.task(name=name, queue=queue, retry=retry, timeout=self.options.get("timeout"), coherence=None)
        return register(run_task)

    def enqueue(self, task: DjangoTask, args: Any, kwargs: Any) -> TaskResult:
        """Enqueue a task; return its result as it is now. Raises `TypeError` for arguments that are not JSON."""
        self.validate_task(task)
        call = self._call(task)
        given = (self.alias, task.module_path, _used(task), normalize_json(list(args)), normalize_json(dict(kwargs)))
        outbox = self.app.outbox
        if isinstance(outbox, DjangoOutbox) and transaction.get_connection(outbox.using).in_atomic_block:
            found = self._result(call.enqueue_in_sync(None, *given), task, given[3], given[4], None)
        else:
            handle = call.enqueue_sync(*given)
            found = self._result(handle.id, task, given[3], given[4], handle.record_sync())
        task_enqueued.send(type(self), task_result=found)
        return found

    def _call(self, task: DjangoTask) -> TaskCall[..., Any]:
        options: dict[str, Any] = {"tags": [task.module_path[-64:]]}
        if task.priority:
            options["priority"] = "high" if task.priority > 0 else "low"
        if task.run_after is not None:
            moment = task.run_after
            options["delay"] = moment if moment.tzinfo is not None else moment.astimezone()
        return self._task_of(self.app, task.queue_name).options(**options)

    def get_result(self, result_id: str) -> TaskResult:
        """Return the result of a task by its id. Raises `TaskResultDoesNotExist`."""
        handle = self.app.sync().find(result_id) if is_task_id(result_id) else None
        if handle is None:
            raise TaskResultDoesNotExist(result_id)
        record = handle.record_sync()
        arguments = self._arguments(handle, record)
        if arguments is None or arguments["backend"] != self.alias:
            raise TaskResultDoesNotExist(result_id)
        task = _django_task(arguments["path"], arguments["used"], self.alias)
        found = self._result(result_id, task, arguments["args"], arguments["kwargs"], record)
        if record.state == State.SUCCEEDED:
            object.__setattr__(found, "_return_value", handle.result_sync(timeout=10))
        return found

    def _arguments(self, handle: TaskHandle[Any], record: Record) -> Any:
        name = record.task or ""
        if not name.startswith("django."):
            return None
        from ....queues.derived_tasks import read_task_input

        async def read(producer: Any) -> bytes:
            return (await read_task_input(producer.gateway, handle.partition, handle.id)).arguments

        task = self._task_of(self.app, name.removeprefix("django."))
        return task.arguments.decode(self.app.sync().call(read, "aget_result(...)"))

    def _result(self, task_id: str, task: DjangoTask, args: Any, kwargs: Any, record: Record | None) -> TaskResult:
        """Return a result. record: None for a task that waits in the outbox."""
        state = State.QUEUED if record is None else record.state
        started = None if record is None else record.started_at
        if record is not None and started is None and record.finished_at is not None and record.ran_ms is not None:
            started = record.finished_at - record.ran_ms
        workers = [] if record is None or record.worker is None else [record.worker] * max(1, record.attempts)
        return TaskResult(
            task=task,
            id=task_id,
            status=_STATUS.get(state, TaskResultStatus.READY),
            enqueued_at=None if record is None else _moment(record.enqueued_at),
            started_at=_moment(started),
            finished_at=None if record is None else _moment(record.finished_at),
            last_attempted_at=_moment(started),
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[] if record is None or not record.error else [_task_error(record.error)],
            worker_ids=workers,
        )


async def run_task(ctx: Context, backend: str, path: str, used: dict[str, Any], args: list[Any], kwargs: Any) -> Any:
    """Run a function of django.tasks in a worker."""
    task, now = _django_task(path, used, backend), datetime.now(UTC)
    result = TaskResult(
        task=task,
        id=ctx.task_id,
        status=TaskResultStatus.RUNNING,
        enqueued_at=None,
        started_at=now,
        finished_at=None,
        last_attempted_at=now,
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=[],
        worker_ids=[f"{socket.gethostname()}-{os.getpid()}"] * ctx.attempt,
    )
    sender = type(task_backends[backend])
    given = [TaskContext(task_result=result), *args] if task.takes_context else args
    await task_started.asend(sender, task_result=result)
    function = partial(_call_async if iscoroutinefunction(task.func) else _call, task.func, given, kwargs)
    try:
        returned = await ctx.step(task.name, function)
    except LeaseLost:
        raise  # another worker continues the task
    except Exception:
        await _finished(sender, result, TaskResultStatus.FAILED)
        raise
    await _finished(sender, result, TaskResultStatus.SUCCESSFUL)
    return returned


async def _finished(sender: type, result: TaskResult, status: TaskResultStatus) -> None:
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", datetime.now(UTC))
    await task_finished.asend(sender, task_result=result)


def _call(function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function in a thread, with the connections of Django as a request has them."""
    close_old_connections()
    try:
        return normalize_json(function(*args, **kwargs))
    finally:
        close_old_connections()


async def _call_async(function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    return normalize_json(await function(*args, **kwargs))


def _used(task: DjangoTask) -> dict[str, Any]:
    """Return what a task has set in `using`, as JSON data."""
    run_after = None if task.run_after is None else task.run_after.isoformat()
    return {"priority": task.priority, "queue_name": task.queue_name, "run_after": run_after}


def _django_task(path: str, used: Mapping[str, Any], backend: str) -> DjangoTask:
    found = import_string(path)
    if not isinstance(found, DjangoTask):
        raise ValueError(f"{path} must be a task of django.tasks, got {found!r}")
    moment = used.get("run_after")
    changes = {**used, "run_after": None if moment is None else datetime.fromisoformat(moment), "backend": backend}
    return found.using(**changes)


def _moment(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)


def _task_error(error: Mapping[str, Any]) -> TaskError:
    """Return the error of a dead letter. The traceback names the module of its class."""
    name, traceback = str(error.get("error", "")), str(error.get("traceback", ""))
    paths = re.findall(rf"^((?:\w+\.)*{re.escape(name)})(?::|$)", traceback, re.MULTILINE)
    path = paths[-1] if paths and "." in paths[-1] else f"builtins.{name}"
    return TaskError(exception_class_path=path, traceback=traceback)


def worker_app(alias: str = "default") -> App:
    """Set Django up, and return the app of a backend with its tasks, for the module that workers run.

    Raises `ImproperlyConfigured` if the backend is not one of Perdure.
    """
    django.setup()
    backend = task_backends[alias]
    if not isinstance(backend, PerdureBackend):
        raise ImproperlyConfigured(
            f"TASKS[{alias!r}] must have the backend PerdureBackend, got {type(backend).__name__}"
        )
    return backend.app
