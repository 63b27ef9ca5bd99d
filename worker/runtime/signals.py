"""Signals: how a worker is told to stop from outside, by `perdure worker run` or by a program of one's own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Final

from ..log import logger

__all__ = ["stop_on_signals"]

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def stop_on_signals(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Within the block, SIGTERM and SIGINT call `stop` in the event loop; the third one ends the process.

    worker = Worker(app)
    async with stop_on_signals(worker.stop), worker:
        await worker.run()

    Put it around the worker, so that a signal finds it while it connects and while it takes its leave. For the main
    thread. Afterwards the signals mean what they meant before. These are Python's own handlers and not the loop's:
    they run also while a handler blocks the loop, where nothing else could end the process any more.
    """
    loop = asyncio.get_running_loop()
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 2:
            os._exit(128 + number)
        loop.call_soon_threadsafe(_stop, stop, signal.Signals(number).name, received)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(stop: Callable[[], None], name: str, received: int) -> None:
    if received == 1:
        logger.info("{}: stopping; again to stop at once", name)
    else:
        logger.warning("{} again: stopping at once; again to end the process", name)
    stop()
