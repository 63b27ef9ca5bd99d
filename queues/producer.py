"""Enqueuing: one task, many, any number, now or later."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic_core import from_json

from .address import Address
from .envelope import (
    DEFAULT_PAYLOAD_LIMIT,
    Envelope,
    Options,
    check_size,
    check_task_id,
    encode_arguments,
    new_task_id,
)
from .gateway import Gateway
from .handle import TaskHandle
from .inspection import find_task
from .keys import Namespace, Partition
from .news import News
from .place import default_address, default_namespace
from .routes import spread
from .sending import Entry, Sending
from .way import Way

__all__ = ["Key", "Message", "Producer", "as_async", "key_of"]

R = TypeVar("R")
T = TypeVar("T")

Key = str | Callable[[Mapping[str, Any]], str] | None
"""What orders tasks: one key for all of a call, or a function of each task's arguments; None for no order."""


@dataclass(frozen=True, slots=True)
class Message:
    """A task ready to be sent: its envelope and its arguments as a JSON object.

    key: tasks of one key go to one partition. own_id: the id is the caller's own, so the task may be known already.
    """

    envelope: Envelope
    arguments: bytes
    key: str | None = None
    own_id: bool = False


class Producer:
    """Puts tasks on queues by name; needs no handler code.

    async with Producer("redis://localhost") as producer:
        handle = await producer.enqueue("audit", {"root": "src"}, queue="default")
        report = await handle.result(timeout=60)
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        namespace: str | None = None,
        address: Address | None = None,
        payload_limit: int = DEFAULT_PAYLOAD_LIMIT,
        gateway: Gateway | None = None,
    ) -> None:
        """redis_url: else PERDURE_REDIS_URL, else the embedded server. namespace: else PERDURE_NAMESPACE, else
        `perdure`. address: in place of a URL. payload_limit: bytes that envelope and arguments of one task may have.
        gateway: one that is open already, shared; it stays its owner's.
        """
        self.address = address or default_address(redis_url)
        self.namespace = Namespace(namespace or default_namespace())
        self.payload_limit = payload_limit
        self.gateway = gateway or Gateway(self.address)
        self._owns_gateway = gateway is None
        self.news = News(self.gateway)
        self._ways: dict[str, Way] = {}

    async def __aenter__(self) -> Self:
        if self._owns_gateway:
            await self.gateway.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.news.close()
        if self._owns_gateway:
            await self.gateway.close()

    async def enqueue(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        queue: str = "default",
        delay: float = 0.0,
        key: str | None = None,
        task_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_attempts: int | None = None,
        result_ttl: float | None = None,
    ) -> TaskHandle[Any]:
        """Enqueue one task by name; once this returns, the task is never lost.

        args: arguments by name, plain JSON data. delay: seconds until it may run. key: tasks of one key are taken up
        in the order in which they were enqueued, see docs/partitions.md. task_id: an id of the caller's own makes
        enqueuing idempotent: a task that is known already (under the same key) is left alone. timeout, max_attempts,
        result_ttl: see `Options`. Raises `PayloadTooLarge`, `TypeError` for arguments that are not JSON,
        `Unavailable`.
        """
        envelope = Envelope(
            id=new_task_id() if task_id is None else check_task_id(task_id),
            task=task,
            headers=dict(headers or {}),
            options=Options(timeout=timeout, max_attempts=max_attempts, result_ttl=result_ttl),
        )
        message = Message(envelope, encode_arguments(args or {}), key, task_id is not None)
        return (await self.send([message], queue=queue, delay=delay))[0]

    async def enqueue_many(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        queue: str = "default",
        delay: float = 0.0,
        key: Key = None,
    ) -> list[TaskHandle[Any]]:
        """Enqueue one task per set of arguments; all are checked before any is sent."""
        messages = [message async for message in self._messages(task, many, key)]
        return await self.send(messages, queue=queue, delay=delay)

    def enqueue_stream(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        queue: str = "default",
        delay: float = 0.0,
        key: Key = None,
    ) -> AsyncIterator[TaskHandle[Any]]:
        """Enqueue one task per set of arguments, as they come and in constant memory: `async for handle in ...`.

        Each handle is of a task that is stored. Where a set of arguments is refused, those before it may be stored.
        """
        return self.send_stream(self._messages(task, many, key), queue=queue, delay=delay)

    async def _messages(
        self, task: str, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], key: Key
    ) -> AsyncIterator[Message]:
        async for args in as_async(many):
            yield Message(Envelope(id=new_task_id(), task=task), encode_arguments(args), key_of(key, args))

    async def send(
        self,
        messages: Sequence[Message],
        *,
        queue: str,
        delay: float = 0.0,
        decode: Callable[[bytes], R] = from_json,
    ) -> list[TaskHandle[R]]:
        """Enqueue messages, in few round trips. Each is stored or not; together they are not one transaction."""
        sending = self._sending(queue, delay)
        entries = [self._entry(message) for message in messages]
        if len(entries) == 1:
            return [self._handle(entries[0].id, await sending.one(entries[0]), decode)]
        stored = sending.all(entries)
        return [self._handle(*one, decode) async for batch in stored for one in batch]

    async def send_stream(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        queue: str,
        delay: float = 0.0,
        decode: Callable[[bytes], R] = from_json,
    ) -> AsyncIterator[TaskHandle[R]]:
        """Enqueue messages as they come, in constant memory; yields the handle of each that is stored."""
        sending = self._sending(queue, delay)
        stored = sending.all(self._entry(message) async for message in as_async(messages))
        try:
            async for batch in stored:
                for task_id, partition in batch:
                    yield self._handle(task_id, partition, decode)
        finally:
            await stored.aclose()

    async def find(self, task_id: str) -> TaskHandle[Any] | None:
        """The handle of a task known only by its id; None where no queue of the namespace has it."""
        partition = await find_task(self.gateway, self.namespace, task_id)
        return None if partition is None else self._handle(task_id, partition, from_json)

    def _sending(self, queue: str, delay: float) -> Sending:
        if delay < 0:
            raise ValueError(f"delay must not be negative, not {delay}")
        way = self._ways.get(queue)
        if way is None:
            way = self._ways[queue] = Way(self.gateway, self.namespace, queue)
        return Sending(self.gateway, way, delay)

    def _entry(self, message: Message) -> Entry:
        envelope, arguments = message.envelope.encode(), message.arguments
        check_size("the task's envelope and arguments", len(envelope) + len(arguments), self.payload_limit)
        task_id = message.envelope.id
        key = task_id if message.key is None and message.own_id else message.key
        return Entry(task_id, envelope, arguments, None if key is None else spread(key), message.own_id)

    def _handle(self, task_id: str, partition: Partition, decode: Callable[[bytes], R]) -> TaskHandle[R]:
        return TaskHandle(task_id, partition, self.gateway, self.news, decode)


def key_of(key: Key, args: Mapping[str, Any]) -> str | None:
    """The key of one task of a call. `TypeError` for a function that gives no text."""
    found = key(args) if callable(key) else key
    if not isinstance(found, str | None):
        raise TypeError(f"a key is text, not {found!r}: key=lambda args: str(...)")
    return found


async def as_async(many: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Whatever kind of iterable it is, one after another."""
    if isinstance(many, AsyncIterable):
        async for one in many:
            yield one
    else:
        for one in many:
            yield one
