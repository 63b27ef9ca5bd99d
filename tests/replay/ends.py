"""Handlers of the replay suite that enqueue tasks, undo steps, and talk over a whole conversation."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from perdure import Agent, AgentState, App, Context, PlanStep, Retry, State, current_step
from perdure.worker.task import Task

from tests.replay.handlers import RETRY, handler
from tests.replay.journal import Journal


def _each_child_once(effects: Counter[str]) -> str:
    tasks = Counter(name.split()[1] for name in effects if name.startswith("child "))
    return "" if tasks == Counter("123") else f"tasks by number: {dict(tasks)}"


@handler(flaky=True, retried=False, enqueues=True, allowed=_each_child_once)
def children(app: App, world: Journal) -> Task[Any, Any]:
    @app.task
    async def child(ctx: Context, number: int) -> None:
        world.call(f"child {number} {ctx.task_id}")

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> int:
        await child.enqueue(1)
        await ctx.step("between", _echo, 0)
        await child.enqueue_many([{"number": 2}, {"number": 3}])
        return await ctx.step("sum", _echo, 6)

    return parent


@handler(flaky=True, retried=False, enqueues=True, allowed=_each_child_once)
def children_of_a_step(app: App, world: Journal) -> Task[Any, Any]:
    @app.task
    async def child(ctx: Context, number: int) -> None:
        world.call(f"child {number} {ctx.task_id}")

    async def start() -> list[str]:
        handles = [await child.enqueue(1), await child.enqueue(2), *await child.enqueue_many([{"number": 3}])]
        return [handle.id for handle in handles]

    @app.task(retry=RETRY)
    async def parent(ctx: Context) -> list[str]:
        return await ctx.step("start", start)

    return parent


async def _echo(value: Any) -> Any:
    return value


def _cleaned_up_once(effects: Counter[str]) -> str:
    tasks = [name for name in effects if name.startswith("clean up ")]
    return (
        ""
        if len(tasks) == 1 and effects["give back"]
        else f"clean-up tasks: {tasks}, {effects['give back']} given back"
    )


def _hotel(app: App, world: Journal) -> Task[Any, Any]:
    """Return the clean-up task of the tasks that book a room."""

    async def release(room: str) -> None:
        world.call("give back")

    @app.task
    async def give_back(ctx: Context, task_id: str) -> None:
        world.call(f"clean up {ctx.task_id}")
        ended = await ctx.ended_task(task_id)
        if ended.state is not State.SUCCEEDED and "book" in ended.steps:
            await ctx.step("give back", release, ended.steps["book"])

    return give_back


@handler(flaky=True, retried=False, enqueues=True, cancels=True, allowed=_cleaned_up_once)
def booking_that_is_cancelled_while_it_waits(app: App, world: Journal) -> Task[Any, Any]:
    @app.task(retry=RETRY, on_end=_hotel(app, world))
    async def stay(ctx: Context) -> str:
        booking = await ctx.step("book", _echo, "blue")
        await ctx.ask("ada", "Confirm?")
        return str(booking)

    return stay


@handler(flaky=True, retried=False, enqueues=True, allowed=_cleaned_up_once)
def booking_that_runs_out_of_time(app: App, world: Journal) -> Task[Any, Any]:
    @app.task(timeout=0.3, retry=Retry(max_attempts=1, max_crashes=5), on_end=_hotel(app, world))
    async def stay(ctx: Context) -> str:
        booking = await ctx.step("book", _echo, "blue")
        await asyncio.sleep(60)  # a call of a service that does not answer
        return str(booking)

    return stay


def _one_payment(effects: Counter[str]) -> str:
    """Return what is wrong unless one payment is left, and one parcel was sent for it."""
    keys = {
        kind: {name.split()[1] for name in effects if name.startswith(kind)} for kind in ("charge", "refund", "sent")
    }
    left = keys["charge"] - keys["refund"]
    return "" if len(left) == 1 and keys["sent"] == left else f"payments and parcels: {keys}"


class _Shop:
    """Services, whose journal has each payment by its idempotency key."""

    def __init__(self, world: Journal) -> None:
        self.world = world

    async def charge(self) -> str:
        key = current_step().idempotency_key.partition(":")[2]
        self.world.call(f"charge {key}")
        return key

    async def refund(self, payment: str) -> None:
        self.world.call(f"refund {payment}")

    async def ship(self, payment: str) -> str:
        if self.world.call("try to ship") == 1:
            raise ConnectionError("no van")
        self.world.call(f"sent {payment}")
        return payment


@handler(flaky=True, undoes=True, allowed=_one_payment)
def saga_that_is_undone(app: App, world: Journal) -> Task[Any, Any]:
    shop = _Shop(world)

    @app.task(retry=RETRY)
    async def buy(ctx: Context) -> str:
        async with ctx.saga() as saga:
            payment = await saga.step("charge", shop.charge, undo=shop.refund)
            return str(await saga.step("ship", shop.ship, payment))

    return buy


@handler(flaky=True, undoes=True, allowed=_one_payment)
def refund_and_forget(app: App, world: Journal) -> Task[Any, Any]:
    shop = _Shop(world)

    @app.task(retry=RETRY)
    async def buy(ctx: Context) -> str:
        payment = await ctx.step("charge", shop.charge)
        try:
            return await ctx.step("ship", shop.ship, payment)
        except ConnectionError:
            await ctx.step("refund", shop.refund, payment)
            await ctx.forget("charge")
            raise

    return buy


@handler(agent=True, arguments={"goal": "hello"}, expects=["hello", "answer 1", "answer 2", "answer 3"])
def agent_with_a_model_loop(app: App, world: Journal) -> Any:
    class Talk(AgentState):
        """A state without fields of its own."""

    async def model(messages: list[str]) -> str:
        world.call(f"model {len(messages)}")
        return f"answer {len(messages)}"

    @app.agent(name="talks", retry=RETRY)
    class Talks(Agent[Talk]):
        async def plan(self, ctx: Context, state: Talk) -> list[PlanStep]:
            await ctx.add_message("user", state.goal)
            return [PlanStep(key="talk", title="Talk")]

        async def act(self, ctx: Context, state: Talk, step: PlanStep) -> None:
            for _ in range(3):
                answer = await ctx.step("model", model, [message.content for message in state.messages])
                await ctx.add_message("assistant", answer)

        async def finish(self, ctx: Context, state: Talk) -> list[str]:
            return [message.content for message in state.messages]

    return Talks
