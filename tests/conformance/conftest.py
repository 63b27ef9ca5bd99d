"""A line to the server that holds bytes back, for the tests of late duplicates."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from perdure.queues import Gateway

from tests.support.consumers import needs_one_server
from tests.support.lossy_proxy import LossyProxy, lossy_gateway


@pytest.fixture
async def line(gateway: Gateway) -> AsyncIterator[tuple[Gateway, LossyProxy]]:
    """A second gateway, and the proxy in front of it."""
    needs_one_server(gateway, "the line that holds bytes back stands before one server")
    async with lossy_gateway(gateway) as (late, proxy):
        yield late, proxy
