"""A worker of examples/research_agent.py, as a process of its own: what its test kills."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from perdure import Worker
from perdure.worker.cli.support.app_loader import load_app

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "research_agent.py"


async def main() -> None:
    async with Worker(load_app(f"{EXAMPLE}:app"), concurrency=int(sys.argv[1])) as worker:
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
