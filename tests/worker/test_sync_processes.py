"""Synchronous callers as processes: forks, SIGINT, the end of the process, and a host without Unix modules."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis.asyncio
from perdure import Settings
from perdure.queues import Address, Gateway, Namespace

from tests.support.paths import ROOT
from tests.support.servers import RedisServer
from tests.support.workers import BOUND, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@contextmanager
def program(kind: str, url: str, namespace: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program of tests/support/programs/sync_caller.py."""
    environment = os.environ | {
        "PERDURE_REDIS_URL": url,
        "PERDURE_NAMESPACE": namespace,
        "PYTHONWARNINGS": "default,ignore:This process:DeprecationWarning",  # of Python 3.12 for a fork beside threads
    }
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.support.programs.sync_caller", kind]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        try:
            yield run
        finally:
            run.kill()


def line(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return run.stdout.readline().strip()


async def test_forked_children_open_connections_of_their_own(settings: Settings) -> None:
    with program("fork", settings.redis_url, settings.namespace) as run:
        out, error = run.communicate(timeout=BOUND)
    assert (run.returncode, out, error) == (0, "", "")
    gateway = Gateway(Address(settings.redis_url))
    await gateway.open()
    try:
        partition = Namespace(settings.namespace).partition("sync-caller")
        assert await gateway.command("XLEN", partition.ready) == 8
    finally:
        await gateway.close()


async def test_an_interrupt_ends_the_wait_for_a_result(settings: Settings) -> None:
    with program("wait", settings.redis_url, settings.namespace) as run:
        async with redis.asyncio.Redis.from_url(settings.redis_url) as client:

            async def waits() -> bool:
                return bool(await client.pubsub_channels(f"*{settings.namespace}*"))

            async def gave_up() -> bool:
                return not await waits()

            await wait_until(waits, "the program waits")
            run.send_signal(signal.SIGINT)
            assert line(run) == "queued"
            await wait_until(gave_up, "the wait ends on the background loop")
        out, error = run.communicate("\n", timeout=BOUND)
    assert (run.returncode, out, error) == (0, "", "")


def test_a_process_ends_although_its_server_does_not_answer(server_program: Path, namespace_name: str) -> None:
    server = RedisServer(server_program).start()
    try:
        with program("leave", server.url, namespace_name) as run:
            assert line(run) == "open"
            os.kill(server.pid, signal.SIGSTOP)
            out, error = run.communicate("\n", timeout=BOUND)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()
    assert (run.returncode, out, error) == (0, "", "")


WITHOUT_UNIX = """
import socket, sys
for module in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules[module] = None
pair, kind = socket.socketpair, socket.AF_UNIX
socket.socketpair = lambda: pair(kind)  # asyncio's; Windows has one without AF_UNIX
del socket.AF_UNIX
from perdure import App, Context, Producer

app = App("sync-caller")

@app.task
async def work(ctx: Context, name: str) -> str: ...

with app.sync() as producer:
    print(work.enqueue_sync("a name").status_sync())
"""


def test_a_producer_works_where_the_modules_of_unix_are_missing(server_program: Path, namespace_name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = RedisServer(server_program, ("--save", "", "--port", str(port))).start()
    url = f"redis://127.0.0.1:{port}"
    environment = os.environ | {"PERDURE_REDIS_URL": url, "PERDURE_NAMESPACE": namespace_name}
    try:
        command = [sys.executable, "-c", WITHOUT_UNIX]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND, check=False)
    finally:
        server.stop()
    assert run.stdout == "queued\n", run.stderr


def test_the_embedded_server_is_refused_where_the_modules_of_unix_are_missing(tmp_path: Path) -> None:
    environment = os.environ | {"PERDURE_REDIS_URL": "", "PERDURE_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_UNIX]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND, check=False)
    error = run.stderr.splitlines()[-1]
    assert "EmbeddedServerError: the embedded server needs Linux or macOS: run a Redis server elsewhere" in error
