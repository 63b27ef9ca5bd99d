"""Fixtures for pytest: an embedded server for the test run, and a namespace for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .fixture import PerdureFixture


def pytest_configure(config: pytest.Config) -> None:
    """Make `ResumeWarning` an error, unless the project's own `filterwarnings` name it."""
    config.getini("filterwarnings").insert(0, "error::perdure.ResumeWarning")


@pytest.fixture(scope="session")
def perdure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the server of this test run: PERDURE_TEST_REDIS_URL, else an embedded server, one for each xdist worker.

    A project with a server of its own for tests overrides this fixture.
    """
    from .fixture import embedded_server

    url = os.environ.get("PERDURE_TEST_REDIS_URL")
    if url:
        yield url
        return
    with embedded_server(tmp_path_factory.mktemp("perdure-server")) as url:
        yield url


@pytest.fixture
def perdure(perdure_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PerdureFixture]:
    """The test's own namespace on the server of the test run, which all apps, producers and subprocesses use."""
    from .fixture import PerdureFixture

    fixture = PerdureFixture(perdure_server, tmp_path / "perdure-data")
    for name, value in fixture.settings.items():
        monkeypatch.setenv(f"PERDURE_{name.upper()}", value)
    with fixture:
        yield fixture
