"""`perdure top` and `--watch`: what the screen shows, and that it ends on Ctrl-C."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from perdure.worker.cli.support.output import rendered
from perdure.worker.cli.top import overview_screen
from perdure.worker.overview import Overview
from rich.cells import cell_len
from rich.console import Console

from tests.support.command_line import BOUND, COMMAND, call
from tests.worker.cli.test_tables import ID, NOW, QUEUE, RECORD, WORKER

RUNNING = replace(RECORD, worker=WORKER.id, step="crawl the third page", started_at=NOW - 90_000)


@pytest.fixture
def place(environment: None) -> Iterator[str]:
    """Enqueue a task that no worker runs; return its id."""
    (task_id,) = call("enqueue", "audit", "--queue", "reports").ids
    yield task_id
    call("task", "cancel", task_id)


def test_the_screen_fits_80_columns() -> None:
    out = io.StringIO()
    found = Overview(NOW, [QUEUE], [WORKER, replace(WORKER, id="killed", seen=3_600.0)], [RUNNING])
    console = Console(file=out, width=80, markup=False, highlight=False, emoji=False)
    screen = overview_screen(found, "namespace perdure on redis://localhost:6379/0")
    console.print(rendered(screen.parts, NOW, width=80))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(cell_len, lines)) <= 80
    assert "1 live worker" in lines
    (running,) = [line for line in lines if ID in line]
    assert running.split()[:2] == ["audit", ID]
    assert running.endswith("90 s ago")
    assert "crawl" in running


@pytest.mark.integration
def test_top_prints_once_without_a_terminal(place: str) -> None:
    answer = call("top")
    assert (answer.code, answer.err) == (0, "")
    assert "0 running tasks" in answer.out
    assert "reports" in answer.out
    found = call("top", "--json").json
    assert [stats["queue"] for stats in found["queues"]] == ["reports"]
    assert (found["workers"], found["running"]) == ([], [])
    assert place in call("task", "list", "--watch").out


@pytest.mark.integration
@pytest.mark.parametrize("command", ["task", "queue", "worker", "dlq"])
def test_watching_as_json_is_misuse(place: str, command: str) -> None:
    answer = call(command, "list", "--watch", "--json")
    assert (answer.code, answer.out) == (2, "")
    assert "--watch is for people and --json for programs: give one of them" in answer.err


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.parametrize("command", [("top",), ("task", "list", "--watch")])
def test_a_live_screen_ends_on_ctrl_c_with_exit_code_0(place: str, command: tuple[str, ...]) -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, *command], stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    guard = threading.Timer(BOUND, process.kill)
    guard.start()
    try:
        shown = b""
        expected = b"reports" if command == ("top",) else place.encode()
        while expected not in shown:
            shown += os.read(screen, 65536)
        process.send_signal(signal.SIGINT)
        while part := _rest(screen):
            shown += part
        assert process.wait() == 0
        assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1, "the former screen is back"
        assert b"Traceback" not in shown
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        os.close(screen)


def _rest(screen: int) -> bytes:
    """Return more of the screen; empty once the command has closed it."""
    try:
        return os.read(screen, 65536)
    except OSError:
        return b""
