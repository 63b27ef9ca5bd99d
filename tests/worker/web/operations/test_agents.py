"""What an agent knew, and what it cost: handoff, plan, timeline, states, prompts, costs, findings and corrections."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import httpx
import pytest
from perdure import Agent, AgentState, App, Coherence, Context, ContextBuilder, Ephemeral, PlanStep, Retry, TaskHandle
from perdure.queues.security.keyring import generate_key
from perdure.web import Role, User, router
from perdure.worker.agents.context.prompt import Prompt
from perdure.worker.durable.call_records import CHARGES, PROMPTS
from perdure.worker.settings import Settings
from pydantic import SecretStr

from tests.support.travel_agent import HOSTILE, Travels, Trip, travelled
from tests.support.workers import bounded, history, letter, redis_command, work_off

from ..conftest import ClientOf

pytestmark = [pytest.mark.integration, pytest.mark.app(lease=30.0)]

PATHS = (
    *("handoff", "plan", "timeline", "state", "state?skip_unreadable=true", "prompts", "costs", "findings"),
    *("identity", "memories", "artifacts"),
)

Get = Callable[..., Awaitable[Any]]


@pytest.fixture
def get(api: httpx.AsyncClient) -> Get:
    """`get(handle, "plan", at=3)` returns the JSON of a GET."""

    async def get(handle: TaskHandle[Any], path: str, status: int = 200, **query: Any) -> Any:
        answer = await api.get(f"/tasks/{handle.id}/{path}", params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    return get


async def test_the_handoff_document_says_what_is_done(app: App, get: Get) -> None:
    handle = await travelled(app)
    found = await get(handle, "handoff")
    assert found["document"]["goal"] == "travel"
    assert found["document"]["why"] == "finished"
    assert found["markdown"].startswith("# Handoff of travels ")
    short = await get(handle, "handoff", budget=60)
    assert len(short["markdown"]) < len(found["markdown"])


async def test_a_task_without_a_predecessor_has_received_no_document(app: App, get: Get) -> None:
    found = await get(await travelled(app), "handoff", 404, received=True)
    assert found["type"] == "urn:perdure:problem:no-handoff"


async def test_the_plan_has_the_progress(app: App, get: Get) -> None:
    class Fails(Travels):
        """An agent whose second step fails."""

        fail = "pay"

    handle = await travelled(app, Fails)
    await letter(app, handle)
    found = await get(handle, "plan")
    assert (found["agent"], found["goal"], found["done"], found["total"]) == ("travels", "travel", 1, 2)
    assert [(step["key"], step["status"]) for step in found["steps"]] == [("book", "done"), ("pay", "running")], (
        "when it failed"
    )
    assert found["steps"][0]["title"] == f"book {HOSTILE}"
    assert "the till is closed" in found["steps"][1]["error"]
    step = await get(handle, "plan/step", key="book")
    assert (step["archived"], step["result"]) == (False, f"answer {HOSTILE}")
    assert (await get(handle, "plan/step", 404, key="nowhere"))["type"] == "urn:perdure:problem:no-plan-step"


async def test_the_plan_of_a_function(app: App, get: Get) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        await ctx.plan(["one", "two"])
        await ctx.step("one", str, 1)

    handle = await work.enqueue()
    await work_off(app)
    found = await get(handle, "plan")
    assert (found["agent"], found["done"], found["total"], found["current"]) == (None, 1, 2, "two")


async def test_the_timeline_has_decisions_with_reasons_in_pages(app: App, get: Get) -> None:
    handle = await travelled(app)
    pages, cursor = list[Any](), dict[str, str]()
    while True:
        page = await get(handle, "timeline", limit=4, decisions=True, **cursor)
        pages.append(page)
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    shown = [item for page in pages for item in page["items"]]
    assert [item["sentence"].partition(",")[0] for item in shown if item["type"] == "decided"] == [
        "go to Oslo",
        "go to Rome",
    ]
    assert all(item["reason"] == f"it is near {HOSTILE}" for item in shown if item["type"] == "decided")
    assert sum(page["read"] for page in pages) == pages[0]["of"] == len(await history(handle))
    assert (await get(handle, "timeline", cursor="0-0"))["items"] == []


async def test_a_state_and_the_difference_between_two_with_its_cause(app: App, get: Get) -> None:
    handle = await travelled(app)
    decisions = [event.number for event in await history(handle) if event.type == "decided"]
    first, second = (number for number in decisions if number is not None)
    assert (await get(handle, "state", at=first))["state"]["city"] == "Rome"
    found = await get(handle, "state", at=second, against=second - 1)
    assert found["state"] is None
    assert found["cause"]["reason"] == f"it is near {HOSTILE}"
    (change,) = found["changes"]
    assert (change["op"], change["path"], change["value"]["choice"]) == ("add", "/decisions/-", "go to Oslo")
    between = await get(handle, "state", at=second, against=first)
    changed = next(one for one in between["changes"] if one["path"] == "/city")
    assert (changed["before"], changed["value"]) == ("Rome", "Oslo")
    beyond = await get(handle, "state", 409, at=10_000)
    assert "has no event 10000" in beyond["detail"]


async def test_the_prompts_of_model_calls_as_they_were_built(app: App, get: Get) -> None:
    built: list[Prompt] = []

    class Notes(Travels):
        """An agent that notes its prompts."""

        async def act(self, ctx: Context, state: Trip, step: PlanStep) -> str:
            async def noted(prompt: Prompt) -> str:
                built.append(prompt)
                return "yes"

            return str(await self.builder.ask(ctx, state, noted))

    handle = await travelled(app, Notes)
    page = await get(handle, "prompts", limit=1)
    assert (page["of"], len(page["items"])) == (2, 1)
    later = await get(handle, "prompts", limit=1, cursor=page["next"])
    latest, first = page["items"][0], later["items"][0]
    assert [one["plan_step"] for one in (first, latest)] == ["book", "pay"]
    assert latest["tokens"] == dict(built[1].tokens)
    assert latest["total"] == built[1].total
    knew = await get(handle, "state", at=latest["event"])
    assert knew["state"]["current"] == "pay"
    shown = await get(handle, f"prompts/{latest['number']}")
    assert [one["content"] for one in shown["messages"]] == [one.content for one in built[1].messages]
    assert (await get(handle, "prompts/99", 404))["type"] == "urn:perdure:problem:no-prompt"
    assert [item async for item in handle.events(follow=False, include="emitted")] == await history(handle)


async def test_a_prompt_has_no_secret(app: App, get: Get) -> None:
    class Booking(AgentState):
        card: Annotated[SecretStr, Ephemeral] = SecretStr("")

    class Pays(Agent[Booking]):
        """An agent that has a secret, and says it."""

        async def plan(self, ctx: Context, state: Booking) -> list[PlanStep]:
            return [PlanStep(key="pay", title="Pay")]

        async def act(self, ctx: Context, state: Booking, step: PlanStep) -> None:
            builder = ContextBuilder(window=20_000, identity=f"Card {state.card.get_secret_value()}", memory=False)
            await builder.build(ctx, state)

        async def finish(self, ctx: Context, state: Booking) -> None: ...

    handle = await app.agent(Pays, name="pays").enqueue("pay", card=SecretStr("4111-1111-2222"))
    await work_off(app)
    await bounded(handle.result())
    (item,) = (await get(handle, "prompts"))["items"]
    shown = await get(handle, f"prompts/{item['number']}")
    assert "4111-1111-2222" not in str(shown)
    assert shown["messages"][0]["content"].startswith("Card ")


async def test_costs_by_step_and_attempt(app: App, get: Get) -> None:
    handle = await travelled(app)
    found = await get(handle, "costs")
    assert [(cost["attempt"], cost["calls"], cost["models"]) for cost in found["steps"]] == [(1, 1, ["m-1"])] * 2
    assert found["usd"] == "0.002"
    assert found["tokens"] == sum(cost["tokens"] for cost in found["steps"]) > 14
    assert (found["read"], found["of"], found["problems"]) == (2, 2, [])


async def test_artifacts_are_sent_as_files(app: App, api: httpx.AsyncClient, get: Get) -> None:
    handle = await travelled(app)
    (item,) = (await get(handle, "artifacts"))["items"]
    assert (item["name"], item["media_type"]) == ("ticket.html", "text/html")
    answer = await api.get(f"/tasks/{handle.id}/artifact", params={"name": "ticket.html"})
    assert hashlib.sha256(answer.content).hexdigest() == item["hash"]
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''ticket.html"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    missing = await get(handle, "artifact", 404, name="no.txt")
    assert missing["detail"].endswith("its artifacts: 'ticket.html'")


async def test_a_correction_is_shown_sent_and_applied(app: App, client_of: ClientOf, log: list[str]) -> None:
    handle = await app.agent(Travels, name="travels").enqueue("travel")
    body = {"changes": {"city": "Lima"}}
    assert (await client_of(Role.VIEWER).post(f"/tasks/{handle.id}/corrections", json=body)).status_code == 403
    answer = await client_of(Role.OPERATOR, name="bob").post(f"/tasks/{handle.id}/corrections", json=body)
    assert (answer.json()["id"], answer.json()["state"]) == (handle.id, "queued")
    await work_off(app)
    (event,) = [event for event in await history(handle) if event.type == "corrected"]
    assert (event.data["paths"], event.data["by"]) == (["city"], "bob")
    assert f"bob: correct state {handle.id}: done\n" in log
    api = client_of(Role.OPERATOR)
    shown = await api.post(f"/tasks/{handle.id}/corrections/preview", json={"changes": {"city": "Kyiv"}})
    assert shown.json()["changes"] == [{"op": "replace", "path": "/city", "before": "Oslo", "value": "Kyiv"}]
    refused = await api.post(f"/tasks/{handle.id}/corrections/preview", json={"changes": {"town": "Kyiv"}})
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:perdure:problem:cannot-correct")
    ended = await api.post(f"/tasks/{handle.id}/corrections", json={"changes": {"city": "Kyiv"}})
    assert ended.status_code == 409
    nothing = await api.post(f"/tasks/{handle.id}/corrections", json={})
    assert nothing.status_code == 422


async def test_a_finding_is_dismissed_once(app: App, client_of: ClientOf, get: Get, log: list[str]) -> None:
    class Repeats(Agent[Trip]):
        """An agent that calls a tool again and again."""

        coherence = Coherence(repeats=2, window=5)

        async def plan(self, ctx: Context, state: Trip) -> list[PlanStep]:
            return [PlanStep(key="look", title="Look")]

        async def act(self, ctx: Context, state: Trip, step: PlanStep) -> None:
            for _ in range(3):
                await ctx.tool("look", look, HOSTILE)
            raise RuntimeError("it is lost")

        async def finish(self, ctx: Context, state: Trip) -> None: ...

    async def look(where: str) -> str:
        return "nothing"

    agent = app.agent(Repeats, name="repeats", retry=Retry(max_attempts=1))
    handle = await agent.enqueue("look")
    await work_off(app)
    await letter(app, handle)
    (item,) = (await get(handle, "findings"))["items"]
    assert item["check"] == "repetition"
    operator = client_of(Role.OPERATOR, name="bob")
    path = f"/tasks/{handle.id}/findings/{item['event']}/dismiss"
    assert (await operator.post(path)).json() == {"id": handle.id, "event": item["event"]}
    assert f"bob: dismiss finding {handle.id} {item['event']}: done\n" in log
    assert (await operator.post(f"/tasks/{handle.id}/findings/1/dismiss")).status_code == 404


async def test_identity_resumes_and_memories(app: App, get: Get) -> None:
    handle = await travelled(app)
    found = await get(handle, "identity")
    assert (found["agent"], found["resumes"], found["problems"]) == ("travels", [], [])
    assert (await get(handle, "memories"))["ids"] == []


async def test_a_producer_sees_nothing_of_it(app: App, client_of: ClientOf) -> None:
    handle = await app.agent(Travels, name="travels").enqueue("travel")
    producer = client_of(Role.PRODUCER)
    for path in ("handoff", "plan", "timeline", "state", "prompts", "costs", "findings", "identity", "artifacts"):
        assert (await producer.get(f"/tasks/{handle.id}/{path}")).status_code == 403, path


async def test_odd_data_in_redis_is_said_and_breaks_nothing(app: App, api: httpx.AsyncClient) -> None:
    handle = await travelled(app)
    place, task_id = handle.partition, handle.id
    await redis_command(app, "XADD", place.log(task_id), "*", "type", b"\xff\x00", "n", "x", "data", b"\xff")
    await redis_command(app, "XADD", place.log(task_id), "*", "type", "decided", "n", "9000", "data", b"[1")
    for field in (
        "s:#coherence",
        "s:#judge",
        "s:#background",
        "s:#memories:0",
        "s:#handoff",
        "s:#artifact:x",
        "s:#state",
    ):
        await redis_command(app, "HSET", place.steps(task_id), field, b"\xff{")
    for stream in (PROMPTS, CHARGES):
        await redis_command(app, "XADD", place.stream(task_id, stream), "900-0", "d", b"\xff\n\xff", "k", "0a")
        await redis_command(app, "XADD", place.stream(task_id, stream), "901-0", "x", b"\xff")
    for path in PATHS:
        answer = await api.get(f"/tasks/{task_id}/{path}")
        assert answer.status_code in (200, 409), (path, answer.text)
        assert answer.json().get("source") != "server", (path, answer.text)
    costs = (await api.get(f"/tasks/{task_id}/costs")).json()
    assert (costs["usd"], len(costs["problems"])) == ("0.002", 2)
    prompts = (await api.get(f"/tasks/{task_id}/prompts")).json()["items"]
    assert [bool(one["problem"]) for one in prompts] == [True, True, False, False]
    unreadable = await api.get(f"/tasks/{task_id}/prompts/900")
    assert (unreadable.status_code, unreadable.json()["source"]) == (500, "redis")


async def test_sealed_data_is_a_problem_that_says_so(app: App, settings: Settings) -> None:
    changed = {"encryption_keys": SecretStr(generate_key()), "encryption_required": True}
    async with App("test", settings=settings.model_copy(update=changed)) as sealed:
        handle = await travelled(sealed)
    transport = httpx.ASGITransport(router(app, authenticate=lambda _: User("ada", [Role.ADMIN])))
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        for path in PATHS:
            answer = await client.get(f"/tasks/{handle.id}/{path}")
            assert answer.json().get("source") != "server", (path, answer.text)
            assert "go to Oslo" not in answer.text
            assert answer.status_code in (200, 409, 500), path


async def test_a_large_state_is_read_and_corrected(app: App, api: httpx.AsyncClient) -> None:
    handle = await travelled(app, goal="x" * 1_000_000)
    state = (await api.get(f"/tasks/{handle.id}/state")).json()["state"]
    assert len(state["goal"]) == 1_000_000
    changes = {"changes": {"goal": "y" * 900_000}}
    shown = await api.post(f"/tasks/{handle.id}/corrections/preview", json=changes)
    assert [one["path"] for one in shown.json()["changes"]] == ["/goal"]
    deep = await api.post(f"/tasks/{handle.id}/corrections/preview", json={"changes": {"a." * 400: 1}})
    assert (deep.status_code, deep.json()["type"]) == (422, "urn:perdure:problem:cannot-correct")


async def test_a_task_that_is_gone_is_not_found(app: App, api: httpx.AsyncClient) -> None:
    for path in PATHS:
        assert (await api.get(f"/tasks/gone/{path}")).status_code == 404, path
