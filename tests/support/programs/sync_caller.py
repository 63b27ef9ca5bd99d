"""A synchronous program of each kind in `main`: `python -m tests.support.programs.sync_caller KIND`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from perdure import App, Context, PerdureError, TaskHandle

app = App("sync-caller")


@app.task
async def work(ctx: Context, name: str) -> str:
    return name


def fork() -> None:
    """Enqueue in a parent, in two forked children with two threads each, and in the parent again."""
    producer = app.sync()
    before = work.enqueue_sync("parent")
    children = []
    with producer:  # open in the parent, and inherited
        for number in range(2):
            child = os.fork()
            if not child:
                enqueue_in_threads(f"child {number}")
                assert producer.find(before.id) is not None
                refuse(before)
                break
            children.append(child)
    if len(children) < 2:  # a child, after the inherited block
        work.enqueue_sync(f"child {len(children)} after the block")
        sys.exit(0)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before.status_sync()
    work.enqueue_sync("parent again")


def refuse(inherited: TaskHandle[str]) -> None:
    """Expect that a handle whose connection belongs to the parent is refused."""
    try:
        inherited.status_sync()
    except PerdureError as error:
        assert "process that forked this one" in str(error)
    else:
        raise AssertionError


def enqueue_in_threads(name: str) -> None:
    threads = [threading.Thread(target=lambda: work.enqueue_sync(name)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait() -> None:
    """Wait for a result until the process is interrupted; end when a line comes."""
    handle = work.enqueue_sync("no worker")
    try:
        handle.result_sync()
    except KeyboardInterrupt:
        sys.stdout.write(f"{handle.status_sync()}\n")
        sys.stdout.flush()
        sys.stdin.readline()


def leave() -> None:
    """Leave the connection open, with a thread that waits for a result, until a line comes; then end."""
    handle = work.enqueue_sync("no worker")
    threading.Thread(target=result_of, args=(handle,), daemon=True).start()
    handle.status_sync()
    sys.stdout.write("open\n")
    sys.stdout.flush()
    sys.stdin.readline()


def result_of(handle: TaskHandle[str]) -> None:
    with suppress(PerdureError):  # the end of the process ends the wait
        handle.result_sync()


KINDS: dict[str, Callable[[], None]] = {"fork": fork, "wait": wait, "leave": leave}

if __name__ == "__main__":
    logging.getLogger("perdure").setLevel(logging.ERROR)  # the server of a test keeps no append-only file
    KINDS[sys.argv[1]]()
