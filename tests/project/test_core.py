"""The core: what the program of a plain task loads."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

MODULES: Final = 190
"""Limit of the modules of the package that a program with one plain task loads."""

PROGRAM: Final = """
import json, sys

from perdure import App, Context, Retry, Worker

app = App("plain")


@app.task(retry=Retry(max_attempts=3), timeout=60)
async def double(ctx: Context, number: int) -> int:
    return await ctx.step("double", lambda: 2 * number)


worker = Worker(app)
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "perdure"]))
"""

PARTS: Final = (
    "perdure.queues.sessions",
    "perdure.worker.agents",
    "perdure.worker.artifacts",
    "perdure.worker.agents.identity",
    "perdure.worker.integrations",
    "perdure.worker.memory",
    "perdure.worker.session",
    "perdure.worker.workspace",
)
"""Beginnings of the names of modules that a plain task does not need."""


def test_the_program_of_a_plain_task_loads_the_core_only() -> None:
    """A new import from the core to an optional part fails here. With a server of its own, more is needed."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PERDURE_REDIS_URL": "redis://localhost"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = json.loads(ran.stdout)
    assert "perdure.worker.durable.run" in loaded
    assert [name for name in loaded if name.startswith(PARTS)] == []
    assert len(loaded) <= MODULES
