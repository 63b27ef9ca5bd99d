"""Perdure: `perdure worker run programs.frameworks.on_perdure:app`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from perdure import App, Context, Settings, TaskHandle

from ..setup import CHILDREN, TIMES
from . import handlers

BLOCKING = False
BULK = True
RESULTS = True

app = App("bench")


@app.task
async def noop(ctx: Context, number: int) -> int:
    return await handlers.noop(number)


@app.task
async def echo(ctx: Context, number: int, text: str) -> str:
    return await handlers.echo(number, text)


@app.task
async def nap(ctx: Context, number: int) -> int:
    return await handlers.nap(number)


@app.task
async def hang(ctx: Context, number: int) -> int:
    return await handlers.hang(number)


@app.task
async def spread(ctx: Context, number: int) -> int:
    TIMES.begin(number)
    children = await noop.enqueue_many({"number": child} for child in range(1, 1 + CHILDREN))
    for child in children:
        await child.result()
    TIMES.end(number)
    return number + 1


async def add(number: int) -> int:
    return number + 1


@app.task
async def walk(ctx: Context, number: int) -> int:
    for _ in range(10):
        number = await ctx.step("add", add, number)
    return number


class Client:
    async def enqueue(self, task: str, *arguments: Any) -> TaskHandle[Any]:
        handle: TaskHandle[Any] = await _TASKS[task].enqueue(*arguments)
        return handle

    async def enqueue_many(self, task: str, arguments: Sequence[Sequence[Any]]) -> Sequence[TaskHandle[Any]]:
        names = ("number", "text")
        named = (dict(zip(names, its, strict=False)) for its in arguments)
        handles: list[TaskHandle[Any]] = await _TASKS[task].enqueue_many(named)
        return handles

    async def ready(self, handle: TaskHandle[Any]) -> bool:
        return (await handle.status()).terminal

    async def read(self, handle: TaskHandle[Any]) -> Any:
        return await handle.result()


_TASKS: dict[str, Any] = {"noop": noop, "echo": echo, "nap": nap, "hang": hang, "spread": spread}


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    async with app:
        yield Client()


def recovery() -> tuple[float, str]:
    """Return the default seconds of silence after which a worker counts as dead, and where it is defined."""
    return float(Settings.model_fields["lease"].default), "Settings.lease"


@asynccontextmanager
async def walker() -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """Provide a durable task of ten steps, run by a worker in another process."""

    async def one(number: int) -> int:
        return await (await walk.enqueue(number)).result()

    async with app:
        yield one
