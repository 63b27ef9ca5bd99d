"""Arguments that a step changes in place, which a resumed run does not repeat: a warning, an error in these tests."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from perdure import App, Context, Retry, SyncContext
from perdure.worker.resume_warning import ResumeWarning
from pydantic import BaseModel

from tests.support.workers import bounded, letter, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("changed")]


@dataclass
class Cart:
    items: list[str] = field(default_factory=list)


class Note(BaseModel):
    tags: set[str] = set()


async def append(messages: list[dict[str, str]]) -> str:
    messages.append({"role": "assistant"})
    return "continue"


def add_item(order: str, cart: Cart) -> None:
    cart.items.append(order)


def add_tag(*notes: Note) -> None:
    notes[-1].tags.add("new")


def rename(first: int, **fields: dict[str, int]) -> None:
    fields["second"].clear()


def cut(words: list[str]) -> None:
    """Add half of an emoji."""
    words.append("\ud83d")


def spoil(words: list[Any]) -> None:
    """Add what has no JSON form."""
    words.append(words)


class Adder:
    def add(self, found: set[int]) -> None:
        found.add(1)


CHANGES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (append, ([{"role": "user"}],), {}, "'messages'"),
    (add_item, ("A", Cart()), {}, "'cart'"),
    (add_tag, (Note(), Note()), {}, "'notes'"),
    (rename, (1,), {"second": {"a": 1}}, "'second'"),
    (Adder().add, (set(),), {}, "'found'"),
    (functools.partial(add_item, "B"), (Cart(),), {}, "'cart'"),
    (list.append, ([1], 2), {}, "'self'"),
    (cut, ([],), {}, "'words'"),
    (spoil, ([],), {}, ""),
]


@pytest.mark.parametrize(("fn", "args", "kwargs", "name"), CHANGES)
async def test_a_step_that_changes_an_argument_is_reported(
    app: App, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.step("act", fn, *args, **kwargs)

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.error.endswith("ResumeWarning")
    what = f"its argument {name}" if name else "one of its arguments"
    assert f"step 'act': {what} changed while the step ran" in found.message


async def test_a_production_worker_warns_once_and_records_the_step(app: App) -> None:
    @app.task
    def job(ctx: SyncContext) -> int:
        messages: list[dict[str, str]] = []
        for _ in range(3):
            ctx.step("turn of a worker", append, messages)
        return len(messages)

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ResumeWarning)
        handle = await job.enqueue()
        await work_off(app)
    assert await bounded(handle.result()) == 3
    assert [str(one.message).partition(":")[0] for one in given] == ["step 'turn of a worker'"]


async def test_arguments_that_stay_are_not_reported(app: App) -> None:
    class Client:
        calls = 0

    def read(client: Client, words: list[str], cart: Cart, other: float) -> list[str]:
        client.calls += 1
        return sorted(words, reverse=True)

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> list[str]:
        found: list[str] = await ctx.step("read", read, Client(), ["a", "b"], Cart(["x"]), other=1.5)
        return found

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["b", "a"]
