"""docket's worker with a short check interval, which its command line takes in whole seconds only."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from docket import Worker

from ..setup import CONCURRENCY, POLL, REDIS_URL, UVLOOP

if __name__ == "__main__":
    if UVLOOP:
        import uvloop

        uvloop.install()
    asyncio.run(
        Worker.run(
            docket_name="bench",
            url=f"{REDIS_URL}?max_connections=1000",
            concurrency=CONCURRENCY,
            minimum_check_interval=timedelta(seconds=POLL or 0.1),
            tasks=["programs.frameworks.on_docket:tasks"],
        )
    )
