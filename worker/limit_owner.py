"""The app as its limits see it: a connection, from asynchronous and from synchronous code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .durable.sync.session import call_in_loop, in_handler_thread
from .task import TaskOwner

T = TypeVar("T")


class LimitedApp:
    """Connection of an app, while it is open."""

    def __init__(self, app: TaskOwner) -> None:
        self._app = app

    async def hold_limit(self, name: str, seconds: float) -> None:
        """Hold a limit, while the app is open."""
        from ..queues.limits.store import LimitStore

        producer = self._app.producer
        await LimitStore(producer.gateway, producer.namespace).hold(name, seconds)

    def run_blocking(self, call: Callable[[], Coroutine[Any, Any, T]], instead: str) -> T:
        """Run an asynchronous call from synchronous code. instead: what asynchronous code writes."""
        if in_handler_thread():
            return call_in_loop(call)
        return self._app.sync().call(lambda _: call(), instead)
