"""Questions of `ctx.ask`: an answer is for one question of one person, whatever changes between two runs."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, SyncContext, TaskHandle
from perdure.deadletter.replay import Replay, replay
from perdure.testing import make_context
from perdure.worker.errors import StepDefinitionError

from tests.support.workers import bounded, history, letter, recorded_steps, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("bank")]


async def asked(handle: TaskHandle[Any], count: int = 1) -> None:
    """Wait until the task waits for the answer to its question of this number."""

    async def waits() -> bool:
        return len(await questions(handle)) == count and (await handle.record()).waits is not None

    await wait_until(waits, f"it waits for the answer to question {count}")


async def questions(handle: TaskHandle[Any]) -> list[dict[str, Any]]:
    return [event.data for event in await history(handle) if event.type == "waiting"]


async def test_an_open_question_is_withdrawn_for_another_one(app: App) -> None:
    """The message that wakes the task was sent by a person who saw the former question."""
    amount = [50]

    @app.task
    async def refund(ctx: Context) -> Any:
        asked = amount[0]
        return [asked, await ctx.ask("ada", f"refund {asked}?")]

    async with app, running_worker(app):
        handle = await refund.enqueue()
        await asked(handle)
        amount[0] = 5000
        await handle.answer("question", "yes to 50", by="ada")
        await asked(handle, 2)
        explained = await handle.explain()
        assert explained.why == "refund 5000?"
        assert "refund 5000?" in explained.sentence
        document = orjson.loads((await recorded_steps(app, handle))["s:#handoff"])
        assert [awaited["why"] for awaited in document["waiting_on"]] == ["refund 5000?"]
        await handle.answer("question", "yes to 5000", by="ada")
        assert await bounded(handle.result()) == [5000, "yes to 5000"]
        first, second = await questions(handle)
        assert (first["why"], second["why"]) == ("refund 50?", "refund 5000?")
        assert "refund 50?" in second["withdrawn"]


@pytest.mark.parametrize(("who", "amount"), [("ada", 5000), ("bob", 50)])
async def test_a_recorded_answer_is_not_taken_for_another_question(app: App, who: str, amount: int) -> None:
    """Also if another person is asked the same."""
    paid: list[int] = []

    @app.task(retry=Retry(max_attempts=1))
    async def refund(ctx: Context, who: str, amount: int) -> None:
        await ctx.ask(who, f"{who}, refund {amount}?")
        if not paid:
            paid.append(0)
            raise ValueError("the bank is closed")
        paid.append(amount)

    async with app:
        handle = await refund.enqueue("ada", 50)
        async with running_worker(app):
            await asked(handle)
            await handle.answer("question", "yes", by="ada")
            dead = await letter(app, handle)
        edited = f'{{"who": "{who}", "amount": {amount}}}'.encode()
        assert await replay(app.producer.gateway, dead, Replay(args=edited))
        await work_off(app)
        found = await letter(app, handle)
        assert found.error.endswith("StepMismatch")
        assert found.reason == "not_retryable"
        assert '"ada, refund 50?"' in found.message
        assert f'"{who}, refund {amount}?"' in found.message
        assert "ctx.options(on_mismatch='rerun').ask(...)" in found.message
        assert paid == [0]
        assert await replay(app.producer.gateway, found, Replay(args=b'{"who": "ada", "amount": 50}'))
        await work_off(app)
        assert paid == [0, 50], "the same question has its answer"


@pytest.mark.parametrize("sync", [False, True])
async def test_a_question_with_rerun_is_asked_again(app: App, sync: bool) -> None:
    texts = ["refund 50?", "refund 5000?", "refund 5000?", "refund 5000?"]
    runs: list[str] = []

    def next_text() -> str:
        runs.append(texts[len(runs)])
        return runs[-1]

    async def refund(ctx: Context) -> Any:
        answer = await ctx.options(on_mismatch="rerun").ask("ada", next_text())
        if ctx.attempt == 1:
            raise ValueError("the bank is closed")
        return answer

    def refund_sync(ctx: SyncContext) -> Any:
        answer = ctx.options(on_mismatch="rerun").ask("ada", next_text())
        if ctx.attempt == 1:
            raise ValueError("the bank is closed")
        return answer

    texts.insert(1, texts[0])  # the run that the answer wakes
    task = app.task(retry=Retry(max_attempts=2, base=0.0))(refund_sync if sync else refund)
    async with app, running_worker(app):
        handle = await task.enqueue()
        await asked(handle)
        await handle.answer("question", "yes to 50", by="ada")
        await asked(handle, 2)
        await handle.answer("question", "no to 5000", by="ada")
        assert await bounded(handle.result()) == "no to 5000"


async def test_a_question_with_a_name_may_have_another_text(app: App) -> None:
    runs: list[int] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def publish(ctx: Context) -> Any:
        runs.append(1)
        answer = await ctx.ask("ada", f"Publish? It is {len(runs)} o'clock", bool, name="publish")
        if ctx.attempt == 1:
            raise ValueError("once more")
        return answer

    async with app, running_worker(app):
        handle = await publish.enqueue()
        await asked(handle)
        await handle.answer("publish", True)
        assert await bounded(handle.result()) is True
        assert len(runs) == 3


async def test_questions_keep_their_answers_in_another_order(app: App) -> None:
    """Two questions are exchanged, and a read of another kind comes before them."""

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def both(ctx: Context) -> dict[str, Any]:
        texts = ["newsletter?", "database?"]
        if ctx.attempt == 2:
            texts.reverse()
            await ctx.inbox(sender="bob")
        found = {text: await ctx.ask("ada", text) for text in texts}
        if ctx.attempt == 1:
            raise ValueError("once more")
        return found

    async with app, running_worker(app):
        handle = await both.enqueue()
        await asked(handle)
        await handle.answer("question", "yes", by="ada")
        await asked(handle, 2)
        await handle.answer("question", "no", by="ada")
        assert await bounded(handle.result()) == {"newsletter?": "yes", "database?": "no"}


async def test_a_read_does_not_return_what_another_sender_wrote(app: App) -> None:
    senders = iter(["bob", "ada"])

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def reads(ctx: Context) -> list[Any]:
        found = await ctx.inbox(sender=next(senders))
        if ctx.attempt == 1:
            raise ValueError("once more")
        return [message.content for message in found]

    async with app:
        handle = await reads.enqueue()
        await handle.send("from bob", sender="bob")
        await handle.send("from ada", sender="ada")
        await work_off(app)
        assert await bounded(handle.result()) == ["from ada"]


class RefundState(AgentState):
    amount: int = 50


class Refund(Agent[RefundState]):
    """Asks for the amount that its state has."""

    async def plan(self, ctx: Context, state: RefundState) -> list[PlanStep]:
        return [PlanStep(key="pay", title="pay")]

    async def act(self, ctx: Context, state: RefundState, step: PlanStep) -> Any:
        answer = await ctx.ask("ada", f"refund {state.amount}?")
        more = await ctx.ask("ada", "really?")
        return [state.amount, answer, more]

    async def finish(self, ctx: Context, state: RefundState) -> Any:
        return state.results["pay"]


async def test_a_correction_withdraws_the_question_of_an_agent(app: App) -> None:
    """An open one, and one that was answered in the step that is cut off."""
    agent = app.agent(Refund)
    async with app, running_worker(app):
        handle = await agent.enqueue("refund")
        await asked(handle)
        await handle.correct({"amount": 500})
        await asked(handle, 2)
        assert (await handle.explain()).why == "refund 500?"
        await handle.answer("question", "yes to 500", by="ada")
        await asked(handle, 3)
        assert (await handle.explain()).why == "really?"
        await handle.correct({"amount": 5000})
        await asked(handle, 4)
        assert (await handle.explain()).why == "refund 5000?"
        await handle.answer("question", "yes to 5000", by="ada")
        await asked(handle, 5)
        await handle.answer("question", "really", by="ada")
        assert await bounded(handle.result()) == [5000, "yes to 5000", "really"]


async def test_a_question_leaves_the_confirmation_of_an_agent_alone(app: App) -> None:
    """A resume that was confirmed is not asked for again after the agent has asked something else."""
    failures = iter(["before its first question", "before its second one"])

    class Asks(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=key, title=key) for key in ("a", "b")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            if step.key == "b":
                for failure in failures:
                    raise ValueError(failure)
            return await ctx.ask("ada", f"{step.key}?") if step.key == "b" else None

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return state.results

    agent = app.agent(Asks, retry=Retry(max_attempts=3, base=0.0), on_resume="ask")
    async with app, running_worker(app):
        handle = await agent.enqueue("work")
        await asked(handle)
        await handle.correct({}, confirm=True)
        await asked(handle, 2)
        await handle.answer("question", "yes", by="ada")
        assert await bounded(handle.result()) == {"a": None, "b": "yes"}
        assert [question["what"] for question in await questions(handle)] == ["confirmation", "answer"]
        assert "s:#asked" in await recorded_steps(app, handle)


async def test_other_options_of_a_question_are_refused(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def asks(ctx: Context) -> None:
        await ctx.options(risky=True).ask("ada", "refund?")

    async with app:
        handle = await asks.enqueue()
        await work_off(app)
        found = await letter(app, handle)
        assert found.error.endswith(StepDefinitionError.__name__)
        assert "durability and on_mismatch" in found.message


async def test_questions_with_options_in_unit_tests() -> None:
    ctx = make_context(answers={"refund": "yes"})
    assert await ctx.options(on_mismatch="rerun").ask("ada", "refund?", name="refund") == "yes"
