"""`perdure queue metrics` and `queue list`: numbers for scrapers and autoscalers."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from perdure.queues.keys import Namespace
from perdure.worker.cli import queue as queue_module
from prometheus_client.parser import text_string_to_metric_families

from tests.support.command_line import Running, call
from tests.support.servers import BUNDLED, RedisServer, find_program

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


@pytest.fixture
def queues(environment: None) -> Iterator[None]:
    """Enqueue three tasks on one queue, and a scheduled one on another."""
    for number in range(3):
        call("enqueue", "t", "--queue", "default", "--args", f'{{"n": {number}}}')
    call("enqueue", "t", "--queue", "mail", "--delay", "60")
    yield
    for task_id in [task["id"] for task in call("task", "list", "--json").json]:
        call("task", "cancel", task_id)


def gauges(text: str) -> dict[tuple[str, str | None], float]:
    """Return values by metric and queue; check that the namespace is the same."""
    return {
        (sample.name, sample.labels.get("queue")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_queue_with_priorities_has_metrics_for_each(queues: None, namespace_name: str) -> None:
    assert "lane=" not in call("queue", "metrics").out
    call("enqueue", "t", "--queue", "default", "--priority", "high")
    out = call("queue", "metrics").out
    for lane, depth in (("normal", 3), ("high", 1)):
        labels = f'{{lane="{lane}",namespace="{namespace_name}",queue="default"}}'
        assert f"perdure_queue_lane_depth{labels} {depth}.0" in out
        assert f"perdure_queue_lane_oldest_age_seconds{labels}" in out
    assert 'lane="normal",namespace="' + namespace_name + '",queue="mail"' not in out


def test_metrics_are_prometheus_text_with_base_units_in_the_names(queues: None, namespace_name: str) -> None:
    answer = call("queue", "metrics")
    assert answer.code == 0, answer.err
    found = gauges(answer.out)
    assert found[("perdure_up", None)] == 1
    assert found[("perdure_queue_depth", "default")] == 3
    assert found[("perdure_queue_in_flight", "default")] == 0
    assert 0 <= found[("perdure_queue_oldest_age_seconds", "default")] < 60
    assert found[("perdure_queue_settled_tasks_per_second", "default")] == 0
    assert found[("perdure_queue_due", "mail")] == 1
    assert found[("perdure_queue_drain_time_seconds", "mail")] == 0
    assert ("perdure_queue_drain_time_seconds", "default") not in found  # it is unknown
    assert f'perdure_queue_depth{{namespace="{namespace_name}",queue="default"}} 3.0' in answer.out
    assert {family.type for family in text_string_to_metric_families(answer.out)} == {"gauge"}


def test_metrics_show_what_is_overdue_without_a_worker(queues: None) -> None:
    assert gauges(call("queue", "metrics").out)[("perdure_queue_overdue_seconds", "mail")] == 0
    assert gauges(call("queue", "metrics").out)[("perdure_schedule_overdue_seconds", None)] == 0
    call("enqueue", "t", "--queue", "mail", "--delay", "0.01", "--priority", "high")  # in another partition
    found: dict[tuple[str, str | None], float] = {}
    deadline = time.monotonic() + 20
    while not found.get(("perdure_queue_overdue_seconds", "mail")) and time.monotonic() < deadline:
        found = gauges(call("queue", "metrics").out)
    assert 0 < found[("perdure_queue_overdue_seconds", "mail")] < 60
    assert call("queue", "list", "--json").json[1]["overdue"] > found[("perdure_queue_overdue_seconds", "mail")]


def test_metrics_show_that_a_schedule_is_overdue(queues: None, namespace_name: str) -> None:
    key = Namespace(namespace_name).schedules
    with redis.Redis.from_url(os.environ["PERDURE_REDIS_URL"], protocol=2) as client:
        for score, low, high in ((1, 1e9, 2e9), (0, 1, 1), (8e15, 0, 0)):  # long ago, at once, in the far future
            client.zadd(key, {"nightly": score})
            found = gauges(call("queue", "metrics").out)[("perdure_schedule_overdue_seconds", None)]
            assert low <= found <= high
        client.delete(key)


def test_the_list_has_the_same_numbers_as_json_and_as_a_table(queues: None) -> None:
    default, mail = call("queue", "list", "--json").json
    assert (default["depth"], default["rate"], default["drain_time"]) == (3, 0.0, None)
    assert (mail["due"], mail["drain_time"]) == (1, 0.0)
    table = call("queue", "list").out
    assert "drained in" in table
    assert "drained in" in table
    assert "0.0/s" in table


def scrape(url: str) -> dict[tuple[str, str | None], float]:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return gauges(answer.read().decode())


@pytest.mark.processes
def test_each_scrape_reads_the_queues_and_sigterm_stops_the_server(queues: None, tmp_path: Path) -> None:
    with Running("queue", "metrics", "--port", "0", cwd=tmp_path) as serving:
        url = serving.line()
        assert url.startswith("http://127.0.0.1:")
        assert scrape(url)[("perdure_queue_depth", "default")] == 3
        call("enqueue", "t", "--queue", "default")
        assert scrape(url)[("perdure_queue_depth", "default")] == 4
        serving.send(signal.SIGTERM)
        answer = serving.wait()
    assert (answer.code, answer.err) == (0, "")


@pytest.mark.processes
def test_a_scrape_without_redis_reports_perdure_up_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    try:
        monkeypatch.setenv("PERDURE_REDIS_URL", server.url)
        with Running("queue", "metrics", "--port", "0", cwd=tmp_path) as serving:
            url = serving.line()
            assert scrape(url)[("perdure_up", None)] == 1
            server.kill()
            assert scrape(url) == {("perdure_up", None): 0}
            server.start()
            assert scrape(url)[("perdure_up", None)] == 1
    finally:
        server.stop()


def test_a_port_in_use_is_reported_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = call("queue", "metrics", "--port", str(port))
    assert answer.code == 1
    assert answer.err.startswith(f"perdure: could not listen on 127.0.0.1, port {port}: ")
    assert answer.err.count("\n") == 1


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str, *_: Any) -> Any:
        return None if name == "prometheus_client" else importlib.util.find_spec(name)

    monkeypatch.setattr(queue_module, "find_spec", find_nothing)
    answer = call("queue", "metrics")
    assert answer.code == 1
    assert "pip install 'perdure[metrics]'" in answer.err


def test_listing_queues_does_not_import_the_extra() -> None:
    code = "import sys; import perdure.worker.cli.queue; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"
