"""`perdure task versions`: what still needs an older version of a task's code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import anyio
import pytest
from perdure import App, Context, Retry, Settings, State, TaskHandle
from perdure.queues.catalog import read_catalog
from perdure.worker.cli.task.history import VersionUse, advice

from tests.support.command_line import call
from tests.support.workers import bounded, redis_command, running_worker, wait_until

NOON = 1_777_896_000_000


@pytest.fixture
def connected(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", settings.namespace)


@asynccontextmanager
async def deployed(settings: Settings, version: int) -> AsyncIterator[App]:
    """The app with one version of its code. Tasks fail in their first attempt, those of 0 attempts for good."""
    app = App("books", settings=settings)

    @app.task(version=version, retry=Retry(max_attempts=2, base=3600.0, never=(ZeroDivisionError,)))
    async def report(ctx: Context, dead: bool = False) -> None:
        await ctx.step("one", int, 1)
        if ctx.attempt == 1:
            raise ZeroDivisionError if dead else ConnectionError

    @app.task(retry=Retry(max_attempts=2, base=3600.0))
    async def plain(ctx: Context) -> None:
        await ctx.step("one", int, 1)
        raise ConnectionError

    async with app:
        yield app


async def begin(settings: Settings, version: int, *, live: int, dead: int) -> list[TaskHandle[Any]]:
    """Run the first attempt of some tasks under a version. Return those that are live."""
    async with deployed(settings, version) as app:
        started = [await app.tasks["report"].enqueue() for _ in range(live)]
        letters = [await app.tasks["report"].enqueue(dead=True) for _ in range(dead)]
        others = [await app.tasks["plain"].enqueue()]
        async with running_worker(app):

            async def ran() -> bool:
                states = [await handle.status() for handle in (*started, *letters, *others)]
                return all(state in (State.SCHEDULED, State.DEAD) for state in states)

            await wait_until(ran, "each first attempt has ended")
        return started


async def shown_while_deployed(settings: Settings, version: int, *args: str) -> Any:
    """Return the answer of the command while a worker of this version runs."""
    async with deployed(settings, version) as app, running_worker(app):

        async def published() -> bool:
            catalog = await read_catalog(app.producer.gateway, app.producer.namespace)
            return any(task.task_version == version for task in catalog.all_versions)

        await wait_until(published, "the worker has published its tasks")
        return await anyio.to_thread.run_sync(lambda: call("task", "versions", *args))


@pytest.mark.integration
async def test_tasks_and_dead_letters_are_counted_by_the_version_that_they_began_with(
    settings: Settings, connected: None
) -> None:
    first = await begin(settings, 1, live=2, dead=1)
    await begin(settings, 2, live=1, dead=0)
    answer = await shown_while_deployed(settings, 2, "report", "--json")
    (report,) = answer.json
    async with deployed(settings, 2) as app:
        found = [await app.producer.find(handle.id) for handle in first]
        oldest = min([(await handle.record()).enqueued_at or 0 for handle in found if handle is not None])
    versions = {one["version"]: one for one in report["versions"]}
    assert report["task"] == "report"
    assert [(one["live"], one["dead"], one["workers"]) for one in versions.values()] == [(2, 1, 0), (1, 0, 1)]
    assert datetime.fromisoformat(versions[1]["oldest"]).timestamp() * 1000 == pytest.approx(oldest)
    assert report["advice"][0].startswith("2 tasks still need version 1 of 'report', the oldest since ")
    assert report["advice"][1].startswith("1 dead letter began with version 1 of 'report'")
    shown = await shown_while_deployed(settings, 2)
    assert "2 tasks still need version 1 of 'report'" in " ".join(shown.out.split())
    assert "plain" not in shown.out


@pytest.mark.integration
async def test_a_branch_can_be_deleted_when_its_last_task_has_ended(settings: Settings, connected: None) -> None:
    (handle,) = await begin(settings, 1, live=1, dead=0)
    async with deployed(settings, 2) as app:
        await redis_command(app, "ZADD", handle.partition.due, "XX", 1, handle.id)
        async with running_worker(app):
            found = await app.producer.find(handle.id)
            assert found is not None
            await bounded(found.result())
    answer = await shown_while_deployed(settings, 2, "report")
    assert "the branch for version 1 of 'report' can be deleted: no live task began with it" in answer.out


@pytest.mark.integration
async def test_a_worker_of_an_older_version_is_counted(settings: Settings, connected: None) -> None:
    async with deployed(settings, 1) as app, running_worker(app):
        answer = await shown_while_deployed(settings, 2, "report", "--json")
    assert answer.json[0]["advice"] == ["1 worker still runs version 1 of 'report': new tasks may begin with it"]


@pytest.mark.integration
def test_without_versions_there_is_nothing_to_list(connected: None) -> None:
    assert "has a version other than 1" in call("task", "versions").err
    unknown = call("task", "versions", "nothing")
    assert (unknown.code, "no live worker has task 'nothing', and no task of this name" in unknown.err) == (1, True)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([VersionUse("r", 1, workers=1, live=3)], []),
        (
            [VersionUse("r", 2, workers=1)],
            ["the branch for version 1 of 'r' can be deleted: no live task began with it"],
        ),
        (
            [VersionUse("r", 5, workers=1)],
            ["the branches for versions below 5 of 'r' can be deleted: no live task began with them"],
        ),
        (
            [VersionUse("r", 3, live=1, oldest=NOON), VersionUse("r", 4), VersionUse("r", 5, workers=1)],
            [
                "1 task still needs version 3 of 'r', the oldest since 2026-05-04 ",
                "the branches for versions below 3 of 'r' can be deleted: no live task began with them",
            ],
        ),
    ],
)
def test_the_advice_names_what_keeps_a_version(uses: list[VersionUse], expected: list[str]) -> None:
    found = advice("r", uses)
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))
