"""Artifacts of a task: saved once, linked with the checkpoint, checked when they are read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Retry, Settings
from perdure.worker.journal import Artifact
from working import history, recorded_steps, soon, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def app(settings: Settings, folder: Path) -> App:
    return App("test", settings=settings.model_copy(update={"artifacts": str(folder)}))


def stored(folder: Path) -> list[Path]:
    """The objects in the store; that each is what its name says."""
    found = [path for path in folder.glob("*/??/*") if path.is_file()]
    for path in found:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.parent.name + path.name
    assert not list(folder.glob("*/incoming/*"))
    return found


async def outcome(app: App, handler: Any, *args: Any, retry: Retry | None = None) -> Any:
    """What one run of the handler returns."""
    task = app.task(retry=retry or Retry(max_attempts=1))(handler)
    async with app:
        handle = await task.enqueue(*args)
        await work_off(app)
        return await soon(handle.result())


async def test_what_is_saved_is_linked_logged_and_read_back(app: App, folder: Path) -> None:
    async def report(ctx: Context) -> tuple[Artifact, bytes, list[Artifact], bytes]:
        saved = await ctx.artifacts.save("report.md", "# Found\n")
        path = await ctx.artifacts.path("report.md")
        return saved, await ctx.artifacts.read("report.md"), ctx.artifacts.list(), path.read_bytes()

    task = app.task(report)
    async with app:
        handle = await task.enqueue()
        await work_off(app)
        saved, data, listed, in_file = await soon(handle.result())
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
