"""Fixtures: a delivery, and a line to the server that holds bytes back, for the tests of late duplicates."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from perdure.queues import Gateway, Partition, Producer
from perdure.queues.delivery.leases import Delivery

from tests.support.consumers import needs_one_server, read_one, worker
from tests.support.lossy_proxy import LossyProxy, lossy_gateway


@pytest.fixture
async def delivery(gateway: Gateway, partition: Partition, producer: Producer) -> Delivery:
    """Task x, read by worker a."""
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    return await read_one(await worker(gateway, partition))


@pytest.fixture
async def line(gateway: Gateway) -> AsyncIterator[tuple[Gateway, LossyProxy]]:
    """A second gateway, and the proxy in front of it."""
    needs_one_server(gateway, "the line that holds bytes back stands before one server")
    async with lossy_gateway(gateway) as (late, proxy):
        yield late, proxy
