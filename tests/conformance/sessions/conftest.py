"""Fixture: the address of a session."""

from __future__ import annotations

import pytest
from perdure.queues import Namespace
from perdure.queues.sessions.record import SessionAddress


@pytest.fixture
def address(namespace: Namespace) -> SessionAddress:
    return SessionAddress.of(namespace, "bot", "ada")
