"""The pytest plugin: its server, a namespace for each test, and what it leaves alone until a fixture is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from perdure.worker.app import App

from tests.support.command_line import BOUND

APP = """
from perdure import App, Context

app = App("shop", redis_url="redis://nowhere.invalid:6379/0", namespace="developer")


@app.task
async def double(ctx: Context, number: int) -> int:
    return await ctx.step("double", lambda: number * 2)
"""

TESTS = """
import asyncio
import os

import pytest
from perdure import Producer

from shop import app, double

SEEN = set()


async def run(perdure):
    async with app:
        handle = await double.enqueue(21)
        states = await perdure.run_until_idle(app)
        return states, await handle.result(timeout=10)


@pytest.mark.parametrize("number", [1, 2])
def test_a_task_runs_in_a_namespace_of_the_test(perdure, number):
    assert asyncio.run(run(perdure)) == ({"succeeded": 1}, 42)
    assert perdure.namespace not in SEEN
    SEEN.add(perdure.namespace)


@pytest.mark.parametrize("number", [1, 2])
def test_a_synchronous_test(perdure, number):
    assert double.enqueue_sync(number).partition.namespace == perdure.namespace
    assert asyncio.run(perdure.run_until_idle(app)) == {"succeeded": 1}


async def test_an_asynchronous_test_and_an_untyped_producer(perdure):
    async with Producer() as producer:
        handle = await producer.enqueue("double", {"number": 4}, queue="shop")
        assert await perdure.run_until_idle(app) == {"succeeded": 1}
        assert await handle.result(timeout=10) == 8


def test_subprocesses_find_the_same_server(perdure):
    assert os.environ["PERDURE_REDIS_URL"] == perdure.redis_url == os.environ["PERDURE_TEST_REDIS_URL"]
    assert os.environ["PERDURE_NAMESPACE"] == perdure.namespace
"""


@pytest.mark.integration
@pytest.mark.processes
def test_each_test_has_a_namespace_on_the_server_for_tests(tmp_path: Path, redis_url: str) -> None:
    """With the embedded server, the test of `perdure new` and docs/how-to/testing.md do the same."""
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "test_shop.py").write_text(TESTS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    servers = {"PERDURE_REDIS_URL": "redis://nowhere.invalid:6379/1", "PERDURE_TEST_REDIS_URL": redis_url}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"],
        cwd=tmp_path,
        env=kept | servers,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert "6 passed" in tested.stdout, tested.stdout + tested.stderr
    with redis.Redis.from_url(redis_url) as client:
        assert list(client.scan_iter("{test-*")) == []


def test_the_plugin_imports_nothing_else_before_a_fixture_is_used() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import perdure.worker.testing.plugin;"
        "print(sorted(set(sys.modules) - before))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "plugin" in found
    assert "redis" not in found
    assert "pydantic" not in found
    assert "perdure.queues" not in found


def test_settings_of_the_fixture_end_with_it(perdure_settings_off: None) -> None:
    app = App("shop", namespace="own")
    App.overrides = {"namespace": "of-a-test"}
    assert app.settings.namespace == "of-a-test"
    app.configure(lease=2.0)
    App.overrides = {}
    assert (app.settings.namespace, app.settings.lease) == ("own", 2.0)


@pytest.fixture
def perdure_settings_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "overrides", {})


def test_a_resume_warning_is_an_error_unless_the_project_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from perdure.worker.resume_warning import warn_once\n\n\ndef test_it():\n    warn_once('the values differ')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    strict = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND, check=False)
    assert strict.returncode == 1
    assert "ResumeWarning: the values differ" in strict.stdout
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore::perdure.ResumeWarning\n")
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=BOUND, check=True)
