"""Watchdog of the embedded server: the parent process of the server, which stops it when no share is left.

It runs by path with `-I -S`, so it imports little of the standard library and needs little memory. It ends with its
server, and (on Linux) the server ends with it.

    watchdog.py DIRECTORY PROGRAM SOCKET

Shares are locks and not a counter, because a counter is wrong after the first kill -9, and the kernel releases locks.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time

LOCK_TIMEOUT = 5  # seconds to acquire the two locks of a watchdog
KILL_AFTER = 3  # seconds from SIGTERM to SIGKILL; a kill loses no data, since every write is synced
PIN_POLL = 5.0  # seconds until a pin that was removed by hand is noticed
WATCHED = {signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD}


def main(directory: str, program: str, socket: str) -> None:
    """Acquire the locks, start the server and wait for its end; return in the starting process only."""
    os.chdir(directory)
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the starting process may have blocked signals
    watchdog_lock, server_lock = _take_locks()
    if os.fork():
        # The starting process waits for this one only, so it has no zombie; the child keeps the locks.
        return
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for watched in WATCHED:  # a signal without a handler may be dropped before sigwait
        signal.signal(watched, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, WATCHED)
    server = _start_server(program, server_lock)
    _record(watchdog_lock, pid=os.getpid(), server=server, program=program, socket=socket)
    threading.Thread(target=_stop_without_shares, daemon=True).start()
    _watch(server)
    os._exit(0)  # the other thread may block on a lock, and holds one until this process ends


def _take_locks() -> tuple[int, int]:
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("another watchdog holds the locks of this directory"))
    signal.alarm(LOCK_TIMEOUT)
    watchdog_lock, server_lock = _open("keeper.lock"), _open("server.lock")
    fcntl.flock(watchdog_lock, fcntl.LOCK_EX)
    fcntl.flock(server_lock, fcntl.LOCK_EX)
    signal.alarm(0)
    return watchdog_lock, server_lock


def _open(name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _start_server(program: str, server_lock: int) -> int:
    watchdog = os.getpid()
    server = os.fork()
    if server:
        return server
    try:
        if sys.platform == "linux":
            import ctypes  # in the child only, to save memory

            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
            if os.getppid() != watchdog:
                os._exit(1)
        os.set_inheritable(server_lock, True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(program, [program, "redis.conf"])  # noqa: S606 - no shell is wanted
    except BaseException as error:  # noqa: BLE001 - a forked child must not return into its parent's code
        sys.stderr.write(f"could not run {program}: {error}\n")
        sys.stderr.flush()
    os._exit(1)


def _record(watchdog_lock: int, **fields: object) -> None:
    os.ftruncate(watchdog_lock, 0)
    os.pwrite(watchdog_lock, json.dumps(fields).encode(), 0)


def _watch(server: int) -> None:
    """Return when the server has ended. SIGTERM stops it, and after a delay kills it."""
    while True:
        match signal.sigwait(WATCHED):
            case signal.SIGTERM:
                os.kill(server, signal.SIGTERM)
                signal.alarm(KILL_AFTER)
            case signal.SIGALRM:
                os.kill(server, signal.SIGKILL)
            case signal.SIGCHLD:
                if os.waitpid(server, os.WNOHANG)[0] == server:
                    return


def _stop_without_shares() -> None:
    users, startup = _open("users.lock"), _open("startup.lock")
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)  # no share is left; a process that joins holds `startup` and has priority
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(startup, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(startup, fcntl.LOCK_UN)
            continue
        if not os.path.exists("pinned"):  # noqa: PTH110 - pathlib would double the imports
            os.kill(os.getpid(), signal.SIGTERM)
            return  # with both locks held: a process that joins now waits for the end of this one and of its server
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(startup, fcntl.LOCK_UN)
        time.sleep(PIN_POLL)


if __name__ == "__main__":
    main(*sys.argv[1:])
