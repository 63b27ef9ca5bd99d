"""Waits for answers: named, typed, answered once, and never by what was meant for another question."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from perdure import App, Context, Retry, Settings, SyncContext, TaskHandle
from perdure.queues import AnswerRefused, InvalidAnswer, PayloadTooLarge, TaskEnded, WaitNotFound
from perdure.queues.records import State
from perdure.queues.waits import read_waits
from perdure.worker.errors import WaitTimedOut
from pydantic import BaseModel, Field, field_validator

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, history, letter, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("bank")]


class Approval(BaseModel):
    approved: bool
    amount: int = 0

    @field_validator("amount")
    @classmethod
    def _bounded(cls, amount: int) -> int:
        if amount > 1000:
            raise ValueError("amount must be at most 1000")
        return amount


async def opened(handle: TaskHandle[Any], *waits: str) -> None:
    """Wait until the task is parked, with these open waits."""

    async def parked() -> bool:
        found = await handle.waits()
        return [wait.id for wait in found] == [*waits] and (await handle.record()).waits is not None

    await wait_until(parked, f"it waits for {waits}")


async def events(handle: TaskHandle[Any], *types: str) -> list[dict[str, Any]]:
    return [event.data for event in await history(handle) if event.type in types]


async def test_a_wait_is_answered_by_name_in_its_type(app: App) -> None:
    @app.task
    async def pay(ctx: Context, order: int) -> Any:
        answer = await ctx.wait_for("approval", Approval, who="finance", why=f"pays order {order}")
        assert isinstance(answer, Approval)
        return [answer.approved, ctx.resumption is not None and ctx.resumption.after]

    async with app, running_worker(app):
        handle = await pay.enqueue(17)
        await opened(handle, "approval")
        assert await handle.status() is State.WAITING
        (wait,) = await handle.waits()
        assert (wait.who, wait.why, wait.until) == ("finance", "pays order 17", None)
        explained = await handle.explain()
        assert "waiting for an answer to 'approval' by finance" in explained.sentence
        assert explained.remedy == f"answer: perdure task answer {handle.id} approval JSON"
        with pytest.raises(InvalidAnswer, match="approved"):
            await handle.answer("approval", {"amount": 3})
        with pytest.raises(WaitNotFound, match="open are: approval"):
            await handle.answer("approval#2", Approval(approved=True))
        sent = await handle.answer("approval", Approval(approved=True, amount=9), by="ada")
        assert (sent.wait, sent.state) == ("approval", State.WAITING)
        assert await bounded(handle.result()) == [True, "wait"]
        assert await handle.waits() == []
        (asked, answered) = await events(handle, "waiting", "answered")
        assert (asked["wait"], asked["on"], asked["why"]) == ("approval", "finance", "pays order 17")
        assert (answered["by"], answered["value"]) == ("ada", {"approved": True, "amount": 9})


async def test_a_second_answer_reaches_no_other_question(app: App) -> None:
    """A late click on "yes" must not delete the production database."""

    @app.task
    async def clean(ctx: Context) -> Any:
        first = await ctx.wait_for("approval", bool, why="delete the staging database?")
        second = await ctx.wait_for("approval", bool, why="delete the production database?")
        return [first, second]

    async with app, running_worker(app):
        handle = await clean.enqueue()
        await opened(handle, "approval")
        await handle.answer("approval", True, answer_id="click")
        await opened(handle, "approval#2")
        assert (await handle.answer("approval", True, answer_id="click")).wait == "approval", "the same click again"
        with pytest.raises(WaitNotFound, match="open are: approval#2"):
            await handle.answer("approval#1", True)
        assert not (await handle.waits())[0].answered
        await handle.answer("approval", False)
        assert await bounded(handle.result()) == [True, False]
        with pytest.raises(TaskEnded, match="takes no more answers"):
            await handle.answer("approval", True)


async def test_an_answer_before_the_question_is_kept_for_the_first_one(app: App) -> None:
    asking = asyncio.Event()

    @app.task
    async def pay(ctx: Context) -> Any:
        await asking.wait()
        first = await ctx.wait_for("approval", bool)
        return [first, await ctx.wait_for("approval", bool, timeout=0.05, default=None)]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        assert (await handle.answer("approval", True, by="ada")).early
        with pytest.raises(AnswerRefused, match="an answer is kept already"):
            await handle.answer("approval", False)
        asking.set()
        assert await bounded(handle.result()) == [True, None]
        (answered,) = await events(handle, "answered")
        assert answered["early"]


async def test_a_wait_that_shows_something_takes_no_early_answer(app: App) -> None:
    asking = asyncio.Event()

    @app.task
    async def pay(ctx: Context) -> Any:
        await asking.wait()
        return await ctx.wait_for("approval", bool, shows={"amount": 900})

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await handle.answer("approval", True)
        asking.set()
        await opened(handle, "approval")
        waits = await read_waits(app.producer.gateway, handle.partition, handle.id)
        assert (list(waits.early), waits.open[0].shown) == (["approval"], {"amount": 900})
        await handle.answer("approval", False)
        assert await bounded(handle.result()) is False
        assert (await handle.record()).unused_answers == 1, "the end of the task reports it"


async def test_an_answer_to_what_was_shown_before_is_void(app: App) -> None:
    shown = [{"amount": 9}]

    @app.task
    async def pay(ctx: Context) -> Any:
        amount = shown[0]
        return [amount, await ctx.wait_for("approval", bool, shows=amount)]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        shown[0] = {"amount": 900}
        await handle.answer("approval", True)

        async def asked_again() -> bool:
            (wait,) = await handle.waits()
            return bool(wait.shown == {"amount": 900} and (await handle.record()).waits)

        await wait_until(asked_again, "it shows the other amount")
        assert not (await handle.waits())[0].answered
        await handle.answer("approval", False)
        assert await bounded(handle.result()) == [{"amount": 900}, False]
        first, second = await events(handle, "waiting")
        assert "withdrawn" not in first
        assert second["withdrawn"] == 'approval for {"amount":9}'


async def test_a_recorded_answer_is_not_taken_for_something_else(app: App) -> None:
    shown = [9]

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def pay(ctx: Context) -> Any:
        await ctx.wait_for("approval", bool, shows=shown[0])
        shown[0] = 900
        raise ValueError("the bank is closed")

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        await handle.answer("approval", True)
        assert (await letter(app, handle)).error.endswith("StepMismatch")


async def test_an_answer_that_a_validator_refuses_leaves_the_wait_open(app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> int:
        return (await ctx.wait_for("approval", Approval)).amount

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        await handle.answer("approval", {"approved": True, "amount": 5000}, by="ada")

        async def dropped() -> bool:
            return bool(await events(handle, "answer_dropped"))

        await wait_until(dropped, "the answer was dropped")
        await opened(handle, "approval")
        ((event),) = await events(handle, "answer_dropped")
        assert (event["by"], event["why"]) == ("ada", "amount: amount must be at most 1000")
        await handle.answer("approval", {"approved": True, "amount": 50})
        assert await bounded(handle.result()) == 50


@pytest.mark.parametrize("default", [True, False])
async def test_a_time_out_raises_or_gives_the_default(app: App, default: bool) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> Any:
        if default:
            return await ctx.wait_for("approval", bool, timeout=timedelta(seconds=0.1), default="no answer")
        try:
            await ctx.wait_for("approval", bool, timeout=0.1, who="ada")
        except WaitTimedOut as error:
            await ctx.step("note", str, error)
            return await ctx.wait_for("approval", bool)
        return None

    async with app, running_worker(app):
        handle = await pay.enqueue()
        if default:
            assert await bounded(handle.result()) == "no answer"
            return
        await opened(handle, "approval#2")
        await handle.answer("approval", True)
        assert await bounded(handle.result()) is True


async def test_the_next_attempt_waits_again_after_a_time_out(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def pay(ctx: Context) -> Any:
        return await ctx.wait_for("approval", bool, timeout=0.1 if ctx.attempt == 1 else None)

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")

        async def second() -> bool:
            return (await handle.record()).attempts == 1 and (await handle.record()).waits is not None

        await wait_until(second, "the second attempt waits")
        await handle.answer("approval", True)
        assert await bounded(handle.result()) is True


async def test_waits_of_one_name_in_branches_keep_their_answers(app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> Any:
        async def page(number: int) -> bool:
            with ctx.scope(f"page {number}"):
                return bool(await ctx.wait_for("approval", bool, why=f"page {number}"))

        return await asyncio.gather(*(page(number) for number in range(3)))

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, *(f"page {number}/approval" for number in range(3)))
        with pytest.raises(WaitNotFound, match="several waits of this name are open"):
            await handle.answer("approval", True)
        await handle.answer("page 1/approval", False)
        await handle.answer("page 0/approval", True)
        await opened(handle, "page 2/approval")
        await handle.answer("approval", True)
        assert await bounded(handle.result()) == [True, False, True]


async def test_a_wait_is_opened_before_people_are_notified(app: App) -> None:
    """It is answered by its token, which no other open wait may have."""
    notified: list[str] = []

    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context, order: int) -> Any:
        wait = await ctx.open_wait("approval", bool, token=f"order:{order}", who="ada")
        await ctx.step("notify", notified.append, f"{wait.id} {wait.token}")
        return [await wait, await wait, wait.by]

    async with app, running_worker(app):
        handle = await pay.enqueue(17)
        await opened(handle, "approval")
        assert notified == ["approval order:17"]
        second = await pay.enqueue(17)
        assert (await letter(app, second)).error.endswith("TokenTaken")
        assert (await app.answer("order:17", True, by="ada")).task_id == handle.id
        assert await bounded(handle.result()) == [True, True, "ada"]
        with pytest.raises(WaitNotFound, match="no open wait has the token"):
            await app.answer("order:17", True)
        third = await pay.enqueue(17)
        await opened(third, "approval")
        await app.answer("order:17", False)
        assert (await bounded(third.result()))[0] is False


async def test_a_synchronous_handler_waits(app: App) -> None:
    @app.task
    def pay(ctx: SyncContext) -> Any:
        wait = ctx.open_wait("second", int)
        return [ctx.wait_for("approval", bool), wait.result(), ctx.ask("ada", "really?")]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "second", "approval")
        await handle.answer("second", 2)
        await handle.answer("approval", True)
        await opened(handle, "question")
        await handle.answer("question", "yes")
        assert await bounded(handle.result()) == [True, 2, "yes"]


async def test_a_closed_wait_takes_no_answer(app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> Any:
        wait = await ctx.open_wait("approval", bool)
        await wait.close()
        await wait.close()
        return await ctx.wait_for("other", bool)

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "other")
        with pytest.raises(AnswerRefused, match="of this name had an end already"):
            await handle.answer("approval", True)
        await handle.answer("other", True)
        assert await bounded(handle.result()) is True


async def test_several_branches_await_one_wait(app: App) -> None:
    """They hold no slot, and all have the answer."""

    @app.task
    async def pay(ctx: Context) -> Any:
        wait = await ctx.open_wait("approval", bool)
        return await asyncio.gather(wait.result(), wait.result(), wait.result())

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        await handle.answer("approval", True)
        assert await bounded(handle.result()) == [True, True, True]


async def test_a_branch_closes_a_wait_that_another_one_awaits(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> Any:
        wait = await ctx.open_wait("approval", bool)

        async def close() -> None:
            await ctx.sleep(0.1)
            await wait.close()

        ends: list[object] = await asyncio.gather(wait.result(), close(), return_exceptions=True)
        return [type(ends[0]).__name__, await ctx.wait_for("other", bool)]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "other")
        await handle.answer("other", True)
        assert await bounded(handle.result()) == ["WaitClosed", True]


async def test_a_wait_that_lost_a_race_has_its_answer_later(app: App) -> None:
    """Its call is cancelled while it stores the answer."""

    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> Any:
        first, second = await ctx.open_wait("first", bool), await ctx.open_wait("second", bool)
        winner, _ = await ctx.first(first=first, second=second)
        return [winner, await first, await second]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "first", "second")
        await asyncio.gather(handle.answer("first", True), handle.answer("second", False))
        assert await bounded(handle.result()) in (["first", True, False], ["second", True, False])


@pytest.mark.parametrize("scope", ["first/ok", "page"])
async def test_a_branch_with_a_scope_withdraws_what_it_showed_before(app: App, scope: str) -> None:
    """One wait is open: an answer to the former content is void, and no second question stays beside it."""
    shown = [9]

    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> Any:
        amount = shown[0]

        async def page() -> bool:
            with ctx.scope("page"):
                return await ctx.wait_for("approval", bool, shows=amount)

        if scope == "page":
            return [amount, *await asyncio.gather(page())]
        return [amount, (await ctx.first(ok=ctx.wait_for("approval", bool, shows=amount), late=ctx.sleep(3600))).value]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, f"{scope}/approval")
        shown[0] = 900
        await handle.answer("approval", True)

        async def asked_again() -> bool:
            return [wait.shown for wait in await handle.waits()] == [900] and (await handle.record()).waits is not None

        await wait_until(asked_again, "it shows the other amount only")
        await handle.answer("approval", False)
        assert await bounded(handle.result()) == [900, False]


async def test_a_withdrawn_question_leaves_the_one_beside_it_alone(app: App) -> None:
    shown = [1, 2]

    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> Any:
        waits = [await ctx.open_wait("approval", int, shows=page) for page in list(shown)]
        return [await wait for wait in waits]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval", "approval#2")
        await handle.answer("approval#2", 22)
        shown[0] = 11
        await handle.answer("approval#1", 1)

        async def asked_again() -> bool:
            found = {wait.id: wait for wait in await handle.waits()}
            return found["approval"].shown == 11 and (await handle.record()).waits is not None

        await wait_until(asked_again, "the first one shows something else")
        await handle.answer("approval#1", 11)
        assert await bounded(handle.result()) == [11, 22]


async def test_a_second_answer_is_not_kept_for_the_first_question_of_a_successor(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def clean(ctx: Context, name: str) -> bool:
        approved = await ctx.wait_for("approval", bool, why=f"delete {name}?")
        if name == "staging":
            await ctx.continue_as(why="next", queue="later", arguments={"name": "production"})
        return approved

    async with app, running_worker(app, queues=["bank"]):
        handle = await clean.enqueue("staging")
        await opened(handle, "approval")
        await handle.answer("approval", True)
        await wait_until(lambda: _successor(handle), "it continues as another task")
        with pytest.raises(AnswerRefused, match=r"none of this name is open, and the task that .*h1 continues had one"):
            await handle.answer("approval", True)
        with pytest.raises(AnswerRefused, match=r"the task continues as .*h1: an answer by id is for the question"):
            await handle.answer("approval#1", True)
        assert (await handle.answer("other", True)).early
        async with running_worker(app, queues=["later"]):
            successor = await app.producer.find(f"{handle.id}.h1")
            assert successor is not None
            await opened(successor, "approval")
            await handle.answer("approval", False)
            assert await bounded(handle.result()) is False


async def _successor(handle: TaskHandle[Any]) -> Any:
    return (await handle.record()).handed_to


async def test_an_answer_to_a_page_that_was_left_open_is_refused(app: App) -> None:
    """The page shows what the wait has shown before."""
    shown = [9]

    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> int:
        await ctx.wait_for("approval", bool, shows=shown[0], token="order")
        return shown[0]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        (page,) = await handle.waits()
        shown[0] = 900
        await handle.answer("approval", True)

        async def asked_again() -> bool:
            return [wait.shown for wait in await handle.waits()] == [900] and (await handle.record()).waits is not None

        await wait_until(asked_again, "it shows the other amount")
        with pytest.raises(AnswerRefused, match="it shows something else now"):
            await handle.answer("approval", True, shows=page.shows)
        with pytest.raises(AnswerRefused, match="it shows something else now"):
            await app.answer("order", True, shows=page.shows)
        with pytest.raises(AnswerRefused, match="none of this name is open"):
            await handle.answer("other", True, shows=page.shows)
        (page,) = await handle.waits()
        await handle.answer("approval", True, shows=page.shows, answer_id="click")
        assert await bounded(handle.result()) == 900
        assert (await handle.answer("approval", True, shows=page.shows, answer_id="click")).wait == "approval"


async def test_an_answer_that_is_sent_again_late_reaches_no_later_question(app: App) -> None:
    """Such as a webhook that is delivered again when two other questions have been answered or have timed out."""

    @app.task(retry=Retry(max_attempts=1))
    async def clean(ctx: Context) -> list[Any]:
        first = await ctx.wait_for("approval", bool, why="delete the staging database?")
        second = await ctx.wait_for("approval", bool, why="are you sure?")
        third = await ctx.wait_for("approval", bool, why="anything else?", timeout=0.1, default=None)
        return [first, second, third, await ctx.wait_for("approval", bool, why="delete the production database?")]

    async with app, running_worker(app):
        handle = await clean.enqueue()
        await opened(handle, "approval")
        await handle.answer("approval", True, answer_id="webhook")
        await opened(handle, "approval#2")
        await handle.answer("approval", True)
        await opened(handle, "approval#4")
        await handle.answer("approval", True, answer_id="webhook")
        assert not (await handle.waits())[0].answered
        await handle.answer("approval", False)
        assert await bounded(handle.result()) == [True, True, None, False]


class Shown(BaseModel):
    is_ok: bool = Field(alias="isOk")
    by: str = Field("", alias="signedBy")


@pytest.mark.parametrize("given", [{"isOk": True, "signedBy": "ada"}, Shown(isOk=True, signedBy="ada")])
async def test_an_answer_has_the_aliases_of_its_fields(app: App, given: Any) -> None:
    @app.task
    async def pay(ctx: Context) -> list[Any]:
        answer = await ctx.wait_for("approval", Shown)
        await ctx.sleep(0.01)  # the answer is read from its record after that
        return [answer.is_ok, answer.by]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        await handle.answer("approval", given)
        assert await bounded(handle.result()) == [True, "ada"]


async def test_a_task_that_has_ended_has_no_open_wait(app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> str:
        wait = await ctx.open_wait("approval", bool)
        return wait.id

    async with app, running_worker(app):
        handle = await pay.enqueue()
        assert await bounded(handle.result()) == "approval"
        assert await handle.waits() == []


async def test_the_largest_answer_that_is_stored_fits_the_run(app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> int:
        return len(await ctx.wait_for("approval", str))

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        size = Settings().payload_limit
        while True:
            try:
                await handle.answer("approval", "x" * size, by="ada")
                break
            except PayloadTooLarge:
                size -= 16
        assert await bounded(handle.result()) == size


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "pay out"}, "name of a wait must be"),
    ({"name": "a/b"}, "name of a wait must be"),
    ({"name": ""}, "name of a wait must be"),
    ({"name": 3}, "name of a wait must be"),
    ({"timeout": 0}, "timeout of wait 'approval' must be more than 0 seconds, got 0"),
    ({"timeout": -1}, "timeout of wait 'approval' must be more than 0 seconds"),
    ({"timeout": float("nan")}, "timeout must be a number of seconds"),
    ({"who": 3}, "who of wait 'approval' must be a text, got 3"),
    ({"why": None}, "why of wait 'approval' must be a text"),
    ({"token": ""}, "token must be a text of 1 to 200 characters"),
    ({"token": "x" * 201}, "token must be a text of 1 to 200 characters"),
    ({"shows": object()}, "shows of wait 'approval' must be JSON-serialisable"),
    ({"type": object()}, "type of wait 'approval' cannot be used: "),
]


@pytest.mark.parametrize(("options", "problem"), BAD)
async def test_wrong_arguments_open_no_wait(app: App, options: dict[str, Any], problem: str) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def pay(ctx: Context) -> None:
        await ctx.wait_for(**({"name": "approval"} | options))

    async with app, running_worker(app):
        handle = await pay.enqueue()
        dead = await letter(app, handle)
        assert problem in dead.message
        assert await handle.waits() == []


async def test_the_wait_of_a_branch_that_is_overtaken_is_closed(app: App) -> None:
    """Its token is free, and no answer reaches it."""

    @app.task
    async def pay(ctx: Context) -> Any:
        found = await ctx.first(answer=ctx.wait_for("approval", bool, token="order:17"), late=ctx.sleep(0.05))
        again = await ctx.wait_for("second", bool, token="order:17")
        return [found.name, again]

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "second")
        with pytest.raises(AnswerRefused, match="1 wait of this name had an end already"):
            await handle.answer("approval", True)
        assert (await app.answer("order:17", False)).wait == "second"
        assert await bounded(handle.result()) == ["late", False]
        assert [event.get("closed") for event in await events(handle, "waited") if event.get("wait")] == [True]


async def test_waits_and_answers_are_encrypted(settings: Settings) -> None:
    app = App("bank", settings=with_keys(settings, FIRST))

    @app.task
    async def pay(ctx: Context) -> Any:
        return await ctx.wait_for("approval", str, why="private", shows="private", token="order:17")

    async with app, running_worker(app):
        handle = await pay.enqueue()
        await opened(handle, "approval")
        token = app.producer.namespace.token("order:17").key
        stored = await redis_command(app, "HVALS", handle.partition.inbox(handle.id))
        assert not any(b"private" in value for value in [*stored, await redis_command(app, "GET", token)])
        assert handle.id.encode() not in await redis_command(app, "GET", token)
        await app.answer("order:17", "private")
        assert await bounded(handle.result()) == "private"


async def test_a_wait_that_the_inbox_has_lost_is_opened_again(app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> Any:
        return await ctx.wait_for("approval", bool)

    async with app:
        handle = await pay.enqueue()
        await work_off(app)
        await redis_command(app, "HDEL", handle.partition.inbox(handle.id), "w:approval")
        with pytest.raises(AnswerRefused, match="its waits change"):
            await handle.answer("approval", True)
        await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)
        await work_off(app)
        await handle.answer("approval", True)
        await work_off(app)
        assert await bounded(handle.result()) is True
