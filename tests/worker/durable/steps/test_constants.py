"""Constants in arguments: the folder of a run and the id of a task, which differ between runs and copies."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Context, Retry, Settings, State, TaskHandle
from perdure.worker.agents.journal.forks import fork
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.durable.steps.calls import Constants
from perdure.worker.durable.steps.codec import digests_of, fingerprint
from perdure.worker.transfer.export import export_task
from perdure.worker.transfer.import_ import import_task
from perdure.worker.workspace import folders as folders_of_runs
from perdure.worker.workspace.folders import make_folder

from tests.support.workers import bounded, work_off

pytestmark = pytest.mark.integration

PLACE = 'a "quoted" plac\u00e9'


@pytest.fixture
async def app(settings: Settings, tmp_path: Path) -> AsyncIterator[App]:
    places = {"artifacts": str(tmp_path / "store"), "workspaces": str(tmp_path / PLACE)}
    async with App("constants", settings=settings.model_copy(update=places)) as app:
        yield app


@pytest.mark.parametrize("form", ["path", "text", "file", "nested", "set", "keys", "sentence", "resolved"])
async def test_the_folder_of_a_run_may_be_an_argument(app: App, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it has another path in each run, as on hosts with other places."""
    monkeypatch.setattr(folders_of_runs, "_hold", lambda folder: False)
    folders: list[Path] = []
    calls: list[Any] = []

    def given(folder: Path) -> Any:
        return {
            "path": folder,
            "text": str(folder),
            "file": f"--file={folder}/src/a.txt",
            "nested": {"files": [(folder / "a", 1), {"b": folder / "b"}]},
            "set": {f"{folder}/a", "/", "~", folder, f"{folder}"},
            "keys": {f"{folder}/z": 1, f"{folder}/b": 2, "/": 3, "~": 4},
            "sentence": f"Write into {folder}, and read {folder}.",
            "resolved": folder.resolve() / "a",
        }[form]

    @app.task(retry=Retry(max_attempts=3, base=0))
    async def build(ctx: Context) -> int:
        folders.append(ctx.workspace.path)
        await ctx.step("write", calls.append, given(ctx.workspace.path))
        if ctx.attempt < 3:
            raise ConnectionError
        return len(calls)

    handle = await build.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == 1
    assert len(set(folders)) == 3


async def test_a_recorded_result_may_have_the_folder_of_an_earlier_run(app: App) -> None:
    calls: list[str] = []

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def build(ctx: Context) -> int:
        def write() -> str:
            path = ctx.workspace.path / "a.txt"
            path.write_text("a")
            return str(path)

        await ctx.step("send", calls.append, await ctx.step("write", write))
        if ctx.attempt == 1:
            raise ConnectionError
        return len(calls)

    handle = await build.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == 1


async def copy_of(app: App, handle: TaskHandle[Any], how: str, new_id: str) -> TaskHandle[Any]:
    if how == "fork":
        return (await fork(app.producer, handle.id, new_id=new_id)).handle
    file, store = io.BytesIO(), await artifact_store(app.producer.gateway, app.settings)
    await export_task(app.producer, handle, store, file)
    file.seek(0)
    return (await import_task(app.producer, store, file, new_id=new_id)).handle


@pytest.mark.parametrize("how", ["fork", "import"])
@pytest.mark.parametrize("ids", [(None, "copy", "again"), ("7", "8", "9"), ("order-7", "order-8", "o")])
async def test_the_id_of_a_task_may_be_an_argument(app: App, how: str, ids: tuple[str | None, str, str]) -> None:
    """A copy finds the records of its source, also if its id or that of the source is an argument by accident."""
    calls: list[Any] = []

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context, given: str) -> None:
        await ctx.step("own", calls.append, ctx.task_id)
        await ctx.step("own", calls.append, {"source": f"task:{ctx.task_id}", "n": 1})
        await ctx.step("given", calls.append, given)
        await ctx.step("numbers", calls.append, [7, 8, "order-7 and order-8, a copy"])
        await ctx.step("text", calls.append, f"of:\n{ctx.task_id}_1, {ctx.task_id}-2, {ctx.task_id}.")
        await ctx.options(step_id="known").step("known", calls.append, given)
        await ctx.ask("ada", "ok?")

    handle = await (job if ids[0] is None else job.options(task_id=ids[0])).enqueue("order-7")
    await work_off(app)
    for new_id in ids[1:]:
        handle = await copy_of(app, handle, how, new_id)
        await work_off(app)
        assert (await handle.record()).reason is None
        assert await handle.status() is State.WAITING  # it waits for ada
        assert len(calls) == 6


def test_arguments_without_constants_keep_their_digest(tmp_path: Path) -> None:
    constants = Constants(["01a21840-f42f-7780-becf-9f435f10c1cd"], make_folder(tmp_path, "x"))
    for args in [(1, "a"), (["/tmp"], {"b": None}), (str(tmp_path),)]:
        assert fingerprint(args, {}, constants) == fingerprint(args, {})


def test_other_folders_and_longer_ids_are_no_constants(tmp_path: Path) -> None:
    mine, other, longer = (make_folder(tmp_path, name) for name in ("mine", "other", "mine-abcdefgh"))
    constants = Constants(["mine"], mine)
    assert fingerprint((mine,), {}, constants)[0] != fingerprint((other,), {}, constants)[0]
    assert fingerprint((mine,), {}, constants)[0] != fingerprint((longer,), {}, constants)[0]
    assert fingerprint((mine,), {}, constants)[0] == fingerprint((make_folder(tmp_path, "mine"),), {}, constants)[0]
    assert fingerprint((mine / "a",), {}, constants)[0] != fingerprint((mine / "b",), {}, constants)[0]


def test_the_digests_of_a_copy_are_its_own_and_those_of_its_source() -> None:
    source, copy = Constants(["first"]), Constants(["second", "first"])
    for args in [("second",), ("first",), ("first and second",), (["task:first"],)]:
        own = fingerprint(args, {}, copy)[0]
        assert fingerprint(args, {}, source)[0] in digests_of(args, {}, own, copy)
    assert fingerprint(("second",), {}, copy)[0] == fingerprint(("first",), {}, source)[0]
