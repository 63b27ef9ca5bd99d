"""Unique tasks of an app: declaration, calls from code, handlers and threads, and producers that know the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from perdure import (
    App,
    Context,
    InvalidArguments,
    Producer,
    Retry,
    SpawnRefused,
    State,
    SyncContext,
    TaskHandle,
    Unique,
)
from perdure.queues.catalog import CatalogTask, read_catalog
from perdure.queues.errors import CatalogError, InvalidUniqueKey
from perdure.worker.errors import TaskDefinitionError
from perdure.worker.middleware import CallNext, EnqueueCall, Middleware
from pydantic import BaseModel, SecretStr

from tests.support.workers import BOUND, bounded, redis_command, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration

BY_ORDER = Unique("while_running", by="order")


class Order(BaseModel):
    number: int
    note: str = ""


async def markers(app: App) -> list[bytes]:
    found = await redis_command(app, "KEYS", f"{{{app.settings.namespace}:~unique:*")
    return list(found)


# declaration


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"during": "while_waiting"}, "unique must be 'while_queued', 'while_running' or seconds, got 'while_waiting'"),
        ({"during": 0}, "a time of unique must be more than 0 seconds"),
        ({"during": -1.5}, "got -1.5"),
        ({"during": float("nan")}, "must be a number of seconds, got nan"),
        ({"during": True}, "must be seconds or a timedelta, got True"),
        ({"during": timedelta(0)}, "must be more than 0 seconds"),
        ({"during": 1e11}, "at most 1e\\+10"),
        ({"during": None}, "must be seconds or a timedelta, got None"),
        ({"by": ()}, "by of unique must be names of arguments, each once, or a function of them, got \\(\\)"),
        ({"by": ["a", "a"]}, "each once"),
        ({"by": 7}, "got 7"),
        ({"by": [1]}, "got \\[1\\]"),
        ({"keep": "newest"}, "keep of unique must be 'first' or 'last', got 'newest'"),
        ({"quiet": 0}, "quiet of unique must be more than 0 seconds"),
        ({"quiet": 5, "keep": "first"}, "quiet of unique must go with 'while_queued' and keep='last'"),
        ({"quiet": 5, "during": "while_running"}, "quiet of unique must go with 'while_queued'"),
        ({"quiet": 5, "during": 60}, "quiet of unique must go with 'while_queued'"),
    ],
)
def test_a_rule_is_checked_where_it_is_made(given: Mapping[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        Unique(**given)


def test_a_rule_has_its_times_in_seconds() -> None:
    assert Unique(timedelta(minutes=1)).during == 60.0
    assert Unique(quiet=timedelta(seconds=5)) == Unique(quiet=5.0, keep="last")
    assert Unique(by="order").by == Unique(by=["order"]).by == ("order",)
    assert (Unique().during, Unique().keep) == ("while_queued", "first")


def test_a_task_takes_only_a_rule_that_fits_its_arguments() -> None:
    app = App("shop")

    def declare(unique: Any) -> Any:
        @app.task(name="pay", unique=unique)
        async def pay(ctx: Context, order: int, tags: set[str], token: SecretStr | None = None) -> None: ...

    for unique, problem in (
        ("while_queued", r"task 'pay': unique must be a Unique, such as Unique\('while_running', by='order'\)"),
        (
            Unique(by="oder"),
            "unique key 'oder' must be an argument; there are order, tags, token; did you mean 'order'?",
        ),
        (Unique(), "unique by all arguments must not have secrets among them; name the others in by="),
    ):
        with pytest.raises(TaskDefinitionError, match=problem.replace("?", r"\?")):
            declare(unique)
    declare(Unique(by="order"))

    with pytest.raises(TaskDefinitionError, match="must not have sets among them, whose order is open, got 'tags'"):

        @app.task(unique=Unique())
        async def tagged(ctx: Context, tags: set[str]) -> None: ...


@pytest.mark.app("shop")
async def test_a_key_that_is_missing_or_no_scalar_is_one_sentence_and_nothing_is_stored(app: App) -> None:
    @app.task(unique=Unique(by=("order", "note")))
    async def pay(ctx: Context, order: Any, note: str = "none") -> None: ...

    @app.task(unique=Unique(by=lambda args: args["order"]["items"]))
    async def ship(ctx: Context, order: Any) -> None: ...

    @app.task(unique=Unique(by="token"))
    async def log_in(ctx: Context, token: SecretStr) -> None: ...

    bad = r"task 'pay': unique key 'order' must be a text, a number, true, false or null, got dict"
    with pytest.raises(InvalidUniqueKey, match=bad):
        await pay.enqueue({"a": 1})
    with pytest.raises(InvalidUniqueKey, match="got list"):
        await pay.enqueue_many([{"order": 1}, {"order": [1]}])
    with pytest.raises(InvalidUniqueKey, match=r"what its function returns must be a text.* got dict"):
        await ship.enqueue({"items": {}})
    with pytest.raises(InvalidUniqueKey, match="unique key 'token' must not be a secret"):
        await log_in.enqueue(SecretStr("x"))
    with pytest.raises(InvalidUniqueKey, match="unique key 'order' is missing in the arguments"):
        await app.producer.enqueue("pay", {}, queue="shop", unique=Unique(by="order"))
    with pytest.raises(TypeError, match="unique must be a Unique"):
        await app.producer.enqueue("pay", {}, queue="shop", unique="while_queued")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="delay must not be given where its rule for unique tasks has quiet"):
        await pay.options(unique=Unique(quiet=5), delay=3).enqueue(1)
    with pytest.raises(InvalidArguments, match="unique key 'oder' must be an argument"):
        pay.options(unique=Unique(by="oder"))
    assert await redis_command(app, "KEYS", f"{{{app.settings.namespace}:*:record:*") == []
    assert await markers(app) == []


# calls


@pytest.mark.app("shop")
async def test_a_collision_returns_the_handle_of_the_task_that_is_there(app: App) -> None:
    @app.task(unique=BY_ORDER)
    async def pay(ctx: Context, order: int, note: str = "") -> str:
        return note

    first = await pay.enqueue(1, "a")
    second = await pay.enqueue(1, "b")
    assert (first.existed, second.existed, second.id) == (False, True, first.id)
    assert not (await pay.enqueue(2)).existed
    unchecked = await pay.options(unique=False).enqueue(1, "c")
    assert unchecked.id != first.id
    await work_off(app)
    assert await second.result(BOUND) == "a"
    assert await markers(app) == [], "a worker removes the markers of tasks that have ended"
    assert not (await pay.enqueue(1)).existed


@pytest.mark.app("shop")
async def test_defaults_and_equal_numbers_make_the_same_key(app: App) -> None:
    @app.task(unique=Unique())
    async def audit(ctx: Context, root: str, depth: float = 3, deep: bool = True) -> None: ...

    first = await audit.enqueue("src")
    for call in (audit.enqueue("src", 3), audit.enqueue("src", 3.0, deep=True), audit.enqueue(root="src", depth=3.0)):
        assert (await call).id == first.id
    assert (await audit.enqueue("src", 3.5)).id != first.id

    @app.task(unique=Unique())
    async def count(ctx: Context, n: int) -> None: ...

    large = [await count.enqueue(2**70 + more) for more in (0, 1, 0)]
    assert [handle.existed for handle in large] == [False, False, True]
    assert (await audit.enqueue("src", deep=False)).id != first.id


@pytest.mark.app("shop")
async def test_tasks_and_queues_have_keys_of_their_own(app: App) -> None:
    """Two apps of a namespace may have tasks of one name."""

    @app.task(unique=BY_ORDER)
    async def pay(ctx: Context, order: int) -> None: ...

    @app.task(unique=BY_ORDER)
    async def ship(ctx: Context, order: int) -> None: ...

    handles = [await pay.enqueue(1), await ship.enqueue(1), await pay.options(queue="other").enqueue(1)]
    assert len({handle.id for handle in handles}) == 3
    assert (await ship.enqueue(1)).id == handles[1].id


@pytest.mark.app("shop")
async def test_a_function_makes_the_key_of_json_data(app: App) -> None:
    @app.task(unique=Unique("while_running", by=lambda args: (args["order"]["number"], args["kind"])))
    async def pay(ctx: Context, order: Order, kind: str = "card") -> None: ...

    first = await pay.enqueue(Order(number=1, note="a"))
    assert (await pay.enqueue(Order(number=1, note="b"))).id == first.id
    assert (await pay.enqueue(Order(number=1), "cash")).id != first.id


@pytest.mark.app("shop")
async def test_the_last_arguments_run_once_after_a_quiet_time(app: App) -> None:
    ran: list[str] = []

    @app.task(unique=Unique(by="page", quiet=0.3))
    async def index(ctx: Context, page: int, text: str) -> None:
        ran.append(text)

    async with running_worker(app):
        handles = [await index.enqueue(1, text) for text in "abc"]
        await handles[-1].result(BOUND)
        assert ran == ["c"]
        assert [await handle.status() for handle in handles] == ["cancelled", "cancelled", "succeeded"]
        await (await index.enqueue(1, "d")).result(BOUND)
    assert ran == ["c", "d"]


@pytest.mark.app("shop")
async def test_the_replaced_task_stops_and_the_last_one_runs(app: App) -> None:
    """`while_running` with `last`: a running task is cancelled."""
    started = asyncio.Event()

    @app.task(unique=Unique("while_running", by="page", keep="last"))
    async def render(ctx: Context, page: int, text: str) -> str:
        if text == "old":
            started.set()
            await asyncio.sleep(BOUND)
        return text

    async with running_worker(app):
        old = await render.enqueue(1, "old")
        await bounded(started.wait())
        new = await render.enqueue(1, "new")
        assert await new.result(BOUND) == "new"
        await wait_until(lambda: ended(old), "the old one ends")
    assert await old.status() is State.CANCELLED
    assert (await old.record()).replaced_by == new.id


async def ended(handle: TaskHandle[Any]) -> bool:
    return (await handle.status()).terminal


@pytest.mark.app("shop")
async def test_synchronous_calls_obey_the_rule(app: App) -> None:
    @app.task(unique=BY_ORDER)
    async def pay(ctx: Context, order: int) -> int:
        return order

    def call() -> list[tuple[str, bool]]:
        with app.sync() as producer:
            handles = [pay.enqueue_sync(1), pay.enqueue_sync(1), *pay.enqueue_many_sync([{"order": 1}, {"order": 2}])]
            handles.append(pay.options(unique=Unique("while_queued", by="order", keep="last")).enqueue_sync(2))
            handles.append(producer.enqueue("pay", {"order": 1}, queue="shop", unique=BY_ORDER))
            handles += producer.enqueue_many("pay", [{"order": 1}], queue="shop", unique=BY_ORDER)
        return [(handle.id, handle.existed) for handle in handles]

    found = await asyncio.to_thread(call)
    assert [existed for _, existed in found] == [False, True, True, False, False, True, True]
    assert len({task_id for task_id, _ in found}) == 3


@pytest.mark.app("shop")
async def test_many_tasks_of_a_call_are_checked_before_the_first_is_stored(app: App) -> None:
    @app.task(unique=BY_ORDER)
    async def pay(ctx: Context, order: int) -> int:
        return order

    handles = await pay.enqueue_many([{"order": number % 5} for number in range(50)])
    assert [handle.existed for handle in handles] == [False] * 5 + [True] * 45
    assert [handle.id async for handle in pay.enqueue_stream([{"order": 3}])] == [handles[3].id]
    await work_off(app)
    assert [await handle.result(BOUND) for handle in handles] == [number % 5 for number in range(50)]


@pytest.mark.app("shop")
async def test_middleware_sees_each_call(settings: Any) -> None:
    seen: list[str] = []

    class Counts(Middleware):
        async def enqueue(self, call: EnqueueCall, call_next: CallNext) -> str:
            seen.append(call.task)
            call.headers["trace"] = "1"
            return await super().enqueue(call, call_next)

    async with App("shop", settings=settings, middleware=[Counts()]) as app:

        @app.task(unique=BY_ORDER)
        async def pay(ctx: Context, order: int) -> None: ...

        first = await pay.enqueue(1)
        assert (await pay.enqueue(1)).id == first.id
        assert seen == ["pay", "pay"]
        assert (await first.record()).headers == {"trace": "1"}


# in handlers


@pytest.mark.app("shop")
async def test_a_handler_finds_the_same_tasks_when_it_runs_again(app: App) -> None:
    """The second run of an attempt finds what the first one has enqueued or found, also tasks that have ended since."""
    found: list[list[str]] = []

    @app.task(unique=BY_ORDER)
    async def pay(ctx: Context, order: int) -> int:
        return order

    @app.task(retry=Retry(max_attempts=1))
    async def shop(ctx: Context) -> None:
        handles = [await pay.enqueue(1), *await pay.enqueue_many([{"order": number} for number in (1, 2, 1, 3)])]
        found.append([handle.id for handle in handles])
        await ctx.wait_for("paid", bool)

    there, handle = await pay.options(delay=1).enqueue(1), await shop.enqueue()
    async with running_worker(app):
        await wait_until(lambda: is_waiting(handle), "it waits")
        await there.result(BOUND)
        assert not (await pay.options(delay=600).enqueue(1)).existed
        await handle.answer("paid", True)
        await handle.result(BOUND)
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] == found[0][3] == there.id
    assert len({*found[0]}) == 3


@pytest.mark.app("shop")
async def test_a_plain_handler_enqueues_a_unique_task_from_its_thread(app: App) -> None:
    @app.task(unique=BY_ORDER)
    async def pay(ctx: Context, order: int) -> int:
        return order

    @app.task
    def shop(ctx: SyncContext) -> list[str]:
        return [pay.options(delay=60).enqueue_sync(1).id, pay.enqueue_sync(1).id]

    async with running_worker(app):
        first, second = await (await shop.enqueue()).result(BOUND)
    assert first == second


@pytest.mark.app("shop")
async def test_children_and_groups_are_not_unique(app: App) -> None:
    @app.task(unique=BY_ORDER)
    async def pay(ctx: Context, order: int) -> int:
        return order

    @app.task
    async def total(ctx: Context, paid: list[int]) -> int:
        return sum(paid)

    @app.task
    async def shop(ctx: Context) -> int:
        with pytest.raises(SpawnRefused, match="a child cannot have the option unique"):
            await ctx.spawn(pay.options(unique=BY_ORDER), 1)
        return sum(await ctx.gather(pay, [1, 1, 2]))

    there = await pay.options(delay=600).enqueue(1)
    with pytest.raises(ValueError, match="cannot have the option unique"):
        await pay.options(unique=BY_ORDER).enqueue_group([1], then=total)
    async with running_worker(app):
        assert await (await shop.enqueue()).result(BOUND) == 4
        assert await (await pay.enqueue_group([1, 1], then=total)).result(BOUND) == 2
    assert await there.status() is State.SCHEDULED
    assert (await pay.enqueue(1)).id == there.id


@pytest.mark.app("shop")
async def test_a_retried_and_a_parked_task_keep_their_key_until_they_end(app: App) -> None:
    tries = 0

    @app.task(unique=BY_ORDER, retry=Retry(max_attempts=3, base=0.05, jitter=0.0))
    async def pay(ctx: Context, order: int) -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("once")
        return int(await ctx.wait_for("amount", int))

    handle = await pay.enqueue(1)
    async with running_worker(app):
        await wait_until(lambda: is_waiting(handle), "it waits")
        assert (await pay.enqueue(1)).id == handle.id
        await handle.answer("amount", 7)
        assert await handle.result(BOUND) == 7
        await wait_until(lambda: is_free(app), "its marker is gone")
    assert not (await pay.enqueue(1)).existed


async def is_waiting(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.WAITING


async def is_free(app: App) -> bool:
    return await markers(app) == []


# producers that know the catalog only


async def is_published(app: App) -> bool:
    return bool((await read_catalog(app.producer.gateway, app.producer.namespace)).tasks)


@pytest.mark.app("shop")
async def test_an_untyped_producer_obeys_the_published_rule(app: App) -> None:
    @app.task(unique=Unique("while_running", by=("order", "kind")))
    async def pay(ctx: Context, order: int, kind: str = "card") -> None: ...

    @app.task(unique=Unique(by=lambda args: args["order"]))
    async def ship(ctx: Context, order: int) -> None: ...

    @app.task(unique=Unique(30, by="order"))
    async def greet(ctx: Context, order: int) -> None: ...

    first = await pay.options(delay=600).enqueue(1)
    async with (
        running_worker(app),
        Producer(app.settings.redis_url, namespace=app.settings.namespace) as producer,
    ):
        await wait_until(lambda: is_published(app), "the tasks are published")
        assert (await producer.enqueue("pay", {"order": 1})).id == first.id
        many = await producer.enqueue_many("pay", [{"order": 1, "kind": "card"}, {"order": 1, "kind": "cash"}])
        assert [handle.existed for handle in many] == [True, False]
        assert [one.id async for one in producer.enqueue_stream("pay", [{"order": 1.0}])] == [first.id]
        assert not (await producer.enqueue("pay", {"order": 1}, unique=False)).existed
        assert (await greet.enqueue(1)).id == (await producer.enqueue("greet", {"order": 1})).id
        with pytest.raises(CatalogError, match=r"unique by a function of app 'shop', which only that app can call"):
            await producer.enqueue("ship", {"order": 1})
        assert not (await producer.enqueue("ship", {"order": 1}, unique=False)).existed
        assert not (await producer.enqueue("pay", {"order": 1}, queue="shop")).existed, "a named queue reads no catalog"


@pytest.mark.parametrize("rule", [{}, {"during": "x"}, {"during": -1}, {"during": 60, "by": 7}, "while_queued", 7, [1]])
@pytest.mark.app("shop")
async def test_a_published_rule_that_is_none_is_one_sentence(app: App, rule: Any) -> None:
    listed = CatalogTask("pay", "shop", unique=rule)
    with pytest.raises(CatalogError, match="could not read the rule for unique tasks of task 'pay'"):
        listed.unique_task()
