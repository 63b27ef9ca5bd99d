"""Django with a database of each test, in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import django
import pytest
from perdure.testing import PerdureFixture

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.adapters.django.settings"
django.setup()

from django.core.management import call_command  # noqa: E402 - after the setup
from django.db import connections  # noqa: E402
from perdure.integrations.django import worker_app  # noqa: E402


@pytest.fixture
def shop(perdure: PerdureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PerdureFixture]:
    """A namespace, a migrated database and a journal."""
    monkeypatch.setenv("SHOP_JOURNAL", str(tmp_path / "journal.txt"))
    monkeypatch.setenv("SHOP_DATABASE", str(tmp_path / "shop.db"))
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # the tests call the database in their event loop
    connections.settings["default"]["NAME"] = str(tmp_path / "shop.db")
    connections["default"].close()
    del connections["default"]
    call_command("migrate", verbosity=0)
    worker_app()  # as a worker process does before it starts
    yield perdure
    connections.close_all()
