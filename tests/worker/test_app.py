"""What can be a task, how it is called from elsewhere, and which settings an app works under."""

from __future__ import annotations

import functools
import math
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import FrozenInstanceError, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from perdure import (
    App,
    Context,
    EnqueueCall,
    InvalidArguments,
    Middleware,
    PayloadTooLarge,
    PerdureError,
    Retry,
    Settings,
    Snooze,
    State,
    TaskExists,
    Unavailable,
    Worker,
)
from perdure.queues import Refused
from perdure.queues.envelope import EnvelopeTemplate, encode_arguments
from perdure.queues.errors import ConfigurationError
from perdure.worker.errors import LifespanError, TaskDefinitionError
from perdure.worker.settings import load_settings
from pydantic import BaseModel, SecretStr, ValidationError

from tests.support.workers import bounded, partition_of, redis_command, work_off

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass
class Rate:
    value: float


class Order(BaseModel):
    item: str
    count: int = 1


@pytest.fixture
def app() -> App:
    """An app that never meets a server."""
    return App("shop")


@pytest.fixture
async def opened(settings: Settings) -> AsyncIterator[App]:
    async with App("shop", settings=settings) as app:
        yield app


# what can be a task


def test_a_task_has_the_functions_name_and_is_found_by_it(app: App) -> None:
    @app.task
    async def plain(ctx: Context) -> None: ...

    @app.task(name="renamed", queue="slow", retry=Retry(max_attempts=9), timeout=5, result_ttl=60)
    async def other(ctx: Context) -> None: ...

    assert app.tasks["plain"] is plain
    assert app.tasks["renamed"] is other
    assert sorted(app.tasks) == ["plain", "renamed"]
    assert len(app.tasks) == 2
    assert app.tasks.queues == ["shop", "slow"]
    assert (other.queue, other.retry.max_attempts, other.timeout, other.result_ttl) == ("slow", 9, 5, 60)
    assert (plain.queue, plain.retry, plain.timeout) == ("shop", Retry(), None)
    assert repr(app) == "App('shop', tasks=['plain', 'renamed'])"


def test_a_task_cannot_be_changed_afterwards(app: App) -> None:
    @app.task
    async def plain(ctx: Context) -> None: ...

    with pytest.raises(FrozenInstanceError):
        plain.queue = "other"  # type: ignore[misc]


async def no_parameters() -> None: ...
async def only_by_name(*, ctx: Context) -> None: ...
async def no_context(path: str) -> None: ...
async def no_context_but_a_list(paths: list[str], depth: int) -> None: ...
async def any_number(ctx: Context, *rest: int) -> None: ...
async def any_names(ctx: Context, **rest: int) -> None: ...
async def nameless_parameter(ctx: Context, one: int, /) -> None: ...
async def unknown_type(ctx: Context, one: Fraction) -> None: ...
async def no_schema(ctx: Context, one: subprocess.Popen[bytes]) -> None: ...
async def no_schema_optional(ctx: Context, one: Handler = None) -> None: ...  # type: ignore[assignment]
async def no_schema_within(ctx: Context, fits: int, one: list[subprocess.Popen[bytes]]) -> None: ...
async def no_schema_returned(ctx: Context) -> subprocess.Popen[bytes]: ...  # type: ignore[empty-body]
def not_async(ctx: Context) -> None: ...


class Handler:
    async def __call__(self, ctx: Context) -> None: ...


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (no_parameters, "the first parameter must be the Context"),
        (only_by_name, "the first parameter must be the Context"),
        (no_context, "'no_context': the first parameter must be the Context, got 'path'"),
        (no_context_but_a_list, "the first parameter must be the Context, got 'paths'"),
        (any_number, "rest.* must be one that can be passed by name"),
        (any_names, "must be one that can be passed by name"),
        (nameless_parameter, "one.* must be one that can be passed by name"),
        (unknown_type, "'Fraction' is not defined; import the type where the module is loaded"),
        (no_schema, r"task 'no_schema': parameter 'one': subprocess.Popen\[bytes\] has no JSON form; use a data"),
        (
            no_schema_optional,
            "parameter 'one': Handler has no JSON form; use a dataclass, a pydantic model or plain data",
        ),
        (no_schema_within, r"parameter 'one': list\[subprocess.Popen\[bytes\]\] has no JSON form; use a"),
        (
            no_schema_returned,
            r"its result: subprocess.Popen\[bytes\] has no JSON form; use a dataclass, a pydantic",
        ),
        (not_async, r"the first parameter must be the SyncContext: def f\(ctx: SyncContext, \.\.\.\)"),
        (lambda ctx: None, "must have a name: pass name="),
        (functools.partial(no_parameters), "must have a name: pass name="),
        (Handler(), "must have a name: pass name="),
    ],
)
def test_what_cannot_be_a_task_is_refused_with_the_remedy(app: App, handler: Callable[..., Any], says: str) -> None:
    with pytest.raises(TaskDefinitionError, match=says):
        app.task(handler)
    assert not app.tasks


