"""Assertions about tasks that were enqueued: `assert_enqueued` and `refute_enqueued`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeVar, cast

from ...queues.errors import ConfigurationError
from ...queues.handle import TaskHandle
from ...queues.inspection.views import list_tasks
from ...queues.keys import Namespace
from ...queues.records import Record
from ...queues.security.encryption import arguments_field
from ...queues.transport.gateway import Gateway
from ...queues.transport.large_values import REFERENCE, read_arguments
from ..app import App
from ..task import Task

R = TypeVar("R")

_SHOWN: Final = 5
"""Tasks that an error shows."""


async def assert_enqueued(task: Task[Any, R], /, **arguments: Any) -> TaskHandle[R]:
    """Return the handle of a task that was enqueued with these arguments, in whatever state it is now.

    Args:
        task: the task, whose app is open.
        arguments: values of arguments; one that is left out may have any value.

    Raises:
        AssertionError: no such task was enqueued; the error shows those of this name.
        ConfigurationError: the task has no argument of this name.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    others: list[str] = []
    async for record, found in _tasks(task, arguments):
        if _fits(found, arguments):
            place = Namespace(_app(task).settings.namespace).partition(record.queue, record.partition)
            return _app(task).producer.handle_at(record.id, place, task.decode)
        others.append(_call(task, found))
    shown = "; ".join([*others[:_SHOWN], *(["..."] if len(others) > _SHOWN else [])])
    raise AssertionError(f"{_call(task, arguments)} was not enqueued; enqueued: {shown or 'no task of this name'}")


async def refute_enqueued(task: Task[Any, Any], /, **arguments: Any) -> None:
    """Raise `AssertionError` if a task was enqueued with these arguments, as `assert_enqueued` finds it."""
    __tracebackhide__ = True
    async for record, found in _tasks(task, arguments):
        if _fits(found, arguments):
            raise AssertionError(f"{_call(task, found)} was enqueued: task {record.id}, {record.state}")


async def _tasks(task: Task[Any, Any], arguments: Mapping[str, Any]) -> AsyncIterator[tuple[Record, dict[str, Any]]]:
    """Yield the tasks of a name, with their arguments. arguments: those that are looked for."""
    parameters = dict([*inspect.signature(task.handler).parameters.items()][1:])
    for name in arguments.keys() - parameters.keys():
        listed = ", ".join(parameters) or "none"
        raise ConfigurationError(f"task {task.name!r} has no argument {name!r}; it has: {listed}")
    defaults = {
        name: parameter.default for name, parameter in parameters.items() if parameter.default is not parameter.empty
    }
    app = _app(task)
    gateway: Gateway = app.settings.make_gateway(app.encryptor)
    await gateway.open()
    try:
        async for record in list_tasks(gateway, Namespace(app.settings.namespace), task=task.name):
            yield record, defaults | await _arguments(gateway, task, record)
    finally:
        await gateway.close()


async def _arguments(gateway: Gateway, task: Task[Any, Any], record: Record) -> dict[str, Any]:
    data = record.args or b"{}"
    if data[:1] == REFERENCE:
        place = Namespace(_app(task).settings.namespace).partition(record.queue, record.partition)
        data = await read_arguments(gateway, place, record.id, task.name, record.secrets, data)
    else:
        data = record.cipher.decrypt(arguments_field(task.name, record.secrets), data)
    return task.arguments.decode(data)


def _fits(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(found.get(name, _MISSING) == value for name, value in wanted.items())


_MISSING: Final = object()


def _call(task: Task[Any, Any], arguments: Mapping[str, Any]) -> str:
    return f"{task.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _app(task: Task[Any, Any]) -> App:
    return cast("App", task.app)
