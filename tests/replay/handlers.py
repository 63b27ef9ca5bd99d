"""Handlers of the replay suite: what programs ordinarily do with failures, time-outs, branches, waits and tools."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from perdure import Agent, AgentState, AlreadyDone, App, Context, PlanStep, Retry, Snooze, SyncContext, current_step
from perdure.worker.task import Task

from tests.replay.journal import Journal
from tests.replay.rehearsal import Build, Handler, Reply

HANDLERS: dict[str, Handler] = {}

RETRY = Retry(max_attempts=6, max_crashes=5, base=0.0)

B = TypeVar("B", bound=Build)


def handler(**options: Any) -> Callable[[B], B]:
    """Add a handler to the suite, under the name of the function that builds it."""

    def add(build: B) -> B:
        name = build.__name__
        HANDLERS[name] = Handler(name, build, **options)
        return build

    return add


class ServiceDown(ConnectionError):
    """A failure of a service, with data of its own."""

    def __init__(self, service: str, status: int) -> None:
        super().__init__(f"{service} is down ({status})")
        self.service, self.status = service, status


def one_of(*services: str) -> Callable[[Counter[str]], str]:
    """Return a check that at most one of these services has acted."""

    def check(effects: Counter[str]) -> str:
        paid = [name for name in services if effects[name]]
        return f"all of these acted: {paid}" if len(paid) > 1 else ""

    return check


# steps one after the other


@handler(expects=6)
def plain_steps(app: App, world: Journal) -> Task[Any, Any]:
    async def add(number: int) -> int:
        world.call(f"add {number}")
        return number

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> int:
        return sum([await ctx.step("add", add, number) for number in (1, 2, 3)])

    return work


@handler(expects="B")
def fallback_bank(app: App, world: Journal) -> Task[Any, Any]:
    async def bank(name: str) -> str:
        world.call(f"bank {name}")
        if name == "A":
            raise ServiceDown("bank A", 503)
        return name

    @app.task(retry=RETRY)
    async def pay(ctx: Context) -> str:
        try:
            paid = await ctx.step("bank A", bank, "A")
        except ServiceDown:
            paid = await ctx.step("bank B", bank, "B")
        await ctx.step("receipt", bank, f"receipt of {paid}")
        return paid

    return pay


@handler(flaky=True, allowed=one_of("paid by A", "paid by B"))
def bank_that_recovers(app: App, world: Journal) -> Task[Any, Any]:
    """The first bank fails once only: a run that calls it again pays twice."""

    async def bank_a() -> str:
        if world.call("bank A") == 1:
            raise ServiceDown("bank A", 503)
        world.call("paid by A")
        return "A"

    async def bank_b() -> str:
        world.call("paid by B")
        return "B"

    @app.task(retry=RETRY)
    async def pay(ctx: Context) -> str:
        try:
            paid = await ctx.step("bank A", bank_a)
        except ConnectionError:
            paid = await ctx.step("bank B", bank_b)
        await ctx.step("receipt", _echo, paid)
        return paid

    return pay


async def _echo(value: Any) -> Any:
    return value


@handler(flaky=True, allowed=one_of("paid by A", "paid by B"), answers=[Reply("question", "yes")])
def bank_that_recovers_and_approval(app: App, world: Journal) -> Task[Any, Any]:
    """The same without a crash: a wait for an approval ends the run as well."""

    async def bank_a() -> str:
        if world.call("bank A") == 1:
            raise ServiceDown("bank A", 503)
        world.call("paid by A")
        return "A"

    async def bank_b() -> str:
        world.call("paid by B")
        return "B"

    @app.task(retry=RETRY)
    async def pay(ctx: Context) -> str:
        try:
            paid = await ctx.step("bank A", bank_a)
        except ConnectionError:
            paid = await ctx.step("bank B", bank_b)
        answer = await ctx.ask("ada", f"paid with {paid}, right?")
        return f"{paid} {answer}"

    return pay


@handler(flaky=True, allowed=one_of("paid by A", "paid by B"))
def later_step_fails_once(app: App, world: Journal) -> Task[Any, Any]:
    """The same without a crash: the task is retried because a later step fails."""

    async def bank_a() -> str:
        if world.call("bank A") == 1:
            raise ServiceDown("bank A", 503)
        world.call("paid by A")
        return "A"

    async def bank_b() -> str:
        world.call("paid by B")
        return "B"

    async def mail(paid: str) -> None:
        if world.call("mail") == 1:
            raise ConnectionResetError("mail")

    @app.task(retry=RETRY)
    async def pay(ctx: Context) -> str:
        try:
            paid = await ctx.step("bank A", bank_a)
        except ServiceDown:
            paid = await ctx.step("bank B", bank_b)
        await ctx.step("mail", mail, paid)
        return paid

    return pay


@handler(expects="B 503 bank A is down (503)")
def failure_with_data(app: App, world: Journal) -> Task[Any, Any]:
    """The handler decides by an attribute of the failure, and quotes its text in the arguments of a step."""

    async def bank(name: str, why: str) -> str:
        world.call(f"bank {name}")
        if name == "A":
            raise ServiceDown("bank A", 503)
        return f"{name} {why}"

    @app.task(retry=RETRY)
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step("bank", bank, "A", "")
        except ServiceDown as error:
            if error.status != 503:
                raise
            return await ctx.step("bank", bank, "B", f"{error.status} {error}")

    return pay


@handler(expects="second")
def both_banks_fail_and_the_task_is_retried(app: App, world: Journal) -> Task[Any, Any]:
    """Of two failures, the one that ended the attempt is called again, the handled one is not."""

    async def bank_a() -> str:
        world.call("bank A")
        raise ServiceDown("bank A", 503)

    async def bank_b(attempt: int) -> str:
        world.call(f"bank B in attempt {attempt}")
        if attempt == 1:
            raise ServiceDown("bank B", 500)
        return "second"

    @app.task(retry=RETRY)
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step("bank A", bank_a)
        except ConnectionError:
            return await ctx.options(step_id="b").step("bank B", bank_b, min(ctx.attempt, 2))

    return pay


# tries


@handler(expects="dead", retried=False)
def tries_of_a_step(app: App, world: Journal) -> Task[Any, Any]:
    """A step has four tries, whatever crashes: one that a crash cuts off does not count."""

    async def flaky() -> str:
        world.call("flaky")
        raise ServiceDown("flaky", 503)

    @app.task(retry=Retry(max_attempts=1, max_crashes=5))
    async def tries(ctx: Context) -> str:
        return await ctx.options(retry=Retry(max_attempts=4, base=0.0)).step("flaky", flaky)

    return tries


@handler(expects="gave up: flaky is down (503)")
def tries_are_used_up_and_the_handler_continues(app: App, world: Journal) -> Task[Any, Any]:
    async def flaky() -> str:
        world.call("flaky")
        raise ServiceDown("flaky", 503)

    @app.task(retry=RETRY)
    async def tries(ctx: Context) -> str:
        try:
            return await ctx.options(retry=Retry(max_attempts=4, base=0.0)).step("flaky", flaky)
        except ServiceDown as error:
            return str(await ctx.step("report", _echo, f"gave up: {error}"))

    return tries


@handler(expects="third time")
def third_try_succeeds(app: App, world: Journal) -> Task[Any, Any]:
    async def flaky() -> str:
        world.call("flaky")
        if current_step().attempt < 3:
            raise ServiceDown("flaky", 503)
        return "third time"

    @app.task(retry=RETRY)
    async def tries(ctx: Context) -> str:
        return await ctx.options(retry=Retry(max_attempts=3, base=0.0)).step("flaky", flaky)

    return tries


@handler(expects="gave up after 3")
def loop_of_three_tries(app: App, world: Journal) -> Task[Any, Any]:
    """The handler tries again itself: each is a step of its own."""

    async def flaky() -> str:
        world.call("flaky")
        raise ServiceDown("flaky", 503)

    @app.task(retry=RETRY)
    async def tries(ctx: Context) -> str:
        for _ in range(3):
            try:
                return await ctx.step("flaky", flaky)
            except ConnectionError:
                continue
        return str(await ctx.step("report", _echo, "gave up after 3"))

    return tries


@handler(expects="works")
def loop_of_three_tries_and_then_raise(app: App, world: Journal) -> Task[Any, Any]:
    """After a loop that gives up, the next attempt calls the last try again."""

    async def flaky(last: bool) -> str:
        world.call(f"flaky {last}")
        raise ServiceDown("flaky", 503)

    async def works() -> str:
        world.call("works")
        return "works"

    @app.task(retry=RETRY)
    async def tries(ctx: Context) -> str:
        error: Exception | None = None
        for number in range(3):
            try:
                return await ctx.step("flaky", works if ctx.attempt > 1 and number == 2 else flaky, *_last(ctx, number))
            except ConnectionError as caught:
                error = caught
        assert error is not None
        raise error

    return tries


def _last(ctx: Context, number: int) -> list[bool]:
    return [] if ctx.attempt > 1 and number == 2 else [number == 2]


# tools and models


@handler(expects="done")
def tool_error_shown_to_the_model(app: App, world: Journal) -> Task[Any, Any]:
    """The loop that every agent has."""

    async def model(messages: list[dict[str, Any]]) -> str:
        world.call(f"model {len(messages)}")
        return {1: "search redis", 3: "answer without it", 4: "done"}[len(messages)]

    async def search(query: str) -> str:
        world.call(f"search {query}")
        raise ServiceDown("search", 429)

    @app.task(retry=RETRY)
    async def agent(ctx: Context) -> str:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "goal"}]
        query = await ctx.step("model", model, list(messages))
        messages.append({"role": "assistant", "content": query})
        try:
            found = await ctx.tool("search", search, query)
        except Exception as error:  # noqa: BLE001 - as such loops do
            found = f"error: {type(error).__name__}: {error!r} {error}"
        messages.append({"role": "tool", "content": found})
        messages.append({"role": "assistant", "content": await ctx.step("model", model, list(messages))})
        return await ctx.step("model", model, list(messages))

    return agent


@handler(flaky=True)
def flaky_tool_error_shown_to_the_model(app: App, world: Journal) -> Task[Any, Any]:
    """The tool works when it is called again, which the model must not see."""

    async def model(messages: list[str]) -> str:
        world.call(f"model {messages[-1]}")
        return f"answer to {messages[-1]}"

    async def search() -> str:
        if world.call("search") == 1:
            raise ServiceDown("search", 429)
        return "3 results"

    @app.task(retry=RETRY)
    async def agent(ctx: Context) -> str:
        messages = ["goal"]
        try:
            messages.append(await ctx.tool("search", search))
        except Exception as error:  # noqa: BLE001 - as such loops do
            messages.append(f"error: {error}")
        await ctx.add_message("tool", messages[-1], tool_call_id="c1")
        messages.append(await ctx.step("model", model, list(messages)))
        return await ctx.step("model", model, list(messages))

    return agent


@handler(expects=["error", "ok"])
def failure_and_logged_calls(app: App, world: Journal) -> Task[Any, Any]:
    """A decision follows from a failure: it is a recorded call too."""

    async def probe(name: str) -> str:
        world.call(f"probe {name}")
        if name == "a":
            raise ServiceDown(name, 500)
        return "ok"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        found = []
        try:
            found.append(await ctx.step("probe", probe, "a"))
        except ServiceDown:
            found.append("error")
            await ctx.decide("go on with b")
            await ctx.discover("a is down")
        found.append(await ctx.step("probe", probe, "b"))
        return found

    return work


# batches and branches


@handler(expects=[0, 1, 3, 4])
def skip_failed_items(app: App, world: Journal) -> Task[Any, Any]:
    async def item(number: int) -> int:
        world.call(f"item {number}")
        if number in (2, 5):
            raise ValueError(f"bad item {number}")
        return number

    @app.task(retry=RETRY)
    async def batch(ctx: Context) -> list[int]:
        done = []
        for number in range(6):
            try:
                done.append(await ctx.step("item", item, number))
            except ValueError:
                continue
        await ctx.step("report", _echo, done)
        return done

    return batch


@handler(expects=[0, 1, 3])
def skip_failed_items_with_tries(app: App, world: Journal) -> Task[Any, Any]:
    async def item(number: int) -> int:
        world.call(f"item {number}")
        if number == 2:
            raise ValueError(f"bad item {number}")
        return number

    @app.task(retry=RETRY)
    async def batch(ctx: Context) -> list[int]:
        done = []
        for number in range(4):
            try:
                done.append(await ctx.options(retry=Retry(max_attempts=2, base=0.0)).step("item", item, number))
            except ValueError:
                continue
        await ctx.step("report", _echo, done)
        return done

    return batch


@handler(expects=["0", "1", "bad 2", "3", "bad 4"])
def gather_with_return_exceptions(app: App, world: Journal) -> Task[Any, Any]:
    async def item(number: int) -> str:
        world.call(f"item {number}")
        await asyncio.sleep(0)
        if number in (2, 4):
            raise ServiceDown(f"item {number}", 500)
        return str(number)

    @app.task(retry=RETRY)
    async def batch(ctx: Context) -> list[str]:
        found = await asyncio.gather(*(ctx.step("item", item, n) for n in range(5)), return_exceptions=True)
        shown = [f"bad {n}" if isinstance(one, ServiceDown) else str(one) for n, one in enumerate(found)]
        await ctx.step("report", _echo, shown)
        return shown

    return batch


@handler(expects="reported")
def gather_reported_and_then_raised(app: App, world: Journal) -> Task[Any, Any]:
    """After the report the failures are history, also in the next attempt."""

    async def item(number: int) -> str:
        world.call(f"item {number}")
        raise ServiceDown(f"item {number}", 500)

    async def report(shown: list[str]) -> str:
        world.call("report")
        return "reported"

    @app.task(retry=RETRY)
    async def batch(ctx: Context) -> str:
        found = await asyncio.gather(*(ctx.step("item", item, n) for n in range(3)), return_exceptions=True)
        shown = await ctx.step("report", report, [str(one) for one in found])
        if ctx.attempt == 1:
            raise ConnectionAbortedError("after the report")
        return shown

    return batch


@handler(expects="attempt 2")
def gather_of_ten_that_all_fail(app: App, world: Journal) -> Task[Any, Any]:
    """Nothing has followed from the failures, so all of them are called again."""

    async def item(number: int, fails: bool) -> str:
        world.call(f"item {number} fails {fails}")
        if fails:
            raise ServiceDown(f"item {number}", 500)
        return str(number)

    @app.task(retry=RETRY)
    async def batch(ctx: Context) -> str:
        await asyncio.gather(*(ctx.options(step_id=str(n)).step("item", item, n, ctx.attempt == 1) for n in range(10)))
        return f"attempt {ctx.attempt}"

    return batch


@handler(expects="gave up")
def task_group_with_a_failure(app: App, world: Journal) -> Task[Any, Any]:
    """The group cuts off the sibling of a step that fails; both are history once the handler continues."""

    async def fails() -> str:
        world.call("fails")
        raise ServiceDown("a", 500)

    async def endless() -> str:
        world.call("endless")
        await asyncio.sleep(60)
        return "never"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ctx.step("endless", endless))
                await asyncio.sleep(0.02)
                group.create_task(ctx.step("fails", fails))
        except* ServiceDown:
            pass
        return str(await ctx.step("report", _echo, "gave up"))

    return work


@handler(expects=["a", "error b", "c"])
def branches_that_handle_their_failures(app: App, world: Journal) -> Task[Any, Any]:
    async def fetch(name: str, source: str) -> str:
        world.call(f"{source} {name}")
        await asyncio.sleep(0)
        if name == "b" and source == "first":
            raise ServiceDown(name, 500)
        return f"error {name}" if source == "second" else name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        async def branch(name: str) -> str:
            with ctx.scope(name):
                try:
                    return await ctx.step("fetch", fetch, name, "first")
                except ServiceDown:
                    return await ctx.step("fetch", fetch, name, "second")

        return list(await asyncio.gather(*(branch(name) for name in "abc")))

    return work


@handler(flaky=True)
def gather_within_branches(app: App, world: Journal) -> Task[Any, Any]:
    """A branch continues after the failure of a step that it awaits in another asyncio task."""

    async def fetch(name: str) -> str:
        if world.call(f"fetch {name}") == 1 and name.endswith("1"):
            raise ServiceDown(name, 500)
        return name

    async def note(found: list[str]) -> str:
        world.call(f"note {found}")
        return ", ".join(found)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        async def branch(name: str) -> str:
            steps = [ctx.step(f"fetch {name}", fetch, f"{name}{number}") for number in (1, 2)]
            found = [str(one) for one in await asyncio.gather(*steps, return_exceptions=True)]
            return await ctx.step(f"note {name}", note, found)

        return list(await asyncio.gather(branch("a"), branch("b")))

    return work


@handler(expects="fast")
def race_whose_loser_is_cut_off(app: App, world: Journal) -> Task[Any, Any]:
    async def fast() -> str:
        world.call("fast")
        await asyncio.sleep(0.02)
        return "fast"

    async def slow() -> str:
        world.call("slow")
        await asyncio.sleep(60)
        return "slow"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        racers = [asyncio.create_task(ctx.step(fn.__name__, fn)) for fn in (slow, fast)]
        done, left = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
        for racer in left:
            racer.cancel()
        await asyncio.wait(left)
        winner = done.pop().result()
        await ctx.step("report", _echo, winner)
        return winner

    return work


# time-outs


@handler(expects="timed out")
def step_with_a_timeout(app: App, world: Journal) -> Task[Any, Any]:
    async def slow() -> str:
        world.call("slow")
        await asyncio.sleep(60)
        return "in time"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            found = await ctx.options(timeout=0.03).step("slow", slow)
        except TimeoutError:
            found = "timed out"
        return str(await ctx.step("report", _echo, found))

    return work


@handler(flaky=True)
def step_that_is_in_time_when_called_again(app: App, world: Journal) -> Task[Any, Any]:
    async def slow() -> str:
        if world.call("slow") == 1:
            await asyncio.sleep(60)
        return "in time"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            async with asyncio.timeout(0.03):
                found = await ctx.step("slow", slow)
        except TimeoutError:
            found = "timed out"
        return str(await ctx.step("report", _echo, found))

    return work


@handler(expects="timed out")
def asyncio_timeout_around_a_step(app: App, world: Journal) -> Task[Any, Any]:
    async def slow() -> str:
        world.call("slow")
        await asyncio.sleep(60)
        return "in time"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            async with asyncio.timeout(0.03):
                found = await ctx.step("slow", slow)
        except TimeoutError:
            found = "timed out"
        return str(await ctx.step("report", _echo, found))

    return work


@handler(expects="timed out")
def wait_for_around_a_step(app: App, world: Journal) -> Task[Any, Any]:
    async def slow() -> str:
        world.call("slow")
        await asyncio.sleep(60)
        return "in time"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            found = await asyncio.wait_for(ctx.step("slow", slow), 0.03)
        except TimeoutError:
            found = "timed out"
        return str(await ctx.step("report", _echo, found))

    return work


@handler(expects=["timed out", "in time"])
def move_on_after_in_branches(app: App, world: Journal) -> Task[Any, Any]:
    async def fetch(name: str) -> str:
        world.call(f"fetch {name}")
        await asyncio.sleep(60 if name == "slow" else 0)
        return "in time"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        async def branch(name: str) -> str:
            found = "timed out"
            with anyio.move_on_after(0.04):
                found = await ctx.step("fetch", fetch, name)
            return str(await ctx.step(f"report {name}", _echo, found))

        return list(await asyncio.gather(branch("slow"), branch("fast")))

    return work


# threads


@handler(expects="B bank A is down (503)")
def def_task(app: App, world: Journal) -> Task[Any, Any]:
    def bank(name: str, why: str) -> str:
        world.call(f"bank {name}")
        if name == "A":
            raise ServiceDown("bank A", 503)
        return f"{name} {why}"

    @app.task(retry=RETRY)
    def pay(ctx: SyncContext) -> str:
        try:
            return ctx.step("bank", bank, "A", "")
        except ServiceDown as error:
            return ctx.step("bank", bank, "B", str(error))

    return pay


@handler(expects=[0, 2])
def def_task_with_tries(app: App, world: Journal) -> Task[Any, Any]:
    def item(number: int) -> int:
        world.call(f"item {number}")
        if number == 1:
            raise KeyError("bad item")
        return number

    @app.task(retry=RETRY)
    def batch(ctx: SyncContext) -> list[int]:
        done = []
        for number in range(3):
            try:
                done.append(ctx.options(retry=Retry(max_attempts=2, base=0.0)).step("item", item, number))
            except KeyError as error:
                ctx.decide(f"skip {number}", reasoning=str(error))
        ctx.step("report", _report, done)
        return done

    return batch


def _report(done: list[int]) -> str:
    return str(done)


@handler(expects="B")
def plain_functions_in_threads(app: App, world: Journal) -> Task[Any, Any]:
    def bank(name: str) -> str:
        world.call(f"bank {name}")
        time.sleep(0.001)
        if name == "A":
            raise OSError(111, "connection refused")
        return name

    @app.task(retry=RETRY)
    async def pay(ctx: Context) -> str:
        try:
            paid = await ctx.step("bank A", bank, "A")
        except OSError as error:
            assert error.errno == 111, error
            paid = await ctx.step("bank B", bank, "B")
        await ctx.step("receipt", _echo, paid)
        return paid

    return pay


# identity of steps


@handler(expects=["a", "skipped b", "c"])
def step_ids(app: App, world: Journal) -> Task[Any, Any]:
    async def fetch(page: str) -> str:
        world.call(f"fetch {page}")
        if page == "b":
            raise ServiceDown(page, 404)
        return page

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        found = []
        for page in "abc":
            try:
                found.append(await ctx.options(step_id=page).step("fetch", fetch, page))
            except ServiceDown:
                found.append(f"skipped {page}")
        await ctx.step("report", _echo, found)
        return found

    return work


@handler(expects={"x": "down", "y": "down"})
def scopes(app: App, world: Journal) -> Task[Any, Any]:
    async def fetch() -> str:
        world.call("fetch")
        raise ServiceDown("fetch", 500)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> dict[str, str]:
        found = {}
        for name in "xy":
            with ctx.scope(name):
                try:
                    found[name] = await ctx.step("fetch", fetch)
                except ServiceDown:
                    found[name] = "down"
        await ctx.step("report", _echo, found)
        return found

    return work


@handler(expects="outer fallback")
def nested_steps(app: App, world: Journal) -> Task[Any, Any]:
    """Steps within a step are a part of it."""

    async def inner(name: str) -> str:
        world.call(f"inner {name}")
        if name == "first":
            raise ServiceDown("inner", 500)
        return name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        async def outer() -> str:
            world.call("outer")
            try:
                return await ctx.step("inner", inner, "first")
            except ServiceDown:
                return "outer " + await ctx.step("inner", inner, "fallback")

        return await ctx.step("outer", outer)

    return work


@handler(expects="outer fallback")
def nested_steps_that_are_recorded(app: App, world: Journal) -> Task[Any, Any]:
    async def inner(name: str) -> str:
        world.call(f"inner {name}")
        if name == "first":
            raise ServiceDown("inner", 500)
        return name

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        async def outer() -> str:
            world.call("outer")
            try:
                return await ctx.step("inner", inner, "first")
            except ServiceDown:
                return "outer " + await ctx.step("inner again", inner, "fallback")

        found = await ctx.options(nested="record").step("outer", outer)
        await ctx.step("report", _echo, found)
        return found

    return work


@handler(expects="verified", beyond=["verify"])
def risky_step_that_fails(app: App, world: Journal) -> Task[Any, Any]:
    """The failure of a risky step that is handled leaves no doubt."""

    async def pay(cents: int) -> str:
        world.call("pay")
        raise ServiceDown("bank", 500)

    async def verify(cents: int) -> AlreadyDone[str] | None:
        world.call("verify")
        return None

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            return await ctx.options(risky=True, verify=verify).step("pay", pay, 100)
        except ServiceDown:
            return str(await ctx.step("report", _echo, "verified"))

    return work


# waits and messages


@handler(expects="no one answered")
def question_after_a_failure(app: App, world: Journal) -> Task[Any, Any]:
    async def bank() -> str:
        world.call("bank")
        raise ServiceDown("bank", 500)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            return await ctx.step("bank", bank)
        except ServiceDown as error:
            answer = await ctx.ask("ada", f"continue after {error}?", timeout=0.05, default=None)
        return str(await ctx.step("report", _echo, "no one answered" if answer is None else "answered"))

    return work


@handler(expects="yes", answers=[Reply("question", "yes")])
def question_that_is_answered(app: App, world: Journal) -> Task[Any, Any]:
    async def bank() -> str:
        world.call("bank")
        raise ServiceDown("bank", 500)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            return await ctx.step("bank", bank)
        except ServiceDown as error:
            answer = await ctx.ask("ada", f"continue after {error}?")
        return str(await ctx.step("report", _echo, answer))

    return work


@handler(flaky=True)
def snooze_after_a_failure(app: App, world: Journal) -> Task[Any, Any]:
    """A handler that asks for another run because a step failed is not given the same failure again."""

    async def poll(number: int) -> str:
        if world.call("poll") % 2:
            raise ServiceDown("poll", 429)
        return "later"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            return await ctx.step("poll", poll, 1)
        except ServiceDown:
            raise Snooze(after=0) from None

    return work


@handler(expects="sent")
def message_sent_after_a_failure(app: App, world: Journal) -> Task[Any, Any]:
    async def bank() -> str:
        world.call("bank")
        raise ServiceDown("bank", 500)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            return await ctx.step("bank", bank)
        except ServiceDown as error:
            sent = await ctx.send(ctx.task_id, str(error))
            world.call(f"sent {sent.number > 0}")
        found = await ctx.inbox()
        return str(await ctx.step("report", _echo, "sent" if found else "not sent"))

    return work


@handler(expects="saved")
def artifact_after_a_failure(app: App, world: Journal) -> Task[Any, Any]:
    async def bank() -> str:
        world.call("bank")
        raise ServiceDown("bank", 500)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            return await ctx.step("bank", bank)
        except ServiceDown as error:
            await ctx.artifacts.save("error.txt", str(error).encode())
            world.call("saved")
        return str(await ctx.step("report", _echo, "saved"))

    return work


@handler(expects="both failed")
def exception_group_of_a_step(app: App, world: Journal) -> Task[Any, Any]:
    async def fails(name: str) -> None:
        raise ServiceDown(name, 500)

    async def both() -> str:
        world.call("both")
        async with asyncio.TaskGroup() as group:
            group.create_task(fails("a"))
            group.create_task(fails("b"))
        return "never"

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        shown = "fine"
        try:
            await ctx.step("both", both)
        except* ServiceDown as errors:
            shown = "both failed" if [str(one) for one in errors.exceptions][1] == "b is down (500)" else "?"
        return str(await ctx.step("report", _echo, shown))

    return work


@handler(expects="exited")
def step_that_exits(app: App, world: Journal) -> Task[Any, Any]:
    async def exits() -> None:
        world.call("exits")
        raise SystemExit(3)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> str:
        try:
            await ctx.step("exits", exits)
        except Exception:  # noqa: BLE001 - of any kind
            return str(await ctx.step("report", _echo, "exited"))
        return "?"

    return work


@handler(expects="third")
def own_backoff_between_tries(app: App, world: Journal) -> Task[Any, Any]:
    """The handler waits between its tries with a sleep of its own, which is no recorded call."""

    async def flaky(number: int) -> str:
        world.call(f"flaky {number}")
        if number < 3:
            raise ServiceDown("flaky", 503)
        return "third"

    @app.task(retry=RETRY)
    async def tries(ctx: Context) -> str:
        for number in (1, 2, 3):
            try:
                return await ctx.step("flaky", flaky, number)
            except ServiceDown:
                await asyncio.sleep(0.001)
        return "never"

    return tries


@handler(expects=["1", "2 failed"])
def outer_step_with_tries_and_recorded_parts(app: App, world: Journal) -> Task[Any, Any]:
    """The next try of a step meets the failures of its parts that the former try has handled."""

    async def part(number: int) -> str:
        world.call(f"part {number}")
        if number == 2:
            raise ServiceDown("part 2", 500)
        return str(number)

    @app.task(retry=RETRY)
    async def work(ctx: Context) -> list[str]:
        async def outer() -> list[str]:
            found = [await ctx.step("part", part, 1)]
            try:
                found.append(await ctx.step("part", part, 2))
            except ServiceDown:
                found.append("2 failed")
            await ctx.step("note", _echo, found)
            if current_step().attempt == 1:
                raise ConnectionResetError("the outer step fails once")
            return found

        options = ctx.options(nested="record", retry=Retry(max_attempts=2, base=0.0))
        return await options.step("outer", outer)

    return work


# agents


@handler(agent=True, arguments={"goal": "buy"}, expects="bought at B")
def agent_with_inner_steps(app: App, world: Journal) -> Any:
    async def shop(name: str) -> str:
        world.call(f"shop {name}")
        if name == "A":
            raise ServiceDown("shop A", 503)
        return name

    class State(AgentState):
        shop: str = ""

    @app.agent(name="buyer", retry=RETRY)
    class Buyer(Agent[State]):
        async def plan(self, ctx: Context, state: State) -> list[PlanStep]:
            return [PlanStep(key="buy", title="buy"), PlanStep(key="tell", title="tell")]

        async def act(self, ctx: Context, state: State, step: PlanStep) -> str:
            if step.key == "tell":
                return str(await ctx.step("tell", _echo, f"bought at {state.shop}"))
            try:
                state.shop = await ctx.step("shop A", shop, "A")
            except ServiceDown:
                state.shop = await ctx.step("shop B", shop, "B")
            return str(await ctx.step("receipt", _echo, state.shop))

        async def finish(self, ctx: Context, state: State) -> str:
            return str(state.results["tell"])

    return Buyer


@handler(agent=True, arguments={"goal": "buy"}, expects="done")
def agent_that_replans(app: App, world: Journal) -> Any:
    async def shop() -> str:
        world.call("shop")
        raise ServiceDown("shop", 503)

    async def other() -> str:
        world.call("other")
        return "done"

    class State(AgentState):
        pass

    @app.agent(name="replanner", retry=RETRY)
    class Replanner(Agent[State]):
        async def plan(self, ctx: Context, state: State) -> list[PlanStep]:
            return [PlanStep(key="shop", title="shop")]

        async def act(self, ctx: Context, state: State, step: PlanStep) -> str:
            return await ctx.step(step.key, other if step.key == "other" else shop)

        async def replan(self, ctx: Context, state: State) -> list[PlanStep] | None:
            if any(step.key == "other" for step in state.plan):
                return None
            return [PlanStep(key="other", title="other")]

        async def finish(self, ctx: Context, state: State) -> str:
            return str(state.results["other"])

    return Replanner
