"""The benchmarks run, and every figure is there. Nothing here asks how large a figure is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import redis

from benchmarks.support.origin import Origin
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.processes]


UNITS = {
    "throughput": "tasks/s",
    "enqueue": "tasks/s",
    "enqueue_bulk": "tasks/s",
    "steps": "steps/s",
    "steps_shared": "steps/s",
    "pick_up_p50": "ms",
    "pick_up_p99": "ms",
    "due_p50": "ms",
    "due_p99": "ms",
    "import": "ms",
    "help": "ms",
    "task_list": "ms",
    "ready": "ms",
    "idle_memory": "MB",
    "run_memory": "MB",
    "bytes_queued": "bytes",
    "bytes_running": "bytes",
    "bytes_finished": "bytes",
    "bytes_1_steps": "bytes",
    "bytes_3_steps": "bytes",
    "bytes_30_steps": "bytes",
    "expired_memory": "times",
    "backlog_enqueue": "us",
    "backlog_read": "us",
    "backlog_settle": "us",
    "backlog_promote": "us",
    "backlog_dlq_list": "us",
    "backlog_queue_list": "us",
    "release": "ms",
    "recovery_short_lease": "s",
    "recovery": "s",
    "recovery_supervised": "s",
}


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmarks to their end; on a timeout, with all the processes they started."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=180)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def data(*options: str) -> dict[str, Any]:
    done = bench("--quick", "--json", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_measure_has_a_positive_figure_with_its_unit_beside_the_raw_limit() -> None:
    found = data()

    rows = {row["key"]: row for row in found["rows"]}
    assert {key: row["unit"] for key, row in rows.items()} == UNITS
    for row in rows.values():
        for spread in (row["value"], row["limit"]):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert row["ratio"] == pytest.approx(row["value"]["median"] / row["limit"]["median"])


def test_the_conditions_name_machine_server_and_durability() -> None:
    (line,) = data("--fsync", "--only", "throughput")["conditions"]

    origin = Origin.parse(line)
    assert origin is not None
    assert origin.command == "python -m benchmarks --quick --json --fsync --only throughput"
    assert f"{os.cpu_count()} cores" in origin.machine
    assert "Python" in origin.machine
    assert origin.machine.endswith("unix socket, fsync on every write")


def test_rounds_are_shown_as_a_median_between_the_lowest_and_the_highest() -> None:
    done = bench("--quick", "--only", "throughput", "--rounds", "3")

    assert done.returncode == 0, done.stderr
    assert "median of 3 rounds (lowest-highest)" in done.stdout
    assert "no-op tasks" in done.stdout


def test_a_given_server_is_left_as_it_was_found(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("other-program", "1")
        before = set(client.keys())
        found = data("--redis-url", redis_url, "--only", "throughput", "--only", "steps", "--only", "release")
        after = set(client.keys())
        client.delete("other-program")

    assert {row["key"] for row in found["rows"]} == {"throughput", "steps", "steps_shared", "release"}
    assert after == before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--only", "nonsense"], "nonsense"),
        (["--fsync", "--redis-url", "redis://localhost"], "--fsync"),
    ],
)
def test_a_call_that_makes_no_sense_is_misuse(options: list[str], complaint: str) -> None:
    done = bench(*options)

    assert done.returncode == 2
    assert complaint in done.stderr


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "nonsense"])
def test_an_unreachable_server_is_reported_in_one_line(url: str) -> None:
    done = bench("--quick", "--redis-url", url)

    assert done.returncode == 1
    assert done.stderr.startswith("could not measure: ")
    assert done.stderr.count("\n") == 1
