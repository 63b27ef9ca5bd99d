"""Enqueuing: one task, many, any number, now or later."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, TypeVar

import orjson
from pydantic_core import from_json

from .defaults import LONGEST, ConnectionSettings, read_settings
from .enqueueing import BatchEnqueuer
from .envelope import (
    DEFAULT_PAYLOAD_LIMIT,
    EnvelopeTemplate,
    Options,
    TaskMessage,
    check_size,
    encode_arguments,
)
from .errors import TaskNotFound
from .handle import DEFAULT_RESULT_TTL, TaskHandle
from .inbox import Sent
from .inspection import find_task
from .keys import Namespace, Partition
from .partitions import PartitionRouter, spread
from .pubsub import TaskNotifications
from .security import Encryptor, arguments_field
from .transport import Address, Gateway, Replicated, Replication

__all__ = ["Key", "Producer", "key_of", "map_items"]

R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")

Key = str | Callable[[Mapping[str, Any]], str] | None
"""What orders tasks: one key for all of a call, or a function of each task's arguments; None for no order."""


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
        result_ttl: float = DEFAULT_RESULT_TTL,
        gateway: Gateway | None = None,
        replication: Replication | None = None,
        encryptor: Encryptor | None = None,
    ) -> None:
        """redis_url: else PERDURE_REDIS_URL, else the embedded server. namespace: else PERDURE_NAMESPACE, else
        `perdure`. address: in place of a URL. payload_limit: bytes that envelope and arguments of one task may have.
        result_ttl: seconds that the record of a task is kept which is cancelled before anybody runs it.
        gateway: one that is open already, shared; it stays its owner's. replication: what `durability="replicated"`
        means, else PERDURE_REPLICAS and PERDURE_REPLICATION_TIMEOUT, else one replica within 5 s.
        encryptor: encrypts the tasks' data, else the keys that the environment names (docs/security.md).
        """
        settings = read_settings(ConnectionSettings, {"redis_url": redis_url or None, "namespace": namespace or None})
        self.address = address or settings.address
        self.namespace = Namespace(settings.namespace)
        self.payload_limit = payload_limit
        self.result_ttl = result_ttl
        self.gateway = gateway or Gateway(
            self.address,
            replication=replication or settings.replication,
            encryptor=settings.encryptor if encryptor is None else encryptor,
        )
        self._owns_gateway = gateway is None
        self.notifications = TaskNotifications(self.gateway)
        self._ways: dict[str, PartitionRouter] = {}

    async def __aenter__(self) -> Self:
        if self._owns_gateway:
            await self.gateway.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.notifications.close()
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
        durability: Replicated | None = None,
    ) -> TaskHandle[Any]:
        """Enqueue one task by name; once this returns, the task is never lost.

        args: arguments by name, plain JSON data; a `SecretStr` is sent whole and never shown. delay: seconds until it
        may run. key: tasks of one key are taken up in the order in which they were enqueued, see docs/partitions.md.
        task_id: an id of the caller's own makes
        enqueuing idempotent: a task that is known already (under the same key) is left alone. timeout, max_attempts,
        result_ttl: see `Options`. durability: "replicated" waits until replicas have the task, see docs/durability.md.
        Raises `PayloadTooLarge`, `TypeError` for arguments that are not JSON, `Unavailable`, and as kinds of it
        `ServerFull` and `NotReplicated`.
        """
        if headers or (timeout, max_attempts, result_ttl) != (None, None, None):
            form = EnvelopeTemplate(
                task, headers, Options(timeout=timeout, max_attempts=max_attempts, result_ttl=result_ttl)
            )
        else:
            form = _plain(task)
        message = form.message(*encode_arguments(args or {}), key=key, task_id=task_id)
        return await self.send_one(message, queue=queue, delay=delay, durability=durability)

    async def enqueue_many(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        queue: str = "default",
        delay: float = 0.0,
        key: Key = None,
        durability: Replicated | None = None,
    ) -> list[TaskHandle[Any]]:
        """Enqueue one task per set of arguments; all are checked before any is sent."""
        return await self.send(_messages(_plain(task), many, key), queue=queue, delay=delay, durability=durability)

    def enqueue_stream(
        self,
        task: str,
        many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        queue: str = "default",
        delay: float = 0.0,
        key: Key = None,
        durability: Replicated | None = None,
    ) -> AsyncIterator[TaskHandle[Any]]:
        """Enqueue one task per set of arguments, as they come and in constant memory: `async for handle in ...`.

        Each handle is of a task that is stored. Where a set of arguments is refused, those before it may be stored.
        """
        return self.send_stream(_messages(_plain(task), many, key), queue=queue, delay=delay, durability=durability)

    async def send_one(
        self,
        message: TaskMessage,
        *,
        queue: str,
        delay: float = 0.0,
        decode: Callable[[bytes], R] = from_json,
        durability: Replicated | None = None,
    ) -> TaskHandle[R]:
        """Enqueue one task that is encoded already."""
        message = self._ready(message, queue)
        if durability is not None:
            message = _placed_by_id(message)
        return self._handle(message.id, await self._sending(queue, delay, durability).one(message), decode)

    async def enqueue_fresh(
        self, message: TaskMessage, *, queue: str, decode: Callable[[bytes], R] = from_json
    ) -> TaskHandle[R]:
        """Enqueue a task of the caller's own id that is encoded already, in the place of a former one that has ended.

        What is kept of the former run goes. Raises `StillRunning` where it has not ended.
        """
        message = self._ready(message, queue)
        return self._handle(message.id, await self._sending(queue, 0.0, None).fresh(message), decode)

    async def send(
        self,
        messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage],
        *,
        queue: str,
        delay: float = 0.0,
        decode: Callable[[bytes], R] = from_json,
        durability: Replicated | None = None,
    ) -> list[TaskHandle[R]]:
        """Enqueue tasks that are encoded already, in few round trips; all are checked before any is sent.

        Each is stored or not; together they are not one transaction.
        """
        sending = self._sending(queue, delay, durability)
        listed = [message async for message in messages] if isinstance(messages, AsyncIterable) else list(messages)
        ready = [self._ready(message, queue) for message in listed]
        if durability is not None:
            ready = [_placed_by_id(message) for message in ready]
        return [self._handle(*one, decode) async for batch in sending.all(ready) for one in batch]

    async def send_stream(
        self,
        messages: Iterable[TaskMessage] | AsyncIterable[TaskMessage],
        *,
        queue: str,
        delay: float = 0.0,
        decode: Callable[[bytes], R] = from_json,
        durability: Replicated | None = None,
    ) -> AsyncIterator[TaskHandle[R]]:
        """Enqueue tasks that are encoded already as they come, in constant memory; yields the handle of each."""
        ready = map_items(lambda message: self._ready(message, queue), messages)
        if durability is not None:
            ready = map_items(_placed_by_id, ready)
        stored = self._sending(queue, delay, durability).all(ready)
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

    async def send_message(
        self, to: str | TaskHandle[Any], content: Any, *, sender: str = "", message_id: str | None = None
    ) -> Sent:
        """Put a message into the inbox of a task, named by its id or handle; see `TaskHandle.send`."""
        handle = await self.find(to) if isinstance(to, str) else to
        if handle is None:
            raise TaskNotFound(str(to), f"any queue of namespace {self.namespace.name!r} on {self.address.shown}")
        return await handle.send(content, sender=sender, message_id=message_id)

    def _sending(self, queue: str, delay: float, durability: Replicated | None) -> BatchEnqueuer:
        if not 0 <= delay <= LONGEST:
            raise ValueError(f"delay must be 0 to {LONGEST:.0e} seconds, not {delay}")
        if durability not in (None, "replicated"):
            raise ValueError(f"durability of what is enqueued is 'replicated' or None, not {durability!r}")
        way = self._ways.get(queue)
        if way is None:
            way = self._ways[queue] = PartitionRouter(self.gateway, self.namespace, queue)
        return BatchEnqueuer(self.gateway, way, delay, replicated=durability is not None)

    def _ready(self, message: TaskMessage, queue: str) -> TaskMessage:
        """The message, checked (its size is that of the data itself) and sealed."""
        size = len(message.envelope) + len(message.arguments)
        if size > self.payload_limit:
            check_size("the task's envelope and arguments", size, self.payload_limit)
        sealer = self.gateway.encryptor
        if not sealer.active:
            return message
        kind = arguments_field(orjson.loads(message.envelope)["task"])
        seal = sealer.of(self.namespace.partition(queue), message.id)
        return message._replace(arguments=seal.encrypt(kind, message.arguments))

    def _handle(self, task_id: str, partition: Partition, decode: Callable[[bytes], R]) -> TaskHandle[R]:
        return TaskHandle(
            task_id,
            partition,
            self.gateway,
            self.notifications,
            decode,
            retention=self.result_ttl,
            payload_limit=self.payload_limit,
        )


