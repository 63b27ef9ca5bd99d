"""Imports of one file, each by a process that kills itself after its first, second, third ... write, with kill -9.

As a program, with the path of the file: prints the exit code of each process, until an import finds the task.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import anyio
from perdure.queues import Gateway
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.cli.support.connection import ConnectionOptions
from perdure.worker.errors import TransferError
from perdure.worker.settings import load_settings
from perdure.worker.transfer.import_ import import_task

FOUND = 3
"""Exit code of an import that was refused because the task is there."""


async def import_file(file: IO[bytes]) -> None:
    async with ConnectionOptions().producer() as producer:
        store = await artifact_store(producer.gateway, load_settings())
        try:
            await import_task(producer, store, file)
        except TransferError as error:
            assert "exists already" in str(error)
            os._exit(FOUND)


def import_until(write: int, path: str) -> None:
    """Import the file, and die after a write; the reply of that one is lost."""
    run, writes = Gateway.run, 0

    async def dies(self: Gateway, *args: Any) -> Any:
        nonlocal writes
        reply = await run(self, *args)
        writes += 1
        if writes == write:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    with patch.object(Gateway, "run", dies), Path(path).open("rb") as file:
        anyio.run(import_file, file)


if __name__ == "__main__":
    code, number = -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        number += 1
        if (child := os.fork()) == 0:
            import_until(number, sys.argv[1])
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{int(code)}\n")
        sys.stdout.flush()
