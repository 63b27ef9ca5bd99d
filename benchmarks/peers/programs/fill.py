"""Enqueuing, timed: one by one by several producers, or in one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .client import AsyncClient, BlockingClient

__all__ = ["Filled", "fill", "fill_blocking"]

_PRODUCERS = 32
"""Coroutines that each await one call after the other."""


@dataclass(frozen=True)
class Filled:
    """The peer's handles by task number, and the seconds that the calls took together."""

    handles: Sequence[Any]
    seconds: float
    bulk: bool


async def fill(client: AsyncClient, task: str, arguments: Sequence[Sequence[Any]], *, bulk: bool) -> Filled:
    """Enqueue a task for each of the arguments."""
    began = time.monotonic()
    if bulk:
        many = await client.enqueue_many(task, arguments)
        return Filled(many, time.monotonic() - began, bulk)
    handles: list[Any] = [None] * len(arguments)
    left = iter(enumerate(arguments))

    async def produce() -> None:
        for number, its in left:
            handles[number] = await client.enqueue(task, *its)

    await asyncio.gather(*(produce() for _ in range(_PRODUCERS)))
    return Filled(handles, time.monotonic() - began, bulk)


def fill_blocking(client: BlockingClient, task: str, arguments: Sequence[Sequence[Any]], *, bulk: bool) -> Filled:
    """The same with a client that blocks."""
    began = time.monotonic()
    if bulk:
        many = client.enqueue_many(task, arguments)
        return Filled(many, time.monotonic() - began, bulk)
    # One after the other: with these clients, threads that share an interpreter enqueue no more than one alone.
    handles = [client.enqueue(task, *its) for its in arguments]
    return Filled(handles, time.monotonic() - began, bulk)
