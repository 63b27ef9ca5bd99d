"""Fixtures for pytest: an embedded server for the test run, and a namespace for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .clock import PerdureClock
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
    _set_environment(fixture, monkeypatch)
    with fixture:
        yield fixture


@pytest.fixture
def perdure_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PerdureClock]:
    """The test's own server in this process, whose time the test sets forward. Needs the extra `testing`."""
    from .clock import open_clock

    with open_clock(tmp_path / "perdure-data") as clock:
        _set_environment(clock, monkeypatch)
        yield clock


def _set_environment(fixture: PerdureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let subprocesses use the server and the namespace of the test."""
    for name, value in fixture.settings.items():
        monkeypatch.setenv(f"PERDURE_{name.upper()}", value)
