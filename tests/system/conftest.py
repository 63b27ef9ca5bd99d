"""Fixtures: a producer for the workers' server, and supervisors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from perdure import Settings
from perdure.queues import Producer

from tests.support.supervisors import Supervisors


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(address=settings.address, namespace=settings.namespace) as producer:
        yield producer


@pytest.fixture
def supervisors(settings: Settings, tmp_path: Path) -> Iterator[Supervisors]:
    supervisors = Supervisors(settings, tmp_path)
    yield supervisors
    supervisors.close()
