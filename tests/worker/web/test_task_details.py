"""Operations on the details of tasks: phases, steps, children, arguments, forks and doubts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.queues.envelope import new_task_id
from perdure.queues.handle import TaskHandle
from perdure.web import Role
from pydantic import SecretStr

from tests.support.workers import work_off

from .conftest import ClientOf

pytestmark = pytest.mark.integration


async def get(api: httpx.AsyncClient, handle: TaskHandle[Any], part: str, **query: Any) -> Any:
    answer = await api.get(f"/tasks/{handle.id}/{part}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
async def done(app: App) -> TaskHandle[Any]:
    """A task with two recorded steps, `one` and `two`, that has succeeded."""

    @app.task
    async def job(ctx: Context, number: int) -> int:
        first = await ctx.step("one", lambda given: given + 1, number)
        return await ctx.step("two", lambda given: given * 2, first)

    handle = await job.enqueue(3)
    await work_off(app)
    return handle


async def test_details_have_the_record_and_the_explanation(api: httpx.AsyncClient, done: TaskHandle[Any]) -> None:
    found = await get(api, done, "details")
    assert (found["task"]["args"], found["result"], found["parent"]) == ({"number": 3}, 8, None)
    assert found["explanation"]["cause"] == "succeeded"


async def test_phases_have_the_steps_in_their_order(api: httpx.AsyncClient, done: TaskHandle[Any]) -> None:
    found = await get(api, done, "phases")
    assert [phase["kind"] for phase in found["phases"]] == ["queued", "running"]
    assert [(step["key"], step["exact"]) for step in found["steps"]] == [("one", True), ("two", True)]
    assert (found["read"], found["of"]) == (2, 2)


async def test_a_step_has_its_arguments_and_result(api: httpx.AsyncClient, done: TaskHandle[Any]) -> None:
    found = await get(api, done, "step", key="two")
    assert (found["state"], found["arguments"], found["result"]) == ("recorded", "4", 8)
    answer = await api.get(f"/tasks/{done.id}/step", params={"key": "three"})
    assert (answer.status_code, answer.json()["source"]) == (404, "request")


async def test_a_record_of_foreign_bytes_is_unreadable(api: httpx.AsyncClient, app: App, done: TaskHandle[Any]) -> None:
    for stored in (b"\xff\xfe", b"[]\n1", b'{"f":{}}\n', b""):
        await app.producer.gateway.command("HSET", done.partition.steps(done.id), "d:two", stored)
        found = await get(api, done, "step", key="two")
        assert found["state"] == "unreadable", stored


async def test_secrets_are_masked_and_an_admin_reveals_them(client_of: ClientOf, app: App, log: list[str]) -> None:
    @app.task
    async def login(ctx: Context, password: SecretStr) -> None: ...

    handle = await login.enqueue(SecretStr("hunter2"))
    viewer, admin = client_of(Role.OPERATOR), client_of(Role.ADMIN, name="root")
    assert "hunter2" not in (await viewer.get(f"/tasks/{handle.id}/details")).text
    found = await get(viewer, handle, "arguments")
    assert (found["arguments"], found["masked"]) == ({"password": "**********"}, True)
    assert (await viewer.post(f"/tasks/{handle.id}/reveal")).status_code == 403
    answer = await admin.post(f"/tasks/{handle.id}/reveal")
    assert answer.json()["arguments"] == {"password": "hunter2"}
    assert f"root: reveal arguments {handle.id}: done\n" in log
    assert not any("hunter2" in line for line in log)


async def test_children_are_a_tree(api: httpx.AsyncClient, app: App) -> None:
    @app.task(retry=None)
    async def leaf(ctx: Context, number: int) -> int:
        if number == 2:
            raise ValueError("no leaf")
        return number

    @app.task(retry=None)
    async def branch(ctx: Context) -> int:
        return len(await ctx.gather(leaf, [1, 2, 3], errors="keep"))

    @app.task
    async def root(ctx: Context) -> None:
        await ctx.join(await ctx.spawn(branch))

    handle = await root.enqueue()
    await work_off(app)
    found = await get(api, handle, "children")
    (child,) = found["root"]["children"]
    assert (found["read"], child["task"], child["how"], len(child["children"])) == (5, "branch", "spawned", 3)
    assert [(node["task"], node["state"]) for node in child["children"]] == [
        ("leaf", "succeeded"),
        ("leaf", "dead"),
        ("leaf", "succeeded"),
    ]
    assert child["children"][1]["error"] == "ValueError: no leaf"
    assert (await api.get(f"/tasks/{child['children'][0]['id']}/children")).json()["parent"] == child["id"]


async def test_a_fork_before_a_step_runs_it_again_with_edited_arguments(
    api: httpx.AsyncClient, app: App, done: TaskHandle[Any]
) -> None:
    new_id = new_task_id()
    body = {"before": "two", "edit": {"number": 3}, "new_id": new_id}
    answer = await api.post(f"/tasks/{done.id}/fork", json=body)
    assert (answer.status_code, answer.json()["id"], answer.json()["steps"]) == (201, new_id, 1)
    assert (await api.post(f"/tasks/{done.id}/fork", json=body)).json()["id"] == new_id, "done twice, it is one task"
    await work_off(app)
    copy = await app.producer.find(new_id)
    assert copy is not None
    assert await copy.result(10) == 8
    assert [event.step async for event in copy.events(follow=False) if event.type == "step_completed"] == ["two"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"before": "none"}, 404, "must have step 'none', it has none"),
        ({"at": 99}, 409, "has no event, entry or step 99"),
        ({"at": 1, "before": "one"}, 422, "give either at or before"),
        ({"edit": {"number.x": 1}}, 422, "cannot edit"),
        ({"edit": {"number": "**********"}}, 422, "must not have masked values"),
        ({"new_id": "turn-x-1"}, 422, "new_id"),
    ],
)
async def test_a_fork_that_cannot_be_is_a_problem(
    api: httpx.AsyncClient, done: TaskHandle[Any], body: dict[str, Any], status: int, said: str
) -> None:
    answer = await api.post(f"/tasks/{done.id}/fork", json=body)
    assert (answer.status_code, answer.json()["source"]) == (status, "request")
    assert said in answer.json()["detail"]


async def test_a_doubt_is_resolved_once_for_all_who_look(client_of: ClientOf, app: App, log: list[str]) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    handle = await job.enqueue()
    gateway, partition = app.producer.gateway, handle.partition
    await gateway.command("HSET", partition.steps(handle.id), "i:pay", b'{"h":"","a":"order 17"}')
    approver = client_of(Role.APPROVER, name="bob")
    details = (await approver.get(f"/tasks/{handle.id}/details")).json()
    assert details["explanation"]["doubts"][0]["step"] == "pay"
    assert (await client_of(Role.VIEWER).post(f"/tasks/{handle.id}/resolve", json={"step": "pay"})).status_code == 403
    both = {"step": "pay", "result": None, "failed": "no"}
    assert (await approver.post(f"/tasks/{handle.id}/resolve", json=both)).status_code == 422
    answer = await approver.post(f"/tasks/{handle.id}/resolve", json={"step": "pay", "result": "receipt 17"})
    assert answer.json() == {"id": handle.id, "step": "pay", "decision": "result", "state": "queued"}
    assert f"bob: resolve step {handle.id} (step=pay): done\n" in log
    other = await approver.post(f"/tasks/{handle.id}/resolve", json={"step": "post", "run_again": True})
    assert other.status_code == 409


async def test_a_task_that_has_expired_is_a_problem(api: httpx.AsyncClient, app: App, done: TaskHandle[Any]) -> None:
    partition = done.partition
    await app.producer.gateway.command(
        "DEL", partition.record(done.id), partition.steps(done.id), partition.log(done.id)
    )
    for part in ("details", "phases", "children", "arguments", "step?key=one"):
        answer = await api.get(f"/tasks/{done.id}/{part}")
        assert (answer.status_code, answer.json()["type"]) == (410, "urn:perdure:problem:task-expired")


async def test_foreign_bytes_in_every_field_of_a_record_make_no_error_of_the_server(
    api: httpx.AsyncClient, app: App, done: TaskHandle[Any]
) -> None:
    gateway, key = app.producer.gateway, done.partition.record(done.id)
    fields = await gateway.command("HKEYS", key)
    for name in fields:
        before = await gateway.command("HGET", key, name)
        await gateway.command("HSET", key, name, b"\xff\x00<script>\x1b[31m")
        for part in ("details", "phases", "children", "arguments", "step?key=one"):
            answer = await api.get(f"/tasks/{done.id}/{part}")
            assert answer.status_code in (200, 500), (name, part, answer.text)
            if answer.status_code == 500:
                assert answer.json()["source"] == "redis", (name, part, answer.text)
        await gateway.command("HSET", key, name, before)
