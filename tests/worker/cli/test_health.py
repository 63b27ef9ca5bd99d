"""`perdure worker health` and `--health-port`: health of worker processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from perdure.queues import Gateway, Namespace
from prometheus_client.parser import text_string_to_metric_families

from tests.support.command_line import BOUND, Answer, Running, call, process

pytestmark = [pytest.mark.integration, pytest.mark.processes]

TASKS = """
import asyncio, time
from pathlib import Path
from perdure import App, Context

app = App("audit")

@app.task
async def quick(ctx: Context) -> None: ...

@app.task
async def blocks(ctx: Context) -> None:
    print("began", flush=True)
    while not Path("go on").exists():
        time.sleep(0.01)

@app.task(timeout=0.1)
async def stubborn(ctx: Context) -> None:
    while True:
        try:
            print("began", flush=True)
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
"""


@pytest.fixture(autouse=True)
def folder(redis_url: str, namespace_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with an application; workers report every 0.5 s."""
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "NAMESPACE": namespace_name,
        "REDIS_URL": redis_url,
        "HEARTBEAT": "0.5",
        "STALL_WARNING": "0.4",
        "STALL_LIMIT": "0.6",
        "LEASE": "1",
    }.items():
        monkeypatch.setenv(f"PERDURE_{name}", value)
    return tmp_path


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + BOUND
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)
    return found


def until_health(code: int, *args: str, says: str = "") -> Answer:
    """Repeat `worker health` until it exits with this code."""

    def so() -> Answer | None:
        answer = call("worker", "health", *args)
        return answer if answer.code == code and says in answer.out + answer.err else None

    found: Answer = until(so, f"worker health ends with {code} and says {says!r}")
    return found


def announced() -> list[dict[str, Any]]:
    found: Any = call("worker", "list", "--json").json
    workers: list[dict[str, Any]] = found["workers"]
    return workers


