"""Notifications of a worker that a task which it runs is to be cancelled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from ....queues.errors import QueueError
from ....queues.producer import Producer
from ....queues.transport.backoff import retry_while_unavailable
from ...log import logger


class CancelListener:
    """Calls `on_request` after each notification, and whenever one may have been missed.

    A notification is a hint that anyone who may publish can forge: what it says is not used. The renewal that follows
    reads the request itself.
    """

    def __init__(self, producer: Producer, worker: str, on_request: Callable[[], None]) -> None:
        self._notifications = producer.notifications
        self._channel = producer.namespace.worker_channel(worker)
        self._on_request = on_request

    async def run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                requests = await retry_while_unavailable(
                    lambda: stack.enter_async_context(self._notifications.listen(self._channel))
                )
                while True:
                    self._on_request()
                    await requests.get()
        except QueueError as error:
            logger.warning("could not subscribe to cancellations: {}; they are read at each lease renewal", error)
