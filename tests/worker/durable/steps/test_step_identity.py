"""A resumed run finds the records of its steps: in any order of concurrent branches, by scope, and by id."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from perdure import AlreadyDone, App, Context, Retry, TaskFailed, current_step
from perdure.deadletter.policy import Reason

from tests.support.workers import bounded, history, letter, recorded_steps, work_off

pytestmark = pytest.mark.integration

AGAIN = Retry(max_attempts=2, base=0.0)


class Effects:
    """Counts how often each step is called, and its idempotency keys."""

    def __init__(self) -> None:
        self.calls: Counter[object] = Counter()
        self.keys: dict[object, set[str]] = {}

    async def act(self, value: Any) -> Any:
        self.calls[value] += 1
        self.keys.setdefault(value, set()).add(current_step().key)
        return f"result of {value}"


async def results(app: App, handler: Callable[[Context], Awaitable[Any]]) -> Any:
    """Return the result of a task whose handler fails in its first attempt."""

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> Any:
        return await handler(ctx)

    handle = await job.enqueue()
    await work_off(app)
    return await bounded(handle.result())


async def in_turn(branches: Sequence[Callable[[], Awaitable[Any]]], order: Sequence[int]) -> list[Any]:
    """Run branches concurrently, so that they begin in this order. Return their results in the order of `branches`."""
    tasks = {number: asyncio.ensure_future(branches[number]()) for number in order}
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return [await tasks[number] for number in range(len(branches))]


ORDERS = {"the same": [0, 1, 2, 3, 4, 5], "reversed": [5, 4, 3, 2, 1, 0], "mixed": [3, 0, 5, 1, 4, 2]}


@pytest.mark.parametrize("order", ORDERS)
async def test_branches_find_their_records_in_another_order(app: App, order: str) -> None:
    effects = Effects()

    async def job(ctx: Context) -> list[str]:
        branches = [lambda n=n: ctx.step("fetch", effects.act, n) for n in range(6)]
        found = await in_turn(branches, ORDERS["the same" if ctx.attempt == 1 else order])
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    assert await results(app, job) == [f"result of {n}" for n in range(6)]
    assert effects.calls == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("unrecorded", [{0}, {5}, {1, 3}, {0, 1, 2, 3, 4}], ids=str)
@pytest.mark.parametrize("order", ORDERS)
async def test_branches_that_were_cut_off_run_again_and_the_others_do_not(
    app: App, order: str, unrecorded: set[int]
) -> None:
    effects = Effects()

    async def job(ctx: Context) -> list[str]:
        async def fetch(number: int) -> str:
            found: str = await effects.act(number)
            if ctx.attempt == 1 and number in unrecorded:
                raise ConnectionError
            return found

        async def branch(number: int) -> str:
            await ctx.step("fetch", fetch, number)
            return await ctx.step("parse", effects.act, f"page {number}")

        branches = [lambda n=n: branch(n) for n in range(6)]
        return await in_turn(branches, ORDERS["the same" if ctx.attempt == 1 else order])

    assert await results(app, job) == [f"result of page {n}" for n in range(6)]
    assert effects.calls == {n: 2 if n in unrecorded else 1 for n in range(6)} | {f"page {n}": 1 for n in range(6)}


async def test_a_handler_that_sorts_its_input_in_another_way_finds_its_records(app: App) -> None:
    effects = Effects()

    async def job(ctx: Context) -> dict[str, str]:
        names = ["a", "b", "c"] if ctx.attempt == 1 else ["c", "a", "b"]
        found = {name: await ctx.step("read", effects.act, name) for name in names}
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    assert await results(app, job) == {name: f"result of {name}" for name in "cab"}
    assert set(effects.calls.values()) == {1}


async def test_equal_calls_get_their_results_in_order(app: App) -> None:
    numbers = iter(range(9))

    async def job(ctx: Context) -> list[int]:
        found = [await ctx.step("roll", lambda: next(numbers)) for _ in range(3)]
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    assert await results(app, job) == [0, 1, 2]


async def test_a_call_that_fits_no_record_while_records_are_left_is_a_mismatch(app: App) -> None:
    effects = Effects()

    async def job(ctx: Context) -> None:
        for name in ["a", "b", "c"] if ctx.attempt == 1 else ["b", "x"]:
            await ctx.step("read", effects.act, name)
        raise ConnectionError

    with pytest.raises(TaskFailed) as caught:
        await results(app, job)
    assert caught.value.reason == Reason.NOT_RETRYABLE
    assert 'step \'read\' was recorded with arguments "a" and is now called with "x"' in str(caught.value)
    assert effects.calls == {"a": 1, "b": 1, "c": 1}


async def test_a_changed_branch_runs_and_takes_no_record_of_another(app: App) -> None:
    effects = Effects()

    async def job(ctx: Context) -> list[str]:
        values = [0, 1, 2] if ctx.attempt == 1 else [2, 9, 0]
        found = await asyncio.gather(*(ctx.step("fetch", effects.act, value) for value in values))
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    assert await results(app, job) == ["result of 2", "result of 9", "result of 0"]
    assert effects.calls == {0: 1, 1: 1, 2: 1, 9: 1}


# records that are left


async def orphans(app: App, handler: Callable[[Context], Awaitable[Any]]) -> list[tuple[tuple[str, ...], int]]:
    """Return the steps and the count of each `orphaned` event of a task whose handler fails in its first attempt."""

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        await handler(ctx)
        if ctx.attempt == 1:
            raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    found = [event.data for event in await history(handle) if event.type == "orphaned"]
    return [(tuple(data["steps"]), data["count"]) for data in found]


async def test_recorded_steps_that_are_not_asked_for_are_logged(app: App) -> None:
    """A step that a deploy renamed runs again, and one that it removed is left."""

    async def job(ctx: Context) -> None:
        await ctx.step("list" if ctx.attempt == 1 else "list files", len, "a")
        with ctx.scope("page-1"):
            await asyncio.gather(*(ctx.step("read", len, "a" * number) for number in range(3 - ctx.attempt)))
        await ctx.options(step_id=f"order-{ctx.attempt}").step("pay", len, "a")
        await ctx.decide("go on")
        if ctx.attempt == 1:
            await ctx.decide("an event is not a step")

    assert await orphans(app, job) == [(("list", "page-1/read#2", "pay#:order-1"), 3)]


async def test_orphans_make_a_dead_letter_of_a_task_that_refuses_them(app: App) -> None:
    former = "list"

    @app.task(retry=Retry(max_attempts=5, base=0.0), on_orphan="fail")
    async def job(ctx: Context) -> int:
        found = await ctx.step("list" if ctx.attempt == 1 else former, len, "a")
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    kept = await job.enqueue()
    await work_off(app)
    assert await bounded(kept.result()) == 1
    former = "list files"
    lost = await job.enqueue()
    await work_off(app)
    found = await letter(app, lost)
    assert (found.reason, found.attempts) == (Reason.ORPHANED_STEPS, 2)
    assert "did not ask for 1 of its recorded steps, such as 'list'" in found.message
    assert [event.type for event in await history(lost)][-2:] == ["orphaned", "buried"]


async def test_a_resumed_run_that_asks_for_all_steps_logs_no_orphans(app: App) -> None:
    async def inner(ctx: Context) -> int:
        return await ctx.options(nested="record").step("inner", len, "a")

    async def job(ctx: Context) -> None:
        for number in range(12):
            await ctx.step("read", len, "a" * number)
        with ctx.scope("page-1"):
            await ctx.step("outer", inner, ctx)
        await ctx.options(step_id="7").step("pay", len, "a")
        await ctx.artifacts.save("a.txt", "text")

    assert await orphans(app, job) == []


async def test_the_orphans_of_a_large_checkpoint_are_counted(app: App) -> None:
    async def job(ctx: Context) -> None:
        fast = ctx.options(durability="async")
        await asyncio.gather(*(fast.step("read", len, str(n)) for n in range(700 if ctx.attempt == 1 else 10)))

    ((steps, count),) = await orphans(app, job)
    assert (len(steps), count) == (20, 690)


@pytest.mark.parametrize("order", ORDERS)
async def test_risky_branches_that_were_cut_off_find_their_intents(app: App, order: str) -> None:
    effects, asked = Effects(), Effects()

    async def job(ctx: Context) -> list[str]:
        async def pay(number: int) -> str:
            found: str = await effects.act(number)
            if ctx.attempt == 1:
                raise ConnectionError
            return found

        async def find(number: int) -> AlreadyDone[str]:
            return AlreadyDone(await asked.act(number))

        once = ctx.options(risky=True, verify=find)
        branches = [lambda n=n: once.step("pay", pay, n) for n in range(6)]
        return await in_turn(branches, ORDERS["the same" if ctx.attempt == 1 else order])

    assert await results(app, job) == [f"result of {n}" for n in range(6)]
    assert effects.calls == asked.calls == dict.fromkeys(range(6), 1)
    assert effects.keys == asked.keys


async def test_a_large_checkpoint_is_matched_in_another_order(app: App) -> None:
    effects, count = Effects(), 700

    async def job(ctx: Context) -> list[str]:
        fast = ctx.options(durability="async")
        order = range(count) if ctx.attempt == 1 else [*range(300, count), *range(300)]
        tasks = {n: asyncio.ensure_future(fast.step("fetch", effects.act, n)) for n in order}
        found = await asyncio.gather(*(tasks[n] for n in range(count)))
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    assert await results(app, job) == [f"result of {n}" for n in range(count)]
    assert max(effects.calls.values()) == 1


# scopes


async def test_a_scope_is_part_of_the_keys(app: App) -> None:
    effects = Effects()

    @app.task
    async def job(ctx: Context) -> None:
        async def branch(page: int) -> None:
            with ctx.scope(f"page-{page}"):
                await ctx.step("fetch", effects.act, "a")
                await asyncio.gather(ctx.step("fetch", effects.act, "b"), ctx.step("fetch", effects.act, "c"))
                with ctx.scope("links"):
                    await ctx.step("fetch", effects.act, "d")

        await asyncio.gather(branch(1), branch(2))
        await ctx.step("fetch", effects.act, "e")
        with ctx.scope("page-1"):
            await ctx.step("fetch", effects.act, "f")

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert effects.keys == {
        "a": {"page-1/fetch", "page-2/fetch"},
        "b": {"page-1/fetch#2", "page-2/fetch#2"},
        "c": {"page-1/fetch#3", "page-2/fetch#3"},
        "d": {"page-1/links/fetch", "page-2/links/fetch"},
        "e": {"fetch"},
        "f": {"page-1/fetch#4"},
    }


async def test_branches_in_scopes_have_their_own_order(app: App) -> None:
    """Equal calls of several branches have different scopes."""
    numbers = iter(range(99))

    async def roll() -> int:
        return next(numbers)

    async def job(ctx: Context) -> list[int]:
        async def branch(number: int) -> int:
            with ctx.scope(f"branch-{number}"):
                return await ctx.step("roll", roll)

        order = ORDERS["the same" if ctx.attempt == 1 else "mixed"]
        found = await in_turn([functools.partial(branch, n) for n in range(6)], order)
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    assert await results(app, job) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["", "a#2", "x" * 201, 7])
async def test_a_scope_must_have_a_name(app: App, name: Any) -> None:
    @app.task
    async def job(ctx: Context) -> None:
        with ctx.scope(name):
            raise AssertionError("it was entered")

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, "scope must be 1 to 200 characters" in found.message) == (Reason.NOT_RETRYABLE, True)


# ids


async def test_a_step_with_an_id_is_found_by_it_alone(app: App) -> None:
    effects = Effects()

    async def job(ctx: Context) -> list[str]:
        orders = ["7", "8", "8b"] if ctx.attempt == 1 else ["8b", "8", "9", "7"]
        found = [await ctx.options(step_id=order).step("pay", effects.act, "same") for order in orders]
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    assert await results(app, job) == ["result of same"] * 4
    assert effects.calls == {"same": 4}
    assert effects.keys["same"] == {"pay#:7", "pay#:8", "pay#:8b", "pay#:9"}


async def test_a_step_with_an_id_and_other_arguments_is_a_mismatch(app: App) -> None:
    effects = Effects()

    async def job(ctx: Context) -> None:
        await asyncio.gather(ctx.options(step_id="7").step("pay", effects.act, ctx.attempt))
        raise ConnectionError

    with pytest.raises(TaskFailed) as caught:
        await results(app, job)
    assert "step 'pay#:7' was recorded with arguments 1 and is now called with 2" in str(caught.value)
    assert effects.calls == {1: 1}


async def test_an_id_is_used_once_in_a_run(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None:
        for _ in range(2):
            await ctx.options(step_id="7").step("pay", len, "same")

    handle = await job.enqueue()
    await work_off(app)
    assert "step 'pay' must have a unique step_id in its scope, got '7' twice" in (await letter(app, handle)).message
    assert "d:pay#:7" in await recorded_steps(app, handle)


# the digest


class Client:
    """An argument without a JSON form."""


class RenamedClient:
    """The same client after a change of the program."""


async def test_the_type_of_a_client_may_change_its_name(app: App) -> None:
    calls: list[object] = []

    async def job(ctx: Context) -> None:
        await ctx.step("ask", calls.append, Client() if ctx.attempt == 1 else RenamedClient())
        if ctx.attempt == 1:
            raise ConnectionError

    await results(app, job)
    assert len(calls) == 1
