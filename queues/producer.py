"""Enqueuing: one task, many, now or later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from .keys import Namespace, Partition
from .news import News
from .place import default_address, default_namespace
from .records import find_task
from .scripts import queue_script

__all__ = ["Message", "Producer"]

R = TypeVar("R")

_ENQUEUE = queue_script("enqueue")
_SCHEDULE = queue_script("schedule")

_CHUNK_TASKS = 500
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Message:
    """A task ready to be sent: its envelope and its arguments as a JSON object."""

    envelope: Envelope
    arguments: bytes


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
        self._known_queues: set[str] = set()

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
        task_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_attempts: int | None = None,
        result_ttl: float | None = None,
    ) -> TaskHandle[Any]:
        """Enqueue one task by name; once this returns, the task is never lost.

        args: arguments by name, plain JSON data. delay: seconds until it may run. task_id: an id of the caller's own
        makes enqueuing idempotent: a task that is known already is left alone. timeout, max_attempts, result_ttl:
        see `Options`. Raises `PayloadTooLarge`, `TypeError` for arguments that are not JSON, `Unavailable`.
        """
        envelope = Envelope(
            id=new_task_id() if task_id is None else check_task_id(task_id),
            task=task,
            headers=dict(headers or {}),
            options=Options(timeout=timeout, max_attempts=max_attempts, result_ttl=result_ttl),
        )
        message = Message(envelope, encode_arguments(args or {}))
        return (await self.send([message], queue=queue, delay=delay))[0]

    async def enqueue_many(
        self, task: str, many: Iterable[Mapping[str, Any]], *, queue: str = "default", delay: float = 0.0
    ) -> list[TaskHandle[Any]]:
        """Enqueue one task per set of arguments; all are checked before any is sent."""
        messages = [Message(Envelope(id=new_task_id(), task=task), encode_arguments(args)) for args in many]
        return await self.send(messages, queue=queue, delay=delay)

    async def send(
        self,
        messages: Sequence[Message],
        *,
        queue: str,
        delay: float = 0.0,
        decode: Callable[[bytes], R] = from_json,
    ) -> list[TaskHandle[R]]:
        """Enqueue messages, in few round trips. Each is stored or not; together they are not one transaction."""
        if delay < 0:
            raise ValueError(f"delay must not be negative, not {delay}")
        partition = self.namespace.partition(queue)
        encoded = [(message.envelope.id, message.envelope.encode(), message.arguments) for message in messages]
        for _, envelope, arguments in encoded:
            check_size("the task's envelope and arguments", len(envelope) + len(arguments), self.payload_limit)
        await self._announce(partition)
        for chunk in _chunks(encoded):
            await self._store(partition, chunk, delay)
        return [TaskHandle(message.envelope.id, partition, self.gateway, self.news, decode) for message in messages]

    async def find(self, task_id: str) -> TaskHandle[Any] | None:
        """The handle of a task known only by its id; None where no queue of the namespace has it."""
        partition = await find_task(self.gateway, self.namespace, task_id)
        return None if partition is None else TaskHandle(task_id, partition, self.gateway, self.news)

    async def _announce(self, partition: Partition) -> None:
        """Make the queue known to whoever lists queues, once per process."""
        if partition.queue not in self._known_queues:
            await self.gateway.command("HSETNX", self.namespace.queues, partition.queue, 1)
            self._known_queues.add(partition.queue)

    async def _store(self, partition: Partition, chunk: Sequence[tuple[str, bytes, bytes]], delay: float) -> None:
        records = [partition.record(task_id) for task_id, _, _ in chunk]
        if delay > 0:
            args: list[str | bytes | int | float] = [round(delay * 1000)]
            for task_id, envelope, arguments in chunk:
                args += (task_id, envelope, arguments)
            await self.gateway.run(_SCHEDULE, [partition.due, partition.nudge, *records], args)
        else:
            payload = [part for _, envelope, arguments in chunk for part in (envelope, arguments)]
            await self.gateway.run(_ENQUEUE, [partition.ready, *records], payload)


def _chunks(encoded: Sequence[tuple[str, bytes, bytes]]) -> Iterable[Sequence[tuple[str, bytes, bytes]]]:
    """Slices small enough that no other client waits long for one script."""
    start, size = 0, 0
    for position, (_, envelope, arguments) in enumerate(encoded):
        weight = len(envelope) + len(arguments)
        if position > start and (position - start >= _CHUNK_TASKS or size + weight > _CHUNK_BYTES):
            yield encoded[start:position]
            start, size = position, 0
        size += weight
    if start < len(encoded):
        yield encoded[start:]