def test_two_tasks_cannot_have_one_name(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    with pytest.raises(TaskDefinitionError, match="must be unique, got 'job' twice: pass name="):

        @app.task(name="job")
        async def another(ctx: Context) -> None: ...


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1}, {"result_ttl": 0}, {"result_ttl": 1e300}])
def test_times_of_a_task_are_more_than_nothing_and_less_than_for_ever(app: App, options: dict[str, Any]) -> None:
    with pytest.raises(TaskDefinitionError, match="must be more than 0 seconds"):

        @app.task(**options)
        async def job(ctx: Context) -> None: ...


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda app: app.task(retry=3), "task 'job': retry must be a Retry, such as Retry.*, got 3"),
        (lambda app: app.task(durability="fast"), "durability must be one of sync, async, replicated, got 'fast'"),
        (lambda app: app.task(on_orphan="drop"), "on_orphan must be one of warn, fail, got 'drop'"),
        (lambda app: app.task(timeout="30s"), "task 'job': timeout must be seconds or a timedelta, got '30s'"),
        (lambda app: app.task(result_ttl=[1]), r"task 'job': result_ttl must be seconds or a timedelta, got \[1\]"),
        (lambda app: app.task(coherence=3), r"task 'job': coherence must be a Coherence, such as Coh.* got 3"),
        (lambda app: app.task(strict_order="no"), "task 'job': strict_order must be True or False, got 'no'"),
        (lambda _: App(None), "must be 1 to 64 letters.*, got None"),  # type: ignore[arg-type]
        (lambda _: Retry(max_attempts="3"), "Retry.max_attempts must be a whole number, got '3'"),  # type: ignore[arg-type]
    ],
)
def test_values_of_a_wrong_type_are_named_at_once(app: App, make: Callable[[App], Any], says: str) -> None:
    async def job(ctx: Context) -> None: ...

    with pytest.raises((TaskDefinitionError, TypeError, ValueError), match=says):
        make(app)(job)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda job: job.options(delay="5").enqueue(1), "delay must be seconds, a timedelta or a datetime, got '5'"),
        (lambda job: job.options(delay=datetime(2030, 1, 1)).enqueue(1), "delay must have a time zone, got 2030"),  # noqa: DTZ001
        (lambda job: job.options(timeout="5"), "timeout must be seconds or a timedelta, got '5'"),
        (lambda job: job.options(result_ttl="5"), "result_ttl must be seconds or a timedelta, got '5'"),
        (lambda _: Snooze("5"), "after must be seconds, a timedelta or a datetime, got '5'"),  # type: ignore[arg-type]
    ],
)
async def test_times_of_a_call_are_named(opened: App, call: Callable[[Any], Any], says: str) -> None:
    @opened.task
    async def job(ctx: Context, one: int) -> None: ...

    with pytest.raises((TypeError, ValueError), match=says):
        await call(job)