def _placed_by_id(message: TaskMessage) -> TaskMessage:
    """The same, where its id alone would put it: so that one that was not confirmed is found when it comes again."""
    number = spread(message.id) if message.number is None else message.number
    return message._replace(number=number, own_id=True)


def key_of(key: Key, args: Mapping[str, Any]) -> str | None:
    """The key of one task of a call. `TypeError` for a function that gives no text."""
    if key is None:
        return None
    found = key(args) if callable(key) else key
    if not isinstance(found, str):
        raise TypeError(f"a key is text, not {found!r}: key=lambda args: str(...)")
    return found


@lru_cache(maxsize=256)
def _plain(task: str) -> EnvelopeTemplate:
    return EnvelopeTemplate(task)


def _messages(
    form: EnvelopeTemplate, many: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], key: Key
) -> Iterable[TaskMessage] | AsyncIterable[TaskMessage]:
    return map_items(lambda args: form.message(*encode_arguments(args), key=key_of(key, args)), many)


def map_items(make: Callable[[T], U], many: Iterable[T] | AsyncIterable[T]) -> Iterable[U] | AsyncIterable[U]:
    """What `make` makes of each, as they come; asynchronous where they are."""
    if isinstance(many, AsyncIterable):
        return (make(one) async for one in many)
    return map(make, many)
