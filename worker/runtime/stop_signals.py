"""Signals that stop a worker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Final

from ...queues.runtime import RUNTIME
from ..log import logger

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def stop_on_signals(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Call `stop` in the event loop for SIGTERM and SIGINT; the third signal ends the process at once.

    worker = Worker(app)
    async with stop_on_signals(worker.stop), worker:
        await worker.run()

    Enter it before the worker, so that it covers connecting and disconnecting. It must be used in the main thread and
    restores the previous handlers at the end. The handlers are those of `signal.signal`, not of the loop, so they also
    run while a task blocks the loop.
    """
    loop = asyncio.get_running_loop()
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 2:
            RUNTIME.exit(128 + number)
        loop.call_soon_threadsafe(_stop, stop, signal.Signals(number).name, received)

    before = {number: RUNTIME.set_signal_handler(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            RUNTIME.set_signal_handler(number, handler)


def _stop(stop: Callable[[], None], name: str, received: int) -> None:
    if received == 1:
        logger.info("{}: stopping; send it again to stop at once", name)
    else:
        logger.warning("{} again: stopping at once; send it again to end the process", name)
    stop()
