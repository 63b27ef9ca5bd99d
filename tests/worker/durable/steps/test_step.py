"""Steps: recorded once, returned from the record in their own type."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import anyio
import anyio.from_thread
import pytest
from perdure import (
    App,
    Context,
    PayloadTooLarge,
    ResumeWarning,
    Retry,
    Settings,
    State,
    StepMismatch,
    StepTimeout,
    TaskHandle,
    current_step,
)
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.worker.durable.steps.codec import codec_of
from perdure.worker.durable.steps.current import StepOptions
from perdure.worker.errors import StepOutsideTask, UnserialisableResult
from pydantic import BaseModel

from tests.support.workers import (
    bounded,
    history,
    letter,
    recorded_steps,
    redis_command,
    running_worker,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app("steps")]

AGAIN = Retry(max_attempts=2, base=0.0)


async def run_twice(app: App, body: Callable[[Context], Awaitable[Any]]) -> tuple[Any, Any]:
    """Return what a handler gets in a run that fails at its end, and in the run that resumes it."""
    seen: list[Any] = []

    @app.task(retry=AGAIN)
    async def twice(ctx: Context) -> None:
        seen.append(await body(ctx))
        if ctx.attempt == 1:
            raise ConnectionError("cut off")

    handle = await twice.enqueue()
    await work_off(app)
    await bounded(handle.result())
    first, second = seen
    return first, second


# recorded once


async def test_a_recorded_step_is_never_run_again(app: App) -> None:
    calls: list[str] = []

    async def read(name: str) -> str:
        calls.append(name)
        return name.upper()

    async def body(ctx: Context) -> tuple[str, str, bool]:
        return await ctx.step("a", read, "a"), await ctx.step("b", read, "b"), ctx.resumed

    first, second = await run_twice(app, body)
    assert first == ("A", "B", False)
    assert second == ("A", "B", True)
    assert calls == ["a", "b"]


async def test_a_failed_step_runs_again_and_recorded_ones_do_not(app: App) -> None:
    calls: list[str] = []

    async def flaky(ctx: Context) -> str:
        calls.append("flaky")
        if ctx.attempt == 1:
            raise ConnectionError
        return "ok"

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> str:
        await ctx.step("sound", calls.append, "sound")
        return await ctx.step("flaky", flaky, ctx)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "ok"
    assert calls == ["sound", "flaky", "flaky"]
    assert sorted(await recorded_steps(app, handle)) == ["d:flaky", "d:sound"]


async def test_none_is_a_result_like_any_other(app: App) -> None:
    calls: list[int] = []

    async def body(ctx: Context) -> object:
        return await ctx.step("nothing", calls.append, 1)

    assert await run_twice(app, body) == (None, None)
    assert calls == [1]


async def test_repeated_names_are_numbered_in_call_order(app: App) -> None:
    calls: list[int] = []

    async def double(number: int) -> int:
        calls.append(number)
        return number * 2

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> list[int]:
        found = [await ctx.step("double", double, number) for number in (5, 6, 7)]
        if ctx.attempt == 1:
            raise ConnectionError
        return found

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [10, 12, 14]
    assert calls == [5, 6, 7]
    steps = [event.step for event in await history(handle) if event.type == "step_completed"]
    assert steps == ["double", "double#2", "double#3"]


@pytest.mark.parametrize("name", ["", "a#2", "x" * 201, 7])
async def test_a_name_must_leave_room_for_its_number(app: App, name: Any) -> None:
    refusals: list[str] = []

    @app.task
    async def job(ctx: Context) -> None:
        try:
            await ctx.step(name, lambda: 1)
        except ValueError as error:
            refusals.append(str(error))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert refusals
    assert "1 to 200 characters without '#'" in refusals[0]


# concurrent steps


async def test_steps_run_concurrently_in_gather(app: App) -> None:
    calls: list[int] = []
    together = asyncio.Barrier(3)

    async def meet(number: int) -> int:
        calls.append(number)
        await together.wait()  # passes only when all three run at once
        return number

    async def body(ctx: Context) -> list[int]:
        return list(await asyncio.gather(*(ctx.step("meet", meet, number) for number in (1, 2, 3))))

    assert await run_twice(app, body) == ([1, 2, 3], [1, 2, 3])
    assert calls == [1, 2, 3]


async def test_steps_run_concurrently_in_a_task_group(app: App) -> None:
    calls: list[str] = []
    together = asyncio.Barrier(2)

    async def meet(name: str) -> str:
        calls.append(name)
        await together.wait()
        return name

    async def body(ctx: Context) -> list[str]:
        async with asyncio.TaskGroup() as group:
            left = group.create_task(ctx.step("left", meet, "left"))
            right = group.create_task(ctx.step("right", meet, "right"))
        return [left.result(), right.result()]

    assert await run_twice(app, body) == (["left", "right"], ["left", "right"])
    assert calls == ["left", "right"]


async def test_finished_concurrent_steps_are_kept(app: App) -> None:
    calls: list[str] = []
    kept = asyncio.Event()

    async def quick() -> str:
        calls.append("quick")
        return "quick"

    async def cut_off(first: bool) -> str:
        calls.append("slow")
        if first:
            await kept.wait()
            raise ConnectionError
        return "slow"

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> list[str]:
        async def first_branch() -> str:
            value = await ctx.step("quick", quick)
            kept.set()
            return value

        slow = functools.partial(cut_off, ctx.attempt == 1)
        return list(await asyncio.gather(first_branch(), ctx.step("slow", slow)))

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["quick", "slow"]
    assert calls == ["quick", "slow", "slow"]


# types


class Colour(Enum):
    RED = "red"


class Level(StrEnum):
    HIGH = "high"


class Point(BaseModel):
    x: int
    at: datetime


@dataclass
class Size:
    width: int
    tags: set[str]


NOON = datetime(2026, 1, 2, 12, 30, 15, 250_000, tzinfo=UTC)


def a_model() -> Point:
    return Point(x=1, at=NOON)


def models() -> list[Point]:
    return [Point(x=1, at=NOON), Point(x=2, at=NOON)]


def a_dataclass() -> Size:
    return Size(3, {"b", "a"})


def a_tuple() -> tuple[int, str]:
    return (1, "one")


def a_long_tuple() -> tuple[float, ...]:
    return (0.1, 1e300, -0.0)


def a_moment() -> datetime:
    return NOON


def a_day() -> date:
    return NOON.date()


def a_duration() -> timedelta:
    return timedelta(seconds=1.5)


def an_enum() -> Colour:
    return Colour.RED


def a_str_enum() -> Level:
    return Level.HIGH


def a_set() -> set[int]:
    return {3, 1, 2}


def numbered() -> dict[int, Point]:
    return {7: a_model()}


def exact() -> Decimal:
    return Decimal("1.10")


def a_uuid() -> UUID:
    return UUID(int=7)


def a_path() -> Path:
    return Path("a/b")


def some_bytes() -> bytes:
    return b"plain"


def maybe() -> Point | None:
    return None


def endless() -> float:
    return float("inf")


def chosen() -> Literal["left", "right"]:
    return "left"


TYPED = [
    a_model,
    models,
    a_dataclass,
    a_tuple,
    a_long_tuple,
    a_moment,
    a_day,
    a_duration,
    an_enum,
    a_str_enum,
    a_set,
    numbered,
    exact,
    a_uuid,
    a_path,
    some_bytes,
    maybe,
    endless,
    chosen,
]


@pytest.mark.parametrize("fn", TYPED, ids=lambda fn: fn.__name__)
def test_a_recorded_result_has_its_declared_type(fn: Callable[[], Any]) -> None:
    codec = codec_of(fn)
    data, first = codec.encode("step", "one", fn())
    again = codec.decode(data)
    assert first == again == fn()
    assert type(first) is type(again) is type(fn())


async def test_typed_results_are_the_same_in_the_first_run_and_in_a_resumed_one(app: App) -> None:
    async def body(ctx: Context) -> list[Any]:
        return [await ctx.step(fn.__name__, fn) for fn in TYPED]

    first, second = await run_twice(app, body)
    assert first == second == [fn() for fn in TYPED]
    assert [type(value) for value in first] == [type(value) for value in second]


def a_list_for_a_tuple() -> tuple[int, ...]:
    return [1, 2]  # type: ignore[return-value]


def a_dict_for_a_model() -> Point:
    return {"x": "7", "at": NOON}  # type: ignore[return-value]


async def test_a_result_is_converted_to_the_declared_type_in_every_run(app: App) -> None:
    async def body(ctx: Context) -> list[Any]:
        return [await ctx.step("tuple", a_list_for_a_tuple), await ctx.step("model", a_dict_for_a_model)]

    first, second = await run_twice(app, body)
    assert first == second == [(1, 2), Point(x=7, at=NOON)]


def says_nothing(value: Any):  # type: ignore[no-untyped-def]
    return value


def says_any(value: Any) -> Any:
    return value


UNTYPED: list[tuple[Any, Any]] = [
    ((1, 2), [1, 2]),
    ({1: "one"}, {"1": "one"}),
    (NOON, "2026-01-02T12:30:15.250000Z"),
    (Point(x=1, at=NOON), {"x": 1, "at": "2026-01-02T12:30:15.250000Z"}),
    (Colour.RED, "red"),
    (Level.HIGH, "high"),
    ({"deep": ({2},)}, {"deep": [[2]]}),
    ("text", "text"),
    (True, True),
    (None, None),
    (1.5, 1.5),
    (0.1 + 0.2, 0.1 + 0.2),
    (2**80, 2**80),
    ([-(2**64)], [-(2**64)]),
    (float("inf"), "Infinity"),
    ({"score": float("-inf")}, {"score": "-Infinity"}),
]


@pytest.mark.filterwarnings("ignore::perdure.ResumeWarning")
@pytest.mark.parametrize("fn", [says_nothing, says_any])
async def test_an_undeclared_result_is_plain_data_in_every_run(app: App, fn: Callable[[Any], Any]) -> None:
    async def body(ctx: Context) -> list[Any]:
        return [await ctx.step("value", fn, given) for given, _ in UNTYPED]

    first, second = await run_twice(app, body)
    assert first == second == [plain for _, plain in UNTYPED]
    assert [type(value) for value in first] == [type(value) for value in second]


def unresolvable() -> Missing:  # type: ignore[name-defined]  # noqa: F821
    return (1, 2)


def test_an_annotation_that_cannot_be_resolved_means_plain_data() -> None:
    data, first = codec_of(unresolvable).encode("step", "one", unresolvable())
    assert first == codec_of(unresolvable).decode(data) == [1, 2]


def without_wraps(function: Any) -> Any:
    def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
        return function(*args, **kwargs)

    return wrapper


class Unresolvable:
    def __call__(self) -> Missing:  # type: ignore[name-defined]  # noqa: F821
        return {1}


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (says_nothing, "says_nothing declares no type of its result"),
        (without_wraps(a_set), "without_wraps.<locals>.wrapper declares no type"),
        (Unresolvable(), "annotations of Unresolvable.__call__ cannot be resolved: name 'Missing' is not defined"),
    ],
    ids=["nothing", "a decorator without wraps", "a callable object"],
)
def test_a_result_of_unknown_type_that_json_changes_gets_a_warning(fn: Callable[..., Any], names: str) -> None:
    with pytest.warns(ResumeWarning, match="step 'one': its result, a set, was replaced") as warned:
        codec_of(fn).encode("step", "one", {1, 2})
    assert names in str(warned[0].message)
    codec_of(fn).encode("step", "one", ("changes", ["to", "lists"]))  # of which nothing is known either way


def test_a_class_and_a_callable_object_declare_their_types() -> None:
    assert codec_of(Point).encode("step", "one", Point(x=1, at=NOON))[1] == Point(x=1, at=NOON)
    assert codec_of(Service()).encode("step", "one", [1, 2])[1] == (1, 2)


def test_functions_of_one_factory_keep_their_own_types() -> None:
    """Their code is the same; their annotations differ."""

    def loads(kind: type[Any]) -> Callable[[], Any]:
        def load() -> Any:
            return kind()

        load.__annotations__["return"] = kind
        return load

    for kind in (set, list, set):
        assert type(codec_of(loads(kind)).decode(b"[1]")) is kind


class Service:
    async def __call__(self, number: int) -> tuple[int, int]:
        return number, number

    def method(self, number: int) -> tuple[int, int]:
        return number, number

    @staticmethod
    async def static(number: int) -> tuple[int, int]:
        return number, number


async def test_any_callable_may_be_a_step(app: App) -> None:
    service = Service()

    async def body(ctx: Context) -> list[Any]:
        return [
            await ctx.step("partial", functools.partial(service.method, 1)),
            await ctx.step("method", service.method, 2),
            await ctx.step("static", Service.static, number=3),
            await ctx.step("object", service, 4),
            await ctx.step("lambda", lambda: 5),
            await ctx.step("lambda that awaits", lambda: service(6)),
            await ctx.step("builtin", len, "seven"),
        ]

    first, second = await run_twice(app, body)
    assert first == second
    assert first[:3] == [(1, 1), (2, 2), (3, 3)]
    assert first[4:5] + first[6:] == [5, 5]


def wrong_type() -> int:
    return "seven"  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fn", "says"),
    [(object, "Unable to serialize"), (wrong_type, "valid integer")],
    ids=["no JSON", "another type"],
)
async def test_a_result_that_cannot_be_stored_buries_the_task(app: App, fn: Callable[[], Any], says: str) -> None:
    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        await ctx.step("make", fn)

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.UNSERIALISABLE_RESULT
    assert found.attempts == 1
    assert found.error.endswith("UnserialisableResult")
    assert "step 'make'" in found.message
    assert says in found.message


# arguments


async def test_other_arguments_for_a_recorded_step_are_an_error_that_names_both(app: App) -> None:
    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        await ctx.step("read", says_any, {"page": ctx.attempt})
        raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason is Reason.NOT_RETRYABLE
    assert found.error.endswith(StepMismatch.__name__)
    assert "step 'read'" in found.message
    assert '{"page":1}' in found.message
    assert '{"page":2}' in found.message


async def test_a_handler_may_catch_the_mismatch_and_sees_both_arguments(app: App) -> None:
    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> list[str]:
        try:
            await ctx.step("read", says_any, ctx.attempt)
        except StepMismatch as error:
            return [error.step, error.recorded, error.asked]
        raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["read", "1", "2"]


async def test_a_recorded_result_that_no_longer_fits_its_type_stops_the_task_before_anything_runs(app: App) -> None:
    """A deploy has added a field without a default; the next one gives it a default, and a replay resumes."""

    class Old(BaseModel):
        title: str

    class Changed(Old):
        pages: int

    class Corrected(Old):
        pages: int = 0

    declared: type[Old] = Old
    calls: list[str] = []

    async def job(ctx: Context) -> dict[str, Any]:
        def read(name: str) -> Any:
            calls.append(f"read {name}")
            return Old(title=name)

        def after() -> None:
            calls.append("after")

        read.__annotations__["return"] = declared
        found: Old = await ctx.step("read", read, "a")
        await ctx.step("after", after)
        if declared is Old:
            raise ConnectionError("once")
        return found.model_dump()

    task = app.task(retry=Retry(max_attempts=2, base=600.0))(job)
    handle = await task.enqueue()
    async with running_worker(app):
        await wait_until(lambda: failed_once(handle), "its first attempt has failed")
    calls.clear()
    declared = Changed
    await redis_command(app, "HDEL", handle.partition.steps(handle.id), "d:after")
    await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)
    async with running_worker(app):
        found = await bounded(letter(app, handle))
        assert found.reason is Reason.NOT_RETRYABLE
        assert found.error.endswith("ResultMismatch")
        assert "the recorded result of step 'read' does not fit" in found.message
        assert "Changed, which its function declares now: pages: Field required; declare a type" in found.message
        assert calls == []
        declared = Corrected
        assert await replay(app.producer.gateway, found, Replay())
        assert await bounded(handle.result()) == {"title": "a", "pages": 0}
    assert calls == ["after"]


async def failed_once(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is State.SCHEDULED


async def test_on_mismatch_rerun_runs_the_step_again_and_records_that(app: App) -> None:
    calls: list[int] = []

    def read(page: int) -> int:
        calls.append(page)
        return page

    @app.task(retry=Retry(max_attempts=3, base=0.0))
    async def job(ctx: Context) -> int:
        page = await ctx.options(on_mismatch="rerun").step("read", read, min(ctx.attempt, 2))
        if ctx.attempt < 3:
            raise ConnectionError
        return page

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == 2
    assert calls == [1, 2]


async def test_the_order_of_sets_and_mappings_does_not_matter(app: App) -> None:
    calls: list[Any] = []

    def read(*args: Any, **kwargs: Any) -> int:
        calls.append(args)
        return 1

    first = ({"a": 1, "b": [{"c": 2, "d": 3}]}, {0, 8}, Size(1, {"x", "y"}))
    second = ({"b": [{"d": 3, "c": 2}], "a": 1}, {8, 0}, Size(1, {"y", "x"}))
    assert list(first[1]) != list(second[1])  # the same set, in another order

    async def body(ctx: Context) -> int:
        args, names = (first, ("k", "l")) if ctx.attempt == 1 else (second, ("l", "k"))
        named: dict[str, Any] = dict.fromkeys(names, 1)
        return await ctx.step("read", read, *args, **named)

    assert await run_twice(app, body) == (1, 1)
    assert len(calls) == 1


FINGERPRINT = """
from dataclasses import dataclass
from pydantic import BaseModel
from perdure.worker.durable.steps.codec import fingerprint

