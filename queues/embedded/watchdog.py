"""The keeper: holds one redis-server as its child, and stops it when nobody uses it any more.

Run by path with `-I -S`, so that it imports only what it needs of the standard library and costs
little memory. It ends with its server, and (on Linux) its server ends with it.

    keeper.py DIRECTORY PROGRAM SOCKET

Why locks and not a count: a count is wrong after the first kill -9; the kernel never forgets a lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time

__all__ = ["main"]

LOCKS_WITHIN = 5  # seconds to take the two locks of a keeper
STOPS_WITHIN = 3  # seconds from SIGTERM to SIGKILL; a kill loses nothing, the file is synced at every write
UNPINNED_WITHIN = 5.0  # seconds until a pin removed by hand is noticed; `stop` needs no such wait
WATCHED = {signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD}


def main(directory: str, program: str, socket: str) -> None:
    """Take the locks, start the server, watch it until its end; returns in the starting process only."""
    os.chdir(directory)
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the starter had blocked or ignored
    keeper_lock, server_lock = _take_locks()
    if os.fork():
        # The starter waits for this process only, so it never has a zombie; the locks live on below.
        return
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for watched in WATCHED:  # a signal without a handler may be dropped before anyone waits for it
        signal.signal(watched, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, WATCHED)
    server = _start_server(program, server_lock)
    _record(keeper_lock, pid=os.getpid(), server=server, program=program, socket=socket)
    threading.Thread(target=_leave_with_the_last_user, daemon=True).start()
    _watch(server)
    os._exit(0)  # the other thread waits for a lock, and holds one that only this end may let go


def _take_locks() -> tuple[int, int]:
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("another keeper holds the locks of this directory"))
    signal.alarm(LOCKS_WITHIN)
    keeper_lock, server_lock = _open("keeper.lock"), _open("server.lock")
    fcntl.flock(keeper_lock, fcntl.LOCK_EX)
    fcntl.flock(server_lock, fcntl.LOCK_EX)
    signal.alarm(0)
    return keeper_lock, server_lock


def _open(name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT, 0o600)


def _start_server(program: str, server_lock: int) -> int:
    keeper = os.getpid()
    server = os.fork()
    if server:
        return server
    try:
        if sys.platform == "linux":
            import ctypes  # in the child only: it costs the keeper memory

            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
            if os.getppid() != keeper:
                os._exit(1)
        os.set_inheritable(server_lock, True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(program, [program, "redis.conf"])  # noqa: S606 - a program and no shell is what is wanted
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
        sys.stderr.write(f"{program} cannot be run: {error}\n")
        sys.stderr.flush()
    os._exit(1)


def _record(keeper_lock: int, **facts: object) -> None:
    os.ftruncate(keeper_lock, 0)
    os.pwrite(keeper_lock, json.dumps(facts).encode(), 0)


def _watch(server: int) -> None:
    """Return once the server is gone; SIGTERM asks it to stop, and after a while makes it."""
    while True:
        match signal.sigwait(WATCHED):
            case signal.SIGTERM:
                os.kill(server, signal.SIGTERM)
                signal.alarm(STOPS_WITHIN)
            case signal.SIGALRM:
                os.kill(server, signal.SIGKILL)
            case signal.SIGCHLD:
                if os.waitpid(server, os.WNOHANG)[0] == server:
                    return


def _leave_with_the_last_user() -> None:
    users, startup = _open("users.lock"), _open("startup.lock")
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)  # nobody is left; but one who joins holds `startup`, and goes first
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(startup, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(startup, fcntl.LOCK_UN)
            continue
        if not os.path.exists("pinned"):  # noqa: PTH110 - pathlib would double the imports
            os.kill(os.getpid(), signal.SIGTERM)
            return  # holding both locks: who joins now waits until this process and its server are gone
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(startup, fcntl.LOCK_UN)
        time.sleep(UNPINNED_WITHIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
