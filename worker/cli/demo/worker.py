"""Worker process of the demo: `python -m perdure.worker.cli.demo.worker`.

It reads its settings from the environment and stops when its standard input ends. The kernel closes that pipe when
the demo's process ends, so no worker outlives the demo.
"""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread

from ...log import configure_logging
from ...runtime import Worker
from .app import app


async def main() -> None:
    """Run tasks until standard input ends."""
    configure_logging(app.settings.log_level)
    async with Worker(app, concurrency=1) as worker, anyio.create_task_group() as group:
        group.start_soon(_stop_at_end_of_input, worker)
        await worker.run()
        group.cancel_scope.cancel()


async def _stop_at_end_of_input(worker: Worker) -> None:
    await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
    worker.stop()


if __name__ == "__main__":
    anyio.run(main)
