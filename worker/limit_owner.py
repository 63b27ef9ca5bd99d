"""The app as its limits see it: a connection, from asynchronous and from synchronous code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..queues.keys import Namespace
from ..queues.transport.gateway import Gateway
from .durable.sync.session import call_in_loop, in_handler_thread
from .task import TaskOwner

T = TypeVar("T")


class LimitedApp:
    """Connection of an app, while it is open."""

    def __init__(self, app: TaskOwner) -> None:
        self._app = app

    @property
    def place(self) -> tuple[Gateway, Namespace]:
        """The connection and the namespace."""
        producer = self._app.producer
        return producer.gateway, producer.namespace

    def run_blocking(self, call: Callable[[], Coroutine[Any, Any, T]], instead: str) -> T:
        """Run an asynchronous call from synchronous code. instead: what asynchronous code writes."""
        if in_handler_thread():
            return call_in_loop(call)
        return self._app.sync().call(lambda _: call(), instead)
