"""Notifications to systemd: state, status and watchdog."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure.worker.runtime.service_manager import ServiceManager

from tests.support.notify_socket import NotifySocket

WATCHDOG = 0.03
"""Seconds of the watchdog's limit."""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NotifySocket]:
    with NotifySocket(tmp_path / "notify") as manager:
        yield manager


def environment(systemd: NotifySocket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": systemd.name, **more}


async def test_states_are_sent_in_the_form_of_sd_notify(systemd: NotifySocket) -> None:
    service = ServiceManager.from_environment(environment(systemd))
    service.ready()
    service.reloading()
    service.ready()
    service.stopping()
    ready, reloading, again, stopping = systemd.drain()
    assert (ready, again, stopping) == ({"READY": "1"}, {"READY": "1"}, {"STOPPING": "1"})
    assert reloading["RELOADING"] == "1"
    assert int(reloading["MONOTONIC_USEC"]) > 0


async def test_an_abstract_socket_is_found() -> None:
    with NotifySocket(f"@perdure-test-{os.getpid()}") as systemd:
        ServiceManager.from_environment(environment(systemd)).ready()
        assert await systemd.next() == {"READY": "1"}


def test_child_processes_do_not_see_the_service_manager(systemd: NotifySocket) -> None:
    variables = environment(systemd, WATCHDOG_USEC="1000000", WATCHDOG_PID=str(os.getpid()), HOME="/tmp")
    ServiceManager.from_environment(variables)
    assert variables == {"HOME": "/tmp"}


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "notify"])
async def test_without_a_socket_of_this_host_nothing_happens(address: str) -> None:
    service = ServiceManager.from_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"})
    service.ready()
    await asyncio.wait_for(service.run(lambda: True, lambda: pytest.fail("nobody asked for the status")), 5)


async def test_the_watchdog_is_answered_while_the_worker_is_alive(systemd: NotifySocket) -> None:
    alive = True
    service = ServiceManager.from_environment(
        environment(systemd, WATCHDOG_USEC=str(int(WATCHDOG * 1e6)), WATCHDOG_PID=str(os.getpid()))
    )
    status = "one"
    with service.watching(lambda: alive, lambda: status):
        await systemd.until(WATCHDOG="1")
        await systemd.until(WATCHDOG="1")
        alive = False
        systemd.drain()
        status = "two"
        await systemd.until(STATUS="two")
        status = "three"  # one interval later: a watchdog's line would have come before it
        assert await systemd.next() == {"STATUS": "three"}
    assert systemd.drain() == [{"STOPPING": "1"}]


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "10", "WATCHDOG_PID": "1"}])
async def test_no_watchdog_is_answered_that_is_not_of_this_process(
    systemd: NotifySocket, variables: dict[str, str]
) -> None:
    service = ServiceManager.from_environment(environment(systemd, **variables))
    with service.watching(lambda: True, lambda: "2 of 16 slots\nin use"):
        assert await systemd.next() == {"READY": "1"}
        assert await systemd.next() == {"STATUS": "2 of 16 slots in use"}  # one line
    assert systemd.drain() == [{"STOPPING": "1"}]


async def test_what_could_not_be_sent_is_sent_with_the_next_notification(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notify"
    service = ServiceManager(str(path), watchdog=WATCHDOG)
    task = asyncio.create_task(service.run(lambda: True, lambda: "2 of 2 workers ready"))
    service.reloading()
    service.ready()  # the reload is over: it is not reported any more
    await asyncio.sleep(0)
    with NotifySocket(path) as systemd:
        assert await systemd.next() == {"READY": "1", "STATUS": "2 of 2 workers ready", "WATCHDOG": "1"}
        assert await systemd.next() == {"WATCHDOG": "1"}
    task.cancel()
