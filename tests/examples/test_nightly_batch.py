"""examples/nightly_batch.py: a night whose time is set by hand, and all 500 items through a kill."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from perdure import Producer
from perdure.testing import PerdureClock

from tests.support.command_line import BOUND, Running, call
from tests.support.paths import ROOT
from tests.support.workers import wait_until

PROGRAM = ROOT / "examples" / "nightly_batch.py"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("nightly_example", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "nightly_example", module)
    spec.loader.exec_module(module)
    return module


def test_the_program_has_under_40_lines() -> None:
    assert len(PROGRAM.read_text("utf-8").splitlines()) < 40


async def test_a_night_begins_at_two_and_its_calls_are_limited(
    example: Any, perdure_clock: PerdureClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[datetime] = []
    barrier, at_once = asyncio.Barrier(10), 0

    async def fetch_price(item: int) -> int:
        """Return when ten calls run at once; item 60 has no price."""
        nonlocal at_once
        if item == 60:
            raise ValueError("no price")
        started.append(perdure_clock.now())
        at_once += 1
        assert at_once <= 10
        await barrier.wait()
        for _ in range(10):  # time for an eleventh one to begin
            await example.app.producer.gateway.command("PING")
        at_once -= 1
        return 2

    monkeypatch.setattr(example, "ITEMS", range(61))
    monkeypatch.setattr(example, "fetch_price", fetch_price)
    zone = ZoneInfo("Europe/Berlin")
    two = datetime(perdure_clock.now().year + 1, 6, 1, 2, tzinfo=zone)
    perdure_clock.jump(two - timedelta(hours=3) - perdure_clock.now())
    async with example.app, perdure_clock.run_worker(example.app):
        await perdure_clock.move_to(two + timedelta(hours=1))
    night = f"nightly-{two.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    report = (tmp_path / f"{night}.txt").read_text("utf-8").splitlines()
    assert report[0] == "61 items, 1 failed, sum 120"
    assert report[1].endswith("no price"), report
    assert two <= min(started)
    assert two + timedelta(seconds=(60 - 20) / 20) <= max(started) < two + timedelta(minutes=1)


KILLED = f"""
import asyncio, importlib.util, os, signal
from pathlib import Path

spec = importlib.util.spec_from_file_location("nightly_batch", {str(PROGRAM)!r})
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
app, called, fetch = example.app, [], example.fetch_price

async def fetch_price(item):
    if item >= 60 and not Path("killed").exists():
        called.append(item)
        if len(called) == 10:
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()
    with Path("called").open("a") as file:
        file.write(f"{{item}}\\n")
    return fetch(item)

example.fetch_price = fetch_price
"""
"""The program, whose first worker is killed in ten calls at once: then each token belongs to a task that runs."""


async def test_all_items_have_a_price_though_a_worker_is_killed(
    redis_url: str, namespace_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"REDIS_URL": redis_url, "NAMESPACE": namespace_name, "LEASE": "1"}.items():
        monkeypatch.setenv(f"PERDURE_{name}", value)
    (tmp_path / "killed_batch.py").write_text(KILLED, "utf-8")
    command = ("worker", "run", "killed_batch.py:app", "--no-supervisor")

    async def run_command(*arguments: str) -> Any:
        return await asyncio.to_thread(call, *arguments)

    async def is_known() -> bool:
        return bool((await run_command("schedule", "list", "--json")).json)

    async with Producer() as producer:
        with Running(*command, cwd=tmp_path) as killed:
            await wait_until(is_known, "the worker has published the schedule")
            assert (await run_command("limit", "set", "shop", "rate=20000/s")).code == 0
            (night,) = (await run_command("schedule", "run", "nightly")).ids
            assert await asyncio.to_thread(killed.process.wait, BOUND) == -signal.SIGKILL
        with Running(*command, cwd=tmp_path):
            handle = await producer.find(night)
            assert handle is not None
            report = await handle.result(timeout=BOUND)
    assert report == f"500 items, 0 failed, sum {sum(100 + item % 7 for item in range(500))}"
    assert (tmp_path / f"{night}.txt").read_text("utf-8") == report
    assert sorted(map(int, (tmp_path / "called").read_text().split())) == list(range(500)), "one call of the shop each"
    listed = (await run_command("task", "list", "--json", "--limit", "2000")).json
    assert Counter(task["state"] for task in listed) == {"succeeded": 501}
