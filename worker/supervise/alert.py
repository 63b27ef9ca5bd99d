"""Telling somebody: the operator's own command, with what there is to tell on its standard input."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import anyio
import orjson

from ..observe import logger

__all__ = ["alert"]

_BOUND: Final = 30.0
"""Seconds that the command may take."""


async def alert(command: str, about: Mapping[str, Any]) -> None:
    """Run a command line in the shell, with JSON on its standard input. What goes wrong is logged, and nothing else."""
    try:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, stdout=2, process_group=0
        )
    except OSError as error:
        logger.error("the alert command cannot be started: {}", error)
        return
    with anyio.move_on_after(_BOUND):
        try:
            await process.communicate(orjson.dumps(about) + b"\n")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await process.wait()
    if process.returncode:
        logger.error("the alert command {!r} failed with {}", command, process.returncode)
