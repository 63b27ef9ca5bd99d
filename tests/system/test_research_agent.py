"""examples/research_agent.py: its report, also after kills."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Settings, TaskHandle
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.cli.support.app_loader import load_app

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import worker_processes
from tests.support.workers import BOUND, bounded, history, wait_until, work_off

EXAMPLE = ROOT / "examples" / "research_agent.py"

pytestmark = [pytest.mark.integration, pytest.mark.processes]

QUESTION = "How are threads and processes started, and how do they wait for one another?"
MODULES = "subprocess threading socketserver selectors queue sched signal shelve textwrap cmd asyncio multiprocessing"
KILLS = (1, 4)
"""Tool calls after whose payment, and before whose record, a worker is killed."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy a few modules of the standard library."""
    stdlib, folder = Path(sysconfig.get_path("stdlib")), tmp_path / "documents"
    folder.mkdir()
    for name in MODULES.split():
        source = stdlib / f"{name}.py"
        shutil.copyfile(source if source.exists() else stdlib / name / "__init__.py", folder / f"{name}.py")
    return folder


EXAMPLE_APP = load_app(f"{EXAMPLE}:app")


@pytest.fixture
async def app(settings: Settings, tmp_path: Path) -> AsyncIterator[App]:
    EXAMPLE_APP.configure(redis_url=settings.redis_url, namespace=settings.namespace, data_dir=tmp_path / "data")
    async with EXAMPLE_APP as app:
        yield app


async def report_of(app: App, handle: TaskHandle[Any]) -> tuple[dict[str, Any], str]:
    """Return the result and the text of the report."""
    found = (await handle.result(timeout=BOUND)).model_dump()
    (saved,) = [event.data for event in await history(handle) if event.type == "artifact_saved"]
    store = await artifact_store(app.producer.gateway, app.settings)
    return found, (await store.read("the report", found["artifact"], saved["size"])).decode()


def bill(ledger: Path) -> list[str]:
    """Return the paid calls; assert that none was paid twice."""
    paid = [line.split(" ", 1) for line in ledger.read_text().splitlines()]
    assert len({key for key, _ in paid}) == len(paid), "a call was paid for twice"
    return [what for _, what in paid]


async def lines(ledger: Path, number: int) -> None:
    async def written() -> bool:
        return number <= (ledger.read_text().count("\n") if ledger.exists() else 0)  # noqa: ASYNC240 - a few lines

    await wait_until(written, f"{number} paid calls")


async def test_kills_change_no_report_and_repeat_no_paid_call(
    app: App, folder: Path, tmp_path: Path, settings: Settings
) -> None:
    quiet = await app.agents["research"].enqueue(QUESTION, folder=folder, ledger=tmp_path / "quiet")
    await work_off(app)
    found, report = await report_of(app, quiet)
    assert found["documents"] > 5
    assert "[1]" in report
    assert "(subprocess:11)" in report
    ledger = tmp_path / "troubled"
    handle = await app.agents["research"].enqueue(QUESTION, folder=folder, ledger=ledger, pause=0.05)
    program = PROGRAMS / "researcher.py"
    with worker_processes(settings, tmp_path, program) as workers:
        for number in KILLS:
            process = workers.start()
            await lines(ledger, number)
            process.kill()
        workers.start()
        assert await bounded(report_of(app, handle)) == (found, report)
    assert bill(ledger) == bill(tmp_path / "quiet")
    assert (await handle.record()).crashes >= len(KILLS)
    reported = [event for event in await history(handle) if event.type == "discovered"]
    assert len(reported) == found["passages"], "no discovery is there twice"


async def test_an_answered_question_returns_the_stored_result(app: App, folder: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    first = await app.agents["research"].enqueue(QUESTION, folder=folder, ledger=ledger)
    await work_off(app)
    paid = bill(ledger)
    again = await app.agents["research"].enqueue(QUESTION, folder=folder, ledger=ledger)
    assert await again.result(timeout=0) == await first.result(timeout=0)
    assert bill(ledger) == paid
