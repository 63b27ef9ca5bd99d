"""kill -9 between saving an artifact and linking it: an orphan, which the collector finds, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest
from perdure import Producer, Settings

from tests.support.command_line import Answer, call
from tests.support.processes import WorkerProcesses, push_token, worker_processes
from tests.support.workers import bounded

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def workers(settings: Settings, tmp_path: Path) -> Iterator[WorkerProcesses]:
    environment = {"HELD_LINKS": "1", "PERDURE_ARTIFACTS": str(tmp_path / "artifacts")}
    with worker_processes(settings, tmp_path, environment=environment) as workers:
        yield workers


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def test_a_run_killed_between_saving_and_linking(
    workers: WorkerProcesses, producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", workers.settings.redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", workers.settings.namespace)
    monkeypatch.setenv("PERDURE_ARTIFACTS", str(tmp_path / "artifacts"))

    async def command(*args: str) -> Answer:
        return await anyio.to_thread.run_sync(lambda: call(*args))

    handle = await producer.enqueue("saves", {}, queue="replica")
    victim = await workers.start().ready()
    orphan = (await workers.line("saved", pid=victim.pid)).key
    victim.kill()
    assert orphan == sha(f"run of {victim.pid}")
    assert (await command("artifacts", "gc", "--dry-run")).ids == []  # its run might be about to link it
    assert (await command("artifacts", "gc", "--dry-run", "--grace", "0")).ids == [orphan]

    heir = await workers.start().ready()
    await push_token(producer, "link")
    first = (await workers.line("linked", pid=heir.pid)).key
    await workers.line("saved", sha("the same"), pid=heir.pid)
    heir.kill()  # the first is linked, and is never saved again; the second is saved, and linked by the next
    third = await workers.start().ready()
    await push_token(producer, "link")
    assert await bounded(handle.result()) == first
    assert [line.key for line in workers.lines("saved", pid=third.pid)] == [sha("the same")]

    listed = (await command("task", "artifact", handle.id, "--json")).json
    assert {one["name"]: one["hash"] for one in listed} == {"of one run": first, "of any run": sha("the same")}
    assert (await command("artifacts", "gc", "--grace", "0")).ids == [orphan]
    assert (await command("artifacts", "gc", "--grace", "0")).ids == []
    assert (await command("task", "artifact", handle.id, "of one run", "-o", str(tmp_path / "got"))).code == 0
    assert (tmp_path / "got").read_text() == f"run of {heir.pid}"