def ask(port: int, path: str) -> tuple[int, Any]:
    """Return status and body of the probe; status 0 if the server does not listen yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=BOUND) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)
    except OSError:
        return 0, None


def test_a_healthy_worker_can_be_selected_by_id_pid_and_name(folder: Path, unused_tcp_port: int) -> None:
    port = unused_tcp_port
    with Running(
        "worker", "run", "tasks:app", "--no-supervisor", "--name", "mine", "--health-port", str(port), cwd=folder
    ) as worker:
        answer = until_health(0)
        for level in ("alive", "connected", "consuming", "progress"):
            assert level in answer.out
        [info] = announced()
        pid = worker.process.pid
        for choice in ([info["id"]], ["--pid", str(pid)], ["--name", "mine"]):
            [report] = call("worker", "health", *choice, "--json").json
            assert (report["worker"], report["live"], report["ready"]) == (info["id"], True, True)
        assert call("worker", "health", "--name", "other").code == 1
        assert call("worker", "health", "--pid", str(pid), "--name", "mine").code == 2
        assert "ready" in call("worker", "list").out
        assert [ask(port, path)[0] for path in ("/livez", "/readyz")] == [200, 200]
        assert ask(port, "/readyz")[1]["worker"] == info["id"]
        worker.send(signal.SIGTERM)
        assert worker.wait().code == 0
    answer = call("worker", "health")
    assert answer.code == 1
    assert "not alive: no worker on host" in answer.err


def test_a_frozen_worker_is_presumed_dead_after_two_intervals_until_it_wakes_up(folder: Path) -> None:
    with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder) as worker:
        until_health(0)
        worker.send(signal.SIGSTOP)
        answer = until_health(1, says="is not alive: last report")
        assert "every 0.5 s" in answer.err
        assert "presumed dead" in call("worker", "list").out
        assert announced()[0]["presumed_dead"]
        worker.send(signal.SIGCONT)
        until_health(0)


def test_a_worker_whose_loop_is_blocked_fails_its_probes(folder: Path, unused_tcp_port: int) -> None:
    port = unused_tcp_port
    with Running("worker", "run", "tasks:app", "--no-supervisor", "--health-port", str(port), cwd=folder) as worker:
        until(lambda: ask(port, "/readyz")[0] == 200, "it is ready")
        call("enqueue", "blocks", "--queue", "audit")
        assert worker.line() == "began"
        until(lambda: ask(port, "/livez")[0] == 503, "the probe fails")
        levels = {level["name"]: level for level in ask(port, "/livez")[1]["levels"]}
        assert levels["alive"]["said"].startswith("the event loop has not answered for")
        until_health(1, says="not alive")
        (folder / "go on").touch()
        until(lambda: ask(port, "/readyz")[0] == 200, "it is ready again")
        until_health(0)


def test_a_worker_whose_loop_is_blocked_is_listed_as_blocked_and_forgotten_when_it_is_killed(
    folder: Path, redis_url: str, namespace_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_STALL_LIMIT", "60")
    monkeypatch.setenv("PERDURE_LEASE", "3")

    def health() -> list[str]:
        lines = [line for line in call("worker", "list", "--wide").out.splitlines() if "audit" in line]
        return [word for line in lines for word in ("blocked", "presumed dead", "ready", "not ") if word in line]

    with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder) as blocked:
        until(lambda: health() == ["ready"], "it is ready")
        task_id = call("enqueue", "blocks", "--queue", "audit").ids[0]
        assert blocked.line() == "began"
        until(lambda: health() == ["blocked"], "it is blocked")
        (info,) = announced()
        assert (info["blocked"], info["presumed_dead"]) == (True, False)
        until(lambda: announced()[0]["seen"] > 1.5 and health() == ["blocked"], "its lease is renewed")
        blocked.send(signal.SIGKILL)
        blocked.wait()
    until(lambda: health() == ["presumed dead"], "it is lost, and holds the task")
    (folder / "go on").touch()
    with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder):
        until(lambda: call("task", "show", task_id, "--json").json["state"] == "succeeded", "the task is resumed")
        with redis.Redis.from_url(redis_url) as client:
            client.hincrby(Namespace(namespace_name).worker(info["id"]), "seen", -60_000)  # as if a minute had passed
        until(lambda: health() == ["ready"], "the lost worker is forgotten")


def test_a_worker_with_a_stuck_handler_fails_progress_and_still_exits(folder: Path) -> None:
    with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder) as worker:
        [task_id] = call("enqueue", "stubborn", "--queue", "audit", "--max-attempts", "1").ids
        assert worker.line() == "began"
        answer = until_health(1, says="making progress")
        assert "a handler of task 'stubborn' does not end; restart this worker" in answer.err
        assert call("task", "show", task_id, "--json").json["state"] == "dead"
        worker.send(signal.SIGTERM)
        ended = worker.wait()
    assert ended.code == 0
    assert "exiting with 1 handlers that ignored their cancellation" in ended.err


def test_a_killed_worker_does_not_affect_the_health_of_the_next_one(folder: Path) -> None:
    with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder) as killed:
        until_health(0)
        killed.send(signal.SIGKILL)
        killed.wait()
    until(lambda: announced()[0]["presumed_dead"], "it is presumed dead")
    assert "not alive: no worker" in call("worker", "health").err
    with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder):
        until_health(0)


def test_a_lost_worker_fails_until_its_deliveries_were_claimed(
    folder: Path, redis_url: str, namespace_name: str
) -> None:
    with Running("worker", "run", "tasks:app", "--no-supervisor", "--queues", "other", cwd=folder):
        with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder) as killed:
            lost = until(lambda: [one["id"] for one in announced() if "other" not in one["queues"]], "it is listed")[0]
            call("enqueue", "blocks", "--queue", "audit")
            assert killed.line() == "began"
            until_health(0)
            killed.send(signal.SIGKILL)
            killed.wait()
        answer = until_health(1, says=f"worker {lost} is not alive: last report")
        assert "it holds 1 delivery" in answer.err
        with redis.Redis.from_url(redis_url) as client:
            kept = cast("int", client.pttl(Namespace(namespace_name).worker(lost)))
        assert kept > 3_500_000  # it is listed for an hour, not for six intervals of 0.5 s
        (folder / "go on").touch()
        with Running("worker", "run", "tasks:app", "--no-supervisor", cwd=folder):
            answer = until_health(0)
        assert f"worker {lost} is lost: last report" in answer.err
        assert lost not in answer.out
        assert call("worker", "health", lost).code == 1


def test_all_workers_of_the_host_must_be_healthy(folder: Path) -> None:
    (folder / "other").mkdir()
    with (
        Running("worker", "run", "tasks:app", "--no-supervisor", "--name", "first", cwd=folder),
        Running(
            "worker", "run", "../tasks.py:app", "--no-supervisor", "--name", "second", cwd=folder / "other"
        ) as second,
    ):
        until(lambda: len(announced()) == 2 and call("worker", "health").code == 0, "both are well")
        second.send(signal.SIGSTOP)
        answer = until_health(1, says="is not alive")
        assert answer.err.count("is not alive") == 1
        until_health(0, "--name", "first")
        assert call("worker", "health", "--name", "second").code == 1
        second.send(signal.SIGCONT)


def test_a_worker_without_health_reports_is_healthy_while_it_registers(redis_url: str, namespace_name: str) -> None:
    """A user program may run workers that register no health."""
    namespace = Namespace(namespace_name)
    with redis.Redis.from_url(redis_url) as client:
        now = int(client.time()[0]) * 1000
        reported = {"id": "old", "app": "x", "host": socket.gethostname(), "pid": os.getpid(), "version": "0.0.9"}
        reported |= {"queues": '["default"]', "concurrency": 1, "in_flight": 0, "started": now, "seen": now}
        client.hset(namespace.worker("old"), mapping=reported)
        client.expire(namespace.worker("old"), 60)
        client.zadd(namespace.workers, {"old": now})
        client.expire(namespace.workers, 60)
        answer = call("worker", "health", "old")
        assert (answer.code, "version 0.0.9 sends no health report" in answer.out) == (0, True)
        assert "?" in call("worker", "list").out
        client.hset(namespace.worker("old"), "seen", now - 11_000)
        assert call("worker", "health", "old").code == 1


def test_an_unavailable_redis_is_reported_as_not_connected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("worker", "health", "absent").err.startswith("perdure: no worker 'absent' reported lately")
    monkeypatch.setattr(Gateway, "__setattr__", _impatient)  # it need not insist
    answer = call("worker", "health", "--redis-url", "redis://127.0.0.1:1")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("perdure: not connected: cannot reach Redis at redis://127.0.0.1:1")


def _impatient(gateway: Gateway, name: str, value: Any) -> None:
    object.__setattr__(gateway, name, 0.0 if name == "patience" else value)


def test_a_port_in_use_is_reported_in_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for processes in ((), ("--processes", "1")):
            answer = process("worker", "run", "tasks:app", "--health-port", str(port), *processes)
            assert answer.code == 1
            assert answer.err.endswith(
                f"--health-port: could not listen on 127.0.0.1:{port}: Address already in use; choose another port (0: "
                "any free one) or another --health-host\n"
            )
            assert "Traceback" not in answer.err
    answer = process("worker", "run", "tasks:app", "--health-host", "0.0.0.0")
    assert (answer.code, "needs --health-port" in answer.err) == (2, True)


def test_a_supervisor_reports_the_health_of_all_its_workers(folder: Path, unused_tcp_port: int) -> None:
    port = unused_tcp_port
    options = ("--processes", "2", "--health-port", str(port))
    with Running("worker", "run", "tasks:app", *options, cwd=folder) as supervisor:
        until(lambda: ask(port, "/readyz")[0] == 200 and len(ask(port, "/readyz")[1]["workers"]) > 1, "all are ready")
        body = ask(port, "/livez")[1]
        assert len({report["worker"] for report in body["workers"]}) == 2  # the spare does not work, and has no health
        until_health(0)
        supervisor.send(signal.SIGTERM)
        assert supervisor.wait().code == 0


def metric(port: int, name: str, **labels: str) -> float | None:
    """Return the sum of the samples of a metric with these labels, None without any."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=BOUND) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except OSError:
        return None
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    values = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return sum(values) if values else None


def test_counters_of_a_supervisor_outlive_a_worker_that_was_killed(folder: Path, unused_tcp_port: int) -> None:
    port, runs = unused_tcp_port, "perdure_task_runs_total"
    with Running("worker", "run", "tasks:app", "--processes", "2", "--health-port", str(port), cwd=folder) as running:
        until(lambda: metric(port, "perdure_workers_ready") == 2, "both are ready")
        assert [call("enqueue", "quick").code for _ in range(20)] == [0] * 20
        until(lambda: metric(port, runs, task="quick", outcome="completed") == 20, "all runs are counted")
        until(lambda: metric(port, "perdure_supervisor_spare") == 1, "a spare is ready")
        os.kill(announced()[0]["pid"], signal.SIGKILL)
        until(lambda: metric(port, "perdure_supervisor_crashes_total", role="worker") == 1, "the crash is counted")
        until(lambda: metric(port, "perdure_workers_ready") == 2, "another one has taken over")
        assert metric(port, runs, task="quick", outcome="completed") == 20
        assert metric(port, "perdure_worker_slots") == 32
        running.send(signal.SIGTERM)
        assert running.wait().code == 0