async def test_an_argument_without_a_json_form_is_named(app: App) -> None:
    @app.task
    async def job(ctx: Context, one: Any, two: int = 2, key: SecretStr | None = None) -> None: ...

    for wrong in (Handler(), [{"a": Handler()}]):
        for others in ({}, {"key": SecretStr("secret")}):
            with pytest.raises(InvalidArguments) as caught:
                await job.enqueue(wrong, **others)  # type: ignore[arg-type]
            assert str(caught.value).startswith("task 'job': one: Unable to serialize unknown type: <class 'tests.")
            assert str(caught.value).endswith("Handler'>; pass JSON data, or declare its type")


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.integration
async def test_each_of_many_is_a_dict_of_arguments(settings: Settings, hooked: bool) -> None:
    class Hook(Middleware):
        async def enqueue(self, call: EnqueueCall, call_next: Callable[[], Awaitable[str]]) -> str:
            return await call_next()

    app = App("shop", settings=settings, middleware=[Hook()] if hooked else [])

    @app.task
    async def job(ctx: Context, one: int) -> None: ...

    for wrong, shown in (([1, 2], "1"), ([(1,), (2,)], "(1,)"), ({"one": 1}, "'one'")):
        async with app:
            with pytest.raises(InvalidArguments) as caught:
                await job.enqueue_many(wrong)  # type: ignore[arg-type]
        assert str(caught.value) == f"task 'job': each item must be a dict of arguments by name, got {shown}"


