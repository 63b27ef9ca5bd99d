"""`perdure task answer` and `perdure task waiting`."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from perdure import App, Context, Settings
from pydantic import BaseModel

from tests.support.command_line import call
from tests.support.workers import work_off


class Approval(BaseModel):
    approved: bool


@pytest.fixture
def work(settings: Settings, environment: None) -> Any:
    """Function that runs all queued tasks."""

    async def run() -> None:
        app = App("test", settings=settings)

        @app.task
        async def pay(ctx: Context, order: int) -> Any:
            shown = {"order": order}
            answer = await ctx.wait_for(
                "approval", Approval, who="finance", why=f"pays {order}", shows=shown, token=f"order:{order}"
            )
            return [answer.approved, await ctx.wait_for("amount", int)]

        async with app:
            await work_off(app)

    return lambda: anyio.run(run)


def test_questions_are_listed_and_answered(work: Any) -> None:
    assert call("task", "waiting").err == "perdure: no task waits for an answer\n"
    first, second = (
        call("enqueue", "pay", "--queue", "test", "--args", f'{{"order": {order}}}').ids[0] for order in (1, 2)
    )
    early = call("task", "answer", second, "amount", "7", "--by", "ada")
    assert (early.code, early.ids) == (0, [second])
    assert early.err == f"perdure: kept the answer of 'ada' for the first wait 'amount' of task {second}\n"
    work()
    found = call("task", "waiting", "--json").lines
    assert [(row["id"], row["wait"], row["who"], row["why"], row["shown"], row["token"]) for row in found] == [
        (first, "approval", "finance", "pays 1", {"order": 1}, "order:1"),
        (second, "approval", "finance", "pays 2", {"order": 2}, "order:2"),
    ]
    assert found[0]["schema"]["required"] == ["approved"]
    assert [row["until"] for row in found] == [None, None]
    shown = call("task", "waiting", "--queue", "test").out
    assert "pays 1" in shown
    assert "finance" in shown
    own = call("task", "waiting", second, "--json").lines
    assert [(row.get("wait"), row.get("name"), row.get("value")) for row in own] == [
        ("approval", "approval", None),
        (None, "amount", 7),
    ]
    assert "early answer: 7" in call("task", "waiting", second).out
    answered = call("task", "answer", first, "approval", '{"approved": true}', "--by", "ada", "--json").json
    assert answered == {"id": first, "wait": "approval", "state": "waiting", "early": False}
    assert "(answered) pays 1" in call("task", "waiting").out
    work()
    assert call("task", "waiting", first, "--json").lines[0]["wait"] == "amount"
    assert f"answer: perdure task answer {first} amount JSON" in call("task", "why", first).out
    assert call("task", "answer", first, "amount", "3").code == 0
    call("task", "answer", second, "approval", '{"approved": false}')
    work()
    assert call("task", "result", first).out == "[true,3]\n"
    assert call("task", "result", second).out == "[false,7]\n"
    assert call("task", "waiting").err == "perdure: no task waits for an answer\n"


def test_an_answer_that_cannot_be_stored_says_why(work: Any) -> None:
    task_id = call("enqueue", "pay", "--queue", "test", "--args", '{"order": 1}').ids[0]
    work()
    for args, problem, code in (
        (("approval", "{"), "JSON", 2),
        (("approval", '{"approved": "perhaps"}'), "approved", 1),
        (("approval#7", "true"), "open are: approval", 1),
        (("pay out", "true"), "name of a wait must be", 2),
    ):
        refused = call("task", "answer", task_id, *args)
        assert (refused.code, refused.out) == (code, ""), refused.err
        assert problem in refused.err
    call("task", "answer", task_id, "approval", '{"approved": true}')
    assert "it has an answer already" in call("task", "answer", task_id, "approval", '{"approved": true}').err
    assert "no task missing" in call("task", "waiting", "missing").err
    assert call("task", "waiting", "--queue", "missing").code == 1
    call("task", "cancel", task_id)
    assert "takes no more answers: it is cancelled" in call("task", "answer", task_id, "amount", "1").err
