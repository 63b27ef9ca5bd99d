"""Jobs with workers: a worker runs those that no process runs, also after the command that made it was killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess

import pytest
from perdure import App, Context, Settings
from perdure.queues.jobs import JobPlan, JobStore, StoredJob
from perdure.queues.task_filter import TaskFilter

from tests.support.command_line import COMMAND, call
from tests.support.workers import running_worker, wait_until

pytestmark = pytest.mark.integration


def make_app(settings: Settings) -> App:
    app = App("test", settings=settings)

    @app.task
    async def served(ctx: Context) -> None:
        """A task of the queue that the worker reads."""

    return app


def kill_at_its_first_line(*args: str) -> None:
    """Start a command, and kill it when it has printed a line."""
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline()
        command.send_signal(signal.SIGKILL)


async def ended(store: JobStore, name: str = "job") -> StoredJob:
    async def is_over() -> bool:
        return not (await store.read(name)).running

    await wait_until(is_over, "the job ends")
    return await store.read(name)


async def test_a_worker_runs_a_job_that_no_process_runs(settings: Settings) -> None:
    app = make_app(settings)
    async with app:
        tasks = await app.producer.enqueue_many("other", [{} for _ in range(3)], queue="backlog")
        store = JobStore(app.producer.gateway, app.producer.namespace)
        await store.create("job", "cancel", lambda now: JobPlan("backlog", TaskFilter(until=now).form()))
        async with running_worker(app):
            job = await ended(store)
        assert (job.state, job.counts.done) == ("done", 3)
        assert {str(await task.status()) for task in tasks} == {"cancelled"}


async def test_a_worker_continues_the_job_of_a_command_that_was_killed(settings: Settings, environment: None) -> None:
    app = make_app(settings)
    async with app:
        tasks = await app.producer.enqueue_many("other", [{} for _ in range(30)], queue="backlog")
        store = JobStore(app.producer.gateway, app.producer.namespace)
        options = ("--all", "--queue", "backlog", "--rate", "5/s", "--job", "job", "--yes")
        await asyncio.to_thread(kill_at_its_first_line, "task", "cancel", *options)
        left = await store.read("job")
        assert left.running
        assert left.counts.done < 30
        assert await store.write(left, {"until": left.now - 1, "rate": ""})  # its lease has passed
        async with running_worker(app):
            job = await ended(store)
        assert job.state == "done"
        assert {str(await task.status()) for task in tasks} == {"cancelled"}


async def test_a_worker_notes_why_it_cannot_run_a_job(settings: Settings, log: list[str]) -> None:
    app = make_app(settings)
    async with app:
        store = JobStore(app.producer.gateway, app.producer.namespace)
        job = await store.create("job", "cancel", lambda now: JobPlan(None, {"moon": "full"}))
        async with running_worker(app):

            async def is_noted() -> bool:
                return bool((await store.read(job.name)).text("problem"))

            await wait_until(is_noted, "the problem is noted")
        assert "moon" in (await store.read("job")).text("problem")
        assert any("could not run job job: could not read what the job is to do" in line for line in log)
        await store.abort("job")


def test_a_detached_command_leaves_the_job_to_workers(environment: None) -> None:
    call("enqueue", "other", "--queue", "backlog", "--args", "{}")
    answer = call("queue", "purge", "backlog", "--yes", "--detach", "--job", "later")
    assert (answer.code, answer.out) == (0, "later\n")
    assert "no worker runs now; one continues it when it starts, or 'perdure job run later' does" in answer.err
    assert call("job", "list", "--json").json[0]["state"] == "running"
    assert "perdure job run later" in call("job", "show", "later").err
    assert len(call("job", "run", "later").ids) == 1
    assert call("job", "watch", "later").err == "perdure: cancelled: 1\n"
    assert call("job", "run", "later").code == 1