@dataclass
class Size:
    tags: set[str]

class Page(BaseModel):
    tags: frozenset[str]

tags = {"alpha", "beta", "gamma", "delta", "epsilon"}
print(fingerprint((tags, [tags], {"tags": tags}, Size(tags), Page(tags=tags), object()), {"tags": tags}))
"""


def test_arguments_hash_the_same_in_every_process() -> None:
    """Python orders a set of strings differently in each process, which must not look like a mismatch after a crash."""
    seen = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert len(seen) == 1


async def test_an_argument_without_a_json_form_counts_by_its_type(app: App) -> None:
    class Client:
        pass

    calls: list[object] = []

    async def body(ctx: Context) -> object:
        return await ctx.step("call", calls.append, Client())

    assert await run_twice(app, body) == (None, None)
    assert len(calls) == 1


# where it runs

REQUEST: ContextVar[str] = ContextVar("request", default="none")


async def test_a_sync_function_runs_in_a_thread_and_an_async_one_in_the_loop(app: App) -> None:
    threads: dict[str, int] = {}

    def blocking() -> None:
        threads["sync"] = threading.get_ident()

    async def awaiting() -> None:
        threads["async"] = threading.get_ident()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("sync", blocking)
        await ctx.step("async", awaiting)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert threads["async"] == threading.get_ident()
    assert threads["sync"] != threading.get_ident()


async def test_context_variables_reach_steps_of_both_kinds(app: App) -> None:
    async def in_the_loop() -> str:
        return REQUEST.get()

    @app.task
    async def job(ctx: Context) -> list[str]:
        REQUEST.set(ctx.task_id)
        return [await ctx.step("thread", REQUEST.get), await ctx.step("loop", in_the_loop)]

    handles = [await job.enqueue() for _ in range(3)]
    await work_off(app)
    for handle in handles:
        assert await bounded(handle.result()) == [handle.id, handle.id]


# timeout and retry of a step


async def sleeps() -> None:
    await anyio.sleep_forever()


async def test_a_step_that_takes_too_long_is_cancelled(app: App) -> None:
    errors: list[StepTimeout] = []

    @app.task
    async def job(ctx: Context) -> str:
        try:
            await ctx.options(timeout=0.05).step("sleep", sleeps)
        except StepTimeout as error:
            errors.append(error)
        return "went on"

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "went on"
    assert [(error.step, error.seconds) for error in errors] == [("sleep", 0.05)]
    assert await recorded_steps(app, handle) == {}


async def test_a_sync_step_that_takes_too_long_is_abandoned(app: App) -> None:
    release = threading.Event()

    @app.task
    async def job(ctx: Context) -> str:
        try:
            await ctx.options(timeout=0.05).step("wait", release.wait)
        except StepTimeout:
            return "went on"
        finally:
            release.set()
        return "waited"

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "went on"


async def test_a_step_is_retried_within_the_run(app: App) -> None:
    tries: list[int] = []

    async def flaky() -> int:
        tries.append(current_step().attempt)
        if len(tries) < 3:
            raise ConnectionError
        return len(tries)

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> int:
        return await ctx.options(retry=Retry(max_attempts=3, base=0.0)).step("flaky", flaky)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == 3
    assert tries == [1, 2, 3]
    logged = [(event.type, event.step, event.data.get("attempt", 1)) for event in await history(handle)]
    assert logged == [("step_failed", "flaky", 1), ("step_failed", "flaky", 2), ("step_completed", "flaky", 3)]
    assert (await handle.record()).attempts == 1


async def test_a_timeout_applies_per_try_and_is_retried(app: App) -> None:
    tries: list[int] = []

    async def slow_at_first() -> str:
        tries.append(1)
        if len(tries) == 1:
            await anyio.sleep_forever()
        return "ok"

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> str:
        return await ctx.options(timeout=0.05, retry=Retry(max_attempts=2, base=0.0, on=(TimeoutError,))).step(
            "slow", slow_at_first
        )

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "ok"


@pytest.mark.parametrize(
    "retry",
    [Retry(max_attempts=5, base=0.0, never=(ValueError,)), Retry(max_attempts=5, base=0.0, on=(OSError,))],
)
@pytest.mark.parametrize("grouped", [False, True])
async def test_an_error_that_is_not_retried_fails_the_step_at_once(app: App, retry: Retry, grouped: bool) -> None:
    """Also within the group that a task group raises."""
    tries: list[int] = []

    async def wrong() -> None:
        tries.append(1)
        raise ExceptionGroup("unhandled", [OSError(), ValueError("wrong")]) if grouped else ValueError("wrong")

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.options(retry=retry).step("wrong", wrong)

    handle = await job.enqueue()
    await work_off(app)
    assert "wrong" in (await letter(app, handle)).message
    assert tries == [1]


@pytest.mark.parametrize("retry", [Retry(max_attempts=2, base=0.0, on=(OSError,)), Retry(max_attempts=2, base=0.0)])
async def test_a_step_is_tried_again_after_a_group_of_errors_that_are_retried(app: App, retry: Retry) -> None:
    tries: list[int] = []

    async def flaky() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ExceptionGroup("unhandled", [OSError("one"), ExceptionGroup("inner", [ConnectionError("two")])])
        return len(tries)

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> int:
        return await ctx.options(retry=retry).step("flaky", flaky)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"verify": len}, "risky=True"),
        ({"verify": "find", "risky": True}, "verify must be a function, used with risky=True, got 'find'"),
        ({"retry": 3}, "retry must be a Retry, .*, got 3"),
        ({"timeout": 0}, "more than 0"),
        ({"timeout": math.nan}, "more than 0 seconds, got nan"),
        ({"durability": "later"}, "durability"),
        ({"in_doubt": "maybe"}, "in_doubt"),
        ({"on_mismatch": "ignore"}, "on_mismatch"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StepOptions(**options)


async def test_all_arguments_go_to_the_function(app: App) -> None:
    def fetch(url: str, *, timeout: float, retry: int, name: str, fn: str, self: str) -> list[object]:
        return [url, timeout, retry, name, fn, self]

    @app.task
    async def job(ctx: Context) -> list[object]:
        got = await ctx.step("fetch", fetch, "u", timeout=5, retry=3, name="n", fn="f", self="s")
        once = ctx.options(timeout=600)
        assert got == await once.step("fetch", fetch, "u", timeout=5, retry=3, name="n", fn="f", self="s")
        assert got == await once.tool("fetch", fetch, "u", timeout=5, retry=3, name="n", fn="f", self="s")
        return got

    handle = await job.enqueue()
    await work_off(app)
    assert await handle.result() == ["u", 5, 3, "n", "f", "s"]


async def test_what_describes_a_tool_call_is_refused_for_a_step(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.options(reasoning="to know").step("fetch", len, "u")

    handle = await job.enqueue()
    await work_off(app)
    assert "reasoning and call must be used with tool(), got step 'fetch'" in (await letter(app, handle)).message


# the current step


async def test_the_idempotency_key_is_the_same_in_every_run(app: App) -> None:
    keys: list[str] = []

    async def act(first: bool) -> None:
        keys.append(current_step().idempotency_key)
        if first:
            raise ConnectionError

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        await ctx.step("act", functools.partial(act, False))
        await ctx.step("act", functools.partial(act, ctx.attempt == 1))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert keys == [f"{handle.id}:act", f"{handle.id}:act#2", f"{handle.id}:act#2"]


async def test_saved_progress_is_restored_when_the_step_runs_again(app: App) -> None:
    seen: list[Any] = []

    async def walk(first: bool) -> str:
        step = current_step()
        seen.append(step.saved)
        await step.save({"page": 1})
        await step.save({"page": 2})
        seen.append(step.saved)
        if first:
            raise ConnectionError
        return "end"

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> str:
        return await ctx.step("walk", functools.partial(walk, ctx.attempt == 1))

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "end"
    assert seen == [None, {"page": 2}, {"page": 2}, {"page": 2}]
    assert list(await recorded_steps(app, handle)) == ["d:walk"]  # the result replaced the progress


async def test_a_step_in_a_thread_can_save_progress(app: App) -> None:
    def walk() -> Any:
        step = current_step()
        if step.saved is None:
            anyio.from_thread.run(step.save, [1, 2])
            raise ConnectionError
        return step.saved

    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> list[int]:
        found: list[int] = await ctx.step("walk", walk)
        return found

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == [1, 2]


async def test_saved_progress_has_the_size_limit_of_a_record(app: App, settings: Settings) -> None:
    errors: list[PayloadTooLarge] = []

    async def hoard() -> None:
        try:
            await current_step().save("x" * settings.payload_limit)
        except PayloadTooLarge as error:
            errors.append(error)

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("hoard", hoard)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert [(error.size, error.limit) for error in errors] == [(settings.payload_limit + 2, settings.payload_limit)]


async def test_saved_progress_must_be_json(app: App) -> None:
    async def keep() -> None:
        await current_step().save(object())

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("keep", keep)

    handle = await job.enqueue()
    await work_off(app)
    assert (await letter(app, handle)).error.endswith(UnserialisableResult.__name__)


# where steps are refused


async def takes_two(one: int, two: int) -> None:
    raise AssertionError("it was called")


@functools.wraps(takes_two)
async def passes_one_more(*args: int) -> None:
    await takes_two(*[*args, 0])


def raises_type_error(*_: int) -> None:
    raise TypeError("unsupported operand")


WRONG_CALLS: dict[str, tuple[Callable[[Any], Awaitable[Any]], str]] = {
    "too few arguments": (
        lambda ctx: ctx.options(retry=AGAIN).step("pair", takes_two, 1),
        "step 'pair' calls takes_two(one: 'int', two: 'int') -> 'None' with other arguments: missing",
    ),
    "a plain function": (
        lambda ctx: ctx.options(retry=AGAIN).tool("text", str.upper, "a", 5),
        "step 'text' calls str.upper(self, /) with other arguments: too many positional arguments",
    ),
    "a lambda": (
        lambda ctx: ctx.step("none", lambda: 1, depth=2),
        "got an unexpected keyword argument 'depth'",
    ),
    "verify": (
        lambda ctx: ctx.options(risky=True, verify=lambda: None).step("pay", cut_off_once, ctx.attempt),
        "step 'pay' calls",
    ),
    "not callable": (lambda ctx: ctx.step("list", [1]), "step 'list' must have a function, got [1]"),
    "a coroutine": (lambda ctx: ctx.step("late", _closed(ctx)), "step 'late' must have a function, got <coroutine"),
    "no function": (lambda ctx: ctx.step("list"), "step 'list' must have a function, got None"),
    "no tool": (lambda ctx: ctx.tool("list"), "step 'list' must have a function, got None"),
    "no name": (lambda ctx: ctx.step(len, "a"), "name must be 1 to 200 characters"),
    "options": (lambda ctx: ctx.options(timeout="3").step("late", len, "a"), "timeout must be seconds or a timedelta"),
    "unnamed": (lambda ctx: ctx.options(3).step("late", len, "a"), "options of a step must have names"),
    "no option": (lambda ctx: ctx.options(timeot=3).step("late", len, "a"), "no option of a step is called timeot"),
}


def cut_off_once(attempt: int) -> None:
    if attempt == 1:
        raise ConnectionError


def _closed(ctx: Context) -> object:
    called = takes_two(1, 2)
    called.close()
    return called


@pytest.mark.parametrize("what", WRONG_CALLS)
async def test_a_wrong_call_of_a_step_is_not_tried_again(app: App, what: str) -> None:
    call, says = WRONG_CALLS[what]

    @app.task(retry=Retry(max_attempts=9, base=0.0))
    async def job(ctx: Context) -> None:
        await call(ctx)

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert says in found.message
    assert found.error.endswith("StepDefinitionError")
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1 if what != "verify" else 2)


@pytest.mark.parametrize("fn", [passes_one_more, raises_type_error])
async def test_a_type_error_of_the_function_itself_is_tried_again(app: App, fn: Callable[..., Any]) -> None:
    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        await ctx.step("call", fn, 1, 2)

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.error.split(".")[-1]) == (Reason.ATTEMPTS_EXHAUSTED, "TypeError")


async def test_a_step_outside_of_its_task_is_not_tried_again(app: App) -> None:
    @app.task(retry=AGAIN)
    async def job(ctx: Context) -> None:
        current_step()

    handle = await job.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1)


async def refusal(call: Awaitable[Any]) -> str:
    with pytest.raises(StepOutsideTask) as caught:
        await call
    return str(caught.value)


async def test_a_leaked_ctx_is_refused_outside_the_task(app: App) -> None:
    leaked: list[Context] = []
    running, proceed = asyncio.Event(), asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        leaked.append(ctx)
        running.set()
        await proceed.wait()

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(running.wait())
        assert "outside a running task" in await refusal(leaked[0].step("while it runs", len, "x"))
        proceed.set()
        await bounded(handle.result())
        assert "outside a running task" in await refusal(leaked[0].step("after it ended", len, "x"))
    assert await recorded_steps(app, handle) == {}


async def test_an_asyncio_task_left_running_cannot_call_steps(app: App) -> None:
    ended = asyncio.Event()
    left: list[asyncio.Task[str]] = []

    async def straggler(ctx: Context) -> str:
        await ended.wait()
        return await refusal(ctx.step("late", len, "x"))

    @app.task
    async def job(ctx: Context) -> None:
        left.append(asyncio.create_task(straggler(ctx)))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    ended.set()
    assert "while it runs" in await bounded(left[0])


async def test_the_ctx_of_another_task_is_refused(app: App) -> None:
    leaked: list[Context] = []
    lent, borrowed = asyncio.Event(), asyncio.Event()

    @app.task
    async def lender(ctx: Context) -> None:
        leaked.append(ctx)
        lent.set()
        await borrowed.wait()

    @app.task
    async def borrower(ctx: Context) -> str:
        try:
            return await refusal(leaked[0].step("borrowed", len, "x"))
        finally:
            borrowed.set()

    async with running_worker(app):
        lending = await lender.enqueue()
        await bounded(lent.wait())
        borrowing = await borrower.enqueue()
        text = await bounded(borrowing.result())
        await bounded(lending.result())
    assert lending.id in text
    assert borrowing.id in text
    assert await recorded_steps(app, lending) == {}


async def test_current_step_is_refused_outside_steps(app: App) -> None:
    with pytest.raises(StepOutsideTask, match="no step is running"):
        current_step()

    @app.task
    async def job(ctx: Context) -> str:
        key = await ctx.step("in a step", lambda: current_step().key)
        with pytest.raises(StepOutsideTask):
            current_step()
        return key

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "in a step"
