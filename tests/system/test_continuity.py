"""An agent that uses every continuity feature, killed once at each of them: docs/explanation/guarantees.md."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Settings, TaskHandle
from perdure.worker.agents.journal.history import check_state
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.memory import LazyMemoryStore

from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcesses, worker_processes
from tests.support.workers import BOUND, history

pytestmark = [pytest.mark.integration, pytest.mark.processes]

PROGRAM = PROGRAMS / "continuing.py"

PLACES = "checkpoint events memory artifact handoff boot coherence compaction notification end finish"
DEATHS = set(PLACES.split())


async def run_scenario(
    app: App, workers: WorkerProcesses, folder: Path, name: str
) -> tuple[TaskHandle[Any], dict[str, Any], list[str]]:
    """One scenario: the task, its result, and the paid calls."""
    workers.environment = {"BILL": str(folder / f"{name}.bill"), "PERDURE_DATA_DIR": str(folder / name)}
    if name == "troubled":
        (folder / "deaths").mkdir()
        workers.environment["DEATHS"] = str(folder / "deaths")
    handle: TaskHandle[Any] = await app.producer.enqueue(
        "continuing", {"goal": "continue"}, task_id=name, queue=app.name
    )
    await handle.send("are you there?", sender="operator")
    waiting = asyncio.ensure_future(handle.result(timeout=BOUND * 4))
    while not waiting.done():
        process = workers.start()
        ended = asyncio.ensure_future(process.ended())
        await asyncio.wait([waiting, ended], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            process.stop()
        await ended
    return handle, await waiting, (folder / f"{name}.bill").read_text().splitlines()


async def test_a_kill_at_each_point_does_not_change_the_result(settings: Settings, tmp_path: Path) -> None:
    app = App("continuing", settings=settings)
    async with app:
        with worker_processes(settings.model_copy(update={"lease": 0.4, "grace": 0.2}), tmp_path, PROGRAM) as workers:
            _, expected, bill = await run_scenario(app, workers, tmp_path, "quiet")
            handle, found, paid = await run_scenario(app, workers, tmp_path, "troubled")
        assert {grave.name for grave in (tmp_path / "deaths").iterdir()} == DEATHS
        assert found == expected
        assert paid == bill, "nothing was paid for twice"
        assert found["count"] == 10
        assert found["results"]["boot"] == ["are you there?"]
        assert found["decisions"] == ["continue"]
        record = await handle.record()
        assert (record.attempts, record.crashes) == (1, len(DEATHS) - 1), "a handoff is no crash"
        events = await history(handle)
        reported = [event.data["after"] for event in events if event.type == "resumed"]
        assert sorted(reported) == ["crash"] * (len(DEATHS) - 1) + ["hand_off"], "each resumption is logged"
        assert [event.type for event in events].count("incoherent") == 1, "a finding is logged once"
        assert [event.type for event in events].count("compacted") == 1
        await check_state(app.producer.gateway, handle.partition, handle.id)
        own = settings.model_copy(update={"data_dir": tmp_path / "troubled"})
        store = await artifact_store(app.producer.gateway, own)
        assert [kept.hash async for kept in store.objects()] == [found["results"]["artifact"]]
    memories = LazyMemoryStore(own)
    try:
        known = [memory.text for memory in await (await memories.get()).list()]
    finally:
        await memories.close()
    assert sorted(known) == ["agents go on where they stood", "the stove is hot"], "and nothing is known twice"
