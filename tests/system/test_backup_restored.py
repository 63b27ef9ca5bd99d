"""A namespace is lost and restored while tasks are under way: workers resume at the recorded steps."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest
from perdure import Producer, Settings, State

from tests.support.command_line import BOUND, Running, call
from tests.support.workers import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

APP = """
import asyncio
import os
from perdure import App, Context
app = App("walks")

def note(line):
    with open("steps", "a") as file:
        file.write(line + "\\n")

async def third(name):
    note(f"{name} third")
    while not os.path.exists("go"):
        await asyncio.sleep(0.02)

@app.task
async def walk(ctx: Context, name: str) -> str:
    for step in ("first", "second"):
        await ctx.step(step, note, f"{name} {step}")
    await ctx.step("third", third, name)
    await ctx.step("fourth", note, f"{name} fourth")
    return name

@app.task
async def asks(ctx: Context) -> str:
    await ctx.step("before", note, "asks before")
    return await ctx.wait_for("answer", str)
"""


def lines(folder: Path) -> Counter[str]:
    file = folder / "steps"
    return Counter(file.read_text().splitlines() if file.exists() else ())


async def test_workers_resume_at_the_recorded_step_after_a_restore(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walks.py").write_text(APP)
    monkeypatch.setenv("PERDURE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", settings.namespace)
    monkeypatch.setenv("PERDURE_LEASE", "1")
    names = ("a", "b", "c")
    file = str(tmp_path / "walks.backup")
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        with Running("worker", "run", "walks.py:app", "--no-supervisor", cwd=tmp_path) as worker:
            walks = [await producer.enqueue("walk", {"name": name}, queue="walks") for name in names]
            asks = await producer.enqueue("asks", queue="walks")
            later = await producer.enqueue("walk", {"name": "later"}, queue="walks", delay=3600)

            async def under_way() -> bool:
                found = await asyncio.to_thread(lines, tmp_path)
                return all(found[f"{name} third"] for name in names) and await asks.status() is State.WAITING

            await wait_until(under_way, "all tasks are under way")
            assert (await asyncio.to_thread(call, "backup", file)).code == 1  # a worker runs
            backup = await asyncio.to_thread(call, "backup", file, "--live", "--json")
            assert (backup.code, backup.json["live"]) == (0, True)
            worker.send(signal.SIGKILL)
            await asyncio.to_thread(worker.wait)
        await lose(producer)
        assert await producer.find(walks[0].id) is None
        assert (await asyncio.to_thread(call, "worker", "list", "--json")).json["workers"] == []
        restored = await asyncio.to_thread(call, "restore", file, "--json")
        assert restored.code == 0, restored.err
        (tmp_path / "go").touch()
        await asks.answer("answer", "yes")
        with Running("worker", "run", "walks.py:app", "--no-supervisor", cwd=tmp_path) as worker:
            assert [await walk.result(BOUND) for walk in walks] == list(names)
            assert await asks.result(BOUND) == "yes"
            worker.send(signal.SIGTERM)
            await asyncio.to_thread(worker.wait)
        assert await later.status() is State.SCHEDULED
    found = await asyncio.to_thread(lines, tmp_path)
    assert {found[f"{name} {step}"] for name in names for step in ("first", "second", "fourth")} == {1}
    assert {found[f"{name} third"] for name in names} == {2}  # cut off by the kill, so it runs once more
    assert found["asks before"] == 1


async def lose(producer: Producer) -> None:
    """Delete all keys of the namespace, as FLUSHALL does."""
    cursor = b"0"
    while True:
        pattern = f"{{{producer.namespace.name}[:}}]*"
        cursor, keys = await producer.gateway.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        if keys:
            await producer.gateway.command("DEL", *keys)
        if cursor == b"0":
            return
