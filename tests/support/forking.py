"""Processes that are forked from one which has imported the package, so that a start costs milliseconds.

Each is a process of its own, which signals reach and SIGKILL ends. `tests/worker/cli` and the tests of supervisors
start workers as a user does.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TextIO

from tests.support.paths import ROOT

__all__ = ["ForkedProcess", "fork"]

_REQUEST = 1 << 20
"""Bytes of a request at most."""


class ForkedProcess:
    """A process of a `_Server`, with the methods of `subprocess.Popen`."""

    def __init__(self, server: _Server, pid: int, stdout: TextIO) -> None:
        self._server = server
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, as `Popen.poll` does; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the exit; return the exit code. Raises `subprocess.TimeoutExpired`."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until its exit code is read, no other process has its id
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks. It ends with the process that has started it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        command = [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._socket.close()
        self._process.wait(10)

    def start(self, program: Path, arguments: list[str], environment: Mapping[str, str]) -> ForkedProcess:
        read, write = os.pipe()
        try:
            request = {"program": str(program), "arguments": arguments, "environment": dict(environment)}
            pid = self._ask({**request, "folder": str(Path.cwd())}, [write, 2])
        finally:
            os.close(write)
        return ForkedProcess(self, int(pid or 0), os.fdopen(read))

    def exit_code(self, pid: int) -> int | None:
        return self._ask({"pid": pid})

    def _ask(self, request: Mapping[str, object], files: list[int] | None = None) -> int | None:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files or [])
            found: int | None = json.loads(self._socket.recv(_REQUEST))
            return found


@functools.cache
def _server() -> _Server:
    return _Server()


def fork(program: Path, *arguments: str, environment: Mapping[str, str]) -> ForkedProcess:
    """Run a Python file in a process of its own, whose output is a pipe and whose errors are those of this process."""
    return _server().start(program, [*arguments], environment)


# the process that forks


def _serve(requests: socket.socket) -> ModuleType | None:
    """Answer requests until there are no more. Return the module to run in a process that was forked."""
    while True:
        data, files, *_ = socket.recv_fds(requests, _REQUEST, 2)
        if not data:
            return None
        request = json.loads(data)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                requests.close()
                return _module(request, files)
        for file in files:
            os.close(file)
        requests.send(json.dumps(answer).encode())


def _module(request: dict[str, object], files: list[int]) -> ModuleType:
    """Make this process what an interpreter that starts with the program is, and return its main module."""
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]  # JSON
    program = str(request["program"])
    sys.argv = [program, *request["arguments"]]  # type: ignore[misc]  # JSON
    sys.path[0] = str(Path(program).parent)
    module = ModuleType("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    return module


def _load() -> None:
    """Import what most programs import. Nothing of it starts a thread."""
    import loguru
    import redis.asyncio
    from perdure import Agent, App, Context, Worker
    from perdure.worker.agents.coherence.monitor import CoherenceMonitor
    from perdure.worker.artifacts.task_artifacts import Artifacts

    del loguru, redis, Agent, App, Context, Worker, CoherenceMonitor, Artifacts
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _load()
    if (_main := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        exec(compile(Path(str(_main.__file__)).read_bytes(), str(_main.__file__), "exec"), vars(_main))
