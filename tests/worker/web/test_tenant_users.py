"""Users of a tenant: they see and make what belongs to it, and nothing else of the deployment."""

from __future__ import annotations

from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry
from perdure.web import Role, User
from perdure.worker.web.operation import OPERATIONS, Call, knows_tenants
from perdure.worker.web.problems import Problem
from perdure.worker.web.router import load_operations

from tests.support.workers import running_worker, wait_until, work_off

from .conftest import SECRET, ClientOf

pytestmark = pytest.mark.integration

BOUND = 60


class Echo(Agent[AgentState]):
    """Answers with what it was sent."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        raise AssertionError("the plan has no steps")

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return f"{ctx.tenant}: {state.goal}"


@pytest.fixture
async def orders(app: App) -> App:
    """The app of the test with a task and an agent that are in the catalog."""
    app.agent(Echo)

    @app.task(retry=Retry(max_attempts=1))
    async def order(ctx: Context, number: int) -> list[Any]:
        if number < 0:
            raise ValueError("no such number")
        if number == 0:
            return [ctx.tenant, await ctx.wait_for("approval", str, token="order:0")]
        return [ctx.tenant, number]

    await work_off(app)
    return app


async def test_the_same_id_and_idempotency_key_of_two_tenants_are_two_tasks(client_of: ClientOf, orders: App) -> None:
    acme, other = (client_of(Role.OPERATOR, tenant=name) for name in ("acme", "other"))
    given = {"task": "order", "args": {"number": 1}, "task_id": "order-17"}
    ids = [(await client.post("/tasks", json=given)).json()["id"] for client in (acme, other, acme)]
    assert ids == ["acme~order-17", "other~order-17", "acme~order-17"]
    keyed = {"task": "order", "args": {"number": 2}}
    key = {"Idempotency-Key": "k1"}
    by_key = [(await client.post("/tasks", json=keyed, headers=key)).json() for client in (acme, other, acme)]
    assert by_key[0]["id"] == by_key[2]["id"] != by_key[1]["id"]
    assert [one["existed"] for one in by_key] == [False, False, True]
    batch = (await acme.post("/tasks/batch", json={"tasks": [given, keyed]})).json()
    assert [item["id"].partition("~")[0] for item in batch["items"]] == ["acme", "acme"]
    await work_off(orders)

    for task_id in ("order-17", "acme~order-17"):
        assert (await acme.get(f"/tasks/{task_id}/result")).json()["result"] == ["acme", 1]
    assert (await acme.get("/tasks/order-17")).json()["tenant"] == "acme"
    assert (await acme.get("/tasks/order-17/details")).status_code == 200
    assert (await acme.get("/tasks/other~order-17")).status_code == 404
    listed = (await acme.get("/tasks")).json()
    assert {item["id"] for item in listed["items"]} == {ids[0], by_key[0]["id"], batch["items"][1]["id"]}
    assert listed["of"] == listed["read"] == 3, "the number of the tasks of others is not shown"
    everything = (await client_of(Role.VIEWER).get("/tasks")).json()
    assert len(everything["items"]) == 5


async def test_a_user_of_a_tenant_cannot_make_tasks_of_another(client_of: ClientOf, orders: App) -> None:
    acme, free = client_of(Role.OPERATOR, tenant="acme"), client_of(Role.OPERATOR)
    given = {"task": "order", "args": {"number": 1}}
    for wrong in ({"tenant": "other"}, {"task_id": "other~order-17"}):
        refused = await acme.post("/tasks", json=given | wrong)
        assert refused.status_code == 422, refused.text
    assert (await free.post("/tasks", json=given | {"task_id": "acme~order-17"})).status_code == 422
    assert (await free.post("/tasks", json=given | {"tenant": "acme", "task_id": "o"})).json()["id"] == "acme~o"


async def test_dead_letters_questions_and_sessions_of_other_tenants_are_not_there(
    client_of: ClientOf, orders: App
) -> None:
    acme, other = (client_of(Role.ADMIN, tenant=name) for name in ("acme", "other"))
    for client in (acme, other):
        for number in (-1, 0):
            given = {"task": "order", "args": {"number": number}, "task_id": f"order{number}"}
            await client.post("/tasks", json=given)
        sent = await client.post("/sessions/echo/messages", json={"session": "ada", "text": "hello"})
        assert sent.status_code == 201, sent.text
    async with running_worker(orders):
        for client in (acme, other):

            async def asked(client: Any = client) -> Any:
                found = (await client.get("/questions")).json()["items"]
                letters = (await client.get("/dead-letters")).json()["items"]
                turn = await client.get("/sessions/echo/turns/1", params={"session": "ada"})
                return found and letters and turn.json()["ended"]

            await wait_until(asked, "question, dead letter and turn")
        page = (await acme.get("/questions")).json()
        assert [item["task_id"] for item in page["items"]] == ["acme~order0"]
        assert (page["read"], page["of"]) == (1, 1)
        [item] = (await acme.get("/questions", params={"token": "order:0"})).json()["items"]
        assert item["task_id"] == "acme~order0"
        answered = await acme.post("/answers", json={"token": "order:0", "value": "yes"})
        assert answered.json()["task_id"] == "acme~order0"
        assert len((await other.get("/questions")).json()["items"]) == 1
    letters = (await acme.get("/dead-letters")).json()
    assert ([item["id"] for item in letters["items"]], letters["of"]) == (["acme~order-1"], letters["read"])
    [group] = (await acme.get("/dead-letter-groups")).json()["items"]
    assert (group["count"], group["newest"]) == (1, "acme~order-1")
    assert b"other~" not in (await acme.get("/dead-letter-export")).content
    assert (await acme.get("/dead-letters/order-1")).json()["id"] == "acme~order-1"
    assert (await acme.post("/dead-letters/other~order-1/replay", json={})).status_code == 404
    assert (await acme.post("/dead-letters/order-1/replay", json={})).status_code == 200
    sessions = (await acme.get("/sessions")).json()["items"]
    assert [(one["id"], one["tenant"]) for one in sessions] == [("acme~ada", "acme")]
    messages = (await acme.get("/sessions/echo/messages", params={"session": "ada"})).json()["items"]
    assert [one["content"] for one in messages] == ["hello", "acme: hello"]
    for stolen in ("other~ada",):
        assert (await acme.get("/sessions/echo", params={"session": stolen})).status_code == 404
        refused = await acme.post("/sessions/echo/messages", json={"session": stolen, "text": "mine?"})
        assert refused.status_code == 404


async def test_each_operation_knows_tenants_or_is_refused_to_them(app: App) -> None:
    """A new operation is about the whole deployment, unless its path is among those that know tenants."""
    load_operations()
    call = Call(User("ada", [Role.ADMIN], "acme"), app.producer, app, SECRET)
    assert call.producer.namespace.tenant == "acme"
    with pytest.raises(Problem, match="must be of the tenant that is served here"):
        Call(User("ada", [Role.ADMIN], "other"), call.producer)
    about_tasks = 0
    for known in OPERATIONS.values():
        required: dict[str, Any] = {name: 1 for name, info in known.inputs.model_fields.items() if info.is_required()}
        if not knows_tenants(known.path):
            with pytest.raises(Problem) as refused:
                await known(call, known.inputs.model_construct(**required))
            assert (refused.value.status, refused.value.kind) == (403, "whole-deployment"), known.name
        elif "{task_id}" in known.path:
            about_tasks += 1
            with pytest.raises(Problem) as missing:
                await known(call, known.inputs.model_construct(**required | {"task_id": "other~order-17"}))
            assert (missing.value.status, missing.value.kind) == (404, "task-not-found"), known.name
    assert about_tasks > 30
    closed = {known.path for known in OPERATIONS.values() if not knows_tenants(known.path)}
    assert {"/queues", "/workers", "/jobs", "/limits", "/tasks/cancel", "/dead-letters/purge", "/overview"} <= closed
