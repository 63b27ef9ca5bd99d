"""Worker processes that work on a handler of the suite, and kill themselves with SIGKILL after a write.

A process takes longer to start than to die, so one that has imported everything forks the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure import Settings

from tests.replay.journal import Observer
from tests.replay.rehearsal import Disturbance, Process, Rehearsal, kill
from tests.support.paths import ROOT


class Forks:
    """Process that forks the worker processes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def work(self, settings: Settings, folder: Path, name: str, rehearsal: str, write: int) -> int:
        """Work on a task in a process that kills itself when it has written so often; return its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [settings.redis_url, settings.namespace, str(folder), name, rehearsal, write]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def forks() -> Iterator[Forks]:
    """Run the process that forks the others."""
    command = [sys.executable, "-m", "tests.replay.process"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Forks(process)
    finally:
        process.communicate(timeout=60)


def _work(url: str, namespace: str, folder: str, name: str, rehearsal: str, write: int) -> None:
    from tests.replay.suite import HANDLERS

    settings = Settings(redis_url=url, namespace=namespace, lease=30.0)
    one = Rehearsal(HANDLERS[name], settings, Path(folder), rehearsal)
    observer = Observer(one.journal)
    with observer.watching():
        Process(Disturbance("kill", write), dies=kill).run(lambda: one.work(observer))


def _main() -> None:
    import tests.replay.suite  # noqa: F401 - before the first fork

    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                _work(*json.loads(line))
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
