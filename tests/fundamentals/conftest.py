"""Fixture of the tutorial: an app with the settings of the test's server."""

from __future__ import annotations

import pytest
from perdure import App, Settings


@pytest.fixture
def app(settings: Settings) -> App:
    """An app without tasks; the test registers its own."""
    return App("fundamentals", settings=settings)