def test_arguments_and_keys_of_a_wrong_type_are_named() -> None:
    with pytest.raises(TypeError, match=r"arguments must be a dict by name, got \[1\]"):
        encode_arguments([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key must be a string, got 3"):
        EnvelopeTemplate("job").message(b"{}", key=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a b", "-a", "a:b", "a{b}", "x" * 65])
def test_names_that_cannot_stand_in_a_key_are_refused_where_they_are_given(app: App, name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 64 letters"):
        app.task(queue=name)
    with pytest.raises(ValueError, match="must be 1 to 64 letters"):
        App(name)


# calling a task


async def test_a_task_is_still_a_function(app: App) -> None:
    @app.task
    async def double(ctx: Context, number: int) -> int:
        return number * 2

    ctx: Any = None
    assert await double(ctx, 4) == 8
    assert await double(ctx, number=5) == 10


async def test_an_app_that_is_not_open_says_how_to_open_it(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    with pytest.raises(Unavailable, match="enqueue inside 'async with app:'"):
        await job.enqueue()


@pytest.mark.integration
async def test_an_app_is_open_until_its_last_user_leaves(settings: Settings) -> None:
    app = App("shop", settings=settings)

    @app.task
    async def job(ctx: Context) -> None: ...

    async with app:
        async with app:
            await job.enqueue()
        await job.enqueue()
    with pytest.raises(Unavailable):
        await job.enqueue()
    async with app:
        assert await redis_command(app, "XLEN", partition_of(app).ready) == 2


@pytest.mark.integration
async def test_arguments_and_result_arrive_in_their_types(opened: App) -> None:
    seen: list[Any] = []

    @opened.task
    async def buy(ctx: Context, order: Order, at: datetime, places: tuple[str, ...], note: str = "none") -> Order:
        seen.extend([order, at, places, note])
        return Order(item=order.item, count=order.count + 1)

    at = datetime.fromisoformat("2026-05-04T03:02:01+00:00")
    handle = await buy.enqueue(Order(item="tea"), at, places=("a", "b"))
    await work_off(opened)
    assert await bounded(handle.result()) == Order(item="tea", count=2)
    assert seen == [Order(item="tea"), at, ("a", "b"), "none"]


@pytest.mark.integration
async def test_undeclared_arguments_are_plain_data(opened: App) -> None:
    @opened.task
    async def echo(ctx, one, two=2):  # type: ignore[no-untyped-def]
        return [one, two]

    handle = await echo.enqueue({"a": (1, 2)})
    await work_off(opened)
    assert await bounded(handle.result()) == [{"a": [1, 2]}, 2]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, "missing a required argument: 'order'"),
        (("tea",), {}, "order: Input should be a valid dictionary or instance of Order"),
        (({"item": "tea", "count": "many"},), {}, "order.count: Input should be a valid integer"),
        ((Order(item="tea"), 1, 2), {}, "too many positional arguments"),
        ((Order(item="tea"),), {"colour": "red"}, "unexpected keyword argument 'colour'"),
        ((Order(item="tea"),), {"often": object()}, "often: Input should be a valid integer"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(
    opened: App, args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    @opened.task
    async def buy(ctx: Context, order: Order, often: int = 1) -> None: ...

    with pytest.raises(InvalidArguments, match=says) as caught:
        await buy.enqueue(*args, **kwargs)
    assert caught.value.task == "buy"
    assert await redis_command(opened, "EXISTS", partition_of(opened).ready) == 0


@pytest.mark.integration
async def test_numbers_that_json_does_not_have_are_kept_as_floats_and_become_text_elsewhere(opened: App) -> None:
    @opened.task
    async def echo(ctx: Context, rates: list[float], rate: Rate, free: Any = None) -> list[str]:
        return [repr(rate) for rate in (*rates, rate.value, free)]

    handle = await echo.enqueue([math.inf, 1.5], Rate(math.nan), [1.0, {"x": -math.inf}])
    await work_off(opened)
    assert await bounded(handle.result()) == ["inf", "1.5", "nan", "[1.0, {'x': '-Infinity'}]"]


@pytest.mark.integration
async def test_of_many_all_are_checked_before_any_is_sent(opened: App) -> None:
    @opened.task
    async def square(ctx: Context, number: int) -> int:
        return number * number

    with pytest.raises(InvalidArguments):
        await square.enqueue_many([{"number": 1}, {"number": "two"}])
    assert await redis_command(opened, "EXISTS", partition_of(opened).ready) == 0
    handles = await square.enqueue_many([{"number": number} for number in range(20)])
    await work_off(opened)
    assert [await bounded(handle.result()) for handle in handles] == [number * number for number in range(20)]


@pytest.mark.integration
async def test_a_payload_over_the_limit_is_refused_with_both_sizes(settings: Settings) -> None:
    app = App("shop", settings=settings.model_copy(update={"payload_limit": 2000, "large_limit": 0}))

    @app.task
    async def job(ctx: Context, text: str) -> None: ...

    async with app:
        with pytest.raises(PayloadTooLarge) as caught:
            await job.enqueue("x" * 2000)
        assert await redis_command(app, "EXISTS", partition_of(app).ready) == 0
    assert caught.value.limit == 2000
    assert caught.value.size > 2000
    assert f"{caught.value.size:,} bytes" in str(caught.value)
    assert "2,000 bytes" in str(caught.value)


@pytest.mark.integration
async def test_options_of_one_call_go_before_the_tasks(opened: App) -> None:
    seen: list[Any] = []

    @opened.task(timeout=1)
    async def job(ctx: Context, number: int) -> int:
        seen.append((ctx.task, ctx.task_id, ctx.queue, ctx.headers, ctx.attempt, ctx.crashes, ctx.resumed))
        return number

    call = job.options(task_id="mine-1", queue="other", headers={"trace": "t1"}, result_ttl=50)
    handle = await call.enqueue(3)
    again = await call.enqueue(number=3)
    assert handle.id == again.id == "mine-1"
    await work_off(opened, queues=["other"])
    assert await bounded(handle.result()) == 3
    assert seen == [("job", "mine-1", "other", {"trace": "t1"}, 1, 0, False)]
    assert 0 < await redis_command(opened, "TTL", handle.partition.record("mine-1")) <= 50


@pytest.mark.integration
async def test_repeated_arguments_are_compared_as_values(opened: App) -> None:
    @opened.task
    async def tag(ctx: Context, numbers: set[int]) -> None: ...

    call, first, second = tag.options(task_id="tags"), {0, 8}, {8, 0}
    assert list(first) != list(second)
    handle = await call.enqueue(first)
    assert (await call.enqueue(second)).id == handle.id
    with pytest.raises(TaskExists, match=r"task tags exists already with other arguments \(numbers\)"):
        await call.enqueue({0, 9})
    await handle.cancel()


@pytest.mark.integration
async def test_a_delayed_task_waits_for_its_time(opened: App) -> None:
    @opened.task
    async def job(ctx: Context) -> None: ...

    handle = await job.options(delay=3600).enqueue()
    await work_off(opened)
    assert await handle.status() is State.SCHEDULED
    await handle.cancel()


def test_one_id_cannot_name_many(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    with pytest.raises(ValueError, match="a list of ids or a function of the arguments, got one id"):
        job.options(task_id="a").enqueue_many([{}, {}]).send(None)


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [
        {"delay": -1},
        {"task_id": "a b"},
        {"timeout": 0},
        {"max_attempts": 0},
        {"result_ttl": -1},
    ],
)
async def test_options_that_make_no_sense_are_refused(opened: App, options: dict[str, Any]) -> None:
    @opened.task
    async def job(ctx: Context) -> None: ...

    with pytest.raises(ValueError):
        await job.options(**options).enqueue()
    assert await redis_command(opened, "EXISTS", partition_of(opened).ready) == 0


# workers and settings


def test_a_worker_needs_tasks_and_room_for_them(app: App, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no tasks"):
        Worker(app)

    @app.task
    async def job(ctx: Context) -> None: ...

    wrong: dict[str, tuple[Any, dict[str, Any]]] = {
        "concurrency must be a whole number, 1 or more, got 0": (app, {"concurrency": 0}),
        "concurrency must be a whole number, 1 or more, got '4'": (app, {"concurrency": "4"}),
        "queues must be a list of names, got 'mine'": (app, {"queues": "mine"}),
        "queues must be a list of names, got 3": (app, {"queues": 3}),
        "queue must be 1 to 64 letters, .*, got 'a b'": (app, {"queues": ["a", "a b"]}),
        "queue must be 1 to 64 letters, .*, got 3": (app, {"queues": [3]}),
        "name must be 1 to 64 letters, .*, got '~left'": (app, {"name": "~left"}),
        "app must be an App, got 'tasks:app'": ("tasks:app", {}),
    }
    for says, (given, options) in wrong.items():
        with pytest.raises(ConfigurationError, match=says):
            Worker(given, **options)
    assert Worker(app, queues=["a", "b"]).queues == ("a", "b")
    assert Worker(app, name="left").id.startswith("left-")
    assert Worker(app).id != Worker(app).id


def test_settings_come_from_the_environment_and_arguments_go_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", "redis://there:1/2")
    monkeypatch.setenv("PERDURE_NAMESPACE", "theirs")
    monkeypatch.setenv("PERDURE_LEASE", "7")
    monkeypatch.setenv("PERDURE_GRACE", "")
    app = App("shop", namespace="ours")
    assert app.settings.redis_url == "redis://there:1/2"
    assert app.settings.namespace == "ours"
    assert app.settings.lease == 7
    assert app.settings.grace == 30
    app.configure(redis_url="redis://here", lease=None)
    assert app.settings.redis_url == "redis://here"
    assert app.settings.lease == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE", "soon"),
        ("LEASE", "0"),
        ("LEASE", "inf"),
        ("GRACE", "-1"),
        ("NAMESPACE", "a b"),
        ("RESULT_TTL", "nan"),
        ("PAYLOAD_LIMIT", "1"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"PERDURE_{name}", value)
    with pytest.raises(ConfigurationError, match=name.split("_", maxsplit=1)[0] if name != "NAMESPACE" else "a b"):
        load_settings()


def test_settings_of_another_type_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"^settings must be perdure.Settings, .* got dict$"):
        App("shop", settings={"lease": 3})  # type: ignore[arg-type]


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no setting is called leese"):
        load_settings(leese=3)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().lease = 3


def test_without_a_url_the_server_is_the_embedded_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERDURE_DATA_DIR", str(tmp_path))
    assert App("shop").settings.address.directory == tmp_path
    with pytest.raises(PerdureError, match="unknown scheme"):
        _ = Settings(redis_url="http://here").address


# the lifespan


class Pool:
    """A resource that knows how often it was opened and closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @asynccontextmanager
    async def open(self, app: App) -> AsyncIterator[Pool]:
        self.calls.append("open")
        yield self
        self.calls.append("closed")


async def test_the_lifespan_is_open_while_the_app_is_and_once_for_nested_uses(settings: Settings) -> None:
    pool = Pool()
    app = App("shop", settings=settings, lifespan=pool.open)
    with pytest.raises(Unavailable, match="not open"):
        _ = app.resources
    async with app:
        async with app:
            assert app.resources is pool
        assert pool.calls == ["open"]
        assert app.resources is pool
    assert pool.calls == ["open", "closed"]
    async with app:
        assert pool.calls == ["open", "closed", "open"]


async def test_concurrent_uses_open_the_lifespan_once(settings: Settings) -> None:
    pool = Pool()
    app = App("shop", settings=settings, lifespan=pool.open)
    inside = 0

    async def use() -> None:
        nonlocal inside
        async with app:
            inside += 1
            while inside < 5:
                await anyio.lowlevel.checkpoint()
            assert app.resources is pool

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(use)
    assert pool.calls == ["open", "closed"]


async def test_an_app_may_be_used_in_one_event_loop_after_another(settings: Settings) -> None:
    pool = Pool()
    app = App("shop", settings=settings, lifespan=pool.open)

    async def use() -> None:
        async with app:
            pass

    await anyio.to_thread.run_sync(anyio.run, use)
    await anyio.to_thread.run_sync(anyio.run, use)
    assert pool.calls == ["open", "closed"] * 2


async def test_tasks_find_what_the_lifespan_yielded_and_it_is_closed_after_the_last_run(settings: Settings) -> None:
    pool = Pool()
    app = App("shop", settings=settings, lifespan=pool.open)

    @app.task
    async def job(ctx: Context) -> list[str]:
        found: list[str] = ctx.resources.calls
        found.append("ran")
        return found

    async with Worker(app) as worker:
        handle = await job.enqueue()
        await worker.run(burst=True)
        assert await bounded(handle.result()) == ["open", "ran"]
    assert pool.calls == ["open", "ran", "closed"]


async def test_without_a_lifespan_there_are_no_resources(settings: Settings) -> None:
    async with App("shop", settings=settings) as app:

        @app.task
        async def job(ctx: Context) -> bool:
            return ctx.resources is None

        handle = await job.enqueue()
        await work_off(app)
        assert app.resources is None
        assert await bounded(handle.result()) is True


async def test_a_lifespan_is_closed_after_an_error_in_the_block_too(settings: Settings) -> None:
    pool = Pool()
    app = App("shop", settings=settings, lifespan=pool.open)
    with pytest.raises(ZeroDivisionError):
        async with app:
            _ = 1 / 0
    assert pool.calls == ["open", "closed"]


async def test_an_error_of_the_lifespan_closes_the_app_and_names_its_cause(settings: Settings) -> None:
    @asynccontextmanager
    async def broken(app: App) -> AsyncIterator[None]:
        if app.name == "shop":
            raise ConnectionRefusedError("no database")
        yield

    app = App("shop", settings=settings, lifespan=broken)
    expected = "could not open the lifespan of app 'shop': ConnectionRefusedError: no database"
    for use in (app, Worker(_with_task(app))):
        with pytest.raises(LifespanError, match=expected):
            await use.__aenter__()
    with pytest.raises(Unavailable, match="not open"):
        _ = app.producer


async def test_a_worker_that_cannot_join_its_queues_closes_the_app(settings: Settings) -> None:
    pool = Pool()
    app = App("shop", settings=settings, lifespan=pool.open)
    async with App("other", settings=settings) as other:
        await redis_command(other, "HSET", other.producer.namespace.deployment, "format", "99")
    with pytest.raises(Refused, match="format 99"):
        await Worker(_with_task(app)).__aenter__()
    assert pool.calls == ["open", "closed"]
    with pytest.raises(Unavailable, match="not open"):
        _ = app.producer


def _with_task(app: App) -> App:
    @app.task
    async def job(ctx: Context) -> None: ...

    return app


async def test_a_lifespan_must_be_an_async_context_manager(settings: Settings) -> None:
    async def bare(app: App) -> AsyncIterator[None]:
        yield

    app = App("shop", settings=settings, lifespan=bare)  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(LifespanError, match="must return an async context manager"):
        await app.__aenter__()


async def test_an_error_of_the_lifespans_end_is_raised_after_everything_is_closed(settings: Settings) -> None:
    @asynccontextmanager
    async def stuck(app: App) -> AsyncIterator[None]:
        yield
        raise OSError("cannot close")

    app = App("shop", settings=settings, lifespan=stuck)
    with pytest.raises(LifespanError, match="could not close the lifespan of app 'shop': OSError: cannot close"):
        async with app:
            pass
    with pytest.raises(Unavailable, match="not open"):
        _ = app.producer
