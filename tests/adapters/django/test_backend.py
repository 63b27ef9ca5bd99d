"""The backend for django.tasks: its tasks in a worker, their results and their errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.tasks import TaskResultStatus, default_task_backend
from django.tasks.exceptions import TaskResultDoesNotExist
from django.utils import timezone
from perdure.integrations.django import PerdureBackend
from perdure.testing import PerdureFixture

from tests.adapters.django import shop as tasks
from tests.adapters.django.models import left
from tests.adapters.django.waiting import until

StartWorker = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start_worker(shop: PerdureFixture) -> Iterator[StartWorker]:
    """Starts a worker process that takes over the tasks of a dead worker after a second."""
    running: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        settings = {"DJANGO_SETTINGS_MODULE": "tests.adapters.django.settings", "PERDURE_LEASE": "2"}
        command = [str(Path(sys.executable).with_name("perdure")), "worker", "run", "--no-supervisor"]
        process = subprocess.Popen(
            [*command, "tests.adapters.django.worker:app"],
            env={**os.environ, **settings},
            cwd=Path(__file__).parents[3],
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


async def ended(result: Any) -> Any:
    """Wait until a task has ended; return its result."""

    def refresh() -> bool:
        result.refresh()
        finished: bool = result.is_finished
        return finished

    while not await to_thread.run_sync(refresh):
        pass
    return result


async def test_results_and_errors(shop: PerdureFixture) -> None:
    async with tasks.app, shop.run_worker(tasks.app):
        added = await tasks.add.aenqueue(2, second=3)
        described = await tasks.describe.aenqueue(text="hello")
        failed = await tasks.fail.aenqueue("no such order")
        assert added.status != TaskResultStatus.FAILED
        assert (await ended(added)).return_value == 5
        assert (await ended(described)).return_value == {"text": "hello", "id": described.id, "attempt": 1}
        assert (await ended(failed)).status == TaskResultStatus.FAILED
    assert (added.args, added.kwargs, added.attempts) == ([2], {"second": 3}, 1)
    assert added.enqueued_at <= added.started_at <= added.finished_at
    assert failed.errors[0].exception_class is LookupError
    assert "no such order" in failed.errors[0].traceback


async def test_options_of_using(shop: PerdureFixture) -> None:
    async with tasks.app:
        later = await tasks.add.using(priority=50, run_after=timezone.now() + timedelta(hours=1)).aenqueue(1, 2)
        handle = await tasks.app.producer.find(later.id)
        assert handle is not None
        assert await handle.status() == "scheduled"
        found = await tasks.add.aget_result(later.id)
        assert (found.task.priority, found.task.run_after) == (50, later.task.run_after)
        with pytest.raises(TaskResultDoesNotExist):
            await tasks.add.aget_result("unknown")


async def test_a_task_of_a_transaction(shop: PerdureFixture) -> None:
    """Enqueued when the transaction commits, by the outbox of the app; never if it is rolled back."""
    kept: list[Any] = []

    def order() -> None:
        with transaction.atomic():
            kept.append(tasks.add.enqueue(1, 1))
            tasks.invoice.enqueue_in_sync(None, 7)
            assert left() == 2
        with pytest.raises(LookupError), transaction.atomic():
            tasks.add.enqueue(2, 2)
            raise LookupError

    await to_thread.run_sync(order)
    with pytest.raises(TaskResultDoesNotExist):  # before a relay has sent it
        await default_task_backend.aget_result(kept[0].id)
    async with tasks.app, shop.run_worker(tasks.app):
        await until(lambda: not left(), "the outbox is empty")
        await until(lambda: len(tasks.lines()) == 2, "both tasks have run")
        assert (await ended(kept[0])).return_value == 2
    assert sorted(tasks.lines()) == ["add 1 1", "invoice 7"]


async def test_a_killed_worker(start_worker: StartWorker) -> None:
    """The call that was in flight runs once more, the others do not."""
    hold = Path(os.environ["SHOP_JOURNAL"]).with_suffix(".hold")
    hold.touch()
    first = start_worker()
    done = await to_thread.run_sync(tasks.add.enqueue, 1, 2)
    await until(lambda: "add 1 2" in tasks.lines(), "the first task has run")
    await ended(done)
    held = await to_thread.run_sync(tasks.slow.enqueue, "a")
    await until(lambda: "slow a" in tasks.lines(), "the second task runs")
    first.kill()
    start_worker()
    await until(lambda: tasks.lines().count("slow a") == 2, "another worker runs it")
    hold.unlink()
    assert (await ended(held)).return_value == "a"
    assert tasks.lines() == ["add 1 2", "slow a", "slow a"]


async def test_a_frozen_worker_that_wakes(start_worker: StartWorker) -> None:
    """The result of the worker that took over stays."""
    hold = Path(os.environ["SHOP_JOURNAL"]).with_suffix(".hold")
    hold.touch()
    frozen = start_worker()
    held = await to_thread.run_sync(tasks.slow.enqueue, "a")
    await until(lambda: "slow a" in tasks.lines(), "the task runs")
    frozen.send_signal(signal.SIGSTOP)
    start_worker()
    await until(lambda: tasks.lines().count("slow a") == 2, "another worker runs it")
    hold.unlink()
    finished = (await ended(held)).finished_at
    frozen.send_signal(signal.SIGCONT)
    frozen.terminate()
    await until(lambda: frozen.poll() is not None, "the frozen worker has ended")
    held.refresh()
    assert (held.return_value, held.finished_at) == ("a", finished)


def test_unknown_options_are_refused() -> None:
    backend = PerdureBackend("default", {"OPTIONS": {"url": "redis://"}})
    [problem] = backend.check()
    assert problem.msg.startswith("TASKS['default'] has the unknown option 'url'; there are app, max_attempts")
    with pytest.raises(ImproperlyConfigured, match="unknown option 'url'"):
        _ = backend.app
