"""A task, seen by whoever enqueued it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, Generic, TypeVar

import anyio
from pydantic_core import from_json

from .derived_tasks import MOST_HAND_OFFS
from .envelope import DEFAULT_PAYLOAD_LIMIT
from .errors import HandOffRefused, TaskCancelled, TaskFailed, TaskNotFound
from .event_log import TaskEvent, read_events, walk_events
from .inbox import InboxMessage, Sent, read_inbox, send_message
from .inspection import find_task
from .keys import GROUP, RESERVED, Namespace, Partition
from .pubsub import TaskNotifications
from .records import Record, State, read_record
from .security import RESULT
from .transport import Gateway, queue_script, retry_while_unavailable

__all__ = ["DEFAULT_RESULT_TTL", "TaskHandle"]

R = TypeVar("R")

_CANCEL = queue_script("cancel")

DEFAULT_RESULT_TTL: Final = 86_400.0
"""Seconds that the record of a task which has ended is kept."""

_ONE_LOOK: Final = 1.0
"""Seconds that the first look may take, so that a timeout of 0 means to look once."""

_PAGE: Final = 200
"""Events that are read together."""

_LOOK_AGAIN = 30.0
"""Seconds after which a waiter reads the record though it heard nothing."""


class TaskHandle(Generic[R]):
    """One task: its id, and what can be asked about it from anywhere."""

    def __init__(
        self,
        task_id: str,
        partition: Partition,
        gateway: Gateway,
        news: TaskNotifications,
        decode: Callable[[bytes], R] = from_json,
        *,
        retention: float = DEFAULT_RESULT_TTL,
        payload_limit: int = DEFAULT_PAYLOAD_LIMIT,
    ) -> None:
        self.id = task_id
        self.partition = partition
        self._gateway = gateway
        self._news = news
        self._decode = decode
        self._retention = retention
        self._handed = 0
        self._payload_limit = payload_limit

    def __repr__(self) -> str:
        return f"TaskHandle({self.id!r}, queue={self.partition.queue!r})"

    async def record(self) -> Record:
        """All that is known of the task; `TaskNotFound` where there is no record (any more)."""
        record = await read_record(self._gateway, self.partition, self.id)
        if record is None:
            raise TaskNotFound(self.id, f"queue {self.partition.queue!r}")
        return record

    async def status(self) -> State:
        """Where the task stands now."""
        return (await self.record()).state

    async def result(self, timeout: float | None = None) -> R:
        """Wait for the outcome and return it; of a task that was handed on, that of the other. Woken by push.

        It outlives a server that goes away, also one that is away when the waiting begins. timeout: seconds to wait,
        None for ever. Raises `TimeoutError` when they have passed, `TaskFailed` when the task is a dead letter,
        `TaskCancelled` when it was cancelled, `TaskNotFound` when nothing is known of it, `DecryptionError` when
        it is sealed and the key is missing.
        """
        begun = time.monotonic()
        with anyio.fail_after(None if timeout is None else max(timeout, _ONE_LOOK)):
            record = await retry_while_unavailable(self.record)
        if not record.state.terminal:
            with anyio.fail_after(None if timeout is None else timeout - (time.monotonic() - begun)):
                record = await self._wait()
        if record.handed_to is not None:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
            return await (await self._next(record.handed_to)).result(left)
        return self._outcome(record)

    async def successor(self) -> TaskHandle[R] | None:
        """The task that goes on where this one has handed on; None where it has not. Raises `TaskNotFound`."""
        record = await self.record()
        return None if record.handed_to is None else await self._next(record.handed_to)

    async def _next(self, task_id: str) -> TaskHandle[R]:
        if self._handed > MOST_HAND_OFFS or task_id == self.id:
            raise HandOffRefused(f"task {self.id} was handed on in a circle, or too often to be followed: {task_id}")
        namespace = Namespace(self.partition.namespace)
        found = await retry_while_unavailable(lambda: find_task(self._gateway, namespace, task_id))
        if found is None:
            raise TaskNotFound(task_id, f"namespace {namespace.name!r}, as which task {self.id} goes on")
        following = TaskHandle(
            task_id,
            found,
            self._gateway,
            self._news,
            self._decode,
            retention=self._retention,
            payload_limit=self._payload_limit,
        )
        following._handed = self._handed + 1
        return following

    async def _wait(self) -> Record:
        async with self._listening() as inbox:
            while True:
                record = await retry_while_unavailable(self.record)
                if record.state.terminal:
                    return record
                with anyio.move_on_after(_LOOK_AGAIN):
                    await inbox.get()

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[asyncio.Queue[bytes]]:
        """News of the task; begins when Redis is there to begin with."""
        channel = self.partition.record(self.id)
        async with AsyncExitStack() as stack:
            yield await retry_while_unavailable(lambda: stack.enter_async_context(self._news.listen(channel)))

    async def _events_after(self, last: str) -> list[TaskEvent]:
        return await read_events(self._gateway, self.partition, self.id, after=last, limit=_PAGE)

    def _outcome(self, record: Record) -> R:
        if record.state is State.CANCELLED:
            raise TaskCancelled(self.id)
        if record.state is State.DEAD:
            raise TaskFailed(self.id, record.reason or "unknown", dict(record.error or {}))
        if record.result is None:
            return self._decode(b"null")
        return self._decode(record.cipher.decrypt(RESULT, record.result))

    async def cancel(self) -> State:
        """Cancel the task: at once where nobody runs it, else at its next step or beat.

        Returns the state after the request: `cancelled`, `running` (the worker has been asked), or the terminal state
        that came first. Raises `TaskNotFound`.
        """
        partition = self.partition
        keys = [
            partition.ready,
            partition.record(self.id),
            partition.steps(self.id),
            partition.log(self.id),
            partition.due,
        ]
        answer: bytes = await self._gateway.run(_CANCEL, keys, [GROUP, RESERVED, self.id, int(self._retention * 1000)])
        if answer == b"missing":
            raise TaskNotFound(self.id, f"queue {partition.queue!r}")
        return State.RUNNING if answer == b"requested" else State(answer.decode())

    async def send(self, content: Any, *, sender: str = "", message_id: str | None = None) -> Sent:
        """Put a message into the task's inbox, which wakes it where it waits for one.

        content: JSON data. sender: who it is from. message_id: sent again under the same id, it is there once. Raises
        `TaskNotFound`, `TaskEnded`, `InboxFull`, `PayloadTooLarge`, `TypeError` for what is no JSON.
        """
        return await send_message(
            self._gateway,
            self.partition,
            self.id,
            content,
            sender=sender,
            message_id=message_id,
            limit=self._payload_limit,
        )

    async def pending_messages(self) -> list[InboxMessage]:
        """The messages in the task's inbox that it has not read yet, in order; they stay there."""
        return [message async for message in read_inbox(self._gateway, self.partition, self.id)]

    async def events(self, *, follow: bool = True, after: str = "0-0") -> AsyncIterator[TaskEvent]:
        """What happened to the task, oldest first; with `follow`, goes on until the task has its outcome.

        after: the id of the event after which to begin.
        """
        if not follow:
            async for event in walk_events(self._gateway, self.partition, self.id, after=after):
                yield event
            return
        async with self._listening() as inbox:
            while True:
                state = await retry_while_unavailable(self.status)
                more = True
                while more:
                    page = await retry_while_unavailable(partial(self._events_after, after))
                    more = len(page) == _PAGE
                    for event in page:
                        after = event.id
                        yield event
                if state.terminal:
                    return
                with anyio.move_on_after(_LOOK_AGAIN):
                    await inbox.get()
                    _drain(inbox)


def _drain(inbox: asyncio.Queue[Any]) -> None:
    while not inbox.empty():
        inbox.get_nowait()
