"""A child of a supervisor that runs no tasks: it sends the messages and exits in the way that the test orders.

It appends what happens to it to a journal. Orders come in files of its folder: ORDERS/PID for one process, line by
line, and ORDERS/start or ORDERS/start-ROLE for each that starts. It imports nothing of Perdure, so that a test may have
many of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
ORDERS = Path(os.environ["ORDERS"])
os.environ["ROLE"], READ, WRITE = os.environ.pop("PERDURE_SUPERVISED").split(":")


def note(what: str, key: str = "") -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {key or os.environ['ROLE']}\n".encode())


def say(what: str, **more: Any) -> None:
    os.write(int(WRITE), json.dumps({"say": what, **more}).encode() + b"\n")


LAG = [0.0]
BEGINNING = threading.Lock()
"""Held while the first messages of a role are sent: orders of a test that has seen `ready` come after them."""


def beat() -> None:
    while True:
        say("alive", lag=LAG[0], health={})
        time.sleep(0.05)


def listen() -> None:
    for line in os.fdopen(int(READ), "rb"):
        message = json.loads(line)
        what = message["say"]
        note("heard", what)
        if what == "work":
            os.environ["ROLE"] = message["role"]
            silent = (ORDERS / "silent").exists()
            with BEGINNING:
                note("ready")
                say("ready", worker=f"{os.environ['ROLE']}-{os.getpid()}", queues=["default"])
                say("idle")
            if not silent:
                threading.Thread(target=beat, daemon=True).start()
        if what == "stop" and not (ORDERS / "stubborn").exists():
            os._exit(0)
    os._exit(7)


def obey(order: str) -> None:
    word, _, rest = order.partition(" ")
    match word:
        case "say":
            say(**json.loads(rest))
        case "raw":
            os.write(int(WRITE), rest.encode() + b"\n")
        case "lag":
            LAG[0] = float(rest)
        case "note":
            note("noted", rest)
        case "exit":
            os._exit(int(rest))
        case "fail":
            say("failed", why=rest)
            os._exit(2)
        case "kill":
            os.kill(os.getpid(), getattr(signal, rest))
        case "stick":  # in C code that never gives the interpreter's lock back
            note("stuck")
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "hang":
            time.sleep(1000)


def main() -> None:
    note("began")
    pipes = [one for one in Path("/proc/self/fd").iterdir() if int(one.name) > 2 and _is_pipe(one)]
    note("pipes", str(len(pipes)))
    for start in (ORDERS / "start", ORDERS / f"start-{os.environ['ROLE']}"):
        if start.exists():
            order = start.read_text()
            note("obeys", order.replace(" ", "-"))
            obey(order)
    threading.Thread(target=listen, daemon=True).start()
    say("loaded", **json.loads(os.environ["FACTS"]))
    note("loaded")
    own = ORDERS / str(os.getpid())
    done = 0
    while True:
        lines = own.read_text().split("\n")[:-1] if own.exists() else []
        for line in lines[done:]:
            with BEGINNING:
                pass
            obey(line)
        done = len(lines)
        time.sleep(0.005)


def _is_pipe(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith("pipe:")
    except OSError:
        return False  # the folder's own, closed by now


if __name__ == "__main__":
    main()
