"""Sessions over HTTP: lists, conversations, messages, corrections, export, removal."""

from __future__ import annotations

import httpx
import orjson
import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry
from perdure.web import Role

from tests.support.workers import work_off

from .conftest import ClientOf

pytestmark = pytest.mark.integration

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"


class Echo(Agent[AgentState]):
    """Answers with what it was sent; fails for 'bad'."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        raise AssertionError("the plan has no steps")

    async def finish(self, ctx: Context, state: AgentState) -> str:
        if state.goal == "bad":
            raise ValueError("bad message")
        return f"echo {state.goal} {len(state.messages)}"


@pytest.fixture
async def echo(app: App) -> App:
    """The app of the test with an agent that is in the catalog."""
    app.agent(Echo, retry=Retry(max_attempts=1))
    await work_off(app)
    return app


async def test_a_conversation(client_of: ClientOf, echo: App, log: list[str]) -> None:
    operator, viewer = client_of(Role.OPERATOR, name="ada"), client_of(Role.VIEWER)
    given = {"session": "user/42 é", "text": f"one {HOSTILE}", "message_id": "m1"}
    sent = await operator.post("/sessions/echo/messages", json=given)
    assert (sent.status_code, sent.json()["turn"], sent.json()["queue"]) == (201, 1, "test")
    assert (await operator.post("/sessions/echo/messages", json=given)).json() == sent.json(), "stored once"
    assert "ada: send session message echo (session=user/42 é): done\n" in log
    place = {"session": "user/42 é"}
    [running] = (await viewer.get("/sessions/echo/messages", params=place)).json()["items"]
    assert (running["status"], running["sender"], running["task_id"]) == ("running", "ada", sent.json()["task_id"])
    pending = (await viewer.get("/sessions/echo/turns/1", params=place)).json()
    assert (pending["ended"], pending["answer"]) == (False, None)
    await work_off(echo)
    await operator.post("/sessions/echo/messages", json={"session": "user/42 é", "text": "two"})
    await work_off(echo)
    answer = (await viewer.get("/sessions/echo/turns/2", params=place)).json()
    assert (answer["ended"], answer["answer"]) == (True, "echo two 3")
    page = (await viewer.get("/sessions/echo/messages", params={**place, "limit": 1})).json()
    assert [(one["turn"], one["role"], one["content"]) for one in page["items"]] == [
        (1, "user", f"one {HOSTILE}"),
        (1, "assistant", f"echo one {HOSTILE} 1"),
    ]
    rest = (await viewer.get("/sessions/echo/messages", params={**place, "after": page["next"]})).json()
    assert ([one["turn"] for one in rest["items"]], rest["next"]) == ([2, 2], None)
    shown = (await viewer.get("/sessions/echo", params=place)).json()
    assert (shown["session"]["status"], shown["session"]["turns"], shown["problem"]) == ("idle", 2, None)
    assert shown["state"]["messages"][2]["content"] == "two"
    [listed] = (await viewer.get("/sessions", params={"agent": "echo"})).json()["items"]
    assert listed == shown["session"]
    assert (await viewer.get("/sessions", params={"agent": "other"})).json()["items"] == []
    exported = await viewer.get("/sessions/echo/export", params=place)
    record, *messages = [orjson.loads(line) for line in exported.content.splitlines()]
    assert (record["turns"], len(messages)) == (2, 4)
    assert exported.headers["content-disposition"] == "attachment; filename*=UTF-8''echo-user%2F42%20%C3%A9.jsonl"


async def test_a_correction_is_stored_for_the_next_turn(client_of: ClientOf, echo: App) -> None:
    operator = client_of(Role.OPERATOR, name="eve")
    await operator.post("/sessions/echo/messages", json={"session": "ada", "text": "one"})
    await work_off(echo)
    wrong = {"session": "ada", "changes": {"context2": 1}}
    refused = await operator.post("/sessions/echo/corrections", json=wrong)
    assert (refused.status_code, refused.json()["errors"][0]["where"]) == (422, "changes")
    given = {"session": "ada", "changes": {"context.city": "Paris"}}
    assert (await operator.post("/sessions/echo/corrections", json=given)).status_code == 200
    shown = (await operator.get("/sessions/echo", params={"session": "ada"})).json()
    assert [(one["by"], one["changes"]) for one in shown["corrections"]] == [("eve", {"context.city": "Paris"})]


async def test_a_failed_turn_stops_the_session_until_it_is_passed_over(client_of: ClientOf, echo: App) -> None:
    operator = client_of(Role.OPERATOR)
    await operator.post("/sessions/echo/messages", json={"session": "ada", "text": "bad"})
    await work_off(echo)
    failed = await operator.get("/sessions/echo/turns/1", params={"session": "ada"})
    assert (failed.status_code, failed.json()["source"]) == (409, "task")
    stopped = await operator.post("/sessions/echo/messages", json={"session": "ada", "text": "two"})
    assert (stopped.status_code, "stopped at turn 1" in stopped.json()["detail"]) == (409, True)
    given = {"session": "ada", "text": "two", "skip_failed": True}
    assert (await operator.post("/sessions/echo/messages", json=given)).status_code == 201


async def test_only_an_admin_forgets_a_session(client_of: ClientOf, api: httpx.AsyncClient, echo: App) -> None:
    place = {"session": "ada"}
    await api.post("/sessions/echo/messages", json={**place, "text": "one"})
    await work_off(echo)
    assert (await client_of(Role.OPERATOR).post("/sessions/echo/forget", json=place)).status_code == 403
    assert (await api.post("/sessions/echo/forget", json=place)).json() == {"agent": "echo", "id": "ada", "turns": 1}
    gone = await api.post("/sessions/echo/forget", json=place)
    assert (gone.status_code, gone.json()["type"]) == (404, "urn:perdure:problem:session-not-found")
    assert (await api.get("/sessions/echo", params=place)).status_code == 404


async def test_mistakes_are_problems(client_of: ClientOf, api: httpx.AsyncClient, echo: App) -> None:
    for given, status in (
        ({"session": "a\nb", "text": "x"}, 422),
        ({"session": "ada", "text": "x", "inputs": {"langage": 1}}, 422),
        ({"session": "ada"}, 422),
        ({"session": "ada", "text": "x", "queue": "a b"}, 422),
    ):
        assert (await api.post("/sessions/echo/messages", json=given)).status_code == status, given
    large = await api.post("/sessions/echo/messages", json={"session": "ada", "text": "x" * (3 << 20)})
    assert large.status_code == 413
    assert (await api.post("/sessions/unknown/messages", json={"session": "ada", "text": "x"})).status_code == 422
    assert (await api.get("/sessions", params={"cursor": "x"})).status_code == 422
    assert (await api.get("/sessions/echo")).status_code == 422
    assert (await api.get("/sessions/echo/turns/1", params={"session": "ada"})).status_code == 404
    for role in (Role.VIEWER, Role.PRODUCER, Role.APPROVER):
        refused = await client_of(role).post("/sessions/echo/messages", json={"session": "ada", "text": "x"})
        assert refused.status_code == 403
