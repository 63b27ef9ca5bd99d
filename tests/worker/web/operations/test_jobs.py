"""Jobs by HTTP: the list, progress, abort, removal, and the cancellation of many tasks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from perdure import App, Context
from perdure.web import Role
from perdure.worker.job_runner import JobRunner

from tests.support.workers import running_worker, wait_until
from tests.worker.web.conftest import ClientOf

pytestmark = pytest.mark.integration


@pytest.fixture
async def ids(app: App) -> list[str]:
    """Ids of tasks that wait in a queue which no worker of the test reads."""
    tasks = await app.producer.enqueue_many("other", [{"n": n} for n in range(4)], queue="backlog")
    return [task.id for task in tasks]


async def test_tasks_are_cancelled_by_a_worker(app: App, ids: list[str], client_of: ClientOf, log: list[str]) -> None:
    @app.task
    async def served(ctx: Context) -> None:
        """A task of the queue that the worker reads."""

    operator = client_of(Role.OPERATOR, name="bob")
    given = {"queue": "backlog", "where": ["n=2"]}
    preview = (await operator.post("/tasks/cancel/preview", json=given)).json()
    assert (preview["count"], preview["kinds"], preview["first"]) == (1, {"queued": 1}, [ids[2]])
    async with running_worker(app):
        job = (await operator.post("/tasks/cancel", json=given | {"name": "stop"})).json()
        assert (job["act"], job["by"], job["queue"], job["filter"]["where"]) == ("cancel", "bob", "backlog", ["n=2"])
        assert job["turn"] in (None, "a worker runs it within seconds")

        async def is_over() -> bool:
            return str((await operator.get("/jobs/stop")).json()["state"]) == "done"

        await wait_until(is_over, "the job ends")
    job = (await operator.get("/jobs/stop")).json()
    assert (job["done"], job["failed"], job["share"]) == (1, 0, 1.0)
    assert await _states(app, ids) == ["queued", "queued", "cancelled", "queued"]
    assert "bob: cancel tasks (queue=backlog, name=stop): done\n" in log


async def _states(app: App, ids: list[str]) -> list[str]:
    handles = [await app.producer.find(task_id) for task_id in ids]
    return [str(await handle.status()) if handle else "gone" for handle in handles]


async def test_a_job_is_aborted_with_the_name_of_the_user(
    app: App, ids: list[str], client_of: ClientOf, log: list[str]
) -> None:
    operator = client_of(Role.OPERATOR, name="bob")
    await operator.post("/tasks/cancel", json={"name": "all"})
    job = (await operator.post("/jobs/all/abort")).json()
    assert (job["state"], job["aborted_by"], job["turn"]) == ("aborted", "bob", None)
    assert "bob: abort job all: done\n" in log
    async for _ in JobRunner(app.producer, "test").run("all"):
        pytest.fail("an aborted job acts on nothing")
    assert await _states(app, ids) == ["queued"] * 4


async def test_jobs_are_listed_in_pages_and_removed(ids: list[str], api: httpx.AsyncClient) -> None:
    for name in ("first", "second", "third"):
        await api.post("/tasks/cancel", json={"name": name})
        await api.post(f"/jobs/{name}/abort")
    page = (await api.get("/jobs", params={"limit": 2})).json()
    rest = (await api.get("/jobs", params={"limit": 2, "cursor": page["next"]})).json()
    assert {job["name"] for job in page["items"] + rest["items"]} == {"first", "second", "third"}
    assert (len(page["items"]), rest["next"], rest["of"]) == (2, None, 3)
    assert (await api.delete("/jobs/second")).status_code == 204
    assert (await api.get("/jobs/second")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("GET", "/jobs/none", None, 404, "there is no job 'none'"),
        ("POST", "/jobs/none/abort", None, 404, "there is no job 'none'"),
        ("DELETE", "/jobs/none", None, 404, "there is no job 'none'"),
        ("GET", "/jobs/a b", None, 422, "job"),
        ("DELETE", "/jobs/open", None, 409, "is running"),
        ("POST", "/tasks/cancel", {"name": "open"}, 409, "there is a job 'open' already"),
        ("POST", "/tasks/cancel", {"queue": "nowhere"}, 404, "there is no queue 'nowhere'"),
        ("POST", "/tasks/cancel", {"rate": 0}, 422, "rate"),
        ("POST", "/tasks/cancel", {"state": ["asleep"]}, 422, "state"),
        ("POST", "/tasks/cancel/preview", {"where": ["n"]}, 422, "must be NAME=VALUE"),
    ],
)
async def test_other_requests_are_refused(
    ids: list[str], api: httpx.AsyncClient, method: str, path: str, body: Any, status: int, text: str
) -> None:
    await api.post("/tasks/cancel", json={"name": "open"})
    answer = await api.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["detail"]


async def test_jobs_are_changed_by_operators_only(ids: list[str], api: httpx.AsyncClient, client_of: ClientOf) -> None:
    await api.post("/tasks/cancel", json={"name": "open"})
    viewer = client_of(Role.VIEWER)
    assert (await viewer.get("/jobs/open")).status_code == 200
    for method, path in (("POST", "/tasks/cancel"), ("POST", "/jobs/open/abort"), ("DELETE", "/jobs/open")):
        assert (await viewer.request(method, path)).status_code == 403
    assert (await client_of(Role.PRODUCER).get("/jobs")).status_code == 403
