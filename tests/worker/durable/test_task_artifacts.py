"""Artifacts of a task: saved once, linked in the checkpoint, verified on every read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.from_thread
import pytest
from perdure import Agent, AgentState, App, Artifact, Context, PlanStep, Retry, Settings
from perdure.queues import DecryptionError, generate_key
from perdure.queues.presence import deployment_id
from perdure.worker.artifacts.links import all_links, task_links
from perdure.worker.errors import ArtifactDamaged, ArtifactError, ArtifactTooLarge, BadArtifactName
from pydantic import SecretStr

from tests.support.workers import bounded, history, letter, recorded_steps, redis_command, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def app(settings: Settings, folder: Path) -> App:
    return App("test", settings=settings.model_copy(update={"artifacts": str(folder)}))


def stored(folder: Path) -> list[Path]:
    """Return the objects in the store, whose hashes are checked."""
    found = [path for path in folder.glob("*/??/*") if path.is_file()]
    for path in found:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.parent.name + path.name
    assert not list(folder.glob("*/incoming/*"))
    return found


async def outcome(app: App, handler: Any, *args: Any, retry: Retry | None = None) -> Any:
    """Return the result of one run of the handler."""
    task = app.task(retry=retry or Retry(max_attempts=1))(handler)
    async with app:
        handle = await task.enqueue(*args)
        await work_off(app)
        return await bounded(handle.result())


async def test_a_saved_artifact_is_linked_logged_and_readable(app: App, folder: Path) -> None:
    async def report(ctx: Context) -> tuple[Artifact, bytes, list[Artifact], bytes]:
        saved = await ctx.artifacts.save("report.md", "# Found\n")
        path = await ctx.artifacts.path("report.md")
        return saved, await ctx.artifacts.read("report.md"), await ctx.artifacts.list(), path.read_bytes()

    task = app.task(report)
    async with app:
        handle = await task.enqueue()
        await work_off(app)
        saved, data, listed, in_file = await bounded(handle.result())
        events = [event for event in await history(handle) if event.type == "artifact_saved"]
        fields = await recorded_steps(app, handle)
    digest = hashlib.sha256(b"# Found\n").hexdigest()
    assert saved == Artifact(name="report.md", hash=digest, size=8, media_type="text/markdown")
    assert data == in_file == b"# Found\n"
    assert listed == [saved]
    assert [event.data for event in events] == [
        {"name": "report.md", "hash": digest, "size": 8, "media_type": "text/markdown"}
    ]
    assert "s:#artifact:report.md" in fields
    assert [path.parent.name + path.name for path in stored(folder)] == [digest]


async def test_a_resumed_run_returns_the_recorded_artifact(app: App, folder: Path) -> None:
    """The data of the second attempt is ignored."""
    asked: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        asked.append(1)
        yield b"attempt %d" % len(asked)

    async def twice(ctx: Context) -> list[str]:
        first = await ctx.artifacts.save("a", pieces())
        second = await ctx.artifacts.save("a", b"second")
        if ctx.attempt == 1:
            raise ValueError("not yet")
        return [first.hash, second.hash, (await ctx.artifacts.read("a")).decode()]

    task = app.task(retry=Retry(base=0.0))(twice)
    async with app:
        handle = await task.enqueue()
        await work_off(app)
        found = await bounded(handle.result())
        events = [event.data["hash"] for event in await history(handle) if event.type == "artifact_saved"]
    first, second = hashlib.sha256(b"attempt 1").hexdigest(), hashlib.sha256(b"second").hexdigest()
    assert found == [first, second, "second"]
    assert events == [first, second]
    assert len(asked) == 1
    assert len(stored(folder)) == 2


async def test_a_save_within_a_step_is_part_of_the_step(app: App, folder: Path) -> None:
    tries: list[int] = []

    async def works(ctx: Context) -> list[str]:
        def in_thread() -> str:
            saved: Artifact = anyio.from_thread.run(ctx.artifacts.save, "thread", b"from a thread")
            return saved.name

        async def writes() -> str:
            tries.append(1)
            saved = await ctx.artifacts.save("a", b"the same")
            if len(tries) == 1:
                raise ValueError("not yet")
            return saved.name

        names = [await ctx.step("write", writes), await ctx.step("thread", in_thread)]
        return [*names, *(artifact.name for artifact in await ctx.artifacts.list())]

    task = app.task(retry=Retry(base=0.0))(works)
    async with app:
        handle = await task.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == ["a", "thread", "a", "thread"]
        events = [(event.step, event.data["name"]) for event in await history(handle) if event.type == "artifact_saved"]
        fields = await recorded_steps(app, handle)
    assert tries == [1, 1]
    assert events == [("write", "a"), ("thread", "thread")]  # the second try finds the link of the first
    assert not [field for field in fields if field.startswith("d:#artifact_saved")]
    assert len(stored(folder)) == 2


async def test_another_tasks_artifact_is_read_by_what_save_returned(app: App) -> None:
    async def writes(ctx: Context) -> Artifact:
        return await ctx.artifacts.save("a", "of another")

    async def reads(ctx: Context, artifact: Artifact) -> str:
        return (await ctx.artifacts.read(artifact)).decode()

    saved = await outcome(app, writes)
    assert await outcome(app, reads, saved) == "of another"


async def test_links_are_encrypted_if_there_are_keys(app: App, settings: Settings, folder: Path) -> None:
    keys = SecretStr(generate_key())
    encrypted = App("test", settings=app.settings.model_copy(update={"encryption_keys": keys}))

    async def report(ctx: Context) -> str:
        await ctx.artifacts.save("plan.txt", b"confidential")
        return (await ctx.artifacts.read("plan.txt")).decode()

    task = encrypted.task(report)
    async with encrypted:
        handle = await task.enqueue()
        await work_off(encrypted)
        assert await bounded(handle.result()) == "confidential"
        field = (await recorded_steps(encrypted, handle))["s:#artifact:plan.txt"]
        links = await task_links(encrypted.producer.gateway, handle.partition, handle.id)
    assert hashlib.sha256(b"confidential").hexdigest().encode() not in field
    assert [(link.name, link.size) for link in links] == [("plan.txt", 12)]
    async with app:  # without the key, the links cannot be read
        with pytest.raises(DecryptionError):
            [_ async for _ in all_links(app.producer.gateway, app.producer.namespace)]


async def too_large(ctx: Context) -> None:
    await ctx.artifacts.save("a", b"x" * 2000)


async def bad_name(ctx: Context) -> None:
    await ctx.artifacts.save("../a", b"x")


async def nothing_saved(ctx: Context) -> None:
    await ctx.artifacts.save("a", b"x")
    await ctx.artifacts.read("b")


async def damaged(ctx: Context) -> None:
    await ctx.artifacts.save("report", b"right")
    path = await ctx.artifacts.path("report")
    path.chmod(0o600)
    path.write_bytes(b"wrong")
    await ctx.artifacts.read("report")


@pytest.mark.parametrize(
    ("handler", "reason", "error", "problem"),
    [
        (too_large, "not_retryable", ArtifactTooLarge, "artifact 'a' of task {id} has more than 1024 bytes"),
        (bad_name, "attempts_exhausted", BadArtifactName, "artifact name '../a' is not valid"),
        (nothing_saved, "attempts_exhausted", ArtifactError, "task {id} has no artifact 'b'; its artifacts: 'a'"),
        (
            damaged,
            "attempts_exhausted",
            ArtifactDamaged,
            f"artifact 'report' of task {{id}} is damaged: object {hashlib.sha256(b'right').hexdigest()} in ",
        ),
    ],
)
async def test_errors_name_the_task_and_the_artifact(
    app: App, handler: Any, reason: str, error: type[Exception], problem: str
) -> None:
    app = App("test", settings=app.settings.model_copy(update={"artifact_limit": 1024}))
    task = app.task(retry=Retry(max_attempts=1))(handler)
    async with app:
        handle = await task.enqueue()
        await work_off(app)
        found = await letter(app, handle)
    assert found.reason == reason
    assert found.error == f"{error.__module__}.{error.__name__}"
    assert problem.format(id=handle.id) in found.message


async def test_a_link_of_a_later_version_is_refused_and_kept(app: App) -> None:
    async def report(ctx: Context) -> None:
        await ctx.artifacts.save("a", b"x")

    task = app.task(report)
    async with app:
        handle = await task.enqueue()
        await work_off(app)
        steps = handle.partition.steps(handle.id)
        for data, problem in (
            (b'{"v":2,"name":"a","hash":"","size":1,"media_type":""}', "has version 2"),
            (b"{", "JSON"),
        ):
            await redis_command(app, "HSET", steps, "s:#artifact:a", data)
            with pytest.raises(ArtifactError, match=f"link of task {handle.id} to artifact 'a'.*{problem}"):
                await task_links(app.producer.gateway, handle.partition, handle.id)
            assert await redis_command(app, "HGET", steps, "s:#artifact:a") == data


async def test_deployments_of_one_name_do_not_share_a_folder(app: App, folder: Path) -> None:
    """Otherwise the artifacts of one would be orphans for the other."""

    async def report(ctx: Context) -> None:
        await ctx.artifacts.save("a", b"x")

    await outcome(app, report)
    async with app:
        await redis_command(app, "DEL", app.producer.namespace.deployment)  # as on another server
        found = [await deployment_id(app.producer.gateway, app.producer.namespace) for _ in range(2)]
    assert found[0] == found[1]
    assert f"{app.settings.namespace}-{found[0]}" not in os.listdir(folder)  # noqa: PTH208


async def test_an_agents_artifacts_are_in_its_state_after_the_step(app: App, folder: Path) -> None:
    class Writes(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="write", title="write")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            saved = await ctx.artifacts.save("report", f"attempt {step.attempts}")
            if step.attempts == 1:
                raise ValueError("not yet")
            return saved.hash

        async def finish(self, ctx: Context, state: AgentState) -> list[Artifact]:
            return state.artifacts

    task = app.agent(name="writes", retry=Retry(base=0.0))(Writes)
    async with app:
        handle = await task.enqueue("a report")
        await work_off(app)
        found = await bounded(handle.result())
        events = [(event.step, event.data["name"]) for event in await history(handle) if event.type == "artifact_saved"]
        fields = await recorded_steps(app, handle)
    assert [(one.name, one.hash) for one in found] == [("report", hashlib.sha256(b"attempt 1").hexdigest())]
    assert events == [("write", "report")]
    assert {name for name in fields if "report" in name} == {"s:#artifact:report"}  # the step's own records are dropped
    assert len(stored(folder)) == 1
