"""Steps whose files cannot be saved: they are recorded, and nothing continues before the files are saved."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, TaskHandle
from perdure.queues import State
from perdure.worker.agents.journal.forks import fork
from perdure.worker.artifacts.backend import Upload
from perdure.worker.artifacts.local import LocalBackend
from perdure.worker.errors import BadHistory
from perdure.worker.log import logger

from tests.support.workers import bounded, history, letter, recorded_steps, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def app(settings: Settings, tmp_path: Path) -> App:
    places = {"artifacts": str(tmp_path / "store"), "workspaces": str(tmp_path / "running")}
    return App("test", settings=settings.model_copy(update=places))


def limited(app: App, **limits: int) -> App:
    return App("test", settings=app.settings.model_copy(update=limits))


class Store:
    """Artifact store that can be away. refused: how often it was."""

    def __init__(self) -> None:
        self.away = 0
        self.refused = 0
        self.held: threading.Event | None = None
        self.entered = threading.Event()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    found, upload = Store(), LocalBackend.upload

    def guarded(self: LocalBackend) -> Upload:
        if found.held is not None:
            found.entered.set()
            found.held.wait(60)
        if found.away:
            found.away -= 1
            found.refused += 1
            raise ConnectionError("the store is away")
        return upload(self)

    monkeypatch.setattr(LocalBackend, "upload", guarded)
    yield found
    if found.held is not None:
        found.held.set()


def kept(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "running").glob("*/*") if path.is_dir()]


async def parked(handle: TaskHandle[Any]) -> None:
    async def waits() -> bool:
        return (await handle.record()).waits == "workspace"

    await wait_until(waits, "it waits until its files can be saved")


def pay(folder: Path, paid: list[int], amount: int) -> int:
    return note_payment(folder, paid.append, amount)


def note_payment(folder: Path, note: Callable[[int], None], amount: int) -> int:
    note(amount)
    (folder / f"receipt-{amount}.txt").write_text(str(amount))
    return amount


async def call_tool(ctx: Context, folder: Path, note: Callable[[int], None]) -> Any:
    return await ctx.tool("pay", note_payment, folder, note, 1)


async def call_async(ctx: Context, folder: Path, note: Callable[[int], None]) -> Any:
    return await ctx.options(durability="async").step("pay", note_payment, folder, note, 1)


async def call_nested(ctx: Context, folder: Path, note: Callable[[int], None]) -> Any:
    async def outer() -> int:
        first = await ctx.step("inner", note_payment, folder, note, 1)
        return first + await ctx.step("inner too", lambda: 0)

    return await ctx.options(nested="record").step("outer", outer)


async def call_parallel(ctx: Context, folder: Path, note: Callable[[int], None]) -> Any:
    found = await asyncio.gather(
        *[ctx.step(f"pay {number}", note_payment, folder, note, number) for number in (1, 2, 3)]
    )
    return found[0]


CALLS: dict[str, Callable[..., Any]] = {
    "tool": call_tool,
    "async": call_async,
    "nested": call_nested,
    "parallel": call_parallel,
}


@pytest.mark.parametrize("how", CALLS)
async def test_a_step_runs_once_while_the_store_is_away(app: App, store: Store, tmp_path: Path, how: str) -> None:
    paid: list[int] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def charge(ctx: Context) -> Any:
        folder = ctx.workspace.path
        if ctx.attempt == 2:
            assert (folder / "receipt-1.txt").read_text() == "1"
        else:
            store.away = 4
            await CALLS[how](ctx, folder, paid.append)
            raise ValueError("once more")
        return sorted(path.name for path in folder.iterdir())

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        files = await bounded(handle.result())
        assert not [name for name in await recorded_steps(app, handle) if "unsaved" in name]
    assert len(paid) == len(files) == (3 if how == "parallel" else 1)
    assert store.refused == 4
    assert not kept(tmp_path)


class Payer(Agent[AgentState]):
    """Pays in a risky step of its plan."""

    paid: ClassVar[list[int]] = []

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="pay", title="pay", risky=True), PlanStep(key="look", title="look")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
        folder = ctx.workspace.path
        if step.key == "pay":
            return pay(folder, self.paid, 1)
        return sorted(path.name for path in folder.iterdir())

    async def finish(self, ctx: Context, state: AgentState) -> Any:
        return state.results["look"]


@pytest.mark.parametrize("case", ["away", "too large"])
async def test_a_step_of_a_plan_runs_once(app: App, store: Store, case: str) -> None:
    Payer.paid = []
    small = limited(app, workspace_files=0) if case == "too large" else app
    small.agent(Payer)
    store.away = 4 if case == "away" else 0
    async with small:
        handle = await small.tasks["payer"].enqueue(goal="pay")
        if case == "too large":
            async with running_worker(small):
                await parked(handle)
        else:
            await work_off(small)
            assert await bounded(handle.result()) == ["receipt-1.txt"]
    if case == "too large":
        app.agent(Payer)
        async with app, running_worker(app):
            again = await app.producer.find(handle.id)
            assert again is not None
            await again.send("now")
            assert await bounded(again.result()) == ["receipt-1.txt"]
    assert Payer.paid == [1]


@pytest.mark.parametrize(
    ("limits", "files", "said"),
    [
        ({"workspace_limit": 10}, {"a.txt": "x" * 6, "b.txt": "x" * 6}, "PERDURE_WORKSPACE_LIMIT"),
        ({"workspace_files": 1}, {"a.txt": "x", "b.txt": "x"}, "PERDURE_WORKSPACE_FILES"),
        ({"artifact_limit": 5}, {"large.txt": "x" * 6}, "file 'large.txt' has 6 bytes, more than 5"),
    ],
)
async def test_a_task_whose_files_exceed_a_limit_waits_until_it_is_raised(
    app: App, tmp_path: Path, limits: dict[str, int], files: dict[str, str], said: str
) -> None:
    ran: list[str] = []

    def define(app: App) -> Any:
        @app.task(retry=Retry(max_attempts=1))
        async def heavy(ctx: Context) -> list[str]:
            folder = ctx.workspace.path

            def write() -> None:
                ran.append("write")
                for name, text in files.items():
                    (folder / name).write_text(text)

            await ctx.step("write", write)
            return await ctx.step("look", lambda: sorted(path.name for path in folder.iterdir()))

        return heavy

    small = limited(app, **limits)
    heavy = define(small)
    async with small:
        handle = await heavy.enqueue()
        async with running_worker(small):
            await parked(handle)
            explained = await handle.explain()
            assert said in str(explained.why)
            assert said in explained.sentence
            await handle.send("look again")
            await wait_until(lambda: _looked(small, handle), "it has looked again")
            await parked(handle)
        assert [event.type for event in await history(handle)].count("waiting") == 1
        with pytest.raises(BadHistory, match=r"the files of step 'write' .* are not saved"):
            await fork(small.producer, handle.id)
    assert len(kept(tmp_path)) == 1
    define(app)
    async with app, running_worker(app):
        again = await app.producer.find(handle.id)
        assert again is not None
        await again.send("the limit was raised")
        assert await bounded(again.result()) == sorted(files)
        events = [event.type for event in await history(again)]
        assert events.count("waited") == events.count("workspace_saved") == 1
    assert ran == ["write"]
    assert not kept(tmp_path)


async def _looked(app: App, handle: TaskHandle[Any]) -> bool:
    mark = (await recorded_steps(app, handle)).get("s:#unsaved", b"")
    return b'"tries":2' in mark


async def test_a_task_that_is_released_while_the_store_is_away_has_its_files(
    app: App, store: Store, tmp_path: Path
) -> None:
    paid: list[int] = []

    @app.task
    async def charge(ctx: Context) -> list[str]:
        folder = ctx.workspace.path
        await ctx.step("pay", lambda: pay(folder, paid, 1))
        return await ctx.step("look", lambda: sorted(path.name for path in folder.iterdir()))

    async def refused() -> bool:
        return store.refused > 2

    async with app:
        handle = await charge.enqueue()
        store.away = 1_000_000
        async with running_worker(app):
            await wait_until(refused, "the store refuses files")
        assert await handle.status() is State.QUEUED
        assert len(kept(tmp_path)) == 1
        store.away = 2
        await work_off(app)
        assert await bounded(handle.result()) == ["receipt-1.txt"]
    assert paid == [1]
    assert not kept(tmp_path)


async def test_a_step_is_recorded_if_its_run_is_cut_off_while_the_files_are_saved(app: App, store: Store) -> None:
    paid: list[int] = []

    @app.task(timeout=0.5, retry=Retry(max_attempts=2, base=0.0))
    async def charge(ctx: Context) -> list[str]:
        folder = ctx.workspace.path
        await ctx.step("pay", lambda: pay(folder, paid, 1))
        return sorted(path.name for path in folder.iterdir())

    async def cut_off() -> bool:
        return "attempt_failed" in [event.type for event in await history(handle)]

    async with app:
        store.held = threading.Event()
        handle = await charge.enqueue()
        async with running_worker(app):
            await asyncio.to_thread(store.entered.wait, 60)
            await asyncio.sleep(0.6)
            store.held.set()
            await wait_until(cut_off, "the attempt has timed out")
            store.held = None
            assert await bounded(handle.result()) == ["receipt-1.txt"]
    assert paid == [1]


async def test_a_task_whose_files_are_lost_says_so(app: App, tmp_path: Path) -> None:
    ran: list[str] = []

    def define(app: App) -> Any:
        @app.task(retry=Retry(max_attempts=1))
        async def heavy(ctx: Context) -> None:
            folder = ctx.workspace.path

            def write() -> None:
                ran.append("write")
                (folder / "a").write_text("a")

            await ctx.step("write", write)

        return heavy

    small = limited(app, workspace_files=0)
    heavy = define(small)
    async with small:
        handle = await heavy.enqueue()
        async with running_worker(small):
            await parked(handle)
    for folder in (tmp_path / "running").glob("*/*"):
        if folder.is_dir():
            (folder / "a").unlink()
            folder.rmdir()
    define(app)
    async with app:
        again = await app.producer.find(handle.id)
        assert again is not None
        await again.send("the limit was raised")
        await work_off(app)
        found = await letter(app, again)
    assert "the files of step 'write' could not be saved" in found.message
    assert "PERDURE_WORKSPACES" in found.message
    assert ran == ["write"]


async def test_files_that_cannot_be_saved_are_left_out(app: App) -> None:
    paid: list[int] = []
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}")
    deep = "/".join(["d" * 200] * 6)

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def unpack(ctx: Context) -> list[str]:
        folder = ctx.workspace.path

        def write() -> None:
            pay(folder, paid, 1)
            (folder / deep).mkdir(parents=True)
            os.mkfifo(folder / "new\npipe")
            os.mkfifo(os.fsencode(folder) + b"/odd\x80pipe")

        if ctx.attempt == 1:
            await ctx.step("write", write)
            await ctx.step("more", (folder / "more.txt").write_text, "more")
            raise ValueError("once more")
        return sorted(path.name for path in folder.rglob("*") if not path.is_dir())

    async with app:
        handle = await unpack.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == ["more.txt", "receipt-1.txt"]
    assert paid == [1]
    logger.remove(sink)
    warnings = [line for line in lines if "these special files" in line]
    assert len(warnings) == 1
    for name in (r"new\\x0apipe", r"odd\\x80pipe", deep):
        assert name in warnings[0]
