"""A supervised worker's end of the line: it never waits, its lines are whole, and it is this process's alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress

import orjson
import pytest
from perdure.worker.cli.support.worker_process import StopRequests
from perdure.worker.runtime.supervisor_link import SUPERVISED, InheritedPipe, SupervisorLink

from tests.support.workers import BOUND


@pytest.fixture
def ends() -> Iterator[tuple[SupervisorLink, int, int]]:
    """A link; where the supervisor reads what it says, and where it writes."""
    theirs, write = os.pipe()
    read, ours = os.pipe()
    link = SupervisorLink("worker", InheritedPipe(theirs, ours))
    yield link, read, write
    os.close(read)
    for descriptor in (ours, write):
        with suppress(OSError):  # the test, or the link, has closed it
            os.close(descriptor)


def test_saying_to_one_who_does_not_listen_never_waits_and_leaves_whole_lines(
    ends: tuple[SupervisorLink, int, int],
) -> None:
    link, read, _ = ends
    for number in range(2000):  # more than the pipe holds
        link.send("step", id=f"task-{number}", step="x" * 100)
    os.set_blocking(read, False)
    heard = os.read(read, 1 << 20)
    link.send("alive", lag=0.0)
    heard += os.read(read, 1 << 20)
    lines = [orjson.loads(line) for line in heard.splitlines()]
    assert [line["id"] for line in lines if line["say"] == "step"] == [
        f"task-{number}" for number in range(len(lines) - 1)
    ]
    assert lines[-1] == {"say": "alive", "lag": 0.0}
    assert 100 < len(lines) < 2000


def test_saying_to_one_who_is_gone_is_no_error(ends: tuple[SupervisorLink, int, int]) -> None:
    link, read, _ = ends
    other = os.dup(read)
    os.close(other)
    os.dup2(os.open(os.devnull, os.O_RDONLY), read)
    link.send("alive", lag=0.0)
    link.send("alive", lag=0.0)


def test_what_the_supervisor_says_is_heard_and_its_end_too(ends: tuple[SupervisorLink, int, int]) -> None:
    link, _, write = ends
    reported: list[str] = []
    gone = threading.Event()
    link.listen(reported.append, gone.set)
    os.write(write, b'{"say": "isolate"}\n{"say": "stop", "more": 1}\n')
    os.close(write)
    assert gone.wait(BOUND)
    assert reported == ["isolate", "stop"]


def test_a_program_that_a_supervised_worker_starts_is_not_supervised() -> None:
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_inheritable(descriptor, True)  # as it comes from the supervisor
    environment = {SUPERVISED: f"isolated:{read}:{write}", "OTHER": "stays"}
    link = SupervisorLink.from_environment(environment)
    assert link is not None
    assert link.role == "isolated"
    assert environment == {"OTHER": "stays"}
    assert not os.get_inheritable(read)
    assert not os.get_inheritable(write)
    assert SupervisorLink.from_environment(environment) is None
    os.close(read)
    os.close(write)


def test_a_signal_to_all_processes_and_the_supervisors_word_are_one_request() -> None:
    stopped: list[int] = []
    stops = StopRequests()
    for source in ("signal", "supervisor"):
        stops.add(source, lambda: stopped.append(1))
    assert len(stopped) == 1
    for source in ("supervisor", "signal"):
        stops.add(source, lambda: stopped.append(2))
    assert stopped == [1, 2]
