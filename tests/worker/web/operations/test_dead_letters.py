"""Dead letters by HTTP: list, groups, one letter, replay, purge, export, and jobs over many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest
from perdure import App, Context, Retry
from perdure.web import Role
from perdure.worker.job_runner import JobRunner
from pydantic import SecretStr

from tests.support.workers import partition_of, redis_command, work_off
from tests.worker.web.conftest import ClientOf

pytestmark = pytest.mark.integration

Bury = Callable[..., Awaitable[list[str]]]


@pytest.fixture
def bury(app: App) -> Bury:
    """`await bury(1, 2)` returns the ids of dead letters of these orders, in the order of their deaths."""

    @app.task(retry=Retry(max_attempts=1))
    async def charge(ctx: Context, order: int, card: SecretStr | None = None, fails: bool = True) -> int:
        await ctx.step("kept", lambda: 1)
        if fails:
            raise ValueError(f"no order {order}")
        return order

    async def make(*orders: int, **options: Any) -> list[str]:
        found = [(await charge.options(**options).enqueue(order, SecretStr("4111"))).id for order in orders]
        await work_off(app, concurrency=1, queues=["test", "second"])
        return found

    return make


async def run(app: App, name: str) -> None:
    """Run a job in this process."""
    async for _ in JobRunner(app.producer, "test").run(name):
        pass


async def states(app: App, ids: Sequence[str]) -> set[str]:
    handles = [await app.producer.find(task_id) for task_id in ids]
    return {str(await handle.status()) if handle else "gone" for handle in handles}


async def test_the_list_has_pages_and_no_secret(bury: Bury, client_of: ClientOf) -> None:
    ids = await bury(1, 2, 3, 4, 5)
    viewer = client_of(Role.VIEWER)
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        answer = await viewer.get("/dead-letters", params=query)
        page = answer.json()
        assert "4111" not in answer.text
        assert page["of"] == 5
        seen += [letter["id"] for letter in page["items"]]
        if page["next"] is None:
            break
        query["cursor"] = page["next"]
    assert seen == ids[::-1]
    assert page["items"][0] | {"worker": "", "enqueued_at": "", "died_at": "", "group": ""} == {
        "id": ids[0],
        "queue": "test",
        "partition": 0,
        "task": "charge",
        "app": "test",
        "reason": "attempts_exhausted",
        "group": "",
        "error": "ValueError",
        "message": "no order 1",
        "attempts": 1,
        "crashes": 0,
        "worker": "",
        "enqueued_at": "",
        "died_at": "",
        "key": None,
        "tags": [],
    }


async def test_the_pages_of_several_queues_are_merged_by_time(bury: Bury, api: httpx.AsyncClient) -> None:
    ids = [*await bury(1), *await bury(2, queue="second"), *await bury(3), *await bury(4, queue="second")]
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await api.get("/dead-letters", params={"limit": 1} | ({"cursor": cursor} if cursor else {}))).json()
        seen += [letter["id"] for letter in page["items"]]
        cursor = page["next"]
    assert seen == ids[::-1]


@pytest.mark.parametrize("cursor", ["x", "", "4", "!!", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTktMSBhIDA"])
async def test_a_cursor_that_is_none_is_refused(api: httpx.AsyncClient, cursor: str) -> None:
    answer = await api.get("/dead-letters", params={"cursor": cursor})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:perdure:problem:invalid-cursor"


async def test_filters_select_letters(bury: Bury, api: httpx.AsyncClient) -> None:
    first = await bury(1, tags=["eu"])
    second = await bury(2, tags=["us"])

    async def found(**query: Any) -> list[str]:
        answer = await api.get("/dead-letters", params=query)
        assert answer.status_code == 200, answer.text
        return [letter["id"] for letter in answer.json()["items"]]

    assert await found(tag="eu") == first
    assert await found(where="order=2") == second
    assert await found(search="no order 1") == first
    assert await found(error="valueerror", since="1h") == second + first
    assert await found(until="1h") == []
    assert await found(reason="crash_loop") == []
    assert await found(task="charge", app="test", queue="test") == second + first


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ({"queue": "nowhere"}, 404, "there is no queue 'nowhere'"),
        ({"where": "card=4111"}, 422, "argument 'card' of task 'charge' is secret: leave the condition out"),
        ({"where": "card"}, 422, "must be NAME=VALUE"),
        ({"since": "soon"}, 422, "must be a time before now"),
        ({"since": "2026-11-22T18:00"}, 422, "an ISO time with a time zone such as 2026-11-22T18:00Z"),
        ({"group": "xyz"}, 422, "group"),
        ({"reason": "bad luck"}, 422, "reason"),
        ({"tag": ["x"] * 21}, 422, "tag"),
        ({"limit": 0}, 422, "limit"),
    ],
)
async def test_other_filters_are_refused(
    bury: Bury, api: httpx.AsyncClient, query: dict[str, Any], status: int, text: str
) -> None:
    await bury(1)
    answer = await api.get("/dead-letters", params=query)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["detail"]


async def test_groups_have_the_letters_of_one_cause(bury: Bury, api: httpx.AsyncClient) -> None:
    ids = await bury(1, 2, 3)
    answer = (await api.get("/dead-letter-groups")).json()
    (group,) = answer["items"]
    assert (group["count"], group["newest"], group["message"]) == (3, ids[2], "no order 3")
    assert (answer["groups"], answer["read"], answer["of"]) == (1, 3, 3)
    listed = (await api.get("/dead-letters", params={"group": group["group"]})).json()
    assert len(listed["items"]) == 3
    answer = (await api.get("/dead-letter-groups", params={"newest": 2})).json()
    assert (answer["items"][0]["count"], answer["read"], answer["of"]) == (2, 2, 3)


async def test_a_letter_has_everything_but_its_secret(bury: Bury, client_of: ClientOf) -> None:
    (task_id,) = await bury(7)
    answer = await client_of(Role.VIEWER).get(f"/dead-letters/{task_id}")
    letter = answer.json()
    assert letter["args"] == {"order": 7, "card": "**********"}
    assert letter["steps"] == ["kept"]
    assert "ValueError: no order 7" in letter["traceback"]
    assert f"perdure dlq replay {task_id}" in letter["remedy"]
    assert (letter["doubts"], letter["answers"], letter["problem"]) == ([], [], None)
    assert "4111" not in answer.text


@pytest.mark.parametrize("task_id", ["unknown", "entry-1-1", "x" * 64])
async def test_a_missing_letter_is_not_found(api: httpx.AsyncClient, task_id: str) -> None:
    for method, path in (("GET", ""), ("POST", "/replay"), ("DELETE", "")):
        answer = await api.request(method, f"/dead-letters/{task_id}{path}")
        assert answer.status_code == 404
        assert answer.json()["detail"].startswith(f"there is no dead letter {task_id!r} in namespace")


async def test_a_replay_puts_the_task_back(bury: Bury, app: App, client_of: ClientOf, log: list[str]) -> None:
    (task_id,) = await bury(1)
    answer = await client_of(Role.OPERATOR, name="bob").post(f"/dead-letters/{task_id}/replay")
    assert answer.json() == {"id": task_id, "queue": "test", "task": "charge", "outcome": "replayed"}
    assert await states(app, [task_id]) == {"queued"}
    assert f"bob: replay dead letter {task_id}: done\n" in log


async def test_two_users_replay_the_same_letter_once(bury: Bury, app: App, client_of: ClientOf, log: list[str]) -> None:
    (task_id,) = await bury(1)
    users = [client_of(Role.OPERATOR, name=name) for name in ("ada", "bob")]
    answers = await asyncio.gather(*(user.post(f"/dead-letters/{task_id}/replay") for user in users))
    done, refused = sorted(answers, key=lambda answer: answer.status_code)
    assert (done.status_code, refused.status_code) == (200, 409)
    assert refused.json()["detail"] == (
        f"task {task_id!r} is no dead letter, its state is queued: another user or command may have replayed it; "
        "nothing was changed"
    )
    assert await redis_command(app, "XLEN", partition_of(app).ready) == 1
    assert sum("refused: task" in line for line in log) == 1


async def test_edited_arguments_are_checked_by_the_catalog(bury: Bury, app: App, api: httpx.AsyncClient) -> None:
    (task_id,) = await bury(1)
    answer = await api.post(f"/dead-letters/{task_id}/replay", json={"edit": {"order": "none"}})
    assert answer.status_code == 422
    assert "order" in answer.json()["detail"]
    assert await states(app, [task_id]) == {"dead"}
    answer = await api.post(f"/dead-letters/{task_id}/replay", json={"edit": {"order": 200, "fails": False}})
    assert answer.status_code == 200
    await work_off(app)
    handle = await app.producer.find(task_id)
    assert handle is not None
    assert await handle.result() == 200


async def test_all_arguments_can_be_given_with_masked_secrets(bury: Bury, app: App, api: httpx.AsyncClient) -> None:
    (task_id,) = await bury(1)
    given = {"args": {"order": 2**60 + 1, "card": "**********", "fails": False}}
    assert (await api.post(f"/dead-letters/{task_id}/replay", json=given)).status_code == 200
    handle = await app.producer.find(task_id)
    assert handle is not None
    stored = json.loads((await handle.record()).args or b"")
    assert stored == {"order": 2**60 + 1, "card": "4111", "fails": False}


async def test_args_and_edit_exclude_each_other(bury: Bury, api: httpx.AsyncClient) -> None:
    (task_id,) = await bury(1)
    answer = await api.post(f"/dead-letters/{task_id}/replay", json={"args": {}, "edit": {}})
    assert answer.status_code == 422
    assert "not both" in answer.json()["detail"]


async def test_arguments_that_are_too_large_are_refused(bury: Bury, app: App, api: httpx.AsyncClient) -> None:
    (task_id,) = await bury(1)
    text = "x" * app.producer.payload_limit
    for given in ({"args": {"order": 1, "card": text}}, {"edit": {"card": text}}):
        answer = await api.post(f"/dead-letters/{task_id}/replay", json=given)
        assert answer.status_code == 413, answer.text
    assert await states(app, [task_id]) == {"dead"}


async def test_a_purge_deletes_the_letter_and_its_task(bury: Bury, app: App, client_of: ClientOf) -> None:
    ids = await bury(1, 2)
    operator = client_of(Role.OPERATOR)
    answer = await operator.delete(f"/dead-letters/{ids[0]}")
    assert answer.json()["outcome"] == "purged"
    assert await states(app, ids) == {"gone", "dead"}
    assert (await operator.delete(f"/dead-letters/{ids[0]}")).status_code == 404


async def test_acts_need_an_operator(bury: Bury, client_of: ClientOf, app: App) -> None:
    ids = await bury(1)
    for role in (Role.VIEWER, Role.PRODUCER, Role.APPROVER):
        user = client_of(role)
        answers = [
            await user.post(f"/dead-letters/{ids[0]}/replay"),
            await user.delete(f"/dead-letters/{ids[0]}"),
            await user.post("/dead-letters/replay", json={}),
            await user.post("/dead-letters/purge", json={}),
        ]
        assert [answer.status_code for answer in answers] == [403] * 4
    assert await states(app, ids) == {"dead"}


async def test_a_damaged_letter_is_shown_and_only_purged(app: App, api: httpx.AsyncClient, bury: Bury) -> None:
    await bury(1)
    entry = await redis_command(app, "XADD", partition_of(app).dead, "*", b"\xff", b"\xfe<script>")
    task_id = f"entry-{entry.decode()}"
    assert (await api.get("/dead-letters")).json()["items"][0]["reason"] == "damaged"
    letter = (await api.get(f"/dead-letters/{task_id}")).json()
    assert "perdure dlq purge" in letter["remedy"]
    answer = await api.post(f"/dead-letters/{task_id}/replay")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:perdure:problem:damaged-letter")
    assert (await api.delete(f"/dead-letters/{task_id}")).status_code == 200


async def test_a_key_of_another_type_hides_no_other_queue(app: App, api: httpx.AsyncClient, bury: Bury) -> None:
    ids = await bury(1, 2)
    await bury(3, queue="second")
    await redis_command(app, "DEL", partition_of(app, "second").dead)
    await redis_command(app, "SET", partition_of(app, "second").dead, "x", "EX", 60)
    first = (await api.get("/dead-letters", params={"limit": 2})).json()
    second = (await api.get("/dead-letters", params={"limit": 2, "cursor": first["next"]})).json()
    listed = [letter["id"] for page in (first, second) for letter in page["items"]]
    assert listed[1:] == ids[::-1], "the damaged queue is named once, on the first page"


async def test_an_export_streams_matching_letters_the_oldest_first(bury: Bury, client_of: ClientOf) -> None:
    ids = await bury(1, 2, 3)
    answer = await client_of(Role.VIEWER).get("/dead-letter-export", params={"error": "no order"})
    assert "dead-letters.jsonl" in answer.headers["content-disposition"]
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [letter["id"] for letter in found] == ids
    assert found[0]["args"]["card"] == "**********"


async def test_a_preview_counts_and_changes_nothing(bury: Bury, app: App, client_of: ClientOf) -> None:
    ids = await bury(1, 2)
    viewer = client_of(Role.VIEWER)
    found = (await viewer.post("/dead-letters/preview", json={"where": ["order=2"]})).json()
    assert (found["count"], found["first"], found["kinds"]) == (1, [ids[1]], {"attempts_exhausted": 1})
    assert (found["read"], found["of"], found["complete"], found["problems"]) == (2, 2, True, 0)
    assert found["workers"] is False
    found = (await viewer.post("/dead-letters/preview", json={"edit": {"order": "x"}})).json()
    assert (found["count"], found["problems"], found["failures"][0]["task_id"]) == (2, 2, ids[0])
    assert "order" in found["failures"][0]["reason"]
    assert await states(app, ids) == {"dead"}


async def test_many_are_replayed_by_a_job_with_edited_arguments(bury: Bury, app: App, client_of: ClientOf) -> None:
    ids = await bury(1, 2, 3)
    operator = client_of(Role.OPERATOR, name="bob")
    given = {"where": ["order=2"], "edit": {"fails": False}, "rate": 100, "why": "mended", "name": "mend"}
    answer = await operator.post("/dead-letters/replay", json=given)
    assert answer.status_code == 202
    job = answer.json()
    assert (job["name"], job["by"], job["why"], job["state"]) == ("mend", "bob", "mended", "running")
    assert job["turn"] == "no worker runs now; one continues it when it starts, or 'perdure job run mend' does"
    assert job["options"]["edit"] == ["fails"], "values may be secrets"
    await run(app, "mend")
    job = (await operator.get("/jobs/mend")).json()
    assert (job["state"], job["done"], job["share"], job["turn"]) == ("done", 1, 1.0, None)
    await work_off(app)
    assert await states(app, [ids[1]]) == {"succeeded"}
    assert await states(app, [ids[0], ids[2]]) == {"dead"}


async def test_a_job_leaves_letters_whose_edited_arguments_do_not_fit(
    bury: Bury, app: App, api: httpx.AsyncClient
) -> None:
    ids = await bury(1, 2)
    await api.post("/dead-letters/replay", json={"edit": {"order": "x"}, "name": "wrong"})
    await run(app, "wrong")
    job = (await api.get("/jobs/wrong")).json()
    assert (job["done"], job["failed"]) == (0, 2)
    assert "order" in job["errors"][0]["reason"]
    assert await states(app, ids) == {"dead"}
    await api.post("/dead-letters/replay", json={"edit": {"order": "x"}, "check": False, "name": "forced"})
    await run(app, "forced")
    assert (await api.get("/jobs/forced")).json()["done"] == 2


async def test_many_are_purged_by_a_job(bury: Bury, app: App, api: httpx.AsyncClient) -> None:
    ids = await bury(1, 2)
    assert (await api.post("/dead-letters/purge", json={"queue": "test", "name": "clean"})).status_code == 202
    (later,) = await bury(3)
    await run(app, "clean")
    assert await states(app, ids) == {"gone"}
    assert await states(app, [later]) == {"dead"}, "it died after the job was made"


async def test_letters_of_one_time_are_on_one_page_each(bury: Bury, app: App, api: httpx.AsyncClient) -> None:
    await bury(1)
    await bury(2, queue="second")
    for queue in ("test", "second"):
        await redis_command(app, "XADD", partition_of(app, queue).dead, "2000000000000-7", "damaged", queue)
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await api.get("/dead-letters", params={"limit": 1} | ({"cursor": cursor} if cursor else {}))).json()
        seen += [letter["queue"] for letter in page["items"]]
        cursor = page["next"]
    assert seen == ["second", "test", "second", "test"]
