"""`perdure worker run`, `list` and `resume`: options, signals, exit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from perdure import App, Context, Settings, Worker
from perdure.queues import Producer
from perdure.queues.partitions.route import spread
from perdure.queues.supervisors import count_crash

from tests.support.command_line import BOUND, IGNORING_SIGINT, Answer, Running, call, process
from tests.support.workers import bounded, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

TASKS = """
import asyncio, sys, time
from pathlib import Path
from perdure import App, Context

app = App("audit", redis_url="redis://nowhere.invalid")

def wait_for(name):
    print("began", flush=True)
    while not Path(name).exists():
        time.sleep(0.01)
    return name

@app.task
async def add(ctx: Context, a: int, b: int) -> int:
    return a + b

@app.task
async def step(ctx: Context) -> str:
    await ctx.step("wait", wait_for, "go on")
    return await ctx.step("never", wait_for, "nothing")

@app.task
async def forever(ctx: Context) -> None:
    await ctx.step("stuck", wait_for, "nothing")

@app.task
async def executor(ctx: Context) -> None:
    await asyncio.to_thread(wait_for, "nothing")

@app.task
async def blocks(ctx: Context) -> None:
    wait_for("nothing")

@app.task(queue="second")
async def second(ctx: Context) -> str:
    return "second"
"""


@pytest.fixture(autouse=True)
def folder(redis_url: str, namespace_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with an application."""
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_NAMESPACE", namespace_name)
    return tmp_path


@pytest.fixture
def url(redis_url: str) -> tuple[str, str]:
    return ("--redis-url", redis_url)


