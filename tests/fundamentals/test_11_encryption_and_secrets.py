"""Encryption of what tasks carry, and arguments that are never shown."""

from __future__ import annotations

import subprocess
import sys

import pytest
from perdure import App, Context, DecryptionError, Settings, Worker
from pydantic import SecretStr

pytestmark = pytest.mark.integration


@pytest.fixture
def key() -> SecretStr:
    """A new key, as `perdure keys generate` prints it."""
    command = [sys.executable, "-m", "perdure.worker.cli", "keys", "generate"]
    return SecretStr(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


async def test_with_a_key_arguments_and_results_are_encrypted(settings: Settings, key: SecretStr) -> None:
    """Producers and workers have the key. A program without it can see the task, but neither arguments nor result."""
    app = App("accounts", settings=settings.model_copy(update={"encryption_keys": key}))

    @app.task
    async def greet(ctx: Context, name: str) -> str:
        return f"Hello, {name}!"

    async with app:
        handle = await greet.options(task_id="greeting").enqueue("Ada")
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == "Hello, Ada!"

    async with App("stranger", settings=settings) as stranger:
        same = await stranger.producer.enqueue(greet.name, {"name": "Ada"}, task_id="greeting", queue=greet.queue)
        with pytest.raises(DecryptionError):
            await same.result(timeout=10)


async def test_a_secret_argument_reaches_the_task_and_is_masked_everywhere_else(app: App) -> None:
    """Annotate it with pydantic's `SecretStr`. Records, logs, errors and the command line show asterisks."""

    @app.task
    async def log_in(ctx: Context, user: str, password: SecretStr) -> int:
        return len(password.get_secret_value())

    async with app:
        handle = await log_in.enqueue("ada", SecretStr("correct horse"))
        async with Worker(app) as worker:
            await worker.run(burst=True)
        assert await handle.result(timeout=10) == len("correct horse")
        shown = (await handle.record()).shown_arguments()
    assert shown is not None
    assert b"ada" in shown
    assert b"correct horse" not in shown
