"""Late arrivals: a command was sent again on another connection, and the bytes of the first one arrive afterwards.

A case is an async generator: it lets one call be sent through a line that holds its bytes back, then lets the callers
continue as far as they can, so that as much as possible of the fence is the same. It yields wherever the late bytes
must change nothing; `test_late_arrivals.py` delivers them there, and compares the whole namespace before and after.

| table | calls |
|---|---|
| `commands` | of runs, of producers, and for dead letters |
| `chores` | of a partition, uploads, and edits by persons |
| `registrations` | of processes, settings, routes and apps |
| `joins` | of parents and children |
| `admission` | for tasks that wait for limits |
| `limits` | of tokens and definitions of limits |
| `sessions` | for a session |
| `key_values` | for the key-value store |
| `workspaces` | for identities and shared files |
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from perdure.deadletter.letters import DeadLetter, Filter, list_letters
from perdure.queues import Gateway, Namespace, Partition, Producer
from perdure.queues.delivery.checkpoint import Entry
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery
from perdure.queues.envelope import EnvelopeTemplate
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import claim_all, claim_one, promote, read_one, worker
from tests.support.delivery_calls import SETTLING, add_entries
from tests.support.lossy_proxy import LossyProxy, deliver_unchanged

Moments = AsyncIterator[None]
"""Moments at which the late bytes must change nothing."""


@dataclass(frozen=True)
class Scene:
    """A server, a line to it that holds bytes back (`late`), and the acts of a worker and a producer on it."""

    gateway: Gateway
    late: Gateway
    proxy: LossyProxy
    namespace: Namespace
    producer: Producer
    folder: Path

    @property
    def partition(self) -> Partition:
        return self.namespace.partition("default")

    def hold(self, script: str) -> None:
        """Hold back the next call of the script on the line."""
        self.proxy.hold(queue_script(script).sha.encode())

    async def unchanged(self) -> None:
        """Deliver the late bytes, and check that nothing changes."""
        await deliver_unchanged(self.gateway, self.namespace, self.proxy)

    async def play(self, case: Callable[[Scene], Moments]) -> None:
        moments = 0
        async with aclosing(case(self)) as played:  # type: ignore[type-var]
            async for _ in played:
                moments += 1
                await self.unchanged()
        assert moments

    @asynccontextmanager
    async def late_producer(self) -> AsyncIterator[Producer]:
        """A producer on the line."""
        async with Producer(namespace=self.namespace.name, gateway=self.late) as producer:
            yield producer

    async def worker(self, name: str = "a") -> Consumer:
        return await worker(self.gateway, self.partition, name=name)

    async def enqueue(self, task_id: str = "x", delay: float = 0.0) -> None:
        await self.producer.enqueue("t", {"n": 1}, task_id=task_id, queue="default", delay=delay)

    async def enqueue_fresh(self) -> None:
        await self.producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="x"), queue="default")

    async def read(self) -> Delivery:
        return await read_one(await self.worker())

    async def claim(self) -> Delivery:
        return await claim_one(await self.worker())

    async def claim_all(self, name: str = "a") -> list[Delivery]:
        return await claim_all(await self.worker(name))

    async def enqueue_and_read(self, *entries: Entry) -> Delivery:
        """Enqueue task x, let worker a read it, and write entries."""
        await self.enqueue()
        delivery = await self.read()
        if entries:
            await self.add_entries(delivery, *entries)
        return delivery

    async def promote(self, task_id: str = "x") -> int:
        return await promote(self.gateway, self.partition, task_id)

    async def promote_and_read(self) -> Delivery:
        await self.promote()
        return await self.read()

    async def settle(self, act: str, delivery: Delivery, task_id: str = "x") -> None:
        await SETTLING[act](self.gateway, delivery, task_id)

    async def add_entries(self, delivery: Delivery, *entries: Entry) -> None:
        await add_entries(self.gateway, delivery, "x", entries)

    async def letter(self) -> DeadLetter:
        (letter,) = [letter async for letter in list_letters(self.gateway, [self.partition], Filter())]
        return letter

    async def forget(self) -> None:
        """Delete the keys of task x, as when they expire."""
        place = self.partition
        await self.gateway.command("DEL", place.record("x"), place.steps("x"), place.log("x"))


class Table:
    """Cases by name, for `pytest.mark.parametrize`."""

    def __init__(self) -> None:
        self.cases: list[Any] = []

    def each(self, *variants: object) -> Callable[[Callable[..., Moments]], Callable[..., Moments]]:
        """Add a case once for each variant, its argument of that name."""

        def add(case: Callable[..., Moments]) -> Callable[..., Moments]:
            assert inspect.isasyncgenfunction(case)
            for variant in variants:
                self.cases.append(pytest.param(partial(case, variant=variant), id=f"{case.__name__}-{variant}"))
            return case

        return add

    def case(self, case: Callable[[Scene], Moments]) -> Callable[[Scene], Moments]:
        """Add a case."""
        assert inspect.isasyncgenfunction(case)
        self.cases.append(pytest.param(case, id=case.__name__))
        return case
