"""Fixtures: the log, and the connection options in the environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loguru import logger
from perdure import Settings


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the log, without time and level. A test before may have disabled it."""
    lines: list[str] = []
    logger.enable("perdure")
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the connection options of the test's server in the environment."""
    monkeypatch.setenv("PERDURE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", settings.namespace)