def task_state(url: tuple[str, str], task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = call("task", "show", task_id, "--json", *url).json
    return found


def cancel(url: tuple[str, str], *ids: str) -> None:
    """Remove unfinished tasks, which the leak check would report."""
    for task_id in ids:
        call("task", "cancel", task_id, *url)


def events(url: tuple[str, str], task_id: str) -> list[str]:
    return [event["type"] for event in call("task", "events", task_id, "--json", *url).lines]


@pytest.mark.parametrize("options", [(), ("--partitions", "all"), ("--partitions", "share")])
def test_a_worker_reads_all_partitions_or_shares_them(url: tuple[str, str], options: tuple[str, ...]) -> None:
    assert call("queue", "partitions", "audit", "3", *url).code == 0
    keys = [next(key for key in map(str, range(100)) if spread(key) % 3 == index) for index in range(3)]
    ids = [
        call("enqueue", "add", "--queue", "audit", "--args", '{"a": 1, "b": 2}', "--key", key, *url).ids[0]
        for key in keys
    ]
    assert process("worker", "run", "tasks:app", "--no-supervisor", "--burst", *options, *url).code == 0
    assert {task_state(url, task_id)["state"] for task_id in ids} == {"succeeded"}
    assert [task_state(url, task_id)["partition"] for task_id in ids] == [0, 1, 2]


def test_an_invalid_partitions_option_is_refused(url: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert process("worker", "run", "tasks:app", "--no-supervisor", "--partitions", "some", *url).code == 2
    monkeypatch.setenv("PERDURE_PARTITIONS", "some")
    refused = process("worker", "run", "tasks:app", "--no-supervisor", *url)
    assert refused.code != 0
    assert "PERDURE_PARTITIONS" in refused.err
    assert "Traceback" not in refused.err


def test_burst_runs_the_queued_tasks_and_exits(url: tuple[str, str], redis_url: str, namespace_name: str) -> None:
    ids = call("enqueue", "add", "--queue", "audit", "--file", "-", *url, stdin=b'{"args": {"a": 1, "b": 2}}\n' * 3).ids
    answer = process("worker", "run", "tasks:app", "--no-supervisor", "--burst", *url)
    assert (answer.code, answer.out) == (0, "")
    assert [call("task", "result", task_id, *url).out for task_id in ids] == ["3\n"] * 3
    finding, start, end = answer.err.splitlines()
    assert f"WARNING {redis_url} has no append-only file" in finding
    worker_id = start.partition("worker ")[2].partition(" ")[0]
    assert worker_id.startswith("audit-")
    assert f"started: queues audit, second, namespace {namespace_name} at {redis_url}, concurrency 16" in start
    assert f"worker {worker_id} stopped after 3 runs" in end


def test_the_command_line_overrides_the_app(url: tuple[str, str], folder: Path) -> None:
    ids = [call("enqueue", "add", "--queue", "audit", "--args", '{"a": 1, "b": 2}', *url).ids[0]]
    ids += call("enqueue", "second", "--queue", "second", *url).ids
    options = ("--queues", "second,second", "--concurrency", "2", "--name", "mine", "--lease", "5", "--grace", "0")
    answer = process("worker", "run", "tasks.py:app", "--no-supervisor", "--burst", *options, *url)
    assert "worker mine-" in answer.err
    assert "started: queues second," in answer.err
    assert "concurrency 2" in answer.err
    assert [task_state(url, task_id)["state"] for task_id in ids] == ["queued", "succeeded"]
    cancel(url, *ids)


def test_a_queue_without_tasks_of_the_app_is_a_warning(url: tuple[str, str]) -> None:
    answer = process("worker", "run", "tasks:app", "--no-supervisor", "--burst", "--queues", "defualt", *url)
    assert answer.code == 0
    assert "app 'audit' has no task for queue defualt" in answer.err


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("nothing:app",), 2, "no module 'nothing'"),
        (("tasks:app", "--queues", "a,,b"), 2, "--queues: queue must be 1 to 64 letters"),
        (("tasks:app", "--lease", "0.1"), 2, "lease: Input should be greater than or equal to 0.3"),
        (("tasks:app", "--redis-url", "redis://127.0.0.1:1"), 1, "cannot reach Redis at redis://127.0.0.1:1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_failed_start_is_reported_in_one_line(args: tuple[str, ...], code: int, said: str) -> None:
    answer = process("worker", "run", *args)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert answer.err.startswith("perdure: ")
    assert answer.err.count("\n") == 1


def test_the_environment_can_set_json_logs(url: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_LOG_JSON", "1")
    [task_id] = call("enqueue", "add", "--queue", "audit", "--args", '{"a": 1, "b": 2}', *url).ids
    answer = process("worker", "run", "tasks:app", "--no-supervisor", "--burst", "--log-tasks", *url)
    lines = [json.loads(line) for line in answer.err.splitlines()]
    assert all({"time", "level", "message", "logger", "worker"} <= line.keys() for line in lines)
    began, ended = [line for line in lines if line.get("id") == task_id]
    assert (began["message"], began["task"], began["attempt"]) == ("started", "add", 1)
    assert (ended["message"], ended["level"], ended["stop"]) == ("ended: succeeded", "INFO", "completed")
    assert ended["seconds"] >= 0
    assert ended["worker"] == lines[0]["worker"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_finish_and_releases_the_task(url: tuple[str, str], folder: Path, number: int) -> None:
    [task_id] = call("enqueue", "step", "--queue", "audit", *url).ids
    with Running("worker", "run", "tasks:app", "--no-supervisor", *url, cwd=folder) as worker:
        assert worker.line() == "began"
        worker.send(number)
        (folder / "go on").touch()
        answer = worker.wait()
    assert (answer.code, answer.out) == (0, "")
    assert f"{signal.Signals(number).name}: stopping" in answer.err
    found = task_state(url, task_id)
    assert (found["state"], found["attempts"], found["crashes"]) == ("queued", 0, 0)
    assert events(url, task_id) == ["step_completed", "handed_off"]
    assert "Traceback" not in answer.err
    cancel(url, task_id)


def test_a_second_signal_releases_at_once_and_stuck_threads_do_not_block_the_exit(
    url: tuple[str, str], folder: Path
) -> None:
    [task_id] = call("enqueue", "forever", "--queue", "audit", *url).ids
    with Running("worker", "run", "tasks:app", "--no-supervisor", "--grace", "600", *url, cwd=folder) as worker:
        assert worker.line() == "began"
        worker.send(signal.SIGTERM)
        _until_logged(folder, "SIGTERM: stopping")
        worker.send(signal.SIGTERM)
        answer = worker.wait()
    assert answer.code == 0
    assert "SIGTERM again: stopping at once" in answer.err
    assert "exiting with running threads that cannot be stopped: " in answer.err
    assert (task_state(url, task_id)["state"], events(url, task_id)) == ("queued", ["handed_off"])
    cancel(url, task_id)


def test_a_stuck_thread_of_asyncio_does_not_block_the_exit(url: tuple[str, str], folder: Path) -> None:
    [task_id] = call("enqueue", "executor", "--queue", "audit", *url).ids
    with Running("worker", "run", "tasks:app", "--no-supervisor", "--grace", "0", *url, cwd=folder) as worker:
        assert worker.line() == "began"
        worker.send(signal.SIGTERM)
        answer = worker.wait()
    assert answer.code == 0
    assert "stopped after 1 run" in answer.err
    assert "exiting with running threads that cannot be stopped: " in answer.err
    cancel(url, task_id)


def test_a_third_signal_ends_the_process_though_a_handler_blocks_the_loop(url: tuple[str, str], folder: Path) -> None:
    [task_id] = call("enqueue", "blocks", "--queue", "audit", *url).ids
    with Running("worker", "run", "tasks:app", "--no-supervisor", "--lease", "1", *url, cwd=folder) as worker:
        assert worker.line() == "began"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            worker.send(number)
            _until_handled(worker.process.pid, number)
        answer = worker.wait()
    assert answer.code == 128 + signal.SIGTERM
    assert "Traceback" not in answer.err
    assert task_state(url, task_id)["state"] == "running"
    cancel(url, task_id)
    _recover(url)


def _until_logged(folder: Path, text: str) -> None:
    code = "import sys, time\nwhile sys.argv[2] not in open(sys.argv[1]).read(): time.sleep(0.01)"
    subprocess.run([sys.executable, "-c", code, str(folder / "stderr"), text], check=True, timeout=BOUND)


def _until_handled(pid: int, number: int) -> None:
    """Wait until the signal is delivered: the kernel merges two pending signals of one kind."""
    code = """
import sys, time
pid, bit = sys.argv[1], 1 << (int(sys.argv[2]) - 1)
def pending():
    try:
        lines = open(f"/proc/{pid}/status").read().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))
while pending() & bit:
    time.sleep(0.005)
time.sleep(0.05)
"""
    subprocess.run([sys.executable, "-c", code, str(pid), str(int(number))], check=True, timeout=BOUND)


def _recover(url: tuple[str, str]) -> None:
    """Let another worker claim the cancelled task of the ended worker."""
    assert process("worker", "run", "tasks:app", "--no-supervisor", "--lease", "1", "--burst", *url).code == 0


def test_a_worker_in_a_user_program_can_handle_signals(url: tuple[str, str], folder: Path) -> None:
    program = """
import asyncio, os, signal, sys
from perdure.worker.runtime.stop_signals import stop_on_signals

async def main():
    stopped = asyncio.Event()
    async with stop_on_signals(stopped.set):
        os.kill(os.getpid(), signal.SIGTERM)
        await stopped.wait()
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n")


@pytest.mark.parametrize("prefix", [(), IGNORING_SIGINT], ids=["in the foreground", "in the background"])
def test_ctrl_c_while_the_app_is_imported_ends_with_130(
    url: tuple[str, str], folder: Path, prefix: tuple[str, ...]
) -> None:
    (folder / "slow_import.py").write_text("import time\nprint('began', flush=True)\ntime.sleep(60)\n")
    with Running("worker", "run", "slow_import:app", "--no-supervisor", *url, cwd=folder, prefix=prefix) as worker:
        assert worker.line() == "began"
        worker.send(signal.SIGINT)
        answer = worker.wait()
    assert (answer.code, answer.err) == (130, "")


def test_list_shows_workers(url: tuple[str, str], folder: Path) -> None:
    [task_id] = call("enqueue", "step", "--queue", "audit", *url).ids
    with Running(
        "worker", "run", "tasks:app", "--no-supervisor", "--name", "mine", "--concurrency", "3", *url, cwd=folder
    ) as worker:
        assert worker.line() == "began"
        [found] = call("worker", "list", "--json", *url).json["workers"]
        table = call("worker", "list", *url).out
        (folder / "go on").touch()
        worker.send(signal.SIGTERM)
        assert worker.wait().code == 0
    assert found["id"].startswith("mine-")
    assert (found["app"], found["queues"], found["concurrency"]) == ("audit", ["audit", "second"], 3)
    assert found["pid"] == worker.process.pid
    for text in (found["id"], "audit, second", str(found["pid"])):
        assert text in table
    answer = call("worker", "list", *url)
    assert (answer.code, answer.out) == (0, "")
    assert "no workers" in answer.err
    cancel(url, task_id)


@pytest.mark.parametrize("options", [("--no-supervisor",), ()])
def test_a_drained_worker_finishes_its_task_and_its_process_ends_with_0(
    url: tuple[str, str], folder: Path, options: tuple[str, ...]
) -> None:
    """A supervisor starts no other worker in its place, and ends."""
    [task_id] = call("enqueue", "step", "--queue", "audit", *url).ids
    with Running("worker", "run", "tasks:app", "--grace", "0", *options, *url, cwd=folder) as worker:
        assert worker.line() == "began"
        [found] = call("worker", "list", "--json", *url).json["workers"]
        drained = call("worker", "drain", found["id"], "--by", "ada", *url)
        assert (drained.code, drained.out) == (0, f"{found['id']}\n")
        again = call("worker", "drain", found["id"], *url)
        assert (again.code, again.err) == (0, f"perdure: worker {found['id']} was drained before\n")
        [asked] = call("worker", "list", "--json", *url).json["workers"]
        assert (asked["drain_by"], asked["drain"] is None) == ("ada", False)
        assert worker.process.poll() is None
        (folder / "go on").touch()
        assert worker.line() == "began", "the next step, too"
        (folder / "nothing").touch()
        waited = call("worker", "drain", found["id"], "--wait", *url)
        answer = worker.wait()
    assert answer.code == 0, answer.err
    assert waited.code == 0 or "no worker" in waited.err, "it may have stopped before"
    record = task_state(url, task_id)
    assert (record["state"], record["attempts"], record["crashes"]) == ("succeeded", 1, 0)
    assert len(re.findall(r"INFO +worker audit-\S+ started", answer.err)) == 1
    assert "draining: no more tasks are taken" in answer.err
    assert "starting another" not in answer.err


async def test_a_command_can_wait_until_a_drained_worker_has_stopped(
    settings: Settings, url: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(text: str) -> None:
        assert text == f"worker {worker.id} runs 1 task"
        loop.call_soon_threadsafe(noted.set)

    monkeypatch.setattr("perdure.worker.cli.worker.note", note)
    app = App("audit", settings=settings)
    started, end = anyio.Event(), anyio.Event()

    @app.task
    async def held(ctx: Context) -> None:
        started.set()
        await end.wait()

    async with app:
        handle = await held.enqueue()
        async with Worker(app) as worker, anyio.create_task_group() as group:
            group.start_soon(worker.run)
            await bounded(started.wait())
            waiting = asyncio.create_task(asyncio.to_thread(call, "worker", "drain", worker.id, "--wait", *url))
            await bounded(noted.wait())
            assert not waiting.done()
            end.set()
        answer = await bounded(waiting)
        assert (answer.code, answer.out) == (0, f"{worker.id}\n")
        assert str((await handle.record()).state) == "succeeded"


def test_a_worker_that_is_not_registered_cannot_be_drained(url: tuple[str, str]) -> None:
    answer = call("worker", "drain", "nobody", *url)
    assert answer.code == 1
    assert answer.err.startswith("perdure: no worker 'nobody' is registered in namespace")


@pytest.mark.parametrize("option", [("--alert", "mail"), ("--processes", "3")])
def test_supervisor_options_need_a_supervisor(option: tuple[str, str]) -> None:
    answer = call("worker", "run", "tasks:app", "--no-supervisor", *option)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f"{option[0]} is for a supervisor: omit --no-supervisor" in answer.err


async def test_paused_supervisors_are_listed_and_resumed(
    url: tuple[str, str], redis_url: str, namespace_name: str
) -> None:
    async with Producer(redis_url, namespace=namespace_name) as producer:
        for name in ("one", "two", "three"):
            await count_crash(
                producer.gateway, producer.namespace, name, "w", why=f"{name} fell", threshold=0, window=60
            )
    listed = await in_thread("worker", "list", *url)
    assert "two fell" in listed.out
    assert "supervisor two is paused; fix the cause, then run: perdure worker resume two" in listed.err
    supervisors = (await in_thread("worker", "list", "--json", *url)).json["supervisors"]
    assert {(info["name"], info["why"], info["crashes"]) for info in supervisors} >= {("one", "one fell", 1)}
    assert (await in_thread("worker", "resume", "one", *url)).ids == ["one"]
    again = await in_thread("worker", "resume", "one", *url)
    assert (again.code, again.out) == (1, "")
    assert "no supervisor 'one' is paused" in again.err
    assert set((await in_thread("worker", "resume", "--all", "--json", *url)).json) == {"two", "three"}
    assert (await in_thread("worker", "resume", "--all", *url)).code == 0
    assert (await in_thread("worker", "list", "--json", *url)).json == {
        "workers": [],
        "supervisors": [],
        "problems": [],
    }
    for misuse in ((), ("one", "--all")):
        assert (await in_thread("worker", "resume", *misuse, *url)).code == 2


async def in_thread(*args: str) -> Answer:
    """Run a command in a thread, because it starts its own event loop."""
    return await anyio.to_thread.run_sync(call, *args)


def test_exit_functions_may_run_longer_than_the_limit_of_threads(folder: Path) -> None:
    program = """
import atexit, time
from perdure.worker.cli.support.worker_process import force_exit
atexit.register(lambda: (time.sleep(0.3), print("flushed", flush=True)))
force_exit(3, limit=0.05)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND, check=False)
    assert (done.returncode, done.stdout) == (0, "flushed\n")


def test_a_stuck_thread_does_not_change_the_exit_code() -> None:
    program = """
import threading
from perdure.worker.cli.support.worker_process import force_exit
from perdure import configure_logging
configure_logging()
threading.Thread(target=threading.Event().wait, name="of the user").start()
print("text", end="")
force_exit(3, limit=0.05)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND, check=False)
    assert (done.returncode, done.stdout) == (3, "text")
    assert done.stderr.endswith("cannot be stopped: of the user\n")


def test_the_first_lines_show_that_no_redis_url_is_set(folder: Path) -> None:
    data = os.environ["PERDURE_DATA_DIR"]
    (folder / "local.py").write_text(
        'from perdure import App, Context\napp = App("local")\n@app.task\nasync def idle(ctx: Context) -> None: ...\n'
    )
    answer = process("worker", "run", "local:app", "--no-supervisor", "--burst")
    started, *_ = answer.err.splitlines()
    assert f"at embedded:{data} (only processes on this host share it; PERDURE_REDIS_URL names" in started
    assert "is used, because" not in answer.err


def test_an_unknown_variable_is_reported_once(url: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_LEAS", "3")
    monkeypatch.setenv("PERDURE_TEST_LEAS", "3")
    problem = "the environment variable PERDURE_LEAS is not a setting of Perdure; did you mean PERDURE_LEASE?"
    answer = process("worker", "run", "tasks:app", "--no-supervisor", "--burst", *url)
    assert len([line for line in answer.err.splitlines() if "LEAS" in line]) == 1
    assert f"WARNING {problem}" in answer.err
    listed = process("task", "list", *url)
    assert listed.err.startswith(f"perdure: {problem}\n")


async def test_a_finding_is_logged_by_one_worker_of_a_supervisor(
    url: tuple[str, str], folder: Path, settings: Settings
) -> None:
    app = App("other", settings=settings)

    @app.task(queue="audit")
    async def idle(ctx: Context) -> None: ...

    async with Worker(app):
        answer = await anyio.to_thread.run_sync(
            lambda: process("worker", "run", "tasks:app", "--burst", "--processes", "2", *url)
        )
    assert answer.code == 0
    lines = answer.err.splitlines()
    assert len([line for line in lines if re.search(r"INFO +worker audit-\S+ started", line)]) == 2
    assert len([line for line in lines if "has no append-only file" in line]) == 1
    assert len([line for line in lines if "other apps share queues with app 'audit'" in line]) == 1


SEEING = """
import os
from pathlib import Path
from perdure import App

app = App("seeing", redis_url="redis://127.0.0.1:1")


@app.task
async def look(ctx) -> list[str]:
    own = [text for text in os.environ.values() if "hunter2" in text]
    return [Path("/proc/self/cmdline").read_text().replace("\\0", " "), *own]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("alone", [False, True], ids=["supervisor", "no supervisor"])
async def test_a_url_of_the_command_line_is_not_on_those_of_children(
    settings: Settings, tmp_path: Path, alone: bool
) -> None:
    (tmp_path / "seeing.py").write_text(SEEING)
    url = settings.redis_url.replace("://", "://default:hunter2@", 1)
    options = ["--redis-url", url, "--namespace", settings.namespace]
    async with App("seeing", settings=settings) as app:
        handle = await app.producer.enqueue("look", {}, queue="seeing")
        with Running("worker", "run", "seeing.py:app", *options, *["--no-supervisor"] * alone, cwd=tmp_path) as command:
            line, *found = await bounded(handle.result())

            async def all_run() -> bool:
                return _command_line(command.process.pid) not in _children(command.process.pid)

            await wait_until(all_run, "no child shows the line of its parent, as it does between fork and exec")
            children = _children(command.process.pid)
    printed = (tmp_path / "stderr").read_text()
    assert found == []
    assert "seeing.py:app" in line
    assert "warning: all users of this machine can read the password in --redis-url" in printed
    assert "hunter2" not in printed
    if not alone:
        assert "hunter2" not in line
        assert children
    for child in children:
        assert "hunter2" not in child


def _children(pid: int) -> list[str]:
    """Return the command lines of the processes below a process."""
    found: list[str] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [_command_line(child), *_children(child)]
    return found


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
